"""Reading a journal: what a run did, for reports; a connection of its own that never writes."""

from __future__ import annotations

import math
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from andon.protocol.halts import HaltAnswer, HaltEvidence
from andon.protocol.records import Key, RecordKind
from andon.protocol.run_settings import RunPlan
from andon_coordinator.core.effects import StepContribution, StepResult
from andon_coordinator.transport import rows
from andon_coordinator.transport.ledger import JournalEntry, LedgerFault, chain_of, faults_of
from andon_coordinator.transport.opening import open_to_read
from andon_coordinator.transport.rows import RunEnd
from andon_coordinator.transport.schema import VERSION, evidence_of, plan_of, u64_of
from andon_coordinator.transport.store import JournalError

__all__ = ["JournalReader", "RecordedDeparture", "RecordedHalt", "RecordedRun", "StepOutcome"]


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What the run is; `plan` and `layout_digest` are None before the first worker."""

    run_id: str
    created_at_unix_s: float
    plan: RunPlan | None
    layout_digest: str | None


@dataclass(frozen=True, slots=True)
class RecordedHalt:
    """A halt; `answer` is None while nobody answered it."""

    evidence: HaltEvidence
    at_unix_s: float
    is_open: bool = False
    """Whether it is still to be answered: there is no answer, and no record after it."""
    answer: HaltAnswer | None = None
    worker: int | None = None
    operator: str = ""


@dataclass(frozen=True, slots=True)
class RecordedDeparture:
    """A worker that went; `reason` is a LeaveReason's name, LOST or DROPPED; `digest` is
    hexadecimal."""

    worker: int
    reason: str
    message: str
    step: int
    digest: str
    at_unix_s: float


class StepOutcome(NamedTuple):
    """What people ask of a committed step."""

    loss: float
    """NaN where it was none."""
    samples: int
    correct: int | None
    """None unless all workers counted."""


class JournalReader:
    """A run's journal, open for reading; also while a coordinator writes it."""

    def __init__(self, path: Path) -> None:
        """Opens the journal at `path`.

        Raises:
            JournalError: there is none, or one that this program can't read.
        """
        if not path.is_file():
            raise JournalError(f"there is no journal {path}")
        try:
            self._database = open_to_read(path)
            version = self._database.execute("PRAGMA user_version").fetchone()[0]
        except (sqlite3.Error, OSError) as error:
            raise JournalError(f"the journal {path} can't be read: {error}") from error
        if version != VERSION:
            self._database.close()
            raise JournalError(f"the journal {path} has version {version}, not {VERSION}")

    def __enter__(self) -> Self:
        """Is itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes it."""
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        self._database.close()

    def run(self) -> RecordedRun:
        """What the run is."""
        run_id, created_at, plan, digest = self._database.execute(
            "SELECT run_id, created_at, plan, layout_digest FROM run"
        ).fetchone()
        return RecordedRun(run_id, created_at, None if plan is None else plan_of(plan), digest)

    def entries(self) -> list[JournalEntry]:
        """Every record that was ever written, by key, also those rolled back."""
        parts: dict[int, list[rows.Row]] = defaultdict(list)
        for record, *part in self._database.execute(
            f"SELECT record, {rows.CONTRIBUTION_COLUMNS} FROM contributions ORDER BY rank"
        ):
            parts[record].append(tuple(part))
        return [
            _entry(row, tuple(rows.contribution_of(part, row[8]) for part in parts[row[-1]]))
            for row in self._database.execute(
                f"SELECT {rows.RECORD_COLUMNS} FROM records ORDER BY id"
            )
        ]

    def ancestry(self) -> Iterator[Key]:
        """The keys of the line's history, newest first."""
        return rows.ancestry(self._database)

    def chain(self) -> list[JournalEntry]:
        """The line's history, first to last."""
        return chain_of(self.entries())

    def backwards(self) -> Iterator[JournalEntry]:
        """The line's history, newest first, without contributions; read as far as it is asked."""
        return (_entry(row, ()) for row in rows.walk_back(self._database))

    def results(self) -> list[StepResult]:
        """What each committed step came to, first to last; without contributions."""
        return [entry.result for entry in self.backwards() if entry.result is not None][::-1]

    def outcomes(self) -> list[StepOutcome]:
        """What people ask of each committed step, first to last, and nothing else of it."""
        walked = rows.walk_back(self._database, "key, parent, kind, loss, samples, correct")
        return [
            StepOutcome(math.nan if loss is None else loss, samples, correct)
            for _, _, kind, loss, samples, correct in walked
            if kind == RecordKind.STEP.name
        ][::-1]

    def losses(self) -> list[float]:
        """The loss of each committed step."""
        return [outcome.loss for outcome in self.outcomes()]

    def samples(self) -> int:
        """Samples in all committed steps."""
        return sum(outcome.samples for outcome in self.outcomes())

    def steps(self) -> int:
        """Committed steps: the head's step number."""
        head = next(self.backwards(), None)
        return 0 if head is None else head.record.step

    def began_at_unix_s(self) -> float | None:
        """When the first record was written; None if there is none."""
        row = self._database.execute("SELECT at FROM records ORDER BY id LIMIT 1").fetchone()
        return None if row is None else float(row[0])

    def ends(self) -> RunEnd:
        """How the workers of the line's present history went."""
        return rows.ends(self._database)

    def most_workers(self) -> int:
        """How many workers the step with most of them had; 0 before the first."""
        most: int = self._database.execute("SELECT most_workers FROM totals").fetchone()[0]
        return most

    def gaps(self) -> tuple[int, int]:
        """How often records were missing before one, and at which step last; (0, 0) if never."""
        return rows.gaps(self._database)

    def halts(self) -> list[RecordedHalt]:
        """Every halt by id, with its answer."""
        answers = {
            halt: (HaltAnswer[answer], worker, operator)
            for halt, answer, worker, operator in self._database.execute(
                "SELECT halt, answer, worker, operator FROM answers ORDER BY rowid"
            )
        }
        last = rows.last_record(self._database)
        return [
            RecordedHalt(
                evidence_of(text),
                at,
                halt not in answers and record == last,
                *answers.get(halt, ()),
            )
            for halt, text, record, at in self._database.execute(
                "SELECT id, evidence, record, at FROM halts ORDER BY id"
            )
        ]

    def departures(self) -> list[RecordedDeparture]:
        """Every departure, first to last."""
        return [
            RecordedDeparture(*row)
            for row in self._database.execute(
                "SELECT worker, reason, message, step, digest, at FROM departures ORDER BY rowid"
            )
        ]

    def digests(self) -> dict[int, str]:
        """The last digest that each worker left with, hexadecimal, by worker."""
        return {gone.worker: gone.digest for gone in self.departures() if gone.digest}

    def terms(self) -> list[int]:
        """Every term that was begun, rising."""
        return [
            u64_of(text)
            for (text,) in self._database.execute("SELECT term FROM terms ORDER BY term")
        ]

    def ledger_faults(self) -> list[LedgerFault]:
        """Positions in no committed step or mark, or in more than one (F-DP-002); empty if none."""
        plan = self.run().plan
        return faults_of(self.chain(), None if plan is None else plan.epoch_size)


def _entry(row: rows.Row, contributions: tuple[StepContribution, ...]) -> JournalEntry:
    record = rows.record_of(row)
    result = rows.result_of(row, contributions) if record.kind is RecordKind.STEP else None
    return JournalEntry(record, result, skipped=rows.skip_of(row), note=row[19], at_unix_s=row[20])
