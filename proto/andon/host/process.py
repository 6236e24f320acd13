"""Processes of this host: who this one is, and whether another one is stopped.

A process that is stopped (SIGSTOP, Ctrl-Z) keeps its connections, and its kernel goes on to answer
for it. Only the process table says at once that nothing will come of it. Another host's processes,
or those of another container, can't be looked up: their place has another `host`.
"""

from __future__ import annotations

import functools
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process", "is_stopped", "own_process"]

_PROC = Path("/proc")
_STOPPED = "T"
"""By a signal. A process under a debugger (`t`) is not: that lasts moments, or somebody watches."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process, as other programs may look it up."""

    host: bytes
    """Which host and PID namespace its id belongs to: 16 bytes; empty if that is unknown."""
    id: int


@functools.cache
def _own_host() -> bytes:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_bytes().strip()
        namespace = os.readlink(_PROC / "self/ns/pid").encode()
    except OSError:  # Not Linux, or /proc is hidden.
        return b""
    return hashlib.sha256(boot + b"\0" + namespace).digest()[:16]


def own_process() -> Process:
    """This process."""
    return Process(_own_host(), os.getpid())


def is_stopped(process: Process) -> bool:
    """Whether a process of this host is stopped by a signal; False if that can't be known."""
    if not process.host or process.host != _own_host():
        return False
    try:
        stat = (_PROC / str(process.id) / "stat").read_text("utf-8", "replace")
    except OSError:
        return False  # It has ended: its connections end by themselves.
    # The state follows the name, which is in parentheses and may hold anything.
    return stat.rpartition(")")[2].split(maxsplit=1)[0] == _STOPPED
