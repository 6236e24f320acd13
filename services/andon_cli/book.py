"""Book: what the journal of a run says of it, read once and without writing."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andon.halts import HaltAnswer
from andon.records import RecordKind
from andon_cli.evidence import evidence_fields
from andon_coordinator.core.effects import StepResult
from andon_coordinator.transport.ledger import Entry
from andon_coordinator.transport.reader import AnsweredHalt, Departure, JournalReader, RunRow
from andon_coordinator.transport.store import JournalError

__all__ = ["RunBook", "dropped_workers", "halt_fields"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBook:
    """The history of one run, as far as it was written when this was read."""

    run: RunRow
    chain: list[Entry]
    halts: list[AnsweredHalt]
    departures: list[Departure]
    digests: dict[int, str]

    @classmethod
    def read(cls, journal: Path) -> RunBook:
        """Reads a journal, also one that is being written.

        Raises:
            JournalError: there is none, or it can't be read.
        """
        try:
            with JournalReader(journal) as reader:
                return cls(
                    run=reader.run(),
                    chain=reader.chain(),
                    halts=reader.halts(),
                    departures=reader.departures(),
                    digests=reader.digests(),
                )
        except sqlite3.Error as error:
            raise JournalError(f"the journal {journal} can't be read: {error}") from error

    @property
    def results(self) -> list[StepResult]:
        """What each committed step came to, first to last."""
        return [entry.result for entry in self.chain if entry.result is not None]

    @property
    def steps(self) -> int:
        """Committed steps."""
        return self.chain[-1].record.step if self.chain else 0

    @property
    def most_workers(self) -> int:
        """How many workers the step with most of them had; 0 before the first."""
        steps = [entry for entry in self.chain if entry.record.kind is RecordKind.STEP]
        return max((len(entry.record.roster) for entry in steps), default=0)

    @property
    def dropped(self) -> set[int]:
        """Workers that people sent away."""
        return {
            halt.worker
            for halt in self.halts
            if halt.answer is HaltAnswer.DROP and halt.worker is not None
        }

    @property
    def unanswered(self) -> list[AnsweredHalt]:
        """Halts that nobody answered."""
        return [halt for halt in self.halts if halt.answer is None]

    def complete(self, workers: int) -> bool:
        """Whether all `workers`, but for those dropped, left with the run done and equal weights.

        A worker that went and came back counts by its last end.
        """
        dropped = self.dropped
        ends = {gone.worker: gone.reason for gone in self.departures if gone.worker not in dropped}
        digests = {self.digests[worker] for worker in self.digests if worker not in dropped}
        return (
            list(ends.values()).count("COMPLETE") == len(ends) >= max(1, workers - len(dropped))
            and len(digests) <= 1
            and not self.unanswered
        )


def halt_fields(halt: AnsweredHalt) -> dict[str, Any]:
    """A halt and its answer for JSON; `dropped` is the worker that was sent away, if one was."""
    return evidence_fields(halt.evidence) | {
        "answer": None if halt.answer is None else halt.answer.name.lower(),
        "operator": halt.operator,
        "dropped": halt.worker if halt.answer is HaltAnswer.DROP else None,
    }


def dropped_workers(journal: Path) -> set[int]:
    """Workers that people sent away from a run; none if its journal can't be read."""
    try:
        return RunBook.read(journal).dropped
    except JournalError:
        return set()
