"""The core's shared mutable state, and the operations on it that several modules need.

`LineCore` owns one `CoreState`. The rules are functions in the other modules of this package: they
read this state, change it, and emit effects. Nothing outside the package touches it. One of these
operations is `stop_line`, and it is where the line is stopped, whatever the reason.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from andon.protocol.halts import HaltEvidence, HaltReason
from andon.protocol.layout import Layout
from andon.protocol.records import Cursor, Key, PositionRange, Record, RecordKind
from andon.protocol.reducers import ReducerShare
from andon.protocol.run_settings import RunPlan
from andon.protocol.scalars import ScalarNames
from andon_coordinator.core.arithmetics import Arithmetics
from andon_coordinator.core.chain import Chain, Keys
from andon_coordinator.core.checkpoints import KnownCheckpoint, RunCheckpoints
from andon_coordinator.core.comparison import Comparison
from andon_coordinator.core.defects import LineDefect
from andon_coordinator.core.detectors import Detectors
from andon_coordinator.core.effects import (
    Effect,
    NoteSetback,
    SaveHalt,
    SaveRecord,
    SaveTerm,
    SendCommitted,
    SendHalt,
    SendShutdown,
    SendVoided,
)
from andon_coordinator.core.lateness import SlownessWatch
from andon_coordinator.core.line_state import LineState, Trigger, next_state
from andon_coordinator.core.members import LineMember, Members
from andon_coordinator.core.pacing import Pacing
from andon_coordinator.core.reducers import Reducers
from andon_coordinator.core.round import AttemptCounts, PendingRecord, StepRound
from andon_coordinator.core.scalar_all_reduces import ScalarAllReduces
from andon_coordinator.core.settings import LineSettings
from andon_coordinator.core.spikes import SpikeAction, SpikeBook
from andon_coordinator.core.step_results import Skip, StepResult
from andon_coordinator.core.suspicion import Crowd, Delays, durations_of_rounds
from andon_coordinator.core.transfers import StateTransfer, StateTransfers
from andon_coordinator.core.verification import VerifiedTotals

__all__ = ["CoreState", "GoingBack"]

_LONGEST_PAUSE_S = 5.0
"""The longest back-off between two attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoingBack:
    """The line is to go back to a checkpoint for a spike; see `going_back`."""

    defect: LineDefect
    """The spike."""
    why: str
    """What was decided about it; in words."""
    checkpoint: KnownCheckpoint
    head: Key
    """The line's head."""
    batch: PositionRange
    """The batch of the round that had the spike."""


