"""Past runs: what the journals in a folder of runs say of each, newest first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from andon_coordinator.transport.damage import JournalError, journal_errors
from andon_coordinator.transport.reader import RecordedHalt
from andon_server.book import RunBook
from andon_server.runs import JOURNAL, service_of

__all__ = ["PastRun", "read_run", "read_runs", "state_of"]


_LAST_DATE = 253_402_300_800
"""The end of the year 9999, beyond which no calendar tells dates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """One run; `state` is complete, drained, halted, running, stopped, or unreadable.

    `loss` is None before the first step and where it was not a number.
    """

    run_id: str
    folder: Path
    state: str
    started_unix_s: float = 0.0
    seconds: float = 0.0
    """From its first record to its last one, with all waits."""
    steps: int = 0
    epoch: int | None = None
    """That of the last step, counted from 0; None before the first step, and of sessions."""
    total_epochs: int | None = None
    """After how many the script ends; None: it did not say."""
    loss: float | None = None
    accuracy: float | None = None
    """The share of correct samples in the last step, from 0 to 1; None if nobody counted."""
    workers: int = 0
    halts: tuple[RecordedHalt, ...] = ()
    gaps: int = 0
    """How often records are missing: the journal lost its end, or was replaced by an older copy."""
    last_gap_step: int = 0
    """The step before which they are missing last."""
    problem: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for what no run can have: a journal may be damaged."""
        numbers = (self.started_unix_s, self.seconds, self.loss or 0.0, self.accuracy or 0.0)
        epochs = (self.epoch or 0, self.total_epochs or 0)
        counts = (self.steps, *epochs, self.workers, self.gaps, self.last_gap_step)
        if not (
            isinstance(self.run_id, str)
            and self.run_id.isprintable()
            and all(isinstance(each, float | int) for each in numbers)
            and all(isinstance(each, int) and each >= 0 for each in counts)
            and 0 <= self.started_unix_s < _LAST_DATE
        ):
            raise ValueError("a number, or the run's id, is none")


def read_runs(runs: Path) -> list[PastRun]:
    """All runs under `runs`, newest first."""
    found = [read_run(journal.parent) for journal in runs.glob(f"*/{JOURNAL}")]
    return sorted(found, key=lambda run: (run.started_unix_s, run.run_id), reverse=True)


def read_run(folder: Path) -> PastRun:
    """The run in a folder; `unreadable`, with the problem, if its journal can't be read."""
    journal = folder / JOURNAL
    try:
        with journal_errors(journal):
            return _past_run(RunBook.read(journal), folder)
    except JournalError as error:
        return PastRun(run_id=folder.name, folder=folder, state="unreadable", problem=f"{error}")


def _past_run(book: RunBook, folder: Path) -> PastRun:
    last, plan = book.last_step, book.run.plan
    return PastRun(
        run_id=book.run.run_id,
        folder=folder,
        state=state_of(book, folder),
        started_unix_s=book.run.created_at_unix_s,
        seconds=book.seconds,
        steps=book.steps,
        epoch=None if last is None or last.result is None else last.result.epoch,
        total_epochs=None if plan is None else plan.total_epochs,
        loss=book.last_loss,
        accuracy=book.last_accuracy,
        workers=book.most_workers,
        halts=tuple(book.halts),
        gaps=book.gaps[0],
        last_gap_step=book.gaps[1],
    )


def state_of(book: RunBook, folder: Path) -> str:
    """How the run in a folder stands or ended; the states are those of `PastRun`."""
    service = service_of(folder)
    alive = service is not None and service.alive
    if book.complete and (book.everybody_went or not alive):
        return "drained" if book.drained else "complete"
    if book.unanswered:
        return "halted"
    return "running" if alive else "stopped"
