"""Host: tries the ports, folders, shared memory and clock of this machine."""

from __future__ import annotations

import ctypes
import shutil
import socket
import sqlite3
import stat
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from andon.host.tls import readable_by_others
from andon_cli.commands.doctor.findings import Finding, fail, ok, warn
from andon_coordinator.transport.journal import Journal, JournalError
from andon_server.runs import JOURNAL

__all__ = [
    "check_clock",
    "check_folder",
    "check_ports",
    "check_privacy",
    "check_shared_memory",
    "check_windows",
]

_GIB = 2**30
_MIB = 2**20
_LEAST_SHARED = 256 * _MIB
"""Docker gives a container 64 MiB by default, which is less than most models' gradients."""
_LEAST_DISK = 256 * _MIB
_EARLIEST = datetime(2025, 1, 1, tzinfo=UTC).timestamp()
_LATEST = datetime(2106, 1, 1, tzinfo=UTC).timestamp()
"""A coordinator's term holds seconds in 32 bits."""
_TIMEX_BYTES = 512
_UNSYNCHRONISED = 5
_SLOW_START_AFTER_IDLE = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")


def check_ports(wanted: Sequence[tuple[str, int, str]]) -> list[Finding]:
    """Tries to listen on loopback.

    Args:
        wanted: what takes a port, the port, and the flag that chooses another.
    """
    try:
        _listen(0)
    except OSError as error:
        return [
            fail(
                "ports",
                f"it is impossible to listen on 127.0.0.1 ({error.strerror})",
                "bring the loopback interface up (ip link set lo up)",
            )
        ]
    findings = []
    free = []
    for what, port, flag in wanted:
        try:
            _listen(port)
        except OSError as error:
            findings.append(
                warn(
                    "ports",
                    f"{what} port {port} is not available ({error.strerror})",
                    f"another run may have it; `andon serve {flag} 0` takes any free one, and "
                    "`andon run` does so by itself",
                )
            )
        else:
            free.append(f"{port} ({what})")
    if free:
        findings.insert(0, ok("ports", f"free: {', '.join(free)}"))
    return findings


def check_privacy(runs: Path) -> list[Finding]:
    """Looks for runs that every user of this host may read, as earlier releases left them."""
    if not _may_enter(runs):
        return []
    open_to_all = sorted(
        journal.parent
        for journal in runs.glob(f"*/{JOURNAL}")
        if _may_enter(journal.parent) and readable_by_others(journal)
    )
    if not open_to_all:
        return []
    which = f"{open_to_all[0]}" + (f" and {more} more" if (more := len(open_to_all) - 1) else "")
    return [
        warn(
            "privacy",
            f"every user of this host may read the journals and logs in {which}",
            f"chmod -R o= {runs}; a run that is made now is its owner's alone",
        )
    ]


def _may_enter(folder: Path) -> bool:
    """Whether users other than a folder's owner and group may use what is in it."""
    return folder.is_dir() and bool(folder.stat().st_mode & stat.S_IXOTH)


def check_folder(runs: Path) -> list[Finding]:
    """Writes a journal where runs are kept: files, locks and SQLite must work there."""
    check, parent = "runs", runs if runs.is_dir() else runs.absolute().parent
    try:
        folder = Path(tempfile.mkdtemp(prefix=".doctor-", dir=parent))
    except OSError as error:
        return [
            fail(
                check,
                f"{parent}/ can't be written ({error.strerror})",
                "change to a folder of your own, or pass --run-dir",
            )
        ]
    try:
        journal = Journal.open(folder / JOURNAL, "doctor")
        journal.begin_term(2**32)
        journal.close()
    except (JournalError, sqlite3.Error, OSError) as error:
        return [
            fail(
                check,
                f"no journal can be kept under {parent}/ ({error})",
                "its file system lacks locks or SQLite's WAL, as some network shares do: pass "
                "--run-dir on a local disk",
            )
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    free = shutil.disk_usage(parent).free
    if free < _LEAST_DISK:
        return [
            warn(
                check,
                f"{parent}/ has {_size(free)} left",
                "journals and checkpoints stop a run when they can't be written: make room",
            )
        ]
    return [ok(check, f"{runs}/ can be written and keeps journals, {_size(free)} free")]


def check_shared_memory(folder: Path) -> list[Finding]:
    """Writes a file where processes share memory, and checks how much room there is."""
    check, remedy = "shared memory", "enlarge it, or set ANDON_SHARED_DIR to a folder on tmpfs"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"andon")
        usage = shutil.disk_usage(folder)
    except OSError as error:
        why = f"{folder} can't be used ({error.strerror})"
        return [warn(check, why, f"{remedy} (training works, over TCP)")]
    if usage.free < _LEAST_SHARED:
        return [
            warn(
                check,
                f"{folder} has {_size(usage.free)} free of {_size(usage.total)}, little for the "
                "gradients of a model and the batches of a DataLoader's processes",
                f"{remedy} (training works, over TCP)",
            )
        ]
    return [ok(check, f"{folder} has {_size(usage.free)} free of {_size(usage.total)}")]


def check_clock(runs: Path, now: float | None = None) -> list[Finding]:
    """Checks whether the clock can be right: terms grow with it, and journals have its dates."""
    check = "clock"
    now = time.time() if now is None else now
    said = datetime.fromtimestamp(now, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    if not _EARLIEST < now < _LATEST:
        return [fail(check, f"the clock says {said}", "set it: timedatectl set-ntp true")]
    newest = max((path.stat().st_mtime for path in runs.glob(f"*/{JOURNAL}")), default=0.0)
    if newest > now + 60:
        return [
            warn(
                check,
                f"the clock says {said}, {newest - now:.0f} s before a run here was written",
                "it went backwards, or another host's is fast: timedatectl set-ntp true",
            )
        ]
    if _synchronised() is False:
        return [
            warn(
                check,
                f"{said}, and no time server corrects it",
                "training works; dates in journals and metrics may be wrong: "
                "timedatectl set-ntp true",
            )
        ]
    return [ok(check, said)]


def check_windows(setting: Path = _SLOW_START_AFTER_IDLE) -> list[Finding]:
    """Reads whether TCP connections keep their congestion windows while a step computes."""
    check = "network"
    try:
        forgets = setting.read_text().strip() != "0"
    except OSError:
        return []  # Other systems, and containers that hide it.
    if not forgets:
        return [ok(check, "connections that were idle for a moment start at full rate")]
    return [
        warn(
            check,
            "connections that were idle for 0.2 s start slowly again, as they do in each step",
            "sysctl -w net.ipv4.tcp_slow_start_after_idle=0 on each host saves about 10 ms a step "
            "(training works without)",
        )
    ]


def _listen(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        probe.listen()


def _synchronised() -> bool | None:
    """Whether a time server corrects the kernel's clock; None if unknown."""
    if not sys.platform.startswith("linux"):
        return None
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return None if state < 0 else bool(state != _UNSYNCHRONISED)


def _size(count: int) -> str:
    if count >= _GIB:
        return f"{count / _GIB:.1f} GiB"
    return f"{count / _MIB:.0f} MiB"
