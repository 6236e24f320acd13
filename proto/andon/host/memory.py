"""How much memory this machine has left for this process, and a process holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["available_bytes", "resident_bytes"]

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""By the version of control groups: a group's limit, what it uses, and the line of its
`memory.stat` that says how much of that is files which the kernel would drop first."""


def available_bytes(
    meminfo: Path = _MEMINFO, own_cgroups: Path = _OWN_CGROUPS, cgroups: Path = _CGROUPS
) -> int | None:
    """What this process may take without swapping, as the kernel estimates; None: not Linux.

    The least of what the machine has left and of what each control group with a limit has, such as
    a container's.

    Args:
        meminfo: of the machine.
        own_cgroups: names this process's groups.
        cgroups: the folder in which they are.
    """
    try:
        lines = meminfo.read_text().splitlines()
        words = next(line.split() for line in lines if line.startswith("MemAvailable:"))
        machine = int(words[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    return min([machine, *_left_in_groups(own_cgroups, cgroups)])


def _left_in_groups(own: Path, root: Path) -> Iterator[int]:
    """What each group with a limit has left, of those that this process is in."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            version, folder = 2, root
        elif "memory" in controllers.split(","):
            version, folder = 1, root / "memory"
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        # In a container the path may be the host's, and the folder the container's own group: then
        # only the last one of these is there.
        for each in (group, *group.parents):
            left = _left_in(folder / each, version)
            if left is not None:
                yield left


def _left_in(group: Path, version: int) -> int | None:
    """What one group has left; None: it has no limit, or can't be read."""
    limit, used, files = _FILES[version]
    try:
        # Without a limit it is "max", or in version 1 a number that no machine comes near.
        left = int((group / limit).read_text()) - int((group / used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, left + int(stat.get(files, 0)))
    except (OSError, ValueError):
        return None


def resident_bytes(pid: int | None = None) -> int | None:
    """What a process holds in memory, this one unless named; None: it is gone, or not Linux."""
    try:
        pages = int(Path(f"/proc/{'self' if pid is None else pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") or None  # A zombie holds nothing.
