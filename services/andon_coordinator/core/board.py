"""The board: all that the line knows, and the few acts that every part of it shares.

`Line` owns one board; the modules beside it are its rules, functions that read the board, change
it and put effects on it. Nothing else touches it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from andon.protocol.halts import HaltEvidence, HaltReason
from andon.protocol.layout import Layout
from andon.protocol.records import Cursor, Key, Record, RecordKind
from andon.protocol.reducers import ReducerShare
from andon.protocol.run_settings import RunPlan
from andon.protocol.shards import Ranges
from andon_coordinator.core.chain import Chain
from andon_coordinator.core.defects import Defect
from andon_coordinator.core.detectors import Detectors
from andon_coordinator.core.effects import (
    Effect,
    LineState,
    NoteSetback,
    SaveAnswer,
    SaveHalt,
    SaveRecord,
    SaveTerm,
    SendCommitted,
    SendHalt,
    SendVoided,
    Skip,
    StepResult,
)
from andon_coordinator.core.keys import Keys
from andon_coordinator.core.reducers import Reducers
from andon_coordinator.core.roster import Member, Roster
from andon_coordinator.core.round import Round
from andon_coordinator.core.scalar_all_reduces import ScalarAllReduces
from andon_coordinator.core.settings import LineSettings
from andon_coordinator.core.states import Trigger, next_state
from andon_coordinator.core.transfers import Transfer, Transfers

__all__ = ["Board", "Checkpoints", "Saving"]

_LONGEST_PAUSE_S = 5.0


@dataclass(slots=True, kw_only=True)
class Saving:
    """A record that the journal has been given, and what follows once it is durable."""

    record: Record
    result: StepResult | None = None
    stop: str = ""
    ended: dict[int, bool] = field(default_factory=dict)
    """Who went since it was given to the journal."""
    rolls_back: bool = False
    """Whether the record is the MARK that rolls the line back."""
    answer: SaveAnswer | None = None
    """The answer to a halt that this record carries out: it is written once the record is."""
    resume: Callable[[int], Effect] | None = None
    """Tells a stream that the halt is answered, if this record answers one."""


@dataclass(slots=True, kw_only=True)
class Tries:
    """Attempts at the step after the head."""

    attempt: int = 0
    voids: int = 0
    """Voided since the head moved or a person answered a halt."""
    lost: set[int] = field(default_factory=set)
    """Attempts that each lost a worker; losses within one lease are one."""
    lost_at: float = -math.inf
    """When the last of them lost its worker's stream."""
    dealt: dict[int, Ranges] = field(default_factory=dict)
    """What each worker of the last attempt was dealt: it keeps that in the next one."""
    not_before: float = 0.0
    """The next round opens no earlier: the back-off."""
    company: tuple[tuple[int, ...], tuple[ReducerShare, ...]] = ((), ())
    """Workers and reducers of the last attempt, if some of these are other processes."""
    unreached: int = 0
    """Attempts of that company, on end, that lost a stream to a reducer."""
    corrupt: int = 0
    """Attempts in which a chunk was changed on its way."""

    def forgive(self) -> None:
        """Starts counting anew: a person answered."""
        self.voids = 0
        self.lost.clear()
        self.lost_at = -math.inf
        self.unreached = 0
        self.corrupt = 0
        self.not_before = 0.0


@dataclass(slots=True, kw_only=True)
class Checkpoints:
    """Who writes a run's checkpoints and where, and the last one."""

    writer: int | None = None
    incarnation: int | None = None
    """The writer's process."""
    host: str = ""
    place: str = ""
    """The folder that they go into, on that host."""
    every: int = 0
    step: int = 0
    """Of the last one that was written; 0 if none was, as far as workers have said."""
    folder: str = ""
    """The last one's."""
    overdue: int = 0
    """A step that should have one and has none; 0 if none is missing."""
    told: int = 0
    """The last step that was said to have none."""


