"""How much memory this machine has left."""

from __future__ import annotations

from pathlib import Path

__all__ = ["MEMINFO", "available_bytes"]

MEMINFO = Path("/proc/meminfo")


def available_bytes(meminfo: Path = MEMINFO) -> int | None:
    """What processes may take without swapping, as the kernel estimates; None: not Linux."""
    try:
        lines = meminfo.read_text().splitlines()
        words = next(line.split() for line in lines if line.startswith("MemAvailable:"))
        return int(words[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return None
