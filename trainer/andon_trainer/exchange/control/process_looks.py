"""Process looks: counters of this process, read twice, and what lies between.

Everything comes from /proc, or from nowhere: on another system a field is None. Reading all of it
takes a millisecond or two, and happens only when somebody asks.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import termios
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from andon.host.memory import available_bytes, resident_bytes
from andon.protocol.slowness import ProcessFacts

__all__ = [
    "ProcessLook",
    "child_processes",
    "facts_between",
    "look",
    "retransmitted",
    "waits_for_disk",
]

_PROC = Path("/proc")
_SELF = _PROC / "self"
_TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_MOST_DESCRIPTORS = 2000

# Of Linux's struct tcp_info; both are older than any kernel that runs this.
_TOTAL_RETRANS, _DELIVERY_RATE = 100, 160


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLook:
    """Counters at one moment; None: this machine does not say."""

    at: float
    process_s: float
    script_run_s: float | None = None
    script_wait_s: float | None = None
    threads_wait_s: float | None = None
    blocked_s: float | None = None
    child_s: float | None = None
    children: int = 0
    major_faults: int | None = None
    disk_bytes: int | None = None
    retransmitted: int | None = None
    unsent_bytes: int | None = None
    delivered: float | None = None


def look(script: int) -> ProcessLook:
    """Reads the counters now. `script` is the kernel's number of the script's thread."""
    run_s, wait_s = _schedule(_SELF / "task" / str(script))
    children = child_processes()
    retransmitted, unsent, delivered = _connections()
    return ProcessLook(
        at=time.monotonic(),
        process_s=time.process_time(),
        script_run_s=run_s,
        script_wait_s=wait_s,
        threads_wait_s=_all_waits(children),
        blocked_s=_blocked(script),
        child_s=_used(children),
        children=len(children),
        major_faults=_of_stat(_SELF / "stat", 9),
        disk_bytes=_disk_bytes(),
        retransmitted=retransmitted,
        unsent_bytes=unsent,
        delivered=delivered,
    )


def facts_between(first: ProcessLook, second: ProcessLook, disk: float | None) -> ProcessFacts:
    """What the process and its host did between two looks.

    Args:
        first: the earlier look.
        second: the later one.
        disk: the part of the looks in between that met the script's thread waiting for a disk.
    """
    apart_s = max(second.at - first.at, 1e-6)

    def rate(name: str) -> float | None:
        before, after = getattr(first, name), getattr(second, name)
        if before is None or after is None:
            return None
        return max(0.0, float(after - before) / apart_s)

    blocked = rate("blocked_s")
    waits = [each for each in (blocked, disk) if each is not None]
    sent_again = None
    if first.retransmitted is not None and second.retransmitted is not None:
        # A connection that was closed in between takes its count away.
        sent_again = max(0, second.retransmitted - first.retransmitted)
    return ProcessFacts(
        apart_s=apart_s,
        script_cores=rate("script_run_s"),
        process_cores=rate("process_s"),
        child_cores=rate("child_s") if second.children else None,
        children=second.children,
        waited_for_core=rate("script_wait_s"),
        threads_waited=rate("threads_wait_s"),
        host_cores=os.cpu_count() or 0,
        major_faults=rate("major_faults"),
        swap_bytes=_kibibytes(_SELF / "status", "VmSwap:"),
        memory_bytes=resident_bytes(),
        free_bytes=available_bytes(),
        waited_for_disk=min(1.0, max(waits)) if waits else None,
        disk_bytes=rate("disk_bytes"),
        retransmitted=sent_again,
        unsent_bytes=second.unsent_bytes,
        delivered=second.delivered,
    )


def waits_for_disk(script: int, children: Sequence[int] = ()) -> float | None:
    """Whether a thread sleeps in the kernel so that nothing wakes it but a disk, or memory: 0 or 1.

    Args:
        script: the kernel's number of the script's thread.
        children: processes that it waits for; of them the part that sleeps so counts, if it is
            more.
    """
    found = _sleeps_for_disk(_SELF / "task" / str(script))
    loading = [_sleeps_for_disk(_PROC / str(child)) for child in children]
    known = [each for each in loading if each is not None]
    return max(found or 0.0, sum(known) / len(known)) if known else found


def child_processes() -> list[int]:
    """The processes that this one started, and those that they did; older ones first."""
    found = [int(each) for thread in _listed(_SELF / "task") for each in _children_of(thread)]
    return found + [
        int(each)
        for child in found
        for thread in _listed(_PROC / str(child) / "task")
        for each in _children_of(thread)
    ]


# -------------------------------------------------------------------------------------- parts


def _schedule(path: Path) -> tuple[float | None, float | None]:
    """For how long a thread ran, and for how long it waited for a core, in seconds."""
    with suppress(OSError, ValueError, IndexError):
        run, wait, *_ = (path / "schedstat").read_text().split()
        return int(run) / 1e9, int(wait) / 1e9
    return None, None


def _all_waits(children: Sequence[int]) -> float | None:
    """For how long all threads waited for a core, and those of the children; none that ended."""
    threads = [*_listed(_SELF / "task"), *(_PROC / str(child) for child in children)]
    waits = [wait for each in threads if (wait := _schedule(each)[1]) is not None]
    return sum(waits) if waits else None


def _sleeps_for_disk(path: Path) -> float | None:
    with suppress(OSError, IndexError):
        return float(_stat_fields(path / "stat")[0] == "D")
    return None


def _blocked(script: int) -> float | None:
    ticks = _of_stat(_SELF / "task" / str(script) / "stat", 39)
    return None if ticks is None else ticks / _TICK


def _stat_fields(path: Path) -> list[str]:
    """What a `stat` file has behind the name, which may hold anything."""
    return path.read_text().rpartition(")")[2].split()


def _of_stat(path: Path, field: int) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        return int(_stat_fields(path)[field])
    return None


def _used(children: Sequence[int]) -> float:
    """Processor time of these processes."""
    stats = (_PROC / str(child) / "stat" for child in children)
    return sum(_of_stat(path, field) or 0 for path in stats for field in (11, 12)) / _TICK


def _children_of(thread: Path) -> list[str]:
    return _read(thread / "children").split()


def _listed(folder: Path) -> list[Path]:
    with suppress(OSError):
        return list(folder.iterdir())
    return []


def _read(path: Path) -> str:
    with suppress(OSError):  # A thread may be gone by now.
        return path.read_text()
    return ""


def _word(path: Path, name: str) -> int | None:
    """The number behind a name in a file of such lines."""
    with suppress(OSError, ValueError, IndexError):
        for line in path.read_text().splitlines():
            if line.split(maxsplit=1)[:1] == [name]:
                return int(line.split()[1])
    return None


def _kibibytes(path: Path, name: str) -> int | None:
    amount = _word(path, name)
    return None if amount is None else amount * 1024


def _disk_bytes() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        lines = dict(
            line.split(": ", 1) for line in (_SELF / "io").read_text().splitlines() if ": " in line
        )
        return int(lines["read_bytes"]) + int(lines["write_bytes"])
    return None


def retransmitted() -> dict[int, int] | None:
    """Segments that each TCP connection of this process sent again, by the socket's inode.

    None: this machine does not say.
    """
    found = _each_connection()
    return None if found is None else {inode: again for inode, (again, _, _) in found.items()}


def _connections() -> tuple[int | None, int | None, float | None]:
    """Segments sent again, bytes not yet acknowledged, and the slowest used one's rate."""
    found = _each_connection()
    if found is None:
        return None, None, None
    again = sum(each[0] for each in found.values())
    unsent = sum(each[1] for each in found.values())
    rates = [rate for _, waiting, rate in found.values() if waiting and rate]
    return again, unsent, min(rates, default=None)


