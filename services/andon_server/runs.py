"""Run folders: `runs/<id>/` with the journal, the logs, and the address of the service."""

from __future__ import annotations

import json
import logging
import os
import secrets
import stat
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from andon.host.errors import CommandError
from andon.host.logs import LogEvent
from andon.host.private_files import make_folder, open_private

__all__ = [
    "JOURNAL",
    "RUNS",
    "ServiceAddress",
    "free_run_id",
    "make_run_dir",
    "service_of",
    "services",
    "worker_log",
]

_log = logging.getLogger(__name__)

RUNS = Path("runs")
"""Where runs are kept, below the current folder."""

JOURNAL = "journal.sqlite"
"""The name of the journal in a run's folder."""

_SERVICE = "service.json"
_LONGEST_ADDRESS = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAddress:
    """Where a run is served. `andon serve` announces this, and leaves it in the run's folder."""

    address: str
    """Where this host reaches it, as host:port."""
    metrics_url: str
    run_id: str
    journal: str
    pid: int
    """0: it runs elsewhere, or nobody knows."""
    board_url: str = ""
    """Where people see the run in a browser; empty: it is not served to anybody."""
    advertised: str = ""
    """Where others reach it, as host:port; empty: nobody has said."""
    complete_at_unix_s: float = 0.0
    """Since when the run is complete; 0: it is not. Workers of this host read it if nobody answers
    at `address`."""

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError for what is no address: others may have written it."""
        texts = (self.address, self.metrics_url, self.run_id, self.board_url, self.advertised)
        if not all(isinstance(each, str) for each in (*texts, self.journal)):
            raise TypeError("a text of the address is none")
        if not all(each.isprintable() for each in texts):
            raise ValueError("a text of the address can't be shown")
        # Negative ids mean groups of processes.
        if not (type(self.pid) is int and 0 <= self.pid < 2**31):
            raise ValueError(f"{self.pid!r:.40} is no process id")

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServiceAddress:
        """The inverse of `to_json`.

        Raises:
            ValueError: the text is something else.
        """
        try:
            told = json.loads(text)
            # A later release may say more.
            return cls(**{each.name: told[each.name] for each in fields(cls) if each.name in told})
        except (TypeError, RecursionError) as error:
            raise ValueError(f"not the address of a service: {text!r:.200}") from error

    def write(self, run_dir: Path) -> None:
        """Writes it to the run's folder, completely or not at all."""
        # Others read it at any time: rename a finished draft over it.
        draft = run_dir / f".{_SERVICE}.{os.getpid()}"
        with open(draft, "w", encoding="utf-8", opener=open_private) as file:
            file.write(self.to_json() + "\n")
        draft.replace(run_dir / _SERVICE)

    def note_complete(self, run_dir: Path, at_unix_s: float) -> None:
        """Notes in the run's folder that the run is complete; without room there, only logs that.

        The file keeps its time: by it people find the service that was started last.
        """
        try:
            started_ns = (run_dir / _SERVICE).stat().st_mtime_ns
            replace(self, complete_at_unix_s=at_unix_s).write(run_dir)
            os.utime(run_dir / _SERVICE, ns=(started_ns, started_ns))
        except OSError as error:
            _log.warning(LogEvent("completion_not_noted", why=error.strerror or str(error)))

    @property
    def alive(self) -> bool:
        """Whether its process still exists."""
        if not self.pid:  # to the kernel, 0 is this process's own group
            return False
        # Signal 0 is not sent; the kernel only checks that the process exists.
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # it exists, and belongs to another user
            return True
        return True


def free_run_id(runs: Path = RUNS) -> str:
    """A run id of four random hexadecimal digits that is free under `runs`, or of more digits."""
    for digits in (4, 4, 4, 4, 8):
        run_id = secrets.token_hex(digits // 2)
        if not (runs / run_id).exists():
            return run_id
    return secrets.token_hex(8)


def make_run_dir(run_dir: Path) -> None:
    """Creates a run's folder if it does not exist.

    Raises:
        CommandError: it can't be created.
    """
    try:
        make_folder(run_dir)
    except OSError as error:
        raise CommandError(
            f"the run's folder {run_dir} can't be made ({error.strerror}): make room there, or "
            "choose another with --run-dir"
        ) from error


def services(runs: Path = RUNS) -> list[ServiceAddress]:
    """The addresses of the runs under `runs`, also of those that have ended; the newest first."""
    found = sorted(runs.glob(f"*/{_SERVICE}"), key=_changed_at, reverse=True)
    known = (service_of(path.parent) for path in found)
    return [service for service in known if service is not None]


def service_of(run_dir: Path) -> ServiceAddress | None:
    """The address of the run in a folder, also if it has ended; None if it is not known."""
    try:
        return ServiceAddress.from_json(_text_of(run_dir / _SERVICE))
    except (OSError, ValueError):
        return None


def _text_of(path: Path) -> str:
    """The text of a small file. What is no file is not waited for, as a pipe would be."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise ValueError(f"{path} is no file")
        return file.read(_LONGEST_ADDRESS).decode()


def _changed_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # its folder was removed, or is somebody else's
        return 0


def worker_log(run_dir: Path, slot: int) -> Path:
    """The file with a worker's output."""
    return run_dir / f"worker-{slot}.log"
