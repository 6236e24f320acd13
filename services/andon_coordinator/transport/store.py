"""The store: the journal's database, one transaction for each change, fenced by the term (rule 2).

One thread uses a store. Once the file has a greater term than this store's own, another coordinator
has taken over, and every change is refused. The check is a part of the transaction, so no other
process can begin a term between the check and the change.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

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
)
from andon_coordinator.core.machine_time import Price
from andon_coordinator.core.session_events import SaveSession, SaveSessionEnd
from andon_coordinator.core.step_results import StepResult
from andon_coordinator.transport import logbook, proofs, rows
from andon_coordinator.transport.damage import JournalError
from andon_coordinator.transport.files import FilesChanged, JournalFiles
from andon_coordinator.transport.opening import JournalSync, open_to_write, transaction
from andon_coordinator.transport.past import Past
from andon_coordinator.transport.schema import (
    compact_json,
    evidence_text,
    key_blob,
    layout_text,
    plan_text,
    ranges_text,
    u64_text,
)

__all__ = ["JournalError", "JournalFenced", "JournalStore"]


class JournalFenced(JournalError):
    """Another coordinator has begun a greater term in this journal."""


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
        with ExitStack() as undo:
            try:
                self._database = open_to_write(path, run_id, sync=sync, now=clock())
                undo.callback(self._database.close)
                # Last: both files are there once something was written.
                self._files = JournalFiles(path)
            except FilesChanged as error:
                raise JournalError(str(error)) from error
            except (sqlite3.Error, OSError) as error:
                raise JournalError(f"the journal {path} can't be opened: {error}") from error
            undo.pop_all()
        self.past = Past(self._database, path)
        """What it holds."""

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

    def close(self) -> None:
        """Closes the database."""
        self._database.close()

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
        try:
            with transaction(self._database, self._files):
                yield
        except FilesChanged as error:
            raise JournalError(str(error)) from error
