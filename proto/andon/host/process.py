"""Processes of this host: who this one is, and whether another one is stopped, or about to end.

A process that is stopped (SIGSTOP, Ctrl-Z) keeps its connections, and its kernel goes on to answer
for it. So does one that was killed, until its memory is freed: a third of a second for each GB, and
ten times that where others want the processor. Only the process table says at once that nothing
will come of it. Another host's processes, or those of another container, can't be looked up: their
place has another `host`.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process", "ProcessState", "own_process", "state_of"]

_PROC = Path("/proc")
_STOPPED = "T"
"""By a signal. A process under a debugger (`t`) is not: that lasts moments, or somebody watches."""
_EXITING = 0x4
"""Linux's flag PF_EXITING of a task: set before its memory is freed, and never taken back."""


class ProcessState(enum.Enum):
    """What the process table says."""

    RUNS = "runs"
    """Or can't be looked up: it has ended, or belongs to another host."""
    STOPPED = "stopped"
    """By a signal."""
    ENDS = "ends"
    """It has been killed, or exits: its connections end once its memory is freed."""


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


def state_of(process: Process) -> ProcessState:
    """The state of a process of this host."""
    if not process.host or process.host != _own_host():
        return ProcessState.RUNS
    try:
        stat = (_PROC / str(process.id) / "stat").read_text("utf-8", "replace")
    except OSError:
        return ProcessState.RUNS  # It has ended: its connections have, too.
    # The fields follow the name, which is in parentheses and may hold anything.
    state, *_, flags = stat.rpartition(")")[2].split()[:7]
    if int(flags) & _EXITING:
        return ProcessState.ENDS
    return ProcessState.STOPPED if state == _STOPPED else ProcessState.RUNS
