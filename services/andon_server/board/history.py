"""History: the service's own run and those in the folders beside it, read from their journals.

Journals are read by the threads of viewers, never by the event loop. One thread reads at a time:
otherwise many viewers of long runs would take processor and memory from the run itself. What an
ended run's journal says is kept for as long as its files stay as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from andon.host.strict_json import strict_json
from andon_coordinator.transport.damage import JournalError, journal_errors
from andon_coordinator.transport.reader import JournalReader
from andon_server.board.view import event_view
from andon_server.book import halt_fields
from andon_server.halt_words import halted_line
from andon_server.past_runs import PastRun, read_run
from andon_server.runs import JOURNAL, service_of

__all__ = ["MAX_POINTS", "HistoryBusy", "RunHistory", "UnknownRun"]

MAX_POINTS = 5000
"""A chart has fewer pixels than that."""

_MAX_RUNS = 500
"""The newest so many journals are listed."""

_MAX_EVENTS = 2000
"""The newest so many events of a run are told, and halts: nobody reads more of them on a page."""

_TURN_S = 10.0
"""How long somebody waits for their turn to read journals."""

_Look = tuple[tuple[int, int] | None, ...]


class UnknownRun(Exception):
    """There is no such run here, or its journal can't be read; says which."""


class HistoryBusy(Exception):
    """Others are reading journals, and take long."""


class RunHistory:
    """The runs of one service."""

    def __init__(self, run_id: str, folder: Path, *, turn_s: float = _TURN_S) -> None:
        """The service's own run has its journal in `folder`; the others are beside that. Somebody
        waits for `turn_s` at most while others read.
        """
        self._turn_s = turn_s
        self._run_id = run_id
        self._folder = folder.absolute()
        self._lock = threading.Lock()
        self._known: dict[Path, tuple[_Look, PastRun]] = {}

    def runs(self) -> list[dict[str, Any]]:
        """Every run, newest first."""
        with self.turn():
            found = [(run_id, self._read(folder)) for run_id, folder in self._folders().items()]
        found.sort(key=lambda each: (each[1].started_unix_s, each[0]), reverse=True)
        return [self._summary(run_id, run) for run_id, run in found]

    def run(self, run_id: str) -> str:
        """One run, as JSON: its last events and halts, and the names of what its script logged.

        Raises:
            UnknownRun: there is none, or its journal can't be read.
        """
        folder = self._folder_of(run_id)
        with self.turn(), _journal(folder) as reader:
            # Written here, because only writing shows some damage.
            return strict_json(
                {
                    "run": self._summary(run_id, self._read(folder)),
                    "events": [event_view(each) for each in reader.run_events()[-_MAX_EVENTS:]],
                    "halts": [
                        halt_fields(halt)
                        | {
                            "id": str(halt.evidence.id),
                            "sentence": halted_line(halt.evidence),
                            "ended_session": halt.ended_session,
                        }
                        for halt in reader.halts()[-_MAX_EVENTS:]
                    ],
                    "names": reader.scalar_names(),
                }
            )

    def curves(self, run_id: str, points: int) -> str:
        """A run's curves, as JSON, each reduced to at most `points` points.

        Raises:
            UnknownRun: as for `run`.
        """
        with self.turn(), _journal(self._folder_of(run_id)) as reader:
            return strict_json(_curves(run_id, reader, points))

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A turn to read journals; one thread has it.

        Raises:
            HistoryBusy: others took too long.
        """
        # With a limit: threads that wait here have places that others may need.
        if not self._lock.acquire(timeout=self._turn_s):
            raise HistoryBusy("others are reading long runs here: ask again in a moment")
        try:
            yield
        finally:
            self._lock.release()

    def _folders(self) -> dict[str, Path]:
        """The folder of each run that can be asked for. A name comes from here, never from a path
        that somebody asks for.
        """
        journals = sorted(self._folder.parent.glob(f"*/{JOURNAL}"), key=_changed_at, reverse=True)
        beside = {each.parent.name: each.parent for each in journals[:_MAX_RUNS]}
        others = {name: each for name, each in beside.items() if each != self._folder}
        return {**others, self._run_id: self._folder}

    def _folder_of(self, run_id: str) -> Path:
        folder = self._folders().get(run_id)
        if folder is None:
            raise UnknownRun(
                f"there is no run {run_id[:64]!r} here: /board/api/runs lists those that are"
            )
        return folder

    def _read(self, folder: Path) -> PastRun:
        look = _look_of(folder)
        known = self._known.get(folder)
        if known is not None and known[0] == look:
            return known[1]
        run = read_run(folder)
        self._known[folder] = look, run
        return run

    def _summary(self, run_id: str, run: PastRun) -> dict[str, Any]:
        return {
            "run_id": run_id,
            "state": run.state,
            "started_unix_s": run.started_unix_s,
            "seconds": run.seconds,
            "steps": run.steps,
            "loss": run.loss,
            "accuracy": run.accuracy,
            "workers": run.workers,
            "halts": len(run.halts),
            "problem": run.problem,
            "current": run.folder == self._folder,
        }


def _curves(run_id: str, reader: JournalReader, points: int) -> dict[str, Any]:
    steps = reader.step_curve(points)
    scalars: dict[str, Any] = {}
    for name in reader.scalar_names():
        curve = reader.reduced_scalar_curve(name, points)
        scalars[name] = {
            "step": [step for step, _ in curve],
            "value": [value for _, value in curve],
        }
    return {
        "run_id": run_id,
        "steps": {
            "step": [each.step for each in steps],
            "loss": [each.loss for each in steps],
            "loss_min": [each.loss_min for each in steps],
            "loss_max": [each.loss_max for each in steps],
            "step_seconds": [each.step_seconds for each in steps],
            "samples_per_second": [each.samples_per_second for each in steps],
            "at_unix_s": [each.at_unix_s for each in steps],
            "gradient_norm": [each.gradient_norm for each in steps],
        },
        "scalars": scalars,
    }


@contextmanager
def _journal(folder: Path) -> Iterator[JournalReader]:
    journal = folder / JOURNAL
    try:
        with journal_errors(journal), JournalReader(journal) as reader:
            yield reader
    except JournalError as error:
        raise UnknownRun(str(error)) from error


def _changed_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _look_of(folder: Path) -> _Look:
    """What changes when the run does: its journal, the log beside it, and whether it is served."""
    looks: list[tuple[int, int] | None] = []
    for name in (JOURNAL, f"{JOURNAL}-wal"):
        try:
            found = (folder / name).stat()
            looks.append((found.st_mtime_ns, found.st_size))
        except OSError:
            looks.append(None)
    service = service_of(folder)
    looks.append((service.pid, 1) if service is not None and service.alive else None)
    return tuple(looks)
