"""Reading a journal: what a run did, for reports, and whether its ledger is whole (F-DP-002).

The reader has a connection of its own that never writes, so it may also read while a coordinator
writes.

The ledger says which record took which positions. It is not a table of its own: it is the line's
history, from the last record back through the parents. A STEP takes its batch, a MARK what it
skips; one that rolls the line back may skip nothing. In a whole ledger each position is in exactly
one record.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from andon.protocol.halts import HaltAnswer, HaltEvidence
from andon.protocol.records import Cursor, Key, PositionRange, Record, RecordKind
from andon.protocol.run_settings import RunPlan
from andon.protocol.slowness import Slowness
from andon_coordinator.core.machine_time import MachineTime, Price
from andon_coordinator.core.run_events import RunEvent
from andon_coordinator.core.step_results import Skip, StepContribution, StepResult
from andon_coordinator.core.verification import VerifiedTotals
from andon_coordinator.transport import logbook, proofs, rows
from andon_coordinator.transport.curves import CurvePoint, reduced_scalar_curve, step_curve
from andon_coordinator.transport.damage import JournalError, check_tables, limit_work
from andon_coordinator.transport.files import open_to_read
from andon_coordinator.transport.logbook import LoggedScalar
from andon_coordinator.transport.past import recorded_plan
from andon_coordinator.transport.rows import RecordedArithmetic, RunEnd
from andon_coordinator.transport.schema import VERSION, evidence_of, key_of, u64_of

__all__ = [
    "JournalEntry",
    "JournalReader",
    "LedgerFault",
    "LoggedScalar",
    "RecordedArithmetic",
    "RecordedDeparture",
    "RecordedHalt",
    "RecordedRun",
    "RecordedSession",
    "StepOutcome",
    "chain_of",
    "entry_of",
    "faults_of",
]


_NO_ANSWER: tuple[HaltAnswer | None, int | None, str] = (None, None, "")


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What the run is; `plan` and `layout_digest` are None before the first worker."""

    run_id: str
    created_at_unix_s: float
    plan: RunPlan | None
    layout_digest: str | None


@dataclass(frozen=True, slots=True)
class RecordedHalt:
    """A halt; `answer` is None as long as nobody answered it."""

    evidence: HaltEvidence
    at_unix_s: float
    is_open: bool = False
    """Whether it still needs an answer: there is none, and no record after it."""
    answer: HaltAnswer | None = None
    worker: int | None = None
    operator: str = ""
    ended_session: bool = False
    """Whether it ended a session of ranks: such a halt is never answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSession:
    """A session of ranks; `over_at_unix_s` is None as long as nobody knows how it ended."""

    key: Key
    ranks: int
    at_unix_s: float
    steps: int = 0
    cause: str = ""
    """The name of a SessionEnd; empty if all ranks left in order."""
    culprit: int | None = None
    message: str = ""
    over_at_unix_s: float | None = None

    @property
    def in_order(self) -> bool:
        """Whether all its ranks left with their scripts done."""
        return self.over_at_unix_s is not None and not self.cause


@dataclass(frozen=True, slots=True)
class RecordedDeparture:
    """A worker that went.

    `reason` is the name of a LeaveReason, LOST or DROPPED; `digest` is hexadecimal.
    """

    worker: int
    reason: str
    message: str
    step: int
    digest: str
    at_unix_s: float


class StepOutcome(NamedTuple):
    """The numbers of a committed step that people look at."""

    loss: float
    """NaN if all workers abstained."""
    samples: int
    correct: int | None
    """None unless all workers counted them."""


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A record of the journal, with its result if it is a STEP, and what it skipped if a MARK."""

    record: Record
    result: StepResult | None = None
    skipped: Skip | None = None
    note: str = ""
    at_unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LedgerFault:
    """Positions of an epoch that are in no record (`gap`) or in more than one (`overlap`)."""

    kind: str
    epoch: int
    positions: PositionRange
    record: Key | None = None
    """The record whose contributions are wrong; None if the chain of records is."""


