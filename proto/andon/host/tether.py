"""Tether: a child process that the kernel ends when its parent is gone.

Run as a file (`python -I -S tether.py PARENT SIGNAL command ...`) it ties itself to its parent and
then becomes the command, so that a SIGKILL of the launcher leaves no worker behind. It imports
nothing but the standard library and works on Linux; elsewhere the command simply runs untied.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["tether_command", "tie_to_parent"]

_PR_SET_PDEATHSIG = 1


def tie_to_parent(parent_pid: int, signal_number: int) -> bool:
    """Asks the kernel to send this process the signal when its parent is gone.

    False if the parent is gone already. The kernel means the parent's *thread* that started this
    process; a parent should start it from its main thread.
    """
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    return os.getppid() == parent_pid


def tether_command(command: list[str], signal_number: int) -> list[str]:
    """`command`, to be run as a child that ends with this process."""
    wrapper = [sys.executable, "-I", "-S", os.path.abspath(__file__)]
    return [*wrapper, str(os.getpid()), str(int(signal_number)), *command]


def _become(parent_pid: str, signal_number: str, *command: str) -> None:
    if not tie_to_parent(int(parent_pid), int(signal_number)):
        sys.exit(128 + signal.SIGTERM)
    # It asks a worker for a checkpoint, and must not end one that does not listen yet.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become(*sys.argv[1:])
