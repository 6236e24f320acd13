"""Book: the history of a run, read from its journal once and without writing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from andon.protocol.halts import HaltAnswer
from andon.protocol.records import accuracy_of
from andon.protocol.run_settings import DRAINED
from andon_coordinator.core.departures import is_complete, not_gone
from andon_coordinator.transport.damage import JournalError, journal_errors
from andon_coordinator.transport.reader import (
    JournalEntry,
    JournalReader,
    RecordedDeparture,
    RecordedHalt,
    RecordedRun,
    RecordedSession,
    StepOutcome,
)
from andon_coordinator.transport.rows import RunEnd
from andon_server.halt_words import evidence_fields

__all__ = ["RunBook", "dropped_workers", "halt_fields", "noticed_workers", "outcomes_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBook:
    """The history of one run, up to the moment of reading."""

    run: RecordedRun
    head: JournalEntry | None
    """The last record; None if there is none."""
    last_step: JournalEntry | None
    """The last STEP among the head and its ancestors."""
    last_loss: float | None
    """The last loss that was finite."""
    began_at_unix_s: float | None
    """When the first record was written."""
    ends: RunEnd
    """How each worker of the last step left, since the run began or was resumed."""
    most_workers: int
    """The largest number of workers that any step had."""
    gaps: tuple[int, int]
    """How often records are missing, and before which step last; (0, 0) if none are."""
    halts: list[RecordedHalt]
    departures: list[RecordedDeparture]
    digests: dict[int, str]
    notices: dict[int, str] = field(default_factory=dict)
    """By worker, why its machine was about to go; only those whose last process gave notice."""
    sessions: list[RecordedSession] = field(default_factory=list)
    """Of a run whose ranks attend sessions; empty: it is a line."""

    @classmethod
    def read(cls, journal: Path) -> RunBook:
        """Reads a journal, even while it is being written. The length of the run does not matter.

        Raises:
            JournalError: there is none, or it can't be read.
        """
        with _reading(journal) as reader:
            # Lazily and from the end: a run may have millions of records, and one is enough.
            steps = (entry for entry in reader.backwards() if entry.result is not None)
            last_step = next(steps, None)
            losses = (entry.result.loss for entry in _with(last_step, steps) if entry.result)
            return cls(
                run=reader.run(),
                head=next(reader.backwards(), None),
                last_step=last_step,
                last_loss=next(filter(math.isfinite, losses), None),
                began_at_unix_s=reader.began_at_unix_s(),
                ends=reader.run_end(),
                most_workers=max(
                    [reader.most_workers(), *(each.ranks for each in reader.sessions())]
                ),
                gaps=reader.gaps(),
                halts=reader.halts(),
                departures=reader.departures(),
                digests=reader.digests(),
                notices=reader.notices(),
                sessions=reader.sessions(),
            )

    @property
    def steps(self) -> int:
        """Committed steps; those of all sessions, if the run is one of sessions."""
        if self.sessions:
            return sum(each.steps for each in self.sessions)
        return 0 if self.head is None else self.head.record.step

    @property
    def seconds(self) -> float:
        """The time from the first record to the last one; 0 if a clock was set back meanwhile."""
        if self.sessions:
            last = self.sessions[-1]
            return max(0.0, (last.over_at_unix_s or last.at_unix_s) - self.sessions[0].at_unix_s)
        if self.head is None or self.began_at_unix_s is None:
            return 0.0
        return max(0.0, self.head.at_unix_s - self.began_at_unix_s)

    @property
    def last_accuracy(self) -> float | None:
        """The share of correct samples in the last step, from 0 to 1; None: nobody counted."""
        result = None if self.last_step is None else self.last_step.result
        return None if result is None else accuracy_of(result.correct, result.samples)

    @property
    def drained(self) -> bool:
        """Whether an operator ended the run early."""
        result = None if self.last_step is None else self.last_step.result
        return (result is not None and result.stop_reason == DRAINED) or any(
            gone.reason == "DRAINED" for gone in self.departures
        )

    @property
    def dropped(self) -> set[int]:
        """Slots of workers that operators dropped, and that no worker has taken since."""
        return set(self.ends.dropped)

    @property
    def unanswered(self) -> list[RecordedHalt]:
        """Halts that wait for an answer."""
        return [halt for halt in self.halts if halt.is_open]

    @property
    def everybody_went(self) -> bool:
        """Whether the journal says of every worker of the last step how it left."""
        return not not_gone(self.ends.roster, self.ends.departed)

    @property
    def complete(self) -> bool:
        """Whether the run is complete, provided that no service is still running it.

        The line decides by the same function. Weights that differ at the end are a halt, so a run
        with an open halt is not complete."""
        if self.sessions:
            return self.sessions[-1].in_order
        ends = self.ends
        done = self.head is not None and is_complete(ends.roster, ends.departed, over=ends.over)
        return done and not self.unanswered


def outcomes_of(journal: Path) -> list[StepOutcome]:
    """The outcome of every committed step, first to last.

    Raises:
        JournalError: there is no journal, or it can't be read.
    """
    with _reading(journal) as reader:
        return reader.outcomes()


def halt_fields(halt: RecordedHalt) -> dict[str, Any]:
    """A halt and its answer for JSON; `dropped` is the worker that the answer dropped."""
    return evidence_fields(halt.evidence) | {
        "answer": None if halt.answer is None else halt.answer.name.lower(),
        "operator": halt.operator,
        "dropped": halt.worker if halt.answer is HaltAnswer.DROP else None,
    }


@contextmanager
def _reading(journal: Path) -> Iterator[JournalReader]:
    with journal_errors(journal), JournalReader(journal) as reader:
        yield reader


def _with(first: JournalEntry | None, rest: Iterator[JournalEntry]) -> Iterator[JournalEntry]:
    return rest if first is None else chain([first], rest)


def dropped_workers(journal: Path) -> set[int]:
    """Workers that operators dropped from a run; none if its journal can't be read."""
    try:
        return RunBook.read(journal).dropped
    except JournalError:
        return set()


def noticed_workers(journal: Path) -> dict[int, str]:
    """As `RunBook.notices`; none if the journal can't be read."""
    try:
        with _reading(journal) as reader:
            return reader.notices()
    except JournalError:
        return {}
