"""Tether: a child process that the kernel ends when its parent has ended.

Run as a file (`python -I -S tether.py PARENT SIGNAL command ...`), it ties itself to its parent and
then becomes the command, so that a SIGKILL of the launcher leaves no worker behind. It imports only
the standard library. It works on Linux; elsewhere the command runs without being tied.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["adopting_orphans", "tether_command", "tie_to_parent"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


def tie_to_parent(parent_pid: int, signal_number: int) -> bool:
    """Asks the kernel to send this process the signal when its parent has ended.

    Returns False if the parent has ended already. The kernel watches the parent's *thread* that
    started this process, so a parent should start it from its main thread.
    """
    if sys.platform.startswith("linux"):
        _prctl(_PR_SET_PDEATHSIG, signal_number)
    # Asked after the call above: a parent that ended before it will never be reported.
    return os.getppid() == parent_pid


def tether_command(command: list[str], signal_number: int) -> list[str]:
    """`command`, to be run as a child that ends with this process."""
    wrapper = [sys.executable, "-I", "-S", os.path.abspath(__file__)]
    return [*wrapper, str(os.getpid()), str(int(signal_number)), *command]


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Meanwhile the kernel gives orphans among this process's descendants to this process.

    They are its children from then on. Linux only.
    """
    before = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(before))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, before.value)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _become(parent_pid: str, signal_number: str, *command: str) -> None:
    if not tie_to_parent(int(parent_pid), int(signal_number)):
        sys.exit(128 + signal.SIGTERM)
    # SIGUSR1 asks a worker for a checkpoint. Ignored signals stay ignored in the new program, so
    # that one which comes before the worker listens does not end it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become(*sys.argv[1:])
