"""Output: the last lines of workers that `andon run` started, from the logs that it writes."""

from __future__ import annotations

import ipaddress
import os
import re
import stat
import sys
from contextlib import suppress
from pathlib import Path
from wsgiref.types import WSGIEnvironment

from andon_server.runs import worker_log

__all__ = ["last_lines", "user_of_sender"]

_LINES = 50
_BYTES = 64 << 10
_LONGEST = 2000
_ESTABLISHED = "01"
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")


def last_lines(run_dir: Path, worker: int) -> list[str] | None:
    """The last lines of a worker's output, as plain text; None: it has no log in this folder.

    Only a plain file that is really there is read: a log may be a link to anywhere, if somebody
    else may write to the folder.
    """
    try:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(worker_log(run_dir, worker), flags), "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                return None
            file.seek(max(0, about.st_size - _BYTES))
            data = file.read(_BYTES)
    except OSError:
        return None
    lines = data.decode("utf-8", errors="replace").split("\n")
    if about.st_size > _BYTES:
        del lines[0]  # Its beginning was not read.
    if not lines[-1:] or not lines[-1]:
        del lines[-1:]
    return [_plain(line) for line in lines[-_LINES:]]


def user_of_sender(environ: WSGIEnvironment) -> int | None:
    """The user whose process sent a request, by number; None: nobody knows.

    The kernel's table of connections has both ends of one on loopback, each with its user.
    """
    with suppress(KeyError, ValueError):
        sender = _as_in_table(environ["REMOTE_ADDR"], int(environ["REMOTE_PORT"]))
        for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
            with suppress(OSError):
                for line in table.read_text().splitlines()[1:]:
                    _, local, _, state, _, _, _, user, *_ = line.split()
                    if (local, state) == (sender, _ESTABLISHED):
                        return int(user)
    return None


def _as_in_table(host: str, port: int) -> str:
    """An address as `/proc/net/tcp` has it: words of the processor in network order, and a port."""
    packed = ipaddress.ip_address(host).packed
    words = (packed[at : at + 4] for at in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words) + f":{port:04X}"


def _plain(line: str) -> str:
    """A line without what a terminal obeys; of a progress bar, its last state."""
    text = _ESCAPE.sub("", line.rstrip("\r").rpartition("\r")[2])[:_LONGEST]
    return "".join(each for each in text.expandtabs(4) if each.isprintable())
