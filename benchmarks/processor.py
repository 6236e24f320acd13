"""CPU time of processes, in nanosecond resolution where Linux reports it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["processor_s"]


def processor_s(pid: int) -> float | None:
    """Seconds of CPU time of a process's threads so far; None if the system does not report them.

    Only living threads count: the time of a thread that has ended is lost.
    """
    spent_ns = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            spent_ns += int((task / "schedstat").read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return None
    return spent_ns / 1e9
