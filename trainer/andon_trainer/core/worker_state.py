"""The worker's state: where it is on the line, and what each event changes (rules 3 to 10).

Theory of operation. This is the worker's half of the protocol and nothing else: no stream, no
clock, no tensor. Whoever owns it hands it what was received or decided, and does the deeds that it
answers with, in order, before the next event. The head moves by records and transfers alone
(rule 7); whatever ends a round other than its record leaves the weights as they were.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from andon.protocol.halts import HaltEvidence
from andon.protocol.records import Cursor, Key, Record, RecordKind
from andon_trainer.core.events import Assigned, Committed, ExchangeFailed, TransferAsked, Voided
from andon_trainer.core.reports import NO_DIGEST, Digest

__all__ = ["Deed", "EndExchange", "JoinAgain", "Phase", "ReportFault", "StepDone", "WorkerState"]


class Phase(enum.Enum):
    """Where the worker stands in its round."""

    NONE = enum.auto()
    OPEN = enum.auto()
    """Assigned; averages are missing."""
    HELD = enum.auto()
    """All averages are here; the commit is missing."""
    VOID = enum.auto()
    """Over without a commit."""


@dataclass(frozen=True, slots=True)
class EndExchange:
    """The present round is void: what still travels for it is worth nothing."""

    message: str


@dataclass(frozen=True, slots=True)
class JoinAgain:
    """The stream must be closed and joined anew."""

    why: str


@dataclass(frozen=True, slots=True)
class ReportFault:
    """The coordinator must hear of this."""

    fault: ExchangeFailed


@dataclass(frozen=True, slots=True)
class StepDone:
    """The present round is committed: its weights may move."""

    key: Key


Deed = EndExchange | JoinAgain | ReportFault | StepDone


@dataclass(slots=True)
class WorkerState:
    """One worker's head and round. A fresh worker has neither."""

    head: Key | None = None
    """The key of the last record that was applied."""
    cursor: Cursor = field(default_factory=lambda: Cursor(0, 0))
    step: int = 0
    """Steps committed."""
    assigned: Assigned | None = None
    """The round that the script works on, or worked on last."""
    phase: Phase = Phase.NONE
    begun: bool = False
    """Whether the round's exchange was begun."""
    commit: Committed | None = None
    """The round's record, until the script takes it."""
    halt: HaltEvidence | None = None
    stop_reason: str = ""
    worker: int | None = None
    """This worker's id on the line, once it has joined."""
    behind: bool = False
    """Whether the line went on without this worker, whose state is to be replaced."""
    installed_from: TransferAsked | None = None
    """The transfer that brought the state which was installed last; None: its own."""
    dismissed: bool = False
    """Whether the run was ended without a last step that this worker is part of."""
    _halt_told: bool = False
    """Whether the answer to Join named a halt that was not taken from the inbox yet."""
    scalar_all_reduces: int = 0
    """Scalar all-reduces that were begun since the weights moved; a MARK moves none."""
    given: dict[int, tuple[float, float, Digest]] = field(default_factory=dict)
    """What the last two were given: a coordinator that came back knows none of them."""
    _waiting: Assigned | None = None
    """Work that came, and that the script's loop has not taken yet."""
    _asked: tuple[int, Key | None] | None = None
    """The stream and head that work was last asked for on."""

    @property
    def held_key(self) -> Key | None:
        """The round whose record may be applied: its averages are all here."""
        held = self.assigned is not None and self.phase is Phase.HELD
        return self.assigned.key if held and self.assigned is not None else None

    # ------------------------------------------------------------------ the script's side

    def must_ask(self, stream: int) -> bool:
        """Whether work is to be asked for on `stream` now; it is asked for once a head."""
        if self._halt_told or self.halt is not None:
            return False
        if self._waiting is not None or self._asked == (stream, self.head):
            return False
        self._asked = (stream, self.head)
        return True

    def forget_round(self) -> Assigned | None:
        """The script wants a round: the one it never began, or None and the last one is over."""
        if self.phase is Phase.OPEN and not self.begun:
            return self.assigned
        self.phase = Phase.NONE
        self.assigned = None
        return None

    def leave_epoch(self) -> list[Deed]:
        """The script left the head's epoch: the present round, and work that came, are void."""
        self._waiting = None
        self._asked = None
        return self.void("its epoch was left")

    def take_work(self) -> tuple[Assigned | None, list[Deed]]:
        """The work that came, if any; never work that does not follow this head (rule 4)."""
        work, self._waiting = self._waiting, None
        if work is None:
            return None, []
        if work.parent != self.head:
            return None, [JoinAgain("assigned work for another head")]
        self.assigned, self.phase = work, Phase.OPEN
        self.begun, self.commit = False, None
        return work, []

    def hold(self, key: Key) -> bool:
        """Takes note that all averages of `key` are here; whether that is the present round."""
        if self.phase is Phase.OPEN and self._is_present(key):
            self.phase = Phase.HELD
        return self.held_key == key

    def take_commit(self) -> Committed | None:
        """The record of the script's step, once."""
        commit, self.commit = self.commit, None
        return commit

    def scalar_all_reduce(self, value: float, weight: float, digest: Digest = NO_DIGEST) -> int:
        """Begins a scalar all-reduce with this worker's number; its sequence number."""
        sequence, self.scalar_all_reduces = self.scalar_all_reduces, self.scalar_all_reduces + 1
        self.given[sequence] = value, weight, digest
        self.given.pop(sequence - 2, None)
        return sequence

    def void(self, message: str) -> list[Deed]:
        """Ends the present round without a commit, if it is not over."""
        if self.phase not in (Phase.OPEN, Phase.HELD):
            return []
        self.phase = Phase.VOID
        return [EndExchange(message)]

    # ------------------------------------------------------------------ what is received

    def receive(self, event: Committed | Voided | Assigned | ExchangeFailed) -> list[Deed]:
        """What an event means for the head and the present round."""
        match event:
            case Committed():
                return self._committed(event)
            case Voided():
                return self._voided(event)
            case Assigned():
                return self._offered(event)
            case ExchangeFailed():
                return self._failed(event)

    def halted(self, evidence: HaltEvidence) -> tuple[bool, list[Deed]]:
        """The line stopped; whether this worker did not know (it is told again on each stream)."""
        self._halt_told = False
        if self.halt is not None and self.halt.id == evidence.id:
            return False, []
        self.halt = evidence
        self._waiting = None
        return True, self.void(str(evidence))

    def resumed(self) -> None:
        """The halt was answered."""
        self.halt = None

    def ended(self, stop_reason: str) -> list[Deed]:
        """The run is over for everybody: nothing is waited for any more, not even an answer."""
        self.stop_reason = self.stop_reason or stop_reason
        self.dismissed = True
        self.halt = self._waiting = None
        self._halt_told = False
        return self.void(f"the run is over: {stop_reason}")

    def installed(self, transfer: TransferAsked) -> list[Deed]:
        """A worker in sync gave its state, and it was installed whole (rule 10)."""
        self.head, self.cursor, self.step = transfer.head, transfer.cursor, transfer.step
        self.behind, self.installed_from = False, transfer
        self._forget_scalar_all_reduces()
        return self.void("newer weights were installed") if self.phase is Phase.HELD else []

    # ------------------------------------------------------------------ lost and found

    def lost(self) -> list[Deed]:
        """The stream ended: a round that waits for its record may still get it (rule 8)."""
        self._waiting = None
        self._asked = None
        self._halt_told = False
        return self.void("the coordinator was lost") if self.phase is Phase.OPEN else []

    def joined(self, *, in_sync: bool, behind: bool, worker: int, halted: bool) -> list[Deed]:
        """The Join was accepted, as `worker`; `halted`: the line stands in a halt.

        Averages that are held are of a round without a record, if the worker is in sync, and of no
        use if it is behind. A halt is an event of its own, and the first one of the stream; no work
        is asked for before it is taken.
        """
        self.worker, self.behind = worker, behind
        self._halt_told = halted
        if self.phase is Phase.HELD and (in_sync or behind):
            why = "the line went on without this worker" if behind else "its record was not written"
            return self.void(why)
        return []

    def _offered(self, work: Assigned) -> list[Deed]:
        """A new round was assigned: the present one is void."""
        self._waiting = work
        return self.void("a new round was assigned")

    def _voided(self, event: Voided) -> list[Deed]:
        """A round is void."""
        if self._waiting is not None and event.key == self._waiting.key:
            self._waiting = None
            return []
        return self.void(event.message) if self._is_present(event.key) else []

    def _failed(self, event: ExchangeFailed) -> list[Deed]:
        """An exchange can't be finished; the coordinator voids what it hears of (rule 5)."""
        open_ = self.phase is Phase.OPEN and self._is_present(event.key)
        return [ReportFault(event)] if open_ else []

    def _committed(self, commit: Committed) -> list[Deed]:
        """A record is durable: it is applied, is known, or ends the stream (rule 4)."""
        record = commit.record
        if not self._applies(record):
            known = record.key == self.head
            return [] if known else [JoinAgain("got a record that can't be applied here")]
        self.head, self.cursor, self.step = record.key, record.cursor, record.step
        self.stop_reason = commit.stop_reason or self.stop_reason
        if record.kind is not RecordKind.MARK:
            self._forget_scalar_all_reduces()
        if record.kind is not RecordKind.STEP:
            return []
        self.commit = commit
        self.phase = Phase.NONE
        return [StepDone(record.key)]

    def _applies(self, record: Record) -> bool:
        """Whether this worker can go from its head to a record (rules 7, 11 and 13)."""
        match record.kind:
            case RecordKind.INITIAL:
                # The parent does not matter: what is founded anew has one. Whose weights they are
                # does: nobody else's become the line's by word alone.
                return self.head is None and record.roster == (self.worker,)
            case RecordKind.STEP:
                return record.parent == self.head and self.held_key == record.key
            case RecordKind.MARK:
                return record.parent == self.head

    def _is_present(self, key: Key) -> bool:
        return self.assigned is not None and key == self.assigned.key

    def _forget_scalar_all_reduces(self) -> None:
        self.scalar_all_reduces = 0
        self.given.clear()