class JournalReader:
    """A run's journal, open for reading."""

    def __init__(self, path: Path) -> None:
        """Opens the journal at `path`.

        Raises:
            JournalError: there is none, or this program can't read it.
        """
        self._path = path
        if not path.is_file():
            raise JournalError(f"there is no journal {path}")
        with ExitStack() as undo:
            try:
                self._database = open_to_read(path)
                undo.callback(self._database.close)
                # Before anything is read: in a journal that was edited a query may never end.
                limit_work(self._database, path)
                version = self._database.execute("PRAGMA user_version").fetchone()[0]
                if version == VERSION:
                    check_tables(self._database, path)
            except (sqlite3.Error, OSError) as error:
                raise JournalError(f"the journal {path} can't be read: {error}") from error
            if version != VERSION:
                raise JournalError(
                    f"the journal {path} has version {version}, this program reads {VERSION}: use "
                    "the program that wrote it"
                )
            undo.pop_all()

    def __enter__(self) -> Self:
        """The reader itself."""
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
        row = self._database.execute("SELECT * FROM run").fetchone()
        plan = None if row["plan"] is None else recorded_plan(self._path, row["plan"])
        return RecordedRun(row["run_id"], row["created_at"], plan, row["layout_digest"])

    def entries(self) -> list[JournalEntry]:
        """Every record that was ever written, in the order of keys, including those rolled back."""
        parts: dict[int, list[sqlite3.Row]] = defaultdict(list)
        for part in self._database.execute("SELECT * FROM contributions ORDER BY rank"):
            parts[part["record"]].append(part)
        return [
            entry_of(
                row,
                tuple(rows.contribution_of(part, row["batch_start"]) for part in parts[row["id"]]),
            )
            for row in self._database.execute("SELECT * FROM records ORDER BY id")
        ]

    def ancestry(self) -> Iterator[Key]:
        """The keys of the line's history, newest first."""
        return rows.ancestry(self._database)

    def chain(self) -> list[JournalEntry]:
        """The line's history, first to last."""
        return chain_of(self.entries())

    def backwards(self) -> Iterator[JournalEntry]:
        """The line's history, newest first, without contributions; read as far as it is needed."""
        return (entry_of(row, ()) for row in rows.walk_back(self._database))

    def results(self) -> list[StepResult]:
        """The result of each committed step, first to last; without contributions."""
        return [entry.result for entry in self.backwards() if entry.result is not None][::-1]

    def outcomes(self) -> list[StepOutcome]:
        """The main numbers of each committed step, first to last."""
        walked = rows.walk_back(self._database, "key, parent, kind, loss, samples, correct")
        return [
            StepOutcome(
                math.nan if row["loss"] is None else row["loss"], row["samples"], row["correct"]
            )
            for row in walked
            if row["kind"] == RecordKind.STEP.name
        ][::-1]

    def step_curve(self, points: int) -> list[CurvePoint]:
        """The committed steps, first to last, reduced to at most `points` points."""
        return step_curve(self._database, points)

    def reduced_scalar_curve(self, name: str, points: int) -> list[tuple[int, float | None]]:
        """What scripts logged under a name, reduced to at most `points` steps and values."""
        return reduced_scalar_curve(self._database, name, points)

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

    def run_end(self) -> RunEnd:
        """How the workers of the line's present history went."""
        return rows.run_end(self._database)

    def most_workers(self) -> int:
        """The greatest number of workers in one step; 0 before the first step."""
        most: int = self._database.execute("SELECT most_workers FROM totals").fetchone()[0]
        return most

    def gaps(self) -> tuple[int, int]:
        """How many records lack their parent, and the step of the last of them; (0, 0) if none."""
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
        ended = rows.halts_of_sessions(self._database)
        found = []
        for halt, text, record, at in self._database.execute(
            "SELECT id, evidence, record, at FROM halts ORDER BY id"
        ):
            answer, worker, operator = answers.get(halt, _NO_ANSWER)
            found.append(
                RecordedHalt(
                    evidence_of(text),
                    at,
                    is_open=halt not in answers and record == last and halt not in ended,
                    answer=answer,
                    worker=worker,
                    operator=operator,
                    ended_session=halt in ended,
                )
            )
        return found

    def verdicts(self) -> list[proofs.RecordedVerdict]:
        """What each inquest came to, first to last."""
        return proofs.verdicts(self._database)

    def verified(self) -> VerifiedTotals:
        """How much was computed twice before it was committed."""
        return proofs.verified_totals(self._database)

    def sessions(self) -> list[RecordedSession]:
        """Every session of ranks, first to last."""
        if not rows.has_table(self._database, "sessions"):
            return []
        return [
            RecordedSession(
                key=key_of(row["key"]),
                ranks=len(json.loads(row["ranks"])),
                at_unix_s=row["at"],
                steps=row["steps"] or 0,
                cause=row["cause"] or "",
                culprit=row["culprit"],
                message=row["message"],
                over_at_unix_s=row["over_at"],
            )
            for row in self._database.execute("SELECT * FROM sessions ORDER BY key")
        ]

    def departures(self) -> list[RecordedDeparture]:
        """Every departure, first to last."""
        return [
            RecordedDeparture(*row)
            for row in self._database.execute(
                "SELECT worker, reason, message, step, digest, at FROM departures ORDER BY rowid"
            )
        ]

    def arithmetics(self) -> list[RecordedArithmetic]:
        """With which arithmetics workers joined, in order; none twice in a row for one worker."""
        return rows.arithmetics(self._database)

    def scalar_names(self) -> list[str]:
        """The names of what scripts logged, sorted."""
        return logbook.scalar_names(self._database)

    def scalars(self, name: str | None = None) -> list[LoggedScalar]:
        """What scripts logged, all or of one name, by name, step and worker.

        Steps that were rolled back have none.
        """
        return logbook.scalars(self._database, name)

    def scalar_curve(self, name: str) -> list[tuple[int, float]]:
        """Each step at which a scalar was logged, and its mean over the workers that logged it."""
        return logbook.scalar_curve(self._database, name)

    def run_events(self) -> list[RunEvent]:
        """Everything that happened, in order; ids rise, and stay the same."""
        return logbook.run_events(self._database)

    def notices(self) -> dict[int, str]:
        """By worker, why its machine was about to go; only those whose last process gave notice."""
        return logbook.notices(self._database)

    def machine_time(self) -> MachineTime:
        """How long workers' machines were on the line."""
        return logbook.machine_time(self._database)

    def price(self) -> Price | None:
        """What an hour of a machine costs, as people last said; None: nobody did."""
        return logbook.price(self._database)

    def tokens(self) -> float:
        """How many tokens scripts logged, all workers together; 0: they log none."""
        return logbook.tokens(self._database) if self.scalar_names() else 0.0

    def slownesses(self) -> list[Slowness]:
        """Why workers were slow, in order; the journal has a few an hour."""
        return logbook.slownesses(self._database)

    def digests(self) -> dict[int, str]:
        """The digest of the line's last weights, hexadecimal, by each worker that left with it.

        One that left before, or while it was still learning, had other weights.
        """
        row = self._database.execute("SELECT step FROM records ORDER BY id DESC LIMIT 1").fetchone()
        step = 0 if row is None else row[0]
        gone = (each for each in self.departures() if each.step == step)
        return {each.worker: each.digest for each in gone if each.digest}

    def terms(self) -> list[int]:
        """Every term that was begun, in rising order."""
        return [
            u64_of(text)
            for (text,) in self._database.execute("SELECT term FROM terms ORDER BY term")
        ]

    def ledger_faults(self) -> list[LedgerFault]:
        """Positions in no record, or in more than one (F-DP-002); empty if the ledger is whole."""
        plan = self.run().plan
        return faults_of(self.chain(), None if plan is None else plan.epoch_size)


