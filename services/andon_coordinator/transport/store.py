"""The store: the journal's database, one transaction for each change, fenced by the term (rule 2).

One thread uses a store. Once the file has a greater term than this store's own, another coordinator
has taken over, and every change is refused. The check is a part of the transaction, so no other
process can begin a term between the check and the change.
"""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Literal

from andon.host.private_files import open_private
from andon.protocol.halts import HaltAnswer
from andon.protocol.limits import COUNT_LIMIT
from andon.protocol.records import Key, Record, RecordKind
from andon.protocol.run_settings import RunPlan
from andon_coordinator.core.detectors import WINDOW, is_spike
from andon_coordinator.core.effects import (
    SaveAnswer,
    SaveArithmetic,
    SaveDeparture,
    SaveEviction,
    SaveHalt,
    SaveRecord,
    SaveRun,
    SaveRunEvent,
    SaveScalars,
    SaveSlowness,
    SaveSpike,
    SaveSteered,
    SaveVerdict,
    StepResult,
)
from andon_coordinator.core.events import Undone
from andon_coordinator.core.machine_time import CostMeter, Counted, Price
from andon_coordinator.core.session_events import SaveSession, SaveSessionEnd
from andon_coordinator.core.settings import History
from andon_coordinator.transport import logbook, proofs, rows
from andon_coordinator.transport.damage import JournalError, check_tables
from andon_coordinator.transport.files import FilesChanged, JournalFiles
from andon_coordinator.transport.schema import (
    ARITHMETICS,
    BARRED,
    COSTS,
    EVICTIONS,
    LATER_COLUMNS,
    PACING,
    RESUMED,
    RUN_EVENTS,
    SCALARS,
    SCHEMA,
    SESSIONS,
    SLOWNESS,
    SPIKE_STATE,
    SPIKES,
    STEERED,
    VERSION,
    compact_json,
    evidence_of,
    evidence_text,
    key_blob,
    layout_of,
    layout_text,
    plan_of,
    plan_text,
    ranges_text,
    u64_of,
    u64_text,
)

__all__ = [
    "Counts",
    "JournalError",
    "JournalFenced",
    "JournalStore",
    "JournalSync",
    "recorded_plan",
]

JournalSync = Literal["normal", "full"]
"""`normal` survives the death of any process, `full` also a power failure."""


class JournalFenced(JournalError):
    """Another coordinator has begun a greater term in this journal."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How much a journal holds."""

    steps: int
    samples: int
    halts: dict[str, int]
    """By the name of the reason."""
    answers: dict[str, int]
    """By the name of the answer."""
    departures: dict[str, int]
    """By the name of the reason, `rows.LOST` or `rows.DROPPED`."""
    sessions: dict[str, int]
    """By the name of their cause; those that ended in order by an empty one."""


def recorded_plan(journal: Path, text: str) -> RunPlan:
    """The plan of a run as its journal has it.

    Raises:
        JournalError: it is of a later version of this program, or damaged.
    """
    try:
        return plan_of(text)
    except (TypeError, ValueError) as error:
        raise JournalError(f"the journal {journal} can't be read: {error}") from error


