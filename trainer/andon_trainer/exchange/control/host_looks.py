"""Host looks: what a worker's host and its container withhold from it, and who takes it.

Everything is read from /proc and from the files of control groups, of version 1 or 2, without
privileges; what can't be read is None. Only where something is lacking is it asked who has it:
that goes over all processes of the host, which takes milliseconds of a processor that is short.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from andon.protocol.slowness import ProcessFacts

__all__ = [
    "HostLook",
    "OtherProcess",
    "OtherProcesses",
    "host_facts",
    "lacks_something",
    "look_at_host",
    "look_at_others",
    "who_has_it",
]

_TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_MOST_PROCESSES = 4000
_LEAST_CORES = 0.05
"""Who uses less takes nothing from anybody."""
_STALLS = ("cpu", "memory", "io")
_SHORT = 0.1
"""Whose threads wait for a core for so much of the time lacks something; so with pressure."""


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """A process of the host that is not this worker's."""

    name: str
    used_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLook:
    """Counters at one moment; None: this machine does not say."""

    at: float
    busy_s: float | None = None
    stolen_s: float | None = None
    """Time in which the host's own host ran others."""
    swapped_in: float | None = None
    throttled_s: float | None = None
    """Time in which a limit of processor time held this process's group back."""
    allowed_cores: float | None = None
    stalled_s: dict[str, float] = field(default_factory=dict)
    """Time in which something of the group, or of the host, waited for a resource."""


@dataclass(frozen=True, slots=True)
class OtherProcesses:
    """The processes of a host that are not this worker's, at one moment, by number."""

    at: float
    found: dict[int, OtherProcess]


