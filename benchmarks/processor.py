"""Processor time: what processes spent, to the nanosecond where Linux tells."""

from __future__ import annotations

from pathlib import Path

__all__ = ["processor_s"]


def processor_s(pid: int) -> float | None:
    """Seconds that the threads of a process have run so far; None where nobody tells.

    Of threads that live: what one took with it to its end is not counted.
    """
    spent_ns = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            spent_ns += int((task / "schedstat").read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return None
    return spent_ns / 1e9
