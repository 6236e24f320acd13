"""The journal: what must outlive the coordinator, written by one thread off the event loop.

Theory of operation
===================

A file lock keeps a second coordinator of the same run on this host away. Opening the journal reads
the history and makes the new term durable, before anything else can happen. From then on one thread
takes the core's effects in order and reports TermSaved, RecordSaved, ScalarsSaved, AncestorFound or
JournalFailed. The core announces a record only after RecordSaved. If another coordinator took the
run over, nothing more is written, and `deposed` is called.

A Save effect is one transaction. Those that wait when the thread is free share one, since most of
what a small transaction takes is its beginning and its end. If it fails, each is tried alone.

While the disk is full, records and terms fail, and the core hears of it. Everything else is a fact
that no later one undoes (a halt, its answer, a departure). Such a fact is kept in memory, and
written before whatever comes next. So a record is never durable before the answer that it follows.
"""

from __future__ import annotations

import fcntl
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from andon.host.logs import LogEvent
from andon.host.private_files import make_folder, open_private
from andon.protocol.halts import HaltReason
from andon.protocol.records import Key
from andon_coordinator.core import effects, events
from andon_coordinator.core.machine_time import CostMeter, Price
from andon_coordinator.core.session_events import SaveSession, SaveSessionEnd
from andon_coordinator.core.settings import History
from andon_coordinator.transport.opening import JournalSync
from andon_coordinator.transport.past import Counts
from andon_coordinator.transport.store import JournalError, JournalFenced, JournalStore

__all__ = [
    "Journal",
    "JournalEffect",
    "JournalError",
    "JournalFenced",
    "JournalLocked",
    "JournalSync",
]

log = logging.getLogger(__name__)

JournalEffect = (
    effects.SaveTerm
    | effects.SaveRun
    | effects.SaveRecord
    | effects.SaveHalt
    | effects.SaveAnswer
    | effects.SaveDeparture
    | effects.SaveArithmetic
    | effects.SaveVerdict
    | effects.SaveEviction
    | effects.SaveSpike
    | effects.SaveSlowness
    | effects.SaveScalars
    | effects.SaveRunEvent
    | effects.SaveSteered
    | effects.FindAncestor
    | SaveSession
    | SaveSessionEnd
)
"""What the journal is asked to write, or to find."""

_TRANSIENT = (sqlite3.OperationalError, JournalError)
"""Errors that may go away by themselves: a full disk, a missing file."""

_AWAITED = (effects.SaveTerm, effects.SaveRecord, effects.FindAncestor, SaveSession)
"""What the line, or a session, waits for: it hears at once that it can't be done."""

_ALONE = (effects.SaveTerm, effects.FindAncestor, SaveSession)
"""What shares no transaction: a term is not forgotten if one fails, and a search is none."""

_MOST_WAITING = 4096
"""Scalars are not queued behind so many changes: a flood of them must not fill the memory."""

_MOST_TOGETHER = 256
"""So many effects share a transaction at most: it must not hold a record up for long."""

_MOST_EVENTS = 256
"""Run events that are kept while the disk takes none."""

Report = Callable[[events.Event], None]


class JournalLocked(JournalError):
    """Another process has this journal open."""


