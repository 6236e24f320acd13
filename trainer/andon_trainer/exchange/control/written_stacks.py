"""Written stacks: what a thread writes down of its own calls when a signal comes.

Theory of operation. `faulthandler` writes a stack in C, without the interpreter's lock, into a file
in memory. It writes that of the interrupted thread alone: others may run, and their calls change
while they are read. A loading process (of a DataLoader) opens such a file when it begins; the
worker that started it finds the file among the process's open ones, sends the signal, and reads. So
nothing travels between the two before somebody asks, however the process was started, and a process
that has no such file is sent no signal, which would end it.

Where the system or its Python has no such files, as on macOS, nothing is written.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from andon_trainer.core.stacks import RawFrame

__all__ = ["frames_in", "stacks_of", "stacks_written_at", "write_when_asked"]

_SIGNALS_BELOW_LAST = 6
"""The signal is so many below the last real-time one: languages and libraries use the ends."""
_MAKES_FILES = hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")
_NAME = "andon-loading-stack"
_PATIENCE_S, _APART_S = 0.5, 0.01
_MOST_BYTES = 2**20

_CALL = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


def frames_in(written: str) -> tuple[RawFrame, ...]:
    """The calls in what `faulthandler` wrote first, the innermost first; none: there are none."""
    found: list[RawFrame] = []
    for line in written.splitlines():
        if (call := _CALL.match(line)) is not None:
            found.append((call[1], int(call[2]), call[3]))
        elif found:
            break
    return tuple(found)


def stacks_written_at(number: int, name: str) -> int | None:
    """A file in memory into which a signal has the stack written of the thread that it interrupts.

    None: there can be none here.
    """
    # Some builds of Python have no such files; the signal may be the script's.
    if not _MAKES_FILES or signal.getsignal(number) is not signal.SIG_DFL:
        return None
    file = os.memfd_create(name)
    # Whoever reads empties it: what is written next begins it again.
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(number, file=file, all_threads=False, chain=False)
    return file


def write_when_asked() -> None:
    """From now on `stacks_of` may ask this process. Once in a process."""
    if _MAKES_FILES:
        with suppress(OSError):  # A sandbox without such files: it loads all the same.
            stacks_written_at(_number(), _NAME)


def stacks_of(processes: Sequence[int]) -> dict[int, tuple[RawFrame, ...]]:
    """The calls of each process's main thread; of those that answer within half a second."""
    if not _MAKES_FILES:
        return {}
    with ExitStack() as stack:
        asked: dict[int, int] = {}
        seen: set[int] = set()
        for process in processes:
            # A process may be gone at any moment, and its number be another one's.
            with suppress(OSError, ValueError, StopIteration):
                identity = os.pidfd_open(process)
                stack.callback(os.close, identity)
                file = _file_of(process)
                stack.callback(os.close, file)
                inode = os.fstat(file).st_ino
                if inode in seen or not _would_write(process):
                    continue  # A process that it forked has its file, too.
                seen.add(inode)
                os.ftruncate(file, 0)
                signal.pidfd_send_signal(identity, _number())
                asked[process] = file
        return _read_all(asked)


def _read_all(asked: dict[int, int]) -> dict[int, tuple[RawFrame, ...]]:
    """What each wrote, once it has written and goes on no longer."""
    found: dict[int, tuple[RawFrame, ...]] = {}
    sizes = dict.fromkeys(asked, 0)
    until = time.monotonic() + _PATIENCE_S
    while sizes and time.monotonic() < until:
        time.sleep(_APART_S)
        for process, before in list(sizes.items()):
            sizes[process] = size = os.fstat(asked[process]).st_size
            if size and size == before:
                written = os.pread(asked[process], _MOST_BYTES, 0).decode(errors="replace")
                found[process] = frames_in(written)
                del sizes[process]
    return found


def _number() -> int:
    return int(signal.SIGRTMAX) - _SIGNALS_BELOW_LAST


def _file_of(process: int) -> int:
    """The file of a process, opened here; StopIteration: it has none."""
    folder = Path(f"/proc/{process}/fd")
    link = next(each for each in folder.iterdir() if f"/memfd:{_NAME} " in _target(each))
    return os.open(link, os.O_RDWR)


def _target(link: Path) -> str:
    with suppress(OSError):  # It may be closed by now.
        return os.readlink(link)
    return ""


def _would_write(process: int) -> bool:
    """Whether it still catches the signal."""
    status = Path(f"/proc/{process}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (_number() - 1) & 1)
