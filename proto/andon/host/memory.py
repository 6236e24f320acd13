"""How much memory this machine has left, and a process holds."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["MEMINFO", "available_bytes", "resident_bytes"]

MEMINFO = Path("/proc/meminfo")


def available_bytes(meminfo: Path = MEMINFO) -> int | None:
    """What processes may take without swapping, as the kernel estimates; None: not Linux."""
    try:
        lines = meminfo.read_text().splitlines()
        words = next(line.split() for line in lines if line.startswith("MemAvailable:"))
        return int(words[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def resident_bytes(pid: int | None = None) -> int | None:
    """What a process holds in memory, this one unless named; None: it is gone, or not Linux."""
    try:
        pages = int(Path(f"/proc/{'self' if pid is None else pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") or None  # A zombie holds nothing.