class Journal:
    """The journal of one run: locked while open, written by its own thread once started."""

    def __init__(self, store: JournalStore, lock: IO[str]) -> None:
        """Takes an open store and its held lock; see `open`."""
        self._store = store
        self._lock = lock
        self._queue: queue.SimpleQueue[JournalEffect | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._report: Report = lambda event: None
        self._overdue: list[JournalEffect] = []
        self.wrote: Callable[[float, int | None], None] = lambda seconds, step: None
        """Called on the journal's thread after each write, one that failed too: the time that it
        took, and the step if it was a record's. Set it before `start`."""
        self._lost_scalars = False
        # Read here: from `start` on the journal's thread owns the store.
        self.history: History = store.past.history()
        self.next_event_id: int = store.past.next_event_id()
        """The id of the next run event; read before `start`."""
        self.meter: CostMeter = store.past.meter()
        """What the run has taken; whoever owns the core keeps it up to date."""
        gaps, step = store.past.gaps()
        if gaps:
            log.warning(LogEvent("journal_has_gaps", gaps=gaps, last_at_step=step))

    @classmethod
    def open(
        cls,
        path: Path,
        run_id: str,
        *,
        sync: JournalSync = "normal",
        clock: Callable[[], float] = time.time,
    ) -> Journal:
        """Locks and opens the journal of a run; creates it if it is not there.

        Raises:
            JournalLocked: another coordinator has it open.
            JournalError: it can't be opened, or is of another run.
        """
        try:
            make_folder(path.parent)
        except OSError as error:
            raise JournalError(f"the journal {path} can't be made: {error}") from error
        with ExitStack() as undo:
            # First of all: opening the store writes to it, and reads what must not change
            # meanwhile.
            lock = _locked(path)
            undo.callback(lock.close)
            store = JournalStore(path, run_id, sync=sync, clock=clock)
            undo.callback(store.close)
            journal = cls(store, lock)
            undo.pop_all()
        return journal

    def resume_from(self, key: Key) -> None:
        """Makes `history` that of a line that continues from the record `key`; before `start`.

        Raises:
            JournalError: there is no way on from it; see `Past.history_at`.
        """
        self.history = self._store.past.history_at(key)

    def counts(self) -> Counts:
        """How much it holds; before `start`."""
        assert self._thread is None, "once the thread runs, it owns the store"
        return self._store.past.counts()

    def begin_term(self, term: int) -> None:
        """Makes the coordinator's first term durable; before `start`.

        Raises:
            JournalError: it can't be written, or is not above the journal's.
        """
        assert self._thread is None, "once the thread runs, it saves terms"
        self._store.begin_term(term)

    def verify_key(self, new: bytes) -> bytes:
        """The key that says which steps are verified, kept for the next coordinator.

        It is `new` if there is none yet; before `start`, and after `begin_term`.
        """
        assert self._thread is None, "once the thread runs, it owns the store"
        return self._store.verify_key(new)

    def price(self, price: Price) -> None:
        """Keeps what people say of the price of machines; before `start`, after `begin_term`."""
        assert self._thread is None, "once the thread runs, it owns the store"
        if price != self.meter.price:
            self._store.save_price(price)
            self.meter.price = price

    def start(self, report: Report, deposed: Callable[[str], None]) -> None:
        """Starts the writer's thread, which calls both functions.

        Args:
            report: called with what is durable, or could not be made so, from any thread.
            deposed: called with a sentence if another coordinator took the run over.
        """
        self._report = report
        self._thread = threading.Thread(
            target=self._write, args=(report, deposed), name="andon-journal", daemon=True
        )
        self._thread.start()

    def save(self, effect: JournalEffect) -> None:
        """Queues a change, or a search; never blocks."""
        if isinstance(effect, effects.SaveScalars) and self._queue.qsize() >= _MOST_WAITING:
            self._lose(effect)
            return
        self._queue.put(effect)

    def close(self) -> None:
        """Writes what is queued, then closes and unlocks; blocks until then."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
        # Before the lock goes: the next coordinator must not find the store open.
        self._store.close()
        self._lock.close()

    def _write(self, report: Report, deposed: Callable[[str], None]) -> None:
        while waiting := self._take():
            if not self._write_together(waiting, report):
                for effect in waiting:
                    self._write_alone(effect, report, deposed)
        # The halt for a failed journal is not written. The next coordinator either can write the
        # journal, and then the halt has no cause any more, or does not start.
        self._overdue = [each for each in self._overdue if not _is_journal_halt(each)]
        try:
            self._write_overdue()
        except _TRANSIENT as error:  # There is no later record to write it before.
            lost = len(self._overdue)
            loss = LogEvent("journal_incomplete", lost=lost, why=str(error))
            log.error(loss)  # noqa: TRY400 - as above

    def _take(self) -> list[JournalEffect]:
        """All that waits, at least one effect; empty: the journal is to be closed."""
        taken: list[JournalEffect] = []
        while not taken or (len(taken) < _MOST_TOGETHER and not self._queue.empty()):
            effect = self._queue.get()
            # The end, behind all that was given to `save` before `close`.
            if effect is None:
                if taken:
                    self._queue.put(None)  # What was taken is written first.
                break
            taken.append(effect)
        return taken

    def _write_together(self, waiting: list[JournalEffect], report: Report) -> bool:
        """Writes several effects in one transaction; False: nothing of them is written."""
        # Overdue facts come first, one at a time: see `_write_alone`.
        if len(waiting) == 1 or self._overdue:
            return False
        if any(isinstance(effect, _ALONE) for effect in waiting):
            return False
        saved: list[events.Event | None] = []
        steps: list[int | None] = [
            each.record.step for each in waiting if isinstance(each, effects.SaveRecord)
        ]
        began = time.perf_counter()
        try:
            with self._store.together():
                saved = [self._save(effect) for effect in waiting]
        except Exception:  # Each is tried alone, and its own error is dealt with there.
            return False
        seconds = time.perf_counter() - began
        for step in steps or [None]:
            self.wrote(seconds, step)
        # Only after the commit: what is reported must be durable (rule 2).
        for event in saved:
            if event is not None:
                report(event)
        return True

    def _write_alone(
        self, effect: JournalEffect, report: Report, deposed: Callable[[str], None]
    ) -> None:
        try:
            # Older facts first: if they still can't be written, this effect fails too.
            self._write_overdue()
            saved = self._apply(effect)
        except JournalFenced as error:
            # No JournalFailed: the line must not halt, it belongs to another coordinator now.
            deposed(str(error))
        except _TRANSIENT as error:
            name = type(effect).__name__
            failure = LogEvent("journal_failed", effect=name, why=str(error))
            log.error(failure)  # noqa: TRY400 - the disk's fault
            if isinstance(effect, _AWAITED):
                report(_failed(effect, str(error)))
            else:
                self._keep(effect)
        except Exception as error:  # the boundary of this thread: the line halts
            log.exception(LogEvent("journal_failed", effect=type(effect).__name__))
            report(_failed(effect, str(error)))
        else:
            if saved is not None:
                report(saved)

    def _keep(self, effect: JournalEffect) -> None:
        """Keeps a fact that could not be written; scalars are no such fact, and are lost."""
        if isinstance(effect, effects.SaveScalars):
            self._lose(effect)
            return
        if isinstance(effect, effects.SaveSteered):
            return  # An audit then computes it by itself.
        if isinstance(effect, effects.SaveRunEvent):
            kept = sum(isinstance(each, effects.SaveRunEvent) for each in self._overdue)
            if kept >= _MOST_EVENTS:
                return
        # A worker may come and go many times while the disk is full. One departure of each kind is
        # kept, so that memory stays bounded.
        self._overdue = [each for each in self._overdue if not _repeats(each, effect)]
        self._overdue.append(effect)

    def _lose(self, effect: effects.SaveScalars) -> None:
        # Once: it would be said again with every heartbeat.
        # The event loop's thread comes here from `save`, and the journal's from `_keep`. At worst
        # both say it.
        if not self._lost_scalars:
            why = "the journal does not keep up"
            log.warning(LogEvent("scalars_lost", worker=effect.worker, why=why))
        self._lost_scalars = True
        # The worker must not wait for an answer that never comes.
        self._report(events.ScalarsSaved(effect.stream, effect.sequence))

    def _write_overdue(self) -> None:
        while self._overdue:
            try:
                self._apply(self._overdue[0])
            except _TRANSIENT:
                raise
            except Exception:  # It can never be written, and must not block the rest.
                name = type(self._overdue[0]).__name__
                log.exception(LogEvent("journal_failed", effect=name))
            # Only now: what could not be written stays the first of them.
            del self._overdue[0]

    def _apply(self, effect: JournalEffect) -> events.Event | None:
        if isinstance(effect, effects.FindAncestor):  # No write, so it is not timed as one.
            return events.AncestorFound(effect.heads, self._store.past.find_ancestor(effect.heads))
        began = time.perf_counter()
        try:
            return self._save(effect)
        finally:
            step = effect.record.step if isinstance(effect, effects.SaveRecord) else None
            self.wrote(time.perf_counter() - began, step)

    def _save(self, effect: JournalEffect) -> events.Event | None:
        match effect:
            case effects.SaveTerm():
                self._store.begin_term(effect.term)
                return events.TermSaved(effect.term)
            case effects.SaveRecord():
                record = effect.record
                # Before it is saved, which forgets what scripts logged in the steps after it.
                undone = self._store.past.undone_by(record) if effect.rolls_back else None
                if self._store.save_record(effect):
                    missing = str(record.parent)
                    log.error(LogEvent("journal_has_gap", step=record.step, missing=missing))
                return events.RecordSaved(record.key, undone)
            case effects.SaveScalars():
                self._store.save_scalars(effect)
                return events.ScalarsSaved(effect.stream, effect.sequence)
            case SaveSession():
                self._store.save_session(effect)
                return events.SessionSaved(effect.key)
            case _:
                _SILENT[type(effect)](self._store, effect)
        return None


# Any: each takes the effect that it is listed under.
_SILENT: dict[type[JournalEffect], Callable[[JournalStore, Any], None]] = {
    effects.SaveRun: JournalStore.save_run,
    effects.SaveHalt: JournalStore.save_halt,
    effects.SaveAnswer: JournalStore.save_answer,
    effects.SaveDeparture: JournalStore.save_departure,
    effects.SaveArithmetic: JournalStore.save_arithmetic,
    effects.SaveVerdict: JournalStore.save_verdict,
    effects.SaveEviction: JournalStore.save_eviction,
    effects.SaveSpike: JournalStore.save_spike,
    effects.SaveSlowness: JournalStore.save_slowness,
    effects.SaveRunEvent: JournalStore.save_run_event,
    effects.SaveSteered: JournalStore.save_steered,
    SaveSessionEnd: JournalStore.save_session_end,
}
"""What is written, and nobody waits for."""


def _failed(effect: JournalEffect, why: str) -> events.Event:
    if isinstance(effect, SaveSession):
        return events.SessionNotSaved(effect.key, why)
    return events.JournalFailed(why)


def _is_journal_halt(effect: JournalEffect) -> bool:
    return isinstance(effect, effects.SaveHalt) and effect.evidence.reason is HaltReason.JOURNAL


def _repeats(older: JournalEffect, newer: JournalEffect) -> bool:
    """Whether two departures are alike in everything that decisions depend on."""
    if not isinstance(older, effects.SaveDeparture) or not isinstance(newer, effects.SaveDeparture):
        return False
    first, second = ((e.worker, e.reason, e.dropped) for e in (older, newer))
    return first == second


def _locked(path: Path) -> IO[str]:
    # A file of its own: POSIX locks are dropped when the process closes any descriptor of a file,
    # and SQLite relies on such locks on the database.
    try:
        lock = open(  # noqa: SIM115 - held
            path.with_name(path.name + ".lock"), "a+", encoding="ascii", opener=open_private
        )
    except OSError as error:
        raise JournalError(f"the journal {path} can't be locked: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise JournalLocked(
            f"another coordinator (process {holder}) has the journal {path} open: "
            "stop it, or start another run"
        ) from None
    # Only now that the lock is held: until then the file names its holder.
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock
