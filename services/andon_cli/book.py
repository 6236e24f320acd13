"""Book: what the journal of a run says of it, read once and without writing."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from andon.halts import HaltAnswer
from andon.terms import DRAINED
from andon_cli.evidence import evidence_fields
from andon_coordinator.transport.ledger import Entry
from andon_coordinator.transport.reader import AnsweredHalt, Departure, JournalReader, RunRow
from andon_coordinator.transport.store import JournalError

__all__ = ["RunBook", "dropped_workers", "halt_fields", "losses_and_samples"]

_WELL = ("COMPLETE", "DRAINED")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBook:
    """The history of one run, as far as it was written when this was read."""

    run: RunRow
    head: Entry | None
    """The last record; None if there is none."""
    last_step: Entry | None
    """The last STEP that the head descends from, or is."""
    last_loss: float | None
    """The last loss that was a number."""
    began_at_unix_s: float | None
    """When the first record was written."""
    rolled_back_at_unix_s: float
    """When the line was rolled back last; 0: never. Who left or was dropped before is forgotten."""
    most_workers: int
    """How many workers the step with most of them had."""
    halts: list[AnsweredHalt]
    departures: list[Departure]
    digests: dict[int, str]

    @classmethod
    def read(cls, journal: Path) -> RunBook:
        """Reads a journal, also one that is being written; as quick for a month as for a minute.

        Raises:
            JournalError: there is none, or it can't be read.
        """
        with _reading(journal) as reader:
            steps = (entry for entry in reader.backwards() if entry.result is not None)
            last_step = next(steps, None)
            losses = (entry.result.loss for entry in _with(last_step, steps) if entry.result)
            return cls(
                run=reader.run(),
                head=next(reader.backwards(), None),
                last_step=last_step,
                last_loss=next(filter(math.isfinite, losses), None),
                began_at_unix_s=reader.began_at_unix_s(),
                rolled_back_at_unix_s=reader.rolled_back_at_unix_s(),
                most_workers=reader.most_workers(),
                halts=reader.halts(),
                departures=reader.departures(),
                digests=reader.digests(),
            )

    @property
    def steps(self) -> int:
        """Committed steps."""
        return 0 if self.head is None else self.head.record.step

    @property
    def drained(self) -> bool:
        """Whether a person ended the run before its time."""
        result = None if self.last_step is None else self.last_step.result
        return (result is not None and result.stop_reason == DRAINED) or any(
            gone.reason == "DRAINED" for gone in self.departures
        )

    @property
    def dropped(self) -> set[int]:
        """Workers that people sent away."""
        return {
            halt.worker
            for halt in self.halts
            if halt.answer is HaltAnswer.DROP
            and halt.worker is not None
            and halt.at_unix_s >= self.rolled_back_at_unix_s
        }

    @property
    def unanswered(self) -> list[AnsweredHalt]:
        """Halts that nobody answered."""
        return [halt for halt in self.halts if halt.answer is None]

    @property
    def complete(self) -> bool:
        """Whether the run is done: everybody who took part in its end left with equal weights.

        These are the workers of the last step since the run was resumed, or whoever left since if
        there is none; but for those dropped. A worker that went and came back counts by its last
        end. Those that went earlier for good do not count: the others finished without them.
        """
        since, last = self.rolled_back_at_unix_s, self.last_step
        ends = {gone.worker: gone for gone in self.departures if gone.at_unix_s >= since}
        stepped = last is not None and last.at_unix_s >= since
        awaited = (set(last.record.roster) if last and stepped else set(ends)) - self.dropped
        done = [ends[worker] for worker in awaited if worker in ends]
        return (
            0 < len(done) == len(awaited)
            and all(gone.reason in _WELL for gone in done)
            and len({gone.digest for gone in done} - {""}) <= 1
            and not self.unanswered
        )


def losses_and_samples(journal: Path) -> list[tuple[float, int]]:
    """Loss and samples of each committed step, first to last; all of them, however many.

    Raises:
        JournalError: there is no journal, or it can't be read.
    """
    with _reading(journal) as reader:
        return reader.losses_and_samples()


def halt_fields(halt: AnsweredHalt) -> dict[str, Any]:
    """A halt and its answer for JSON; `dropped` is the worker that was sent away, if one was."""
    return evidence_fields(halt.evidence) | {
        "answer": None if halt.answer is None else halt.answer.name.lower(),
        "operator": halt.operator,
        "dropped": halt.worker if halt.answer is HaltAnswer.DROP else None,
    }


@contextmanager
def _reading(journal: Path) -> Iterator[JournalReader]:
    try:
        with JournalReader(journal) as reader:
            yield reader
    except sqlite3.Error as error:
        raise JournalError(f"the journal {journal} can't be read: {error}") from error


def _with(first: Entry | None, rest: Iterator[Entry]) -> Iterator[Entry]:
    return rest if first is None else chain([first], rest)


def dropped_workers(journal: Path) -> set[int]:
    """Workers that people sent away from a run; none if its journal can't be read."""
    try:
        return RunBook.read(journal).dropped
    except JournalError:
        return set()