@dataclass(slots=True, kw_only=True)
class Board:
    """What the line knows."""

    settings: LineSettings
    keys: Keys
    chain: Chain
    roster: Roster = field(default_factory=Roster)
    reducers: Reducers = field(default_factory=Reducers)
    transfers: Transfers = field(default_factory=Transfers)
    scalar_all_reduces: ScalarAllReduces = field(default_factory=ScalarAllReduces)
    tries: Tries = field(default_factory=Tries)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    detectors: Detectors = field(default_factory=Detectors)
    state: LineState = LineState.FORMING
    plan: RunPlan | None = None
    layout: Layout | None = None
    round: Round | None = None
    saving: Saving | None = None
    halt: HaltEvidence | None = None
    halt_told: bool = True
    """False while a halt waits for the record that is being saved."""
    next_halt_id: int = 1
    stop: str = ""
    """Why the run is over after the head; empty if it is not."""
    draining: bool = False
    shut_down: bool = False
    """Whether the workers were sent away without a last step."""
    formed: bool = False
    """Whether the expected workers were ever here together."""
    equipped: bool = False
    """Whether the expected reducers were ever here together."""
    settled: bool = False
    """Whether this coordinator has built on the head: recovery is over."""
    started_at: float | None = None
    first_join_at: float | None = None
    founder: int | None = None
    """The process whose initial weights are record INITIAL."""
    found_anew: bool = False
    dropped: set[int] = field(default_factory=set)
    last_roster: tuple[int, ...] = ()
    """Workers of the last STEP since the run was begun or resumed; none if there is none."""
    ended: dict[int, bool] = field(default_factory=dict)
    """Who went since then, and whether in order; see `ending`."""
    rolling_back: bool = False
    """Whether the MARK that makes the head the line's is still to be given to the journal."""
    totals_open: bool = False
    """Whether the next worker says how long the run is: it was resumed, maybe to go further."""
    abandoned: Key | None = None
    """The greatest key of a record that was rolled back."""
    final_judged: bool = False
    forming_since: float | None = None
    """Since when the line is FORMING; None if it is not."""
    now: float = 0.0
    wall: float = 0.0
    effects: list[Effect] = field(default_factory=list)

    def emit(self, *effects: Effect) -> None:
        """Adds to what is to be done, in order."""
        self.effects.extend(effects)

    def enter(self, trigger: Trigger) -> None:
        """Changes the state by the table."""
        self.state = next_state(self.state, trigger)

    @property
    def expected(self) -> int:
        """How many workers the line waits for at first: those that were dropped are missed only if
        nobody else takes part in their place."""
        expect = self.settings.expect_workers
        if not self.dropped:
            return expect
        known = {member.worker for member in self.roster}.union(self.last_roster) - self.dropped
        return max(1, min(expect, max(len(known), expect - len(self.dropped))))

    @property
    def needed(self) -> int:
        """How many workers a round needs at least; a person who drops one may leave fewer."""
        return min(self.settings.min_workers, self.expected)

    @property
    def writes_elsewhere(self) -> bool:
        """Whether checkpoints are written on another host than the service's."""
        return bool(self.settings.host) and self.checkpoints.host != self.settings.host

    @property
    def reducer_map(self) -> tuple[ReducerShare, ...]:
        """Who averages what, now."""
        return self.reducers.map_of(self.layout, self.settings.policy.chunk_elements)

    def end_reached(self, step: int, cursor: Cursor) -> str:
        """Why a run that stands there is over; empty if it is not."""
        limits = [self.settings.policy.max_steps]
        if self.plan is not None:
            limits.append(self.plan.total_steps)
        if any(limit is not None and step >= limit for limit in limits):
            return "steps"
        epochs = None if self.plan is None else self.plan.total_epochs
        return "epochs" if epochs is not None and cursor.epoch >= epochs else ""

    def raise_term(self, greatest: int) -> None:
        """Takes a term above one that another coordinator had (rules 1 and 2)."""
        self.void("another coordinator's term was seen", pause=False)
        self.emit(SaveTerm(self.keys.rise_above(greatest, self.wall)))

    def save(self, saving: Saving, *, note: str = "", skipped: Skip | None = None) -> None:
        """Gives a record to the journal; it is announced once it is durable (rule 2)."""
        assert self.saving is None
        self.saving = saving
        self.settled = True
        self.emit(SaveRecord(saving.record, saving.result, note, skipped, saving.rolls_back))

    def note_end(self, worker: int, *, well: bool) -> None:
        """A worker went; once it left in order, a later process in its slot changes nothing."""
        self.ended[worker] = well or self.ended.get(worker, False)
        if self.saving is not None:
            # If this record is a STEP, what was before it will not count.
            self.saving.ended[worker] = well or self.saving.ended.get(worker, False)

    def can_apply(self, member: Member, record: Record) -> bool:
        """Whether a member can go from its head to a record without the line's state (rule 8)."""
        if member.head != record.parent and not (
            record.kind is RecordKind.INITIAL and member.head is None
        ):
            return False
        match record.kind:
            case RecordKind.MARK:
                return True
            case RecordKind.STEP:
                return member.held == record.key
            case RecordKind.INITIAL:
                founder = member.request.incarnation == self.founder
                return founder and member.worker == record.roster[0]

    def announce(self, member: Member, record: Record, result: StepResult | None) -> None:
        """Sends a member a durable record, which it applies before anything sent later."""
        assert member.stream is not None
        member.head = record.key
        member.held = None
        member.step = record.step
        # A STEP or INITIAL record lets its script go on; a MARK leaves it where it waits.
        member.takes_state = member.takes_state and record.kind is RecordKind.MARK
        self.emit(SendCommitted(member.stream, record, result, self.stop))

    def void(self, message: str, *, pause: bool) -> None:
        """Ends the open round for good and tells its members; nothing if none is open (rule 5).

        Its members keep their requests for work. Whatever voids round after round makes the
        next one wait longer each time; with `pause` the first one waits too.
        """
        round_ = self._drop_round()
        if round_ is None:
            return
        for worker, stream in zip(round_.roster, round_.streams, strict=True):
            member = self.roster.get(worker)
            if member is not None and member.stream == stream:
                self.emit(SendVoided(stream, round_.key, message))
        times = self.tries.voids if pause else self.tries.voids - 1
        self.tries.not_before = self.now + self.back_off(times)

    def back_off(self, times: int) -> float:
        """How long to wait once something failed so many times in a row, in seconds."""
        if times < 1:
            return 0.0
        # The exponent is bounded because floats are.
        wait = self.settings.rejoin_grace_s * 2.0 ** min(times - 1, 30)
        return min(wait, _LONGEST_PAUSE_S)

    def note_setback(self, transfer: Transfer, joiner: Member, why: str) -> None:
        """Counts a state that did not reach its joiner, and says so."""
        host, spent_s = joiner.request.node_id, self.now - transfer.began_at
        so_far = f", {joiner.detail}" if joiner.detail else ""
        why = f"{why} (after {spent_s:.0f} s{so_far})"
        setback = self.transfers.fail(
            transfer,
            why,
            host=host,
            step=self.chain.step,
            now=self.now,
            least_s=self.settings.rejoin_grace_s,
        )
        pause_s = setback.not_before - self.now
        self.emit(NoteSetback(joiner.worker, host, setback.failures, pause_s, why))

    def stop_line(self, defect: Defect) -> None:
        """Halts: voids the open round, and tells everybody.

        A record that is being saved may be durable already, so it is announced first.
        """
        journal = defect.reason is HaltReason.JOURNAL
        if self.state is LineState.COMPLETE or (self.state is LineState.HALTED and not journal):
            return
        round_ = self._drop_round()
        key = round_.key if round_ is not None else None
        step = self.chain.step + 1
        if journal and self.saving is not None:
            key = self.saving.record.key
            self.saving = None
            self._count_void(key)
        elif self.saving is not None:
            step = self.saving.record.step + 1
        self.halt = self._evidence(defect, step, key, round_)
        self.next_halt_id += 1
        self.enter(Trigger.HALTED)
        self.emit(SaveHalt(self.halt))
        self.halt_told = self.saving is None
        if self.halt_told:
            self.tell_halt()

    def tell_halt(self) -> None:
        """Sends the present halt to everybody."""
        assert self.halt is not None
        self.halt_told = True
        for member in self.roster.live():
            assert member.stream is not None
            self.emit(SendHalt(member.stream, self.halt))

    def is_newer(self, halt: HaltEvidence) -> bool:
        """Whether a halt is of after the head, and so is still to be answered (rule 9)."""
        if halt.key is not None and self.chain.head is not None:
            return halt.key > self.chain.head
        return halt.step > self.chain.step

    def _drop_round(self) -> Round | None:
        round_, self.round = self.round, None
        if round_ is None:
            return None
        self._count_void(round_.key)
        return round_

    def _count_void(self, key: Key) -> None:
        self.tries.attempt += 1
        self.tries.voids += 1
        for member in self.roster:
            if member.held == key:
                member.held = None

    def _evidence(
        self, defect: Defect, step: int, key: Key | None, round_: Round | None
    ) -> HaltEvidence:
        return HaltEvidence(
            id=self.next_halt_id,
            reason=defect.reason,
            step=step,
            key=key,
            worker=defect.worker,
            block=defect.block,
            parameter=defect.parameter,
            element=defect.element,
            value=defect.value,
            message=defect.message,
            at_unix_s=self.wall,
            epoch=None if round_ is None else round_.epoch,
            positions=None if round_ is None else round_.batch,
        )