def entry_of(row: sqlite3.Row, contributions: tuple[StepContribution, ...]) -> JournalEntry:
    """The record of a row, with these contributions if it is a STEP."""
    record = rows.record_of(row)
    result = rows.result_of(row, contributions) if record.kind is RecordKind.STEP else None
    return JournalEntry(
        record, result, skipped=rows.skip_of(row), note=row["note"], at_unix_s=row["at"]
    )


def chain_of(entries: Iterable[JournalEntry]) -> list[JournalEntry]:
    """The entries of the line's history, first to last: the last entry and its ancestors."""
    chain: list[JournalEntry] = []
    for entry in sorted(entries, key=lambda entry: entry.record.key, reverse=True):
        parent = chain[-1].record.parent if chain else entry.record.key
        # A parent may be missing, because only workers knew it (rule 9). Then the history goes on
        # with the next older record.
        if parent is not None and entry.record.key <= parent:
            chain.append(entry)
    return chain[::-1]


def faults_of(chain: Sequence[JournalEntry], epoch_size: int | None) -> list[LedgerFault]:
    """Every gap and overlap of a chain; empty if each position is in exactly one record.

    Positions before the journal's first record are not checked. An epoch of unknown size ends at
    its last position that was taken. Positions that the last cursor owes are no gap.
    """
    taken: dict[int, list[PositionRange]] = defaultdict(list)
    faults: list[LedgerFault] = []
    start = end = _start(chain[0]) if chain else Cursor(0, 0)
    for entry in chain:
        record = entry.record
        if entry.result is not None:
            if entry.result.change_scale is None and not end.owed:
                taken[entry.result.epoch].append(entry.result.batch)
                faults += _faults_within(record.key, entry.result)
            else:
                # With a quorum a record may lack some of its batch, and have what was owed.
                for part in entry.result.contributions:
                    taken[entry.result.epoch] += part.positions
        if entry.skipped is not None:
            ranges = entry.skipped.ranges
            taken[entry.skipped.epoch] += (entry.skipped.positions,) if ranges is None else ranges
            for epoch, positions in entry.skipped.earlier:
                taken[epoch].append(positions)
        end = record.cursor
    taken[end.epoch] += end.owed  # They are in no record yet, and no other may be.
    for epoch in range(start.epoch, end.epoch + 1):
        first = start.position if epoch == start.epoch else 0
        last = end.position if epoch == end.epoch else epoch_size
        faults += [
            LedgerFault(kind, epoch, positions)
            for kind, positions in _uneven(taken[epoch], first, last)
        ]
    return faults


