"""The worker's state: its head and its round, and what each event changes (rules 3 to 10).

Theory of operation. Two things make up the state. The *head* is the last record that this worker
applied; it moves by records and transfers alone (rule 7). The *round* is what the worker was
assigned last. It goes from OPEN (averages are missing) to HELD (all averages are here) and ends
with its record, or as VOID. Whatever ends a round other than its record leaves the weights alone.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from andon.protocol.halts import HaltEvidence
from andon.protocol.records import Cursor, Key, Record, RecordKind
from andon_trainer.core.computed import Computed
from andon_trainer.core.effects import (
    DropComputed,
    Effect,
    EndExchange,
    JoinAgain,
    ReportFault,
    StepDone,
)
from andon_trainer.core.events import Assigned, Committed, ExchangeFailed, TransferAsked, Voided
from andon_trainer.core.reports import NO_DIGEST, Digest

__all__ = ["RoundPhase", "WorkerState"]


class RoundPhase(enum.Enum):
    """How far the worker's round is."""

    NONE = enum.auto()
    OPEN = enum.auto()
    """Assigned; averages are missing."""
    HELD = enum.auto()
    """All averages are here; the record is missing."""
    LATE = enum.auto()
    """Over for the others, who go on without this worker: it computes its share to the end."""
    VOID = enum.auto()
    """Over without a record."""


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
    phase: RoundPhase = RoundPhase.NONE
    begun: bool = False
    """Whether the round's exchange was begun."""
    reported: bool = False
    """Whether the coordinator was told that all of the round's averages are here: it is HELD."""
    computed: Computed = field(default_factory=Computed)
    """What is computed beyond the head, if this worker makes local steps."""
    commit: Committed | None = None
    """The round's record, until the script takes it."""
    halt: HaltEvidence | None = None
    """The halt that the line is in, as far as this worker knows."""
    stop_reason: str = ""
    pacing: bytes = b""
    """What the last commit said of the workers' speed. It is kept, unread, for the next Join."""
    worker: int | None = None
    """This worker's id on the line, once it has joined."""
    behind: bool = False
    """Whether the line went on without this worker, so that a transfer must replace its state."""
    installed_from: TransferAsked | None = None
    """The transfer that brought the state which was installed last; None: its own state."""
    dismissed: bool = False
    """Whether the run ended without a last step that this worker takes part in."""
    _halt_expected: bool = False
    """Whether the answer to Join named a halt whose event was not taken from the inbox yet."""
    scalar_all_reduces: int = 0
    """Scalar all-reduces begun since the weights moved. A MARK moves no weights."""
    given: dict[int, tuple[float, float, Digest, bytes]] = field(default_factory=dict)
    """The numbers given to the last two: a coordinator that restarted knows none of them."""
    _aside: Assigned | None = None
    """The round that it is late of, while it makes up one that the others made meanwhile."""
    _waiting: Assigned | None = None
    """Work that came and that the script has not taken yet."""
    _asked: tuple[int, Key | None] | None = None
    """The stream and the head that work was last requested for."""

    @property
    def held_key(self) -> Key | None:
        """The round whose record may be applied: its averages are all here."""
        held = self.assigned is not None and self.phase is RoundPhase.HELD
        return self.assigned.key if held and self.assigned is not None else None

    @property
    def attends(self) -> bool:
        """Whether the round that the script works on is one that this worker only attends."""
        return self.assigned is not None and self.assigned.attends

    @property
    def is_midway(self) -> bool:
        """Whether it makes up a round in the middle of its share: what it owes is not computed."""
        return self._aside is not None

    def has_work(self, key: Key) -> bool:
        """Whether round `key` was assigned, and the script has not taken it yet."""
        return self._waiting is not None and self._waiting.key == key

    # ------------------------------------------------------------------ the script's side

    def must_ask(self, stream: int) -> bool:
        """Whether to request work on `stream` now; notes that it was. Once a head and stream."""
        # The coordinator would not assign work in a halt, and this worker would not take it.
        if self._halt_expected or self.halt is not None:
            return False
        if self._waiting is not None or self._asked == (stream, self.head):
            return False
        self._asked = (stream, self.head)
        return True

    def ask_again(self) -> None:
        """Work is to be requested once more at this head: the round that it led to is void."""
        self._asked = None

    def forget_round(self) -> Assigned | None:
        """Ends the last round; if the script never began it, returns it to be worked on."""
        if self.phase is RoundPhase.OPEN and not self.begun:
            return self.assigned  # The script left its loop before it began this round.
        self.phase, self.reported = RoundPhase.NONE, False
        self.assigned = None
        return None

    def leave_epoch(self) -> list[Effect]:
        """The script left the head's epoch: drops the round and the work that came."""
        self._waiting = None
        # Forgotten, so that the same head may be requested for once more: this time its end.
        self._asked = None
        return self.void("its epoch was left")

    def take_work(self) -> tuple[Assigned | None, list[Effect]]:
        """Takes the work that came, if any; never work that does not follow this head (rule 4)."""
        work, self._waiting = self._waiting, None
        if work is None:
            return None, []
        if work.parent != self.head:
            return None, [JoinAgain("assigned work for another head")]
        self.assigned, self.phase = work, RoundPhase.OPEN
        # A record that the script has not taken is of an older step.
        self.begun, self.commit = False, None
        # A coordinator that keeps its place asks for all of it again. A new one may deal otherwise.
        # One that it attends asks for nothing of it.
        fits = work.attends or self.computed.serves(work)
        return work, [] if fits else self.drop_computed("other positions were assigned")

    def take_computed(self) -> Assigned | None:
        """Takes the work that came, if nothing of it is to be computed."""
        work = self._waiting
        if work is None or work.parent != self.head or self.computed.missing(work):
            return None
        if not (work.attends or self.computed.serves(work)):
            return None
        return self.take_work()[0]

    def hold(self, key: Key) -> bool:
        """Notes that all averages of `key` are here; returns whether that is the present round."""
        if self.phase is RoundPhase.OPEN and self.is_present(key):
            self.phase = RoundPhase.HELD
        return self.held_key == key

    def take_commit(self) -> Committed | None:
        """The record of the script's step. It is returned once."""
        commit, self.commit = self.commit, None
        return commit

    def scalar_all_reduce(
        self, value: float, weight: float, digest: Digest = NO_DIGEST, data: bytes = b""
    ) -> int:
        """Begins a scalar all-reduce with this worker's number; returns its sequence number."""
        sequence, self.scalar_all_reduces = self.scalar_all_reduces, self.scalar_all_reduces + 1
        self.given[sequence] = value, weight, digest, data
        # Another worker may still wait for the result before this one. Nobody waits for an older
        # one: whoever gave number s-1 had the result of s-2 already.
        self.given.pop(sequence - 2, None)
        return sequence

    def drop_computed(self, why: str) -> list[Effect]:
        """Forgets what was computed beyond the head, if anything was."""
        return [DropComputed(why)] if self.computed.drop() else []

    def void(self, message: str) -> list[Effect]:
        """Ends the present round without a record, if it is not over."""
        if self.phase is RoundPhase.LATE:
            self.phase = RoundPhase.VOID  # Its exchange was never begun.
        if self.phase not in (RoundPhase.OPEN, RoundPhase.HELD):
            return []
        self.phase, self.reported = RoundPhase.VOID, False
        return [EndExchange(message)]

    def left_out(self, key: Key) -> list[Effect]:
        """The line goes on without this worker's part of round `key`, which it owes from now on."""
        if self.has_work(key):
            # Nothing of it is computed yet. To ask for work would say that it is.
            self._waiting = None
        else:
            self._asked = None  # Its request led to this round.
        if not self.is_present(key):
            return []
        if self.phase is RoundPhase.OPEN and not self.begun:
            self.phase = RoundPhase.LATE
            return []
        return self.void("the others went on without this worker, which was late")

    def set_aside(self, missed: Assigned) -> None:
        """It makes up a round of the others' in the middle of its share, which it is late with."""
        assert self.phase is RoundPhase.LATE
        self._aside, self.assigned, self.phase = self.assigned, missed, RoundPhase.OPEN
        self.begun, self.commit = False, None

    def take_up_again(self) -> None:
        """That is over: it goes on with its share, unless something ended both."""
        if self.phase is RoundPhase.NONE:
            self.assigned, self.phase, self.begun = self._aside, RoundPhase.LATE, False
        self._aside = None

    def own_fault(self, kind: str, message: str, value: str = "") -> ExchangeFailed:
        """What this worker itself saw go wrong in the present round."""
        assert self.assigned is not None
        return ExchangeFailed(
            key=self.assigned.key,
            kind=kind,
            message=message,
            rank=self.assigned.rank,
            value=value,
        )

    # ------------------------------------------------------------------ what is received

    def receive(self, event: Committed | Voided | Assigned | ExchangeFailed) -> list[Effect]:
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

    def halted(self, evidence: HaltEvidence) -> tuple[bool, list[Effect]]:
        """The line was halted. Returns whether that is news: each new stream repeats it."""
        # Before the return below: if it stayed set, no work would be asked for after the answer
        # either.
        self._halt_expected = False
        if self.halt is not None and self.halt.id == evidence.id:
            return False, []
        self.halt = evidence
        # Rule 7: the halt voids the round of that work, too.
        self._waiting = None
        return True, self.void(str(evidence))

    def resumed(self) -> None:
        """The halt was answered."""
        self.halt = None

    def ended(self, stop_reason: str) -> list[Effect]:
        """The run is over for everybody: there is nothing to wait for, not even an answer."""
        # The last step's own reason, if it had one, is the truer one.
        self.stop_reason = self.stop_reason or stop_reason
        self.dismissed = True
        self.halt = self._waiting = None
        self._halt_expected = False
        why = f"the run is over: {stop_reason}"
        return [*self.void(why), *self.drop_computed(why)]

    def installed(self, transfer: TransferAsked) -> Sequence[Effect]:
        """The state of a worker in sync was installed whole (rule 10)."""
        self.head, self.cursor, self.step = transfer.head, transfer.cursor, transfer.step
        self.behind, self.installed_from = False, transfer
        assert not self.computed, "dropped before state moves"
        self._forget_scalar_all_reduces()
        # Averages that are held belong to the head from before.
        return self.void("newer weights were installed") if self.phase is RoundPhase.HELD else ()

    # ------------------------------------------------------------------ between two streams

    def lost(self) -> list[Effect]:
        """The control stream ended. A round that waits for its record may still get it (rule 8)."""
        # Rule 4: what came on the old stream, and was not acted on, is dropped.
        self._waiting = None
        self._asked = None
        self._halt_expected = False
        # What is computed stays, but nobody says any more which round it is for.
        ends = self.phase in (RoundPhase.OPEN, RoundPhase.LATE)
        return self.void("the coordinator was lost") if ends else []

    def joined(self, *, in_sync: bool, behind: bool, worker: int, halted: bool) -> list[Effect]:
        """The coordinator accepted the Join, as `worker`; `halted`: the line is in a halt.

        The halt is an event of its own, and the first one of the stream. No work is requested
        before it is taken.
        """
        self.worker, self.behind = worker, behind
        self._halt_expected = halted
        # Neither in sync nor behind: the line's last record comes again, and the averages that are
        # held may be what it needs. Otherwise no record will ever come for them.
        if self.phase is RoundPhase.HELD and (in_sync or behind):
            why = "the line went on without this worker" if behind else "its record was not written"
            return self.void(why)
        return []

    def _offered(self, work: Assigned) -> list[Effect]:
        """A new round was assigned: the present one is void."""
        self._waiting = work
        return self.void("a new round was assigned")

    def _voided(self, event: Voided) -> list[Effect]:
        """A round is void."""
        # Withdrawn before the script took it: nothing of it is to be ended.
        if self._waiting is not None and event.key == self._waiting.key:
            self._waiting = None
            return []
        return self.void(event.message) if self.is_present(event.key) else []

    def _failed(self, event: ExchangeFailed) -> list[Effect]:
        """An exchange can't be finished: the coordinator voids its round (rule 5)."""
        # Not once the averages are held: the round may be committed already.
        open_ = self.phase is RoundPhase.OPEN and self.is_present(event.key)
        if open_ and self.attends:
            # The others have made this exchange, or will make it: it is this worker's own trouble.
            return [JoinAgain(f"this worker can't make up a step ({event.message})")]
        return [ReportFault(event)] if open_ else []

    def _committed(self, commit: Committed) -> list[Effect]:
        """A record is durable: it is applied, or known already, or ends the stream (rule 4)."""
        record = commit.record
        if not self._applies(record):
            # Rule 4: a record that comes again may be applied already. Any other record that does
            # not fit makes this worker join again.
            known = record.key == self.head
            return [] if known else [JoinAgain("got a record that can't be applied here")]
        self.head, self.cursor, self.step = record.key, record.cursor, record.step
        self.stop_reason = commit.stop_reason or self.stop_reason
        self.pacing = commit.pacing or self.pacing
        if record.kind is not RecordKind.MARK:
            self._forget_scalar_all_reduces()
        if record.kind is not RecordKind.STEP:
            # The cursor moved past what was computed, or may have.
            return self.drop_computed(f"a {record.kind.name} moved the cursor")
        self.commit = commit
        self.phase, self.reported = RoundPhase.NONE, False
        if not self.attends:
            # Of a round that it only attends it has computed nothing: what it owes stays.
            self.computed.committed()
        # No work is asked for then, and if this round becomes void the script asks as ever: for
        # this head it has not.
        self._waiting = commit.next
        return [StepDone(record.key)]

    def _applies(self, record: Record) -> bool:
        """Whether this worker can go from its head to a record (rules 7, 11 and 13)."""
        match record.kind:
            case RecordKind.INITIAL:
                # The parent does not matter: a line that is bootstrapped again has one. Whose
                # weights they are does: no other worker's weights become this one's by a record.
                return self.head is None and record.roster == (self.worker,)
            case RecordKind.STEP:
                return record.parent == self.head and self.held_key == record.key
            case RecordKind.MARK:
                return record.parent == self.head

    def is_present(self, key: Key) -> bool:
        """Whether `key` is the round that the script works on."""
        return self.assigned is not None and key == self.assigned.key

    def _forget_scalar_all_reduces(self) -> None:
        self.scalar_all_reduces = 0
        self.given.clear()
