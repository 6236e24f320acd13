"""Equal shares of the processors: what a process gets, whatever else runs on the machine.

Three worker processes on two cores are not equal by themselves: a core that one of them leaves idle
speeds up another, so a slow worker would look less slow while the others wait for it. Here each
gets the same part of a core and never more. Linux's control groups do that: a quota in a short
period for each group, and a weight far above that of processes outside, so that the quota is also
reached on a machine that has other work. Where the groups can't be made, each process gets a core
of its own, if there are enough.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CpuShare", "NoShares", "equal_shares"]

_PERIOD_US = 10_000
"""Short compared with any step: a group that used up its part waits for a few milliseconds."""
_V1 = Path("/sys/fs/cgroup/cpu")
_V2 = Path("/sys/fs/cgroup")
_WEIGHT_V1, _WEIGHT_V2 = 50 * 1024, 5000
"""Fifty times that of a process outside."""


class NoShares(RuntimeError):
    """This machine gives no equal shares. The message says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuShare:
    """One process's part of the processors."""

    group: Path | None = None
    """The control group's folder; None if there is none."""
    core: int | None = None
    """The only core that the process may use; None: any."""

    def enter(self, pid: int) -> None:
        """Puts a process with all its threads under this share."""
        if self.group is not None:
            (self.group / "cgroup.procs").write_text(f"{pid}\n")
        if self.core is not None:
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), {self.core})


@contextmanager
def equal_shares(count: int, cores: float) -> Iterator[tuple[list[CpuShare], CpuShare, str]]:
    """Provides `count` equal shares of `cores` cores each, until the context exits.

    Yields:
        The shares; one more for a service, which has the same weight and no limit; and how they
        were made, in a sentence.

    Raises:
        NoShares: this machine can't give them.
    """
    version = 1 if _writable(_V1 / "cpu.cfs_quota_us", _V1) else 2 if _has_v2() else 0
    if not version:
        yield _own_cores(count)
        return
    root = (_V1 if version == 1 else _V2) / f"andon-benchmark-{os.getpid()}"
    names = [*(f"worker-{number}" for number in range(count)), "service"]
    try:
        root.mkdir()
        _weigh(root, version)
        if version == 2:
            (root / "cgroup.subtree_control").write_text("+cpu")
        for name in names:
            (root / name).mkdir()
            if name != "service":
                _limit(root / name, version, round(cores * _PERIOD_US))
        *shares, service = (CpuShare(group=root / name) for name in names)
        how = f"a control group each (cgroup v{version}), {cores:g} of a core in each "
        how += f"{_PERIOD_US // 1000} ms"
        yield shares, service, how
    finally:
        _remove([*(root / name for name in names), root])


def _own_cores(count: int) -> tuple[list[CpuShare], CpuShare, str]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) <= count:
        raise NoShares(
            f"equal shares need a control group for each of {count} workers (root, and the cpu "
            f"controller in {_V1} or {_V2}) or {count + 1} cores; this machine has {len(cores)} "
            "cores and its groups can't be written: run this with sudo"
        )
    shares = [CpuShare(core=core) for core in cores[:count]]
    return shares, CpuShare(core=cores[count]), "a core each"


def _writable(*paths: Path) -> bool:
    return all(path.exists() and os.access(path, os.W_OK) for path in paths) and os.geteuid() == 0


def _has_v2() -> bool:
    controllers = _V2 / "cgroup.subtree_control"
    return _writable(controllers) and "cpu" in controllers.read_text().split()


def _weigh(group: Path, version: int) -> None:
    if version == 1:
        (group / "cpu.shares").write_text(str(_WEIGHT_V1))
    else:
        (group / "cpu.weight").write_text(str(_WEIGHT_V2))


def _limit(group: Path, version: int, quota_us: int) -> None:
    if version == 1:
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    else:
        (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")


def _remove(groups: list[Path]) -> None:
    """Removes groups whose processes have ended; the kernel takes a moment to notice that."""
    for group in groups:
        for _ in range(50):
            with suppress(FileNotFoundError):
                try:
                    group.rmdir()
                except OSError:
                    time.sleep(0.1)
                    continue
            break
