"""Run folders: `runs/<id>/` with the journal, the logs, and the address of the service."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from andon.host.errors import CommandError

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

RUNS = Path("runs")
"""Where runs are kept, below the current folder."""

JOURNAL = "journal.sqlite"
"""The name of the journal in a run's folder."""

_SERVICE = "service.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAddress:
    """Where a run is served. `andon serve` announces this, and leaves it in the run's folder."""

    address: str
    """Where this host reaches it, as host:port."""
    metrics_url: str
    run_id: str
    journal: str
    pid: int
    board_url: str = ""
    """Where people see the run in a browser; empty: it is not served to anybody."""
    advertised: str = ""
    """Where others reach it, as host:port; empty: nobody has said."""

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServiceAddress:
        """The inverse of `to_json`.

        Raises:
            ValueError: the text is something else.
        """
        told = json.loads(text)
        try:
            # A later release may say more.
            return cls(**{each.name: told[each.name] for each in fields(cls) if each.name in told})
        except TypeError as error:
            raise ValueError(f"not the address of a service: {text!r}") from error

    def write(self, run_dir: Path) -> None:
        """Writes it to the run's folder, completely or not at all."""
        # Others read it at any time: rename a finished draft over it.
        draft = run_dir / f".{_SERVICE}.{os.getpid()}"
        draft.write_text(self.to_json() + "\n", encoding="utf-8")
        draft.replace(run_dir / _SERVICE)

    @property
    def alive(self) -> bool:
        """Whether its process still exists."""
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
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(
            f"the run's folder {run_dir} can't be made ({error.strerror}): make room there, or "
            "choose another with --run-dir"
        ) from error


def services(runs: Path = RUNS) -> list[ServiceAddress]:
    """The addresses of the runs under `runs`, also of those that have ended; the newest first."""
    found = sorted(
        runs.glob(f"*/{_SERVICE}"), key=lambda path: path.stat().st_mtime_ns, reverse=True
    )
    known = (service_of(path.parent) for path in found)
    return [service for service in known if service is not None]


def service_of(run_dir: Path) -> ServiceAddress | None:
    """The address of the run in a folder, also if it has ended; None if it is not known."""
    try:
        return ServiceAddress.from_json((run_dir / _SERVICE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def worker_log(run_dir: Path, slot: int) -> Path:
    """The file with a worker's output."""
    return run_dir / f"worker-{slot}.log"