def _each_connection() -> dict[int, tuple[int, int, float]] | None:
    """Of each connection, by its inode: segments sent again, unacknowledged bytes, and its rate."""
    found: dict[int, tuple[int, int, float]] = {}
    try:
        descriptors = os.listdir(_SELF / "fd")[:_MOST_DESCRIPTORS]
    except OSError:
        return None
    for descriptor in descriptors:
        with suppress(OSError, ValueError, struct.error):
            about = os.fstat(int(descriptor))
            if not stat.S_ISSOCK(about.st_mode):
                continue
            connection = _connection(int(descriptor))
            if connection is not None:
                found[about.st_ino] = connection
    return found


def _connection(descriptor: int) -> tuple[int, int, float] | None:
    # Of a copy: the end of the block closes what it was given.
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        if copy.family not in (socket.AF_INET, socket.AF_INET6) or not _has_peer(copy):
            return None
        info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        (again,) = struct.unpack_from("=I", info, _TOTAL_RETRANS)
        rate = 0.0
        if len(info) >= _DELIVERY_RATE + 8:
            (rate,) = struct.unpack_from("=Q", info, _DELIVERY_RATE)
        waiting = struct.unpack("=i", fcntl.ioctl(copy, termios.TIOCOUTQ, b"\0" * 4))[0]
        return again, max(0, waiting), float(rate)


def _has_peer(copy: socket.socket) -> bool:
    with suppress(OSError):
        copy.getpeername()
        return copy.type == socket.SOCK_STREAM
    return False
