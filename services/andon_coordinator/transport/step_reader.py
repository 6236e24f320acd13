"""Reading a journal step by step, for people who look something up in it.

The line's history is found backwards, from the last record through the parents. People want it
forwards. So the ranges of records that are not in it are noted first: one for each time that the
line was rolled back.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

from andon.protocol.records import RecordKind
from andon_coordinator.core.step_results import Skip, StepContribution
from andon_coordinator.transport import rows
from andon_coordinator.transport.reader import JournalEntry, JournalReader, entry_of

__all__ = ["CommittedStep", "StepReader", "WorkerTotal"]

_IS_STEP = f"kind = '{RecordKind.STEP.name}'"


@dataclass(frozen=True, slots=True)
class CommittedStep:
    """A committed step without its contributions, and how many workers it had."""

    entry: JournalEntry
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTotal:
    """What one worker did in all committed steps."""

    worker: int
    steps: int
    samples: int
    first_step: int
    last_step: int


class StepReader(JournalReader):
    """A run's journal, open for looking up steps and workers."""

    def steps_forward(self) -> Iterator[CommittedStep]:
        """The committed steps, first to last, read as far as they are asked for."""
        for row in self._database.execute(
            "SELECT *, json_array_length(roster) AS workers FROM records "
            f"WHERE {_IS_STEP}{self._in_history()} ORDER BY id"
        ):
            yield CommittedStep(entry_of(row, ()), row["workers"])

    def step_records(self, step: int) -> list[tuple[JournalEntry, bool]]:
        """Every record of a step with its contributions, and whether it was not rolled back."""
        kept = {
            number
            for (number,) in self._database.execute(
                f"SELECT id FROM records WHERE step = ?{self._in_history()}", (step,)
            )
        }
        found = self._database.execute(
            f"SELECT * FROM records WHERE step = ? AND {_IS_STEP} ORDER BY id", (step,)
        ).fetchall()
        return [(entry_of(row, self._contributions(row)), row["id"] in kept) for row in found]

    def worker_totals(self) -> list[WorkerTotal]:
        """What each worker did in the committed steps, by worker."""
        return [
            WorkerTotal(
                worker=worker, steps=steps, samples=samples, first_step=first, last_step=last
            )
            for worker, steps, samples, first, last in self._database.execute(
                "SELECT contributions.worker, count(*), sum(contributions.samples), min(step), "
                "max(step) FROM contributions JOIN records ON records.id = contributions.record "
                f"WHERE {_IS_STEP}{self._in_history()} GROUP BY contributions.worker ORDER BY 1"
            )
        ]

    def skips(self) -> list[Skip]:
        """Samples that were left out, first to last."""
        found = self._database.execute(
            f"SELECT * FROM records WHERE halt IS NOT NULL{self._in_history()} ORDER BY id"
        )
        return [skip for row in found if (skip := rows.skip_of(row)) is not None]

    def rolled_back(self) -> tuple[int, int, float]:
        """Steps that do not count any more, their samples, and the seconds that they took."""
        kept = f"SELECT id FROM records WHERE {_IS_STEP}{self._in_history()}"
        count, samples, seconds = self._database.execute(
            "SELECT count(*), coalesce(sum(samples), 0), coalesce(sum(seconds), 0.0) FROM records "
            f"WHERE {_IS_STEP} AND id NOT IN ({kept})"
        ).fetchone()
        return count, samples, seconds

    def _contributions(self, record: sqlite3.Row) -> tuple[StepContribution, ...]:
        parts = self._database.execute(
            "SELECT * FROM contributions WHERE record = ? ORDER BY rank", (record["id"],)
        )
        return tuple(rows.contribution_of(part, record["batch_start"]) for part in parts)

    def _in_history(self, column: str = "id") -> str:
        """The condition, in SQL, that a record was not rolled back; empty if none ever was.

        `column` has the record's number.
        """
        gone: list[tuple[int, int]] = []
        newer: int | None = None
        for row in rows.walk_back(self._database, "id, key, parent"):
            # Ids count all records, so a jump in the walk is a range that was rolled back.
            if newer is not None and row["id"] + 1 < newer:
                gone.append((row["id"] + 1, newer - 1))
            newer = row["id"]
        return "".join(f" AND NOT {column} BETWEEN {first} AND {last}" for first, last in gone)