def look_at_host(root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> HostLook:
    """Reads the counters now.

    Args:
        root: where `proc` and `sys` are.
        clock: says what time it is.
    """
    at = clock()
    times = _words(root / "proc/stat", "cpu")
    used = [int(each) / _TICK for each in times[:8]]
    pages = _number(root / "proc/vmstat", "pswpin")
    groups = list(_groups(root))
    throttled = [each for folder in groups if (each := _throttled(folder)) is not None]
    return HostLook(
        at=at,
        # user, nice, system, idle, waits for disks, interrupts, soft ones, stolen
        busy_s=used[0] + used[1] + used[2] + used[5] + used[6] if len(used) > 6 else None,
        stolen_s=used[7] if len(used) > 7 else None,
        swapped_in=None if pages is None else pages * _PAGE,
        throttled_s=sum(throttled) if throttled else None,
        allowed_cores=_allowed(groups),
        stalled_s=_stalls(root, groups),
    )


def look_at_others(
    own: Collection[int], root: Path = Path("/"), clock: Callable[[], float] = time.monotonic
) -> OtherProcesses:
    """Looks at all processes now, but for this one and those that it started (`own`)."""
    return OtherProcesses(clock(), _others(root, own))


def host_facts(facts: ProcessFacts, first: HostLook, second: HostLook) -> ProcessFacts:
    """Facts of a process, with what its host did between two looks."""
    apart_s = max(second.at - first.at, 1e-6)

    def rate(before: float | None, after: float | None) -> float | None:
        if before is None or after is None:
            return None
        return max(0.0, (after - before) / apart_s)

    def part(name: str) -> float | None:
        stalled = rate(first.stalled_s.get(name), second.stalled_s.get(name))
        return None if stalled is None else min(1.0, stalled)

    throttled = rate(first.throttled_s, second.throttled_s)
    return replace(
        facts,
        host_busy_cores=rate(first.busy_s, second.busy_s),
        swapped_in=rate(first.swapped_in, second.swapped_in),
        stolen_cores=rate(first.stolen_s, second.stolen_s),
        # Each processor of a group that is held back counts: several threads, more than the time.
        throttled=None if throttled is None else min(1.0, throttled),
        allowed_cores=second.allowed_cores,
        cpu_pressure=part("cpu"),
        memory_pressure=part("memory"),
        disk_pressure=part("io"),
    )


def lacks_something(facts: ProcessFacts) -> bool:
    """Whether a worker waits for what somebody else may have."""
    parts = (
        facts.waited_for_core,
        facts.threads_waited,
        facts.memory_pressure,
        facts.cpu_pressure if facts.waited_for_core is None else None,
    )
    return bool(facts.major_faults) or any((part or 0.0) >= _SHORT for part in parts)


def who_has_it(
    facts: ProcessFacts, first: OtherProcesses, second: OtherProcesses, root: Path = Path("/")
) -> ProcessFacts:
    """Facts of a process, with who has most of the cores and of the memory of its host."""
    before, now, apart_s = first.found, second.found, max(second.at - first.at, 1e-6)
    cores = {
        pid: (each.used_s - before[pid].used_s) / apart_s
        for pid, each in now.items()
        if pid in before and before[pid].name == each.name
    }
    busiest, busiest_cores = _busiest(cores, now, root)
    largest = max(now, key=lambda pid: now[pid].memory_bytes, default=None)
    return replace(
        facts,
        busiest=busiest,
        busiest_cores=busiest_cores,
        largest="" if largest is None else f"{now[largest].name} (process {largest})",
        largest_bytes=None if largest is None else now[largest].memory_bytes,
    )


# -------------------------------------------------------------------------------------- others


def _others(root: Path, own: Collection[int]) -> dict[int, OtherProcess]:
    found: dict[int, OtherProcess] = {}
    with suppress(OSError):
        folder = root / "proc"
        numbers = (int(name) for name in os.listdir(folder) if name.isdecimal())
        for pid in islice((pid for pid in numbers if pid not in own), _MOST_PROCESSES):
            # It may be gone by now; nobody but its owner may see it on some hosts.
            with (
                suppress(OSError, ValueError, IndexError),
                open(f"{folder}/{pid}/stat", errors="replace") as file,
            ):
                head, _, rest = file.read().rpartition(")")
                fields = rest.split()
                used = int(fields[11]) + int(fields[12])
                found[pid] = OtherProcess(
                    head.partition("(")[2], used / _TICK, int(fields[21]) * _PAGE
                )
    return found


def _busiest(
    cores: dict[int, float], others: dict[int, OtherProcess], root: Path
) -> tuple[str, float | None]:
    """The program that uses most, all its processes together."""
    programs: dict[str, dict[int, float]] = defaultdict(dict)
    for pid, used in cores.items():
        if used >= _LEAST_CORES:
            programs[others[pid].name][pid] = used
    if not programs:
        return "", None
    name, most = max(programs.items(), key=lambda each: sum(each[1].values()))
    pid = max(most, key=lambda each: most[each])
    number = f"process {pid}" if len(most) == 1 else f"{len(most)} processes, such as {pid}"
    alike = _command(root, str(pid)) == _command(root, "self") != b""
    what = f"{name}, started as this worker is" if alike else name
    return f"{what} ({number})", sum(most.values())


def _command(root: Path, pid: str) -> bytes:
    with suppress(OSError):
        return (root / f"proc/{pid}/cmdline").read_bytes()
    return b""


# -------------------------------------------------------------------------------------- limits


def _groups(root: Path) -> Iterator[Path]:
    """Folders of the group that limits this process's processor time, and of those above it."""
    mounted = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, kinds, path = [*line.split(":", 2), "", ""][:3]
        if kinds and "cpu" not in kinds.split(","):
            continue
        top = mounted / kinds
        inner = top / path.strip("/")
        # Of a container's the path may be the host's: then the top is its own.
        for folder in (inner, *inner.parents):
            if not folder.is_relative_to(top):
                break
            if (folder / "cpu.stat").exists():
                yield folder


def _throttled(folder: Path) -> float | None:
    """For how long a group was held back, in seconds."""
    micro = _number(folder / "cpu.stat", "throttled_usec")
    nano = _number(folder / "cpu.stat", "throttled_time")
    if micro is not None:
        return micro / 1e6
    return None if nano is None else nano / 1e9


def _allowed(groups: Sequence[Path]) -> float | None:
    """The cores that this process may use, by its affinity and by its groups' quotas."""
    limits = [float(len(os.sched_getaffinity(0)))] if hasattr(os, "sched_getaffinity") else []
    for folder in groups:
        quota, period, *_ = [*" ".join(_lines(folder / "cpu.max")).split(), "", ""]
        if not quota:  # Version 1 has a file for each.
            quota = " ".join(_lines(folder / "cpu.cfs_quota_us"))
            period = " ".join(_lines(folder / "cpu.cfs_period_us"))
        with suppress(ValueError, ZeroDivisionError):
            if int(quota) > 0:
                limits.append(int(quota) / int(period))
    return min(limits, default=None)


def _stalls(root: Path, groups: Sequence[Path]) -> dict[str, float]:
    """For how long something waited for each resource: of the own group, or of the host."""
    found: dict[str, float] = {}
    for name in _STALLS:
        own = [words for each in groups[:1] if (words := _words(each / f"{name}.pressure", "some"))]
        words = own[0] if own else _words(root / "proc/pressure" / name, "some")
        for total in (each for each in words if each.startswith("total=")):
            found[name] = int(total.removeprefix("total=")) / 1e6
    return found


# --------------------------------------------------------------------------------------- files


def _lines(path: Path) -> list[str]:
    with suppress(OSError):  # Some are there, and can't be read.
        return path.read_text().splitlines()
    return []


def _words(path: Path, first: str) -> list[str]:
    """What stands behind the word that a line begins with."""
    split = (line.split() for line in _lines(path))
    return next((words[1:] for words in split if words[:1] == [first]), [])


def _number(path: Path, name: str) -> int | None:
    words = _words(path, name)
    return int(words[0]) if words else None