@dataclass(slots=True, kw_only=True)
class CoreState:
    """Everything that the core remembers between two events."""

    settings: LineSettings
    keys: Keys
    chain: Chain
    members: Members = field(default_factory=Members)
    reducers: Reducers = field(default_factory=Reducers)
    transfers: StateTransfers = field(default_factory=StateTransfers)
    """The line stands still as long as there is one."""
    snapshots: StateTransfers = field(default_factory=lambda: StateTransfers(begun=2**31))
    """States on their way to learners, while rounds run."""
    scalar_all_reduces: ScalarAllReduces = field(default_factory=ScalarAllReduces)
    rounds: Delays = field(default_factory=durations_of_rounds)
    """For how long the rounds of committed first attempts were open, of late."""
    slowness: SlownessWatch = field(default_factory=SlownessWatch)
    lag_s: float = 0.0
    """For how long this process has not listened, in total, since it began."""
    crowd: Crowd = field(default_factory=Crowd)
    """How long what is to run waits for a processor here."""
    attempts: AttemptCounts = field(default_factory=AttemptCounts)
    standing: frozenset[int] = frozenset()
    """Workers that asked for the step after the record that the present event made durable."""
    scalar_names: ScalarNames = field(default_factory=ScalarNames)
    arithmetics: Arithmetics = field(default_factory=Arithmetics)
    checkpoints: RunCheckpoints = field(default_factory=RunCheckpoints)
    detectors: Detectors = field(default_factory=Detectors)
    comparison: Comparison = field(default_factory=lambda: Comparison(None))
    spikes: SpikeBook = field(default_factory=lambda: SpikeBook(SpikeAction.HALT))
    pacing: Pacing
    line_state: LineState = LineState.FORMING
    plan: RunPlan | None = None
    layout: Layout | None = None
    round: StepRound | None = None
    pending_record: PendingRecord | None = None
    halt: HaltEvidence | None = None
    halt_announced: bool = True
    """False while a halt waits for the pending record to be announced."""
    next_halt_id: int = 1
    stop_reason: str = ""
    """Why the run is over after the head; empty if it goes on."""
    stops_refused: set[int] = field(default_factory=set)
    """Workers whose wish to end the run was refused; people are told once of each."""
    stop_wanted: str = ""
    """Why the run is to end once nothing is computed ahead any more; empty if it is not."""
    draining: bool = False
    shut_down: bool = False
    """Whether the workers were sent away without a last step."""
    workers_ready_once: bool = False
    """Whether the expected workers were ever here together."""
    reducers_ready_once: bool = False
    """Whether the expected reducers were ever here together."""
    recovery_over: bool = False
    """Whether this coordinator used the head for anything; from then on no other is adopted."""
    started_at: float | None = None
    first_join_at: float | None = None
    bootstrap_process: int | None = None
    """The incarnation whose initial weights are the INITIAL record."""
    few_grains: tuple[int, int] = (0, 0)
    """Of the last batch with fewer grains than workers: their numbers, which people know."""
    bootstrap_again: bool = False
    """Whether a person wants lost state at step 0 replaced by new initial weights."""
    dropped: set[int] = field(default_factory=set)
    """Slots of workers that a person dropped, unless another process took the slot since."""
    noticed: dict[int, int] = field(default_factory=dict)
    """By stream, the workers that gave notice and were not released yet."""
    holds_alone: int | None = None
    """The worker that gave notice and stays, since nobody else holds the line's state."""
    keeping: set[int] = field(default_factory=set)
    """Streams of those that were asked to write a checkpoint and leave."""
    released: dict[int, int] = field(default_factory=dict)
    """By stream, those that were released, and may still say good-bye."""
    barred: set[int | str] = field(default_factory=set)
    """Who may not join again: incarnations of dropped workers, and names of their own tokens."""
    unattested: set[int] = field(default_factory=set)
    """Workers whose gradients nobody has compared since their processes joined."""
    unverified: tuple[int, ...] = ()
    """Workers that nobody of the same arithmetic stands beside; people know of them."""
    verified: VerifiedTotals = field(default_factory=VerifiedTotals)
    evicted: dict[int, str] = field(default_factory=dict)
    """Why processes follow that were slow for long, by incarnation; see `evicting`."""
    stand: int = 0
    """How many were in sync after the last of them went."""
    uncompared: set[int] = field(default_factory=set)
    """Workers that got their state from elsewhere, until a round compared them with another's."""
    differed: dict[int, str] = field(default_factory=dict)
    """By slot, the host of a worker whose weights differed when it had learnt, until they agree."""
    late_answers_s: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    """How long the last late workers took to listen."""
    asked_for_digests: tuple[int, ...] = ()
    """The roster that was asked to compare those last: it can't do better if asked again."""
    last_roster: tuple[int, ...] = ()
    """Workers of the last STEP since the run was started or resumed; empty if there is none."""
    departed: dict[int, bool] = field(default_factory=dict)
    """Workers that are gone since that STEP: True if a worker left in order.

    `LeaveReason.in_order` defines that; `departures.is_complete` needs it.
    """
    roll_back_pending: bool = False
    """Whether the MARK that rolls the line back is still to be given to the journal."""
    totals_reopened: bool = False
    """Whether the next join sets the length of the run: a resumed run may be extended."""
    abandoned: Key | None = None
    """The greatest key that a roll-back may have removed from the history."""
    accepts_older: bool = False
    """Whether a person answered lost state by RETRY: any record of the history will do then."""
    going_back: GoingBack | None = None
    """What the line goes back for, until the journal has found the checkpoint's record."""
    sought: tuple[Key, ...] = ()
    """The heads among which the journal looks for a record of the history; empty: it does not."""
    last_wait: tuple[Key | None, str] = (None, "")
    """How members waited for others when `look_for_stragglers` looked last."""
    final_weights_compared: bool = False
    forming_since: float | None = None
    """Since when the line has been FORMING; None if it is not."""
    now: float = 0.0
    wall: float = 0.0
    effects: list[Effect] = field(default_factory=list)

    def emit(self, *effects: Effect) -> None:
        """Appends effects; they are carried out in this order."""
        self.effects += effects

    def shut_down_member(self, member: LineMember) -> None:
        """Tells a live member that the run is over: it does not come back after that."""
        assert member.stream is not None
        text = f"the run is over: {self.stop_reason}"
        self.emit(SendShutdown(member.stream, text, self.stop_reason))
        member.knows_the_end = True

    def note_uncompared(self, worker: int) -> None:
        """Notes that nobody has compared the weights of a worker, if the line compares any."""
        if self.settings.policy.digest_every:
            self.uncompared.add(worker)
            self.asked_for_digests = ()

    def note_source(self, joiner: LineMember, donor: int) -> None:
        """Notes that a member has another worker's weights; what it attested before is void."""
        joiner.weights_from = donor
        if self.attempts.inquest is not None:
            self.attempts.inquest.given.pop(joiner.request.incarnation, None)

    def enter(self, trigger: Trigger) -> None:
        """Changes the line's state by the table."""
        self.line_state = next_state(self.line_state, trigger)

    @property
    def expected(self) -> int:
        """How many workers the line waits for before its first round.

        A person who drops a worker does not want to wait for it. The number falls by one for each
        dropped worker, unless others took part in its place.
        """
        expect = self.settings.expect_workers
        if not self.dropped:
            return expect
        here = {member.worker for member in self.members if not member.spare}
        known = here.union(self.last_roster) - self.dropped
        return max(1, min(expect, max(len(known), expect - len(self.dropped))))

    @property
    def needed(self) -> int:
        """How many workers a round needs; fewer than `min_workers` if a person dropped some."""
        return min(self.settings.min_workers, self.expected)

    @property
    def reducer_map(self) -> tuple[ReducerShare, ...]:
        """Which reducer averages which part of the model, now."""
        return self.reducers.map_of(self.layout, self.settings.policy.chunk_elements)

    def end_reached(self, step: int, cursor: Cursor) -> str:
        """Why a run that is at this step and cursor is over; empty if it goes on."""
        limits = [self.settings.policy.max_steps]
        if self.plan is not None:
            limits.append(self.plan.total_steps)
        if any(limit is not None and step >= limit for limit in limits):
            return "steps"
        epochs = None if self.plan is None else self.plan.total_epochs
        return "epochs" if epochs is not None and cursor.epoch >= epochs else ""

    # ---------------------------------------------------------------------------- records

    def raise_term(self, greatest: int) -> None:
        """Starts a term above one of another coordinator (rules 1 and 2)."""
        # Reducers ignore rounds below the greatest key they have seen. The open round has a key of
        # the old term, so a reducer may already treat it as stale.
        self.void("another coordinator's term was seen", pause=False)
        self.emit(SaveTerm(self.keys.start_term_above(greatest, self.wall)))

    def draw_mark(self, cursor: Cursor, after: Record | None = None) -> Record:
        """A MARK with a new key, after a record of the history; None: after the head."""
        chain = self.chain
        return Record(
            key=self.keys.draw(),
            parent=chain.head if after is None else after.key,
            kind=RecordKind.MARK,
            step=chain.step if after is None else after.step,
            cursor=cursor,
            roster=(),
        )

    def save(self, pending: PendingRecord, *, note: str = "", skipped: Skip | None = None) -> None:
        """Gives a record to the journal; it is announced once it is durable (rule 2)."""
        assert self.pending_record is None
        self.pending_record = pending
        pending.given_at = self.now
        self.recovery_over = True
        self.emit(
            SaveRecord(
                pending.record,
                pending.result,
                note,
                skipped,
                pending.rolls_back,
                pending.pacing,
                by_itself=pending.back_to is not None,
                proved=pending.proved,
                comparison=b"" if pending.comparison is None else pending.comparison.to_bytes(),
            )
        )

    def note_departure(self, worker: int, *, in_order: bool) -> None:
        """Notes that a worker is gone; `in_order`: with the run's last weights.

        Once a worker has left in order, that stands, whatever a later process in its slot does.
        """
        self.departed[worker] = in_order or self.departed.get(worker, False)
        pending = self.pending_record
        if pending is not None:
            # If the pending record is a STEP, `departed` starts again when it is durable, and
            # this worker went after it was given to the journal. One that is not on its roster
            # lacks it.
            in_order = in_order and worker in pending.record.roster
            pending.departed[worker] = in_order or pending.departed.get(worker, False)

    def can_apply(self, member: LineMember, record: Record) -> bool:
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
                # The slot is compared too: the process may have joined again in another one.
                bootstraps = member.request.incarnation == self.bootstrap_process
                return bootstraps and member.worker == record.roster[0]

    def announce(self, member: LineMember, record: Record, result: StepResult | None) -> None:
        """Sends a member a durable record; it applies that before anything we send later."""
        assert member.stream is not None
        # Streams keep their order, so the member counts as at the record from now on. If its
        # stream breaks first, its next Join says where it really is.
        member.head = record.key
        member.held = None
        member.step = record.step
        # A STEP or INITIAL record lets its script go on; a MARK leaves it where it waits.
        member.accepts_state = member.accepts_state and record.kind is RecordKind.MARK
        self.emit(SendCommitted(member.stream, record, result, self.stop_reason, self.pacing.kept))

    # ----------------------------------------------------------------------------- rounds

    def void(self, message: str, *, pause: bool, untold: Collection[int] = ()) -> None:
        """Voids the open round and informs its members (rule 5); does nothing if none is open.

        Its members keep their requests for work, but not those that came with a report. Each
        further void of the same step makes the next round wait longer. With `pause` the next round
        waits after the first void too. The members in `untold` hear of it otherwise.
        """
        round_ = self._drop_round()
        if round_ is None:
            return
        for worker, stream in zip(round_.roster, round_.streams, strict=True):
            member = self.members.get(worker)
            # A member that joined again on a new stream knows nothing of this round there.
            if worker not in untold and member is not None and member.stream == stream:
                self.emit(SendVoided(stream, round_.key, message))
        for learner in self.members.following():
            assert learner.stream is not None
            self.emit(SendVoided(learner.stream, round_.key, message))
        times = self.attempts.voided if pause else self.attempts.voided - 1
        self.attempts.not_before = self.now + self.back_off(times)

    def void_at_once(self, message: str) -> None:
        """Voids a complete round that may not become a record, and tries its step again.

        Nothing failed that might pass, so the next attempt need not wait.
        """
        self.void(message, pause=False)
        self.attempts.voided -= 1
        self.attempts.not_before = self.now

    def withdraw(self, message: str, *, untold: Collection[int] = ()) -> None:
        """Voids a round in which nothing failed, so that this is no attempt that counts.

        A member turned out not to be at it, since its request was a standing one; or the round goes
        on with other members.
        """
        # Put back below: `void` counts.
        attempts = self.attempts
        kept = attempts.attempt, attempts.voided, attempts.not_before
        self.void(message, pause=False, untold=untold)
        attempts.attempt, attempts.voided, attempts.not_before = kept

    def back_off(self, times: int) -> float:
        """How long to wait after `times` consecutive failures, in seconds."""
        if times < 1:
            return 0.0
        # The exponent is bounded because a float overflows at 2**1024.
        wait = self.settings.rejoin_grace_s * 2.0 ** min(times - 1, 30)
        return min(wait, _LONGEST_PAUSE_S)

    def note_setback(self, transfer: StateTransfer, joiner: LineMember, why: str) -> None:
        """Counts a state transfer that failed, and reports it to people."""
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

    # ------------------------------------------------------------------------------ halts

    def stop_line(self, defect: LineDefect) -> None:
        """Halts the line: voids the open round and tells everybody.

        The pending record, if there is one, may be durable already. A halt can't undo it, so
        workers get the record first and then the halt.
        """
        journal = defect.reason is HaltReason.JOURNAL
        # The first halt stands until it is answered. Only a failing journal replaces it.
        if self.line_state is LineState.COMPLETE or (
            self.line_state is LineState.HALTED and not journal
        ):
            return
        # First: no report counts for it any more, and its key and positions go into the evidence.
        round_ = self._drop_round()
        self.going_back = None
        key = round_.key if round_ is not None else None
        step = self.chain.step + 1
        if journal and self.pending_record is not None:
            # The journal says that it did not write the record: that one is void after all.
            key = self.pending_record.record.key
            self.pending_record = None
            # What was learnt from the record goes with it.
            self.pacing.restore(self.pacing.kept)
            self._count_void(key)
        elif self.pending_record is not None:
            step = self.pending_record.record.step + 1
        self.halt = self._evidence(defect, step, key, round_)
        self.next_halt_id += 1
        self.enter(Trigger.HALTED)
        # Before anybody hears of it: effects are carried out in order, so the journal has it first.
        self.emit(SaveHalt(self.halt))
        self.halt_announced = self.pending_record is None
        if self.halt_announced:
            self.announce_halt()

    def announce_halt(self) -> None:
        """Sends the present halt to everybody."""
        assert self.halt is not None
        self.halt_announced = True
        for member in self.members.live():
            assert member.stream is not None
            self.emit(SendHalt(member.stream, self.halt))

    def is_after_head(self, halt: HaltEvidence) -> bool:
        """Whether a halt came after the head, so that it still needs an answer (rule 9)."""
        if halt.key is not None and self.chain.head is not None:
            return halt.key > self.chain.head
        return halt.step > self.chain.step

    def _drop_round(self) -> StepRound | None:
        # Gone before its members are told: what they send about it from now on has a stale key.
        round_, self.round = self.round, None
        if round_ is None:
            return None
        self._count_void(round_.key)
        return round_

    def _count_void(self, key: Key) -> None:
        self.attempts.attempt += 1
        self.attempts.voided += 1
        for member in self.members:
            if member.held == key:
                # Averages of a void key must not be applied to any record.
                member.held = None
            if member.learning is not None and member.learning.follows:
                member.learning.voided = key

    def _evidence(
        self, defect: LineDefect, step: int, key: Key | None, round_: StepRound | None
    ) -> HaltEvidence:
        return HaltEvidence(
            id=self.next_halt_id,
            reason=defect.reason,
            step=step,
            key=key,
            worker=defect.worker,
            block=defect.place.block,
            parameter=defect.place.parameter,
            element=defect.place.element,
            value=defect.value,
            message=defect.message,
            at_unix_s=self.wall,
            epoch=None if round_ is None else round_.terms.epoch,
            positions=None if round_ is None else round_.terms.batch,
            reported_by=defect.reported_by,
        )