class JournalStore:
    """The database of one run, open for writing."""

    def __init__(
        self, path: Path, run_id: str, *, sync: JournalSync, clock: Callable[[], float]
    ) -> None:
        """Opens the database, or creates it; `clock` is the time since the Unix epoch.

        Raises:
            JournalError: it can't be opened, or is of another run or version.
        """
        self._path = path
        self._clock = clock
        self._term = ""
        self._open = False
        """Whether a transaction for several changes is open."""
        self._files: JournalFiles | None = None
        with ExitStack() as undo:
            try:
                # SQLite would make it readable by everybody. Its log and index get the same mode. A
                # journal that is there is not opened: closing it would drop SQLite's locks on it.
                with suppress(FileExistsError):
                    os.close(open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
                self._database = sqlite3.connect(
                    path, isolation_level=None, check_same_thread=False
                )
                undo.callback(self._database.close)
                self._database.row_factory = sqlite3.Row
                self._database.execute("PRAGMA journal_mode = WAL")
                self._database.execute(f"PRAGMA synchronous = {sync.upper()}")
                self._database.execute("PRAGMA foreign_keys = ON")
                self._prepare(run_id)
                # Last: both files are there once something was written.
                self._files = JournalFiles(path)
            except FilesChanged as error:
                raise JournalError(str(error)) from error
            except (sqlite3.Error, OSError) as error:
                raise JournalError(f"the journal {path} can't be opened: {error}") from error
            undo.pop_all()

    def _prepare(self, run_id: str) -> None:
        version = self._database.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            with self._transaction():
                for statement in filter(str.strip, SCHEMA.split(";")):
                    self._database.execute(statement)
                self._database.execute(f"PRAGMA user_version = {VERSION}")
                self._database.execute(
                    "INSERT INTO run (run_id, created_at) VALUES (?, ?)", (run_id, self._clock())
                )
        elif version != VERSION:
            raise JournalError(
                f"the journal {self._path} has version {version}, this program writes {VERSION}: "
                "use the program that wrote it, or start another run"
            )
        # Before anything else is read: what is no plain table might compute something.
        check_tables(self._database, self._path)
        later = (
            PACING,
            SCALARS,
            RUN_EVENTS,
            BARRED,
            ARITHMETICS,
            SESSIONS,
            STEERED,
            SPIKES,
            SLOWNESS,
            SPIKE_STATE,
            COSTS,
            EVICTIONS,
        )
        for table in later:
            self._database.execute(table)
        missing = (
            adds
            for column, adds in LATER_COLUMNS
            if not rows.has_column(self._database, "records", column)
        )
        for statement in missing:
            self._database.execute(statement)
        proofs.prepare(self._database)
        if not rows.has_column(self._database, "totals", "resumed"):
            with self._transaction():
                for statement in RESUMED:
                    self._database.execute(statement)
        kept = self._database.execute("SELECT run_id FROM run").fetchone()[0]
        if kept != run_id:
            raise JournalError(
                f"the journal {self._path} is of run {kept}, not {run_id}: use its own folder"
            )
        step = rows.out_of_order(self._database)
        if step is not None:
            raise JournalError(
                f"the journal {self._path} is damaged: its records are out of order at step "
                f"{step}. Put a copy in its place, or move it away: the line then continues from "
                "what its workers hold, or from a checkpoint"
            )

    def next_event_id(self) -> int:
        """One above the ids of all run events."""
        return logbook.next_event_id(self._database)

    def meter(self) -> CostMeter:
        """What the run has taken so far, as a coordinator goes on from it."""
        time = logbook.machine_time(self._database)
        (samples,) = self._database.execute("SELECT samples FROM totals").fetchone()
        if rows.rolled_back(self._database):
            samples = sum(each["samples"] or 0 for each in self._samples_back())
        counted = Counted(samples, logbook.tokens(self._database), logbook.logged(self._database))
        return CostMeter(time, counted, logbook.price(self._database))

    def undone_by(self, mark: Record) -> Undone:
        """What the steps have that a record rolls back, which is not saved yet."""
        parent = None if mark.parent is None else key_blob(mark.parent)
        gone = takewhile(lambda row: parent is None or row["key"] > parent, self._samples_back())
        samples = sum(each["samples"] or 0 for each in gone)
        return Undone(mark.step, samples, logbook.tokens(self._database, mark.step))

    def _samples_back(self) -> Iterator[sqlite3.Row]:
        return rows.walk_back(self._database, "key, parent, samples")

    def save_price(self, price: Price) -> None:
        """Saves what people say of the price of machines."""
        with self._own_transaction():
            logbook.save_price(self._database, price, self._clock())

    def save_scalars(self, effect: SaveScalars) -> None:
        """Saves what a worker logged."""
        with self._own_transaction():
            logbook.save_scalars(self._database, effect, self._clock())

    def save_arithmetic(self, effect: SaveArithmetic) -> None:
        """Saves with which arithmetic a worker joined."""
        with self._own_transaction():
            rows.save_arithmetic(self._database, effect, self._clock())

    def save_run_event(self, effect: SaveRunEvent) -> None:
        """Saves something that happened."""
        with self._own_transaction():
            logbook.save_run_event(self._database, effect.event)

    def save_steered(self, effect: SaveSteered) -> None:
        """Saves the answer of a scalar all-reduce."""
        with self._own_transaction():
            logbook.save_steered(self._database, effect, self._clock())

    def gaps(self) -> tuple[int, int]:
        """How many records lack their parent, and the step of the last of them; (0, 0) if none."""
        return rows.gaps(self._database)

    def close(self) -> None:
        """Closes the database."""
        self._database.close()

    def history(self) -> History:
        """What the core must know of what was before."""
        one = self._database.execute
        greatest = one("SELECT max(term) FROM terms").fetchone()[0]
        last = one("SELECT * FROM records ORDER BY id DESC").fetchone()
        head = None if last is None else rows.record_of(last)
        halt = one(
            "SELECT evidence, record,"
            " (SELECT answer FROM answers WHERE halt = id ORDER BY rowid DESC) AS answer"
            # Halts of sessions hold nobody back, and are never answered.
            " FROM halts WHERE id NOT IN (SELECT halt FROM sessions WHERE halt IS NOT NULL)"
            " ORDER BY rowid DESC"
        ).fetchone()
        latest = None if halt is None else evidence_of(halt["evidence"])
        # A line that wrote a record after a halt had an answer to it, even if the answer itself was
        # not written.
        is_open = (
            halt is not None
            and not halt["answer"]
            and halt["record"] == rows.last_record(self._database)
        )
        # Older versions accepted any id that a worker reported. Those beyond the limit are left
        # out: above the greatest possible id there is no next one.
        next_halt = one(
            "SELECT max(coalesce((SELECT max(id) FROM halts WHERE id < :bound), ''),"
            " coalesce((SELECT max(halt) FROM answers WHERE halt < :bound), ''))",
            {"bound": u64_text(COUNT_LIMIT)},
        ).fetchone()[0]
        plan, layout = one("SELECT plan, layout FROM run").fetchone()
        run_end = rows.run_end(self._database)
        arithmetics = rows.arithmetics(self._database)
        evicted, stand = logbook.evicted(self._database, rows.resumed(self._database))
        pacing = one("SELECT state FROM pacing").fetchone()
        compared = one("SELECT state FROM spike_state").fetchone()
        retried = halt is not None and halt["answer"] == HaltAnswer.RETRY.name
        accepted = latest.step if latest is not None and retried and is_spike(latest) else None
        return History(
            head=head,
            result=self._result(last) if head and head.kind is RecordKind.STEP else None,
            greatest_term=0 if greatest is None else u64_of(greatest),
            halt=latest if is_open else None,
            next_halt_id=u64_of(next_halt) + 1 if next_halt else 1,
            plan=None if plan is None else recorded_plan(self._path, plan),
            layout=None if layout is None else layout_of(layout),
            dropped=run_end.dropped,
            barred=rows.barred(self._database),
            evicted=evicted,
            stand=stand,
            revoked=rows.revoked(self._database),
            last_roster=run_end.roster,
            departed=run_end.departed,
            pacing=b"" if pacing is None else bytes(pacing[0]),
            abandoned=rows.abandoned(self._database),
            recent=self._recent(),
            accepted_step=accepted,
            arithmetic=arithmetics[0].items if arithmetics else None,
            arithmetics={each.worker: each.items for each in arithmetics},
            scalar_names=frozenset(logbook.scalar_names(self._database)),
            sessions=one("SELECT count(*) FROM sessions").fetchone()[0],
            verified=proofs.verified_totals(self._database),
            spikes=rows.spikes(self._database),
            comparison=b"" if compared is None else bytes(compared[0]),
        )

    def history_at(self, key: Key) -> History:
        """What the core must know to continue from the record `key`, whatever came after it.

        A record newer than all that the journal has is known only to the workers that bring it: the
        journal is of another machine, or lost its end in a power failure. Then nothing is rolled
        back here, and the line takes over what the workers report (rule 9).

        Raises:
            JournalError: the record is of another history, or was rolled back itself.
        """
        history = self.history()
        if history.head is None or key > history.head.key:
            return history
        found = self.find(key)
        if found is None:
            raise JournalError(
                f"the journal has no record {key}: the checkpoint is of another run, or its "
                "journal was replaced"
            )
        if key not in self.ancestry():
            raise JournalError(
                f"record {key} was rolled back when the run was resumed earlier: choose a "
                "checkpoint of the line's present history"
            )
        record, result = found
        return replace(
            history,
            head=record,
            result=result,
            roll_back=True,
            abandoned=history.head.key,
            last_roster=(),
            departed={},
            # It is of a later record. What is usual is learnt again.
            comparison=b"",
        )

    def find(self, key: Key) -> tuple[Record, StepResult | None] | None:
        """A record by its key, with its result if it is a STEP; None if there is none."""
        row = rows.find(self._database, key)
        if row is None:
            return None
        record = rows.record_of(row)
        return record, self._result(row) if record.kind is RecordKind.STEP else None

    def ancestry(self) -> Iterator[Key]:
        """The keys of the line's history, newest first."""
        return rows.ancestry(self._database)

    def find_ancestor(self, heads: Collection[Key]) -> Record | None:
        """The newest of these records in the line's history; None: none of them is in it."""
        wanted = {key_blob(head) for head in heads}
        oldest = min(wanted)
        for row in rows.walk_back(self._database):
            if row["key"] in wanted:
                return rows.record_of(row)
            if row["key"] < oldest:
                break
        return None

    def _recent(self) -> tuple[StepResult, ...]:
        steps = (
            row for row in rows.walk_back(self._database) if row["kind"] == RecordKind.STEP.name
        )
        return tuple(rows.result_of(row, ()) for row in islice(steps, WINDOW))[::-1]

    def _result(self, row: sqlite3.Row) -> StepResult:
        parts = self._database.execute(
            "SELECT * FROM contributions WHERE record = ? ORDER BY rank", (row["id"],)
        )
        start = row["batch_start"]
        return rows.result_of(row, tuple(rows.contribution_of(part, start) for part in parts))

    def counts(self) -> Counts:
        """How much the journal holds, including records that were rolled back."""
        one = self._database.execute
        steps, samples = one("SELECT steps, samples FROM totals").fetchone()

        def by(column: str, table: str) -> dict[str, int]:
            return dict(map(tuple, one(f"SELECT {column}, count(*) FROM {table} GROUP BY 1")))

        return Counts(
            steps,
            samples,
            halts=by("reason", "halts"),
            answers=by("answer", "answers"),
            departures=by("reason", "departures"),
            sessions=by("coalesce(cause, '')", "sessions WHERE over_at IS NOT NULL"),
        )

    def begin_term(self, term: int) -> None:
        """Makes a term durable and this store's own; does nothing if it is that already.

        Raises:
            JournalFenced: the journal has this term of another coordinator, or a greater one.
        """
        text = u64_text(term)
        with self._transaction():
            greatest = self._greatest_term()
            if greatest == text == self._term:
                return
            if greatest >= text:
                raise JournalFenced(
                    f"another coordinator has begun term {greatest} in the journal {self._path}: "
                    f"this one can't begin {text}"
                )
            self._database.execute("INSERT INTO terms VALUES (?, ?)", (text, self._clock()))
        # Only once it is durable: from here on `_own_transaction` takes it for the journal's.
        self._term = text

    def save_run(self, effect: SaveRun) -> None:
        """Saves plan and layout."""
        with self._own_transaction():
            self._database.execute(
                "UPDATE run SET plan = ?, layout = ?, layout_digest = ?",
                (plan_text(effect.plan), layout_text(effect.layout), effect.layout.digest.hex()),
            )

    def save_record(self, effect: SaveRecord) -> bool:
        """Appends a record, which must be newer than every other.

        Returns:
            Whether its parent is missing from the journal.

        Raises:
            JournalError: it is not newer.
        """
        record, key = effect.record, key_blob(effect.record.key)
        with self._own_transaction():
            if u64_text(record.key.term) < self._term:
                raise JournalError(f"record {record.key} is of an older term than the journal's")
            # Inside the transaction, so no other process appends between this look and the insert.
            last = self._database.execute("SELECT key FROM records ORDER BY id DESC").fetchone()
            if last is not None and last[0] >= key:
                raise JournalError(f"record {record.key} is not newer than the journal's last one")
            row = self._database.execute(
                rows.INSERT_RECORD, rows.record_values(effect, self._clock())
            ).lastrowid
            assert row is not None
            if effect.result is not None:
                self._save_contributions(row, effect.result)
                self._database.execute(
                    "UPDATE totals SET steps = steps + 1, samples = samples + ?,"
                    " most_workers = max(most_workers, ?)",
                    (effect.result.samples, len(record.roster)),
                )
            elif effect.rolls_back:
                self._database.execute(
                    "UPDATE totals SET rolled_back = :row,"
                    " resumed = CASE WHEN :by_itself THEN resumed ELSE :row END",
                    {"row": row, "by_itself": effect.by_itself},
                )
                logbook.forget_scalars_after(self._database, record.step)
            if effect.proved is not None:
                head = proofs.parent_row(self._database, effect)
                proofs.save_proved(self._database, effect, row, head, self._clock())
            if effect.pacing:
                # In the same transaction: what was learnt from a record stands or falls with it.
                self._database.execute(
                    "INSERT OR REPLACE INTO pacing VALUES (0, ?, ?)", (row, effect.pacing)
                )
            if effect.comparison:
                self._database.execute(
                    "INSERT OR REPLACE INTO spike_state VALUES (0, ?, ?)", (row, effect.comparison)
                )
            parent = record.parent
            follows = last is not None and parent is not None and last[0] == key_blob(parent)
            gap = not follows and parent is not None and rows.find(self._database, parent) is None
            if gap:
                # Only workers know the parent (rule 9): this journal lost its end, or is old.
                self._database.execute("UPDATE totals SET gaps = gaps + 1, gap = ?", (row,))
        return gap

    def _save_contributions(self, row: int, result: StepResult) -> None:
        self._database.executemany(
            "INSERT INTO contributions VALUES (?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    row,
                    part.worker,
                    part.rank,
                    ranges_text(part.positions, result.batch.start),
                    part.samples,
                    part.weight,
                    None if math.isnan(part.loss_sum) else part.loss_sum,
                )
                for part in result.contributions
            ],
        )

    def save_halt(self, effect: SaveHalt) -> None:
        """Saves a halt; one that is there already stays as it is."""
        evidence = effect.evidence
        with self._own_transaction():
            self._database.execute(
                f"INSERT OR IGNORE INTO halts VALUES (?, ?, ?, ?, ?, ?, {rows.LAST_RECORD}, ?)",
                (
                    u64_text(evidence.id),
                    evidence.reason.name,
                    evidence.step,
                    evidence.worker,
                    evidence.message,
                    evidence_text(evidence),
                    self._clock(),
                ),
            )

    def save_verdict(self, effect: SaveVerdict) -> None:
        """Saves what an inquest came to."""
        with self._own_transaction():
            proofs.save_verdict(self._database, effect, self._clock())

    def save_spike(self, effect: SaveSpike) -> None:
        """Saves what the line did by itself about a spike."""
        with self._own_transaction():
            rows.save_spike(self._database, effect.decision, self._clock())

    def save_eviction(self, effect: SaveEviction) -> None:
        """Saves that a slow process follows, or no longer."""
        with self._own_transaction():
            logbook.save_eviction(self._database, effect, self._clock())

    def save_slowness(self, effect: SaveSlowness) -> None:
        """Saves why a worker was slow."""
        with self._own_transaction():
            logbook.save_slowness(self._database, effect.slowness)

    def verify_key(self, new: bytes) -> bytes:
        """The key that says which steps are verified; `new` if there is none yet."""
        with self._own_transaction():
            return proofs.verify_key(self._database, new)

    def save_answer(self, effect: SaveAnswer) -> None:
        """Saves how a halt was answered."""
        with self._own_transaction():
            self._database.execute(
                f"INSERT INTO answers VALUES (?, ?, ?, ?, {rows.LAST_RECORD}, ?)",
                (
                    u64_text(effect.halt_id),
                    effect.answer.name,
                    effect.worker,
                    effect.operator,
                    self._clock(),
                ),
            )

    def save_departure(self, effect: SaveDeparture) -> None:
        """Saves that a worker went."""
        with self._own_transaction():
            unwanted = rows.DROPPED if effect.dropped else rows.LOST
            self._database.execute(
                f"INSERT INTO departures VALUES (?, ?, ?, ?, ?, {rows.LAST_RECORD}, ?)",
                (
                    effect.worker,
                    unwanted if effect.reason is None else effect.reason.name,
                    effect.message,
                    effect.step,
                    effect.digest.hex(),
                    self._clock(),
                ),
            )
            if effect.dropped:
                self._database.execute(
                    f"INSERT INTO barred VALUES (?, ?, ?, {rows.LAST_RECORD}, ?)",
                    (
                        u64_text(effect.incarnation),
                        effect.credential,
                        effect.worker,
                        self._clock(),
                    ),
                )

    def save_session(self, effect: SaveSession) -> None:
        """Saves a session before its ranks hear of it, and its term if that is new.

        Raises:
            JournalFenced: another coordinator took the run over.
            JournalError: its key was used before.
        """
        self.begin_term(effect.key.term)
        with self._own_transaction():
            greatest = self._database.execute("SELECT max(key) FROM sessions").fetchone()[0]
            key = key_blob(effect.key)
            if greatest is not None and key <= greatest:
                raise JournalError(f"session {effect.key} is not newer than the journal's last one")
            ranks = compact_json([[each.node_id, each.device] for each in effect.roster])
            self._database.execute(
                "INSERT INTO sessions (key, ranks, at) VALUES (?, ?, ?)",
                (key, ranks, self._clock()),
            )

    def save_session_end(self, effect: SaveSessionEnd) -> None:
        """Saves how a session ended; an end that is there already stays as it is."""
        over = effect.over
        with self._own_transaction():
            self._database.execute(
                "UPDATE sessions SET steps = ?, cause = ?, culprit = ?, message = ?, halt = ?,"
                " over_at = ? WHERE key = ? AND over_at IS NULL",
                (
                    effect.steps,
                    None if over is None else over.end.name,
                    None if over is None else over.culprit,
                    "" if over is None else over.message,
                    u64_text(over.halt_id) if over is not None and over.halt_id else None,
                    self._clock(),
                    key_blob(effect.key),
                ),
            )

    def _check_files(self) -> None:
        """Checks that what was written can be found again."""
        if self._files is None:
            return  # The tables are being created.
        try:
            self._files.check()
        except FilesChanged as error:
            raise JournalError(str(error)) from error

    def _greatest_term(self) -> str:
        return self._database.execute("SELECT max(term) FROM terms").fetchone()[0] or ""

    @contextmanager
    def together(self) -> Iterator[None]:
        """Within it, all that is saved becomes durable at once, at its end, or none of it.

        No term may be begun within it.
        """
        with self._own_transaction():
            # The fence was passed for all that follows: the write lock is held until the end.
            self._open = True
            try:
                yield
            finally:
                self._open = False

    @contextmanager
    def _own_transaction(self) -> Iterator[None]:
        if self._open:
            yield
            return
        with self._transaction():
            greatest = self._greatest_term()
            if greatest != self._term:
                raise JournalFenced(
                    f"the journal {self._path} is in term {greatest}, this coordinator in "
                    f"{self._term or 'none'}: another coordinator took the run over"
                )
            yield

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        # IMMEDIATE takes the write lock first, so that what is read inside is what is changed.
        self._database.execute("BEGIN IMMEDIATE")
        try:
            # Checked before the write, which could hide that the file was truncated, and after it,
            # so that nothing is reported durable which nobody can find. Never after COMMIT: what is
            # committed can't be taken back, and reported as failed it would be written again. Files
            # that are taken away during COMMIT are missed by the next transaction, as those are
            # that are taken away right after it.
            self._check_files()
            yield
            self._check_files()
            self._database.execute("COMMIT")
        except BaseException:
            # After some errors (a full disk is one) SQLite rolls back by itself, and then refuses
            # another ROLLBACK. The first error is the one to report.
            with suppress(sqlite3.Error):
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
            raise
        # After the commit, which may have made the files longer: the next check finds if that is
        # cut off.
        if self._files is not None:
            self._files.note()