def _start(entry: JournalEntry) -> Cursor:
    if entry.result is not None:
        return Cursor(entry.result.epoch, entry.result.batch.start)
    if entry.skipped is not None:
        return Cursor(entry.skipped.epoch, entry.skipped.positions.start)
    return entry.record.cursor


def _faults_within(key: Key, result: StepResult) -> list[LedgerFault]:
    shares = [positions for part in result.contributions for positions in part.positions]
    return [
        LedgerFault(kind, result.epoch, positions, key)
        for kind, positions in _uneven(shares, result.batch.start, result.batch.stop)
    ]


def _uneven(
    ranges: Iterable[PositionRange], first: int, last: int | None
) -> list[tuple[str, PositionRange]]:
    uneven: list[tuple[str, PositionRange]] = []
    at = first
    for positions in sorted(ranges):
        if positions.start > at:
            uneven.append(("gap", PositionRange(at, positions.start)))
        elif positions.start < at and len(positions):
            overlap = PositionRange(positions.start, min(at, positions.stop))
            uneven.append(("overlap", overlap))
        at = max(at, positions.stop)
    if last is not None and at < last:
        uneven.append(("gap", PositionRange(at, last)))
    elif last is not None and at > last:
        uneven.append(("overlap", PositionRange(last, at)))
    return uneven
