"""The conversation: what the script waits for, and what each event means for that wait.

Theory of operation. The thread that trains asks the line for something (its weights, work,
averages, a record, the mean of a number, the answer to a halt) and then takes events, one after
another, until it has it. Each of these is a `Wait`. The loop is the same for all of them:

    conversation.wait_for(wait)
    while not conversation.over:
        effects = conversation.poll()           # what this wait has to ask for now
        do(effects)
        if not effects and not conversation.over:
            do(conversation.receive(next event))

`WorkerState` says what an event means for the head and the round; this module says what it means
for the script. Neither has a stream, a clock, a thread or a tensor. `Driver` runs the loop over
real streams, and the search in tests/search runs it over every order of events.

A halt does not end a wait, since the line may retry what was asked for once an operator has
answered. Unless the script wants an exception (`raises_halts`), the wait is *paused* until then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from andon_trainer.core.attending import Attending
from andon_trainer.core.effects import (
    AwaitAnswer,
    Effect,
    EndRun,
    GoOn,
    HearOn,
    JoinAgain,
    Listen,
    MoveState,
    RaiseDropped,
    RaiseHalted,
    RaiseRefused,
    ReportDefect,
    ReportFault,
    ReportState,
    RequestWork,
    SendNumber,
    StopListening,
)
from andon_trainer.core.events import (
    Assigned,
    AveragesComplete,
    Committed,
    ControlLost,
    Dismissed,
    Event,
    ExchangeFailed,
    Halted,
    LearningAsked,
    LeaveWanted,
    LeftOut,
    ListeningLost,
    Resumed,
    ScalarAllReduceDone,
    TransferAsked,
    Voided,
)
from andon_trainer.core.keeping import doubted
from andon_trainer.core.reports import NO_DIGEST, Digest
from andon_trainer.core.waits import Wait
from andon_trainer.core.worker_state import RoundPhase, WorkerState

__all__ = ["Conversation", "Wait"]


# The script is between two steps: it may leave here, and a run that is over ends it here.
_BETWEEN_STEPS = frozenset({Wait.WEIGHTS, Wait.WORK, Wait.TURN, Wait.EPOCH_END, Wait.NUMBER})

_PHASE_OF = {Wait.TURN: RoundPhase.LATE, Wait.COMMIT: RoundPhase.HELD}

# The script has computed what it was assigned.
_ASKING = frozenset({Wait.WORK, Wait.TURN})

# The script is between two waits of its loop: only here may its state be replaced (rule 10).
_BETWEEN_ROUNDS = frozenset({Wait.WEIGHTS, Wait.WORK})


@dataclass(slots=True)
class Conversation:
    """One worker's side of the protocol. Every method returns the effects to do, in order."""

    state: WorkerState = field(default_factory=WorkerState)
    raises_halts: bool = False
    """Whether the script wants an exception when the line is halted."""
    stream: int = 0
    """The present control stream, by number."""
    in_sync: bool = False
    """Whether the coordinator called this worker in sync when it joined last."""
    dropped: bool = False
    """Whether the line dismissed this worker alone."""
    doubts: int = 0
    """How often what this worker computed became useless for another attempt."""
    wait: Wait | None = Wait.WEIGHTS
    """None: the script runs."""
    paused: bool = False
    """Whether the wait goes on only after an operator has answered the halt."""
    attending: Attending = field(default_factory=Attending)
    """What came of rounds that this worker learns of, and has not come to yet."""
    _averages: AveragesComplete | None = None
    _result: ScalarAllReduceDone | None = None
    _before: tuple[object, int] = (None, 0)
    """The head and the epoch when the wait for weights, or for an epoch's end, began."""
    _number: int | None = None
    """The sequence number of the open scalar all-reduce."""
    _defect: tuple[str, str] | None = None
    """What is to halt the line, until the line is halted."""
    _reported_on: int | None = None
    """The stream on which the defect was reported: a new stream's coordinator may not know it."""

    @property
    def mid_script(self) -> bool:
        """Whether the script is in the middle of a step, so that its state must not be replaced."""
        return self.wait not in _BETWEEN_ROUNDS

    @property
    def may_leave(self) -> bool:
        """Whether the script may leave the line instead of waiting on."""
        return self.paused or self.wait in _BETWEEN_STEPS

    # ------------------------------------------------------------------ what the script wants

    def wait_for(self, wait: Wait) -> None:
        """Begins a wait; `poll` and `receive` serve it until it is `over`."""
        self.wait = wait
        if wait in (Wait.WEIGHTS, Wait.EPOCH_END):
            self._before = self.state.head, self.state.cursor.epoch

    def begin(self) -> bool:
        """The script begins an exchange of the present round; False if the round is void."""
        if self.state.phase is not RoundPhase.OPEN:
            return False
        # From here on the others may wait for this worker's part: see `begin_anew`.
        self.state.begun = True
        # AveragesComplete names its round, and not which exchange of it: nothing of the exchange
        # before may be taken for this one's.
        self._averages = None
        return True

    def take_averages(self, *, last: bool = True) -> AveragesComplete | None:
        """The averages that were waited for; None if the round is void.

        With those of the round's `last` exchange this worker holds all of them.
        """
        # The round may have become void after its averages came: `Membership.look` takes events
        # between two local steps.
        averages, self._averages = self._averages, None
        if averages is None or self.state.phase is not RoundPhase.OPEN:
            return None
        if last:
            # Held: from here on a lost stream leaves the averages alone, since their record may be
            # durable already (rule 8).
            self.state.hold(averages.key)
        return averages

    def give(
        self, value: float, weight: float, digest: Digest = NO_DIGEST, data: bytes = b""
    ) -> list[Effect]:
        """Begins a scalar all-reduce; `Wait.NUMBER` waits for its result."""
        self._result = None
        self._number = self.state.scalar_all_reduce(value, weight, digest, data)
        return [SendNumber(self.state.head, self._number, value, weight, digest, data)]

    def take_result(self) -> ScalarAllReduceDone:
        """The result that was waited for."""
        result, self._result = self._result, None
        assert result is not None
        return result

    def refuse(self, fault: ExchangeFailed) -> list[Effect]:
        """Reports a value of this worker's that must not count; `Wait.VERDICT` waits for the end.

        The value may be of a window that is computed ahead, and the round's averages here already.
        They are not held by that: a round that this worker never reports is never committed.
        """
        if self.state.phase is not RoundPhase.OPEN:
            return []  # Void already: what was wrong with it does not matter.
        return [ReportFault(fault)]

    def halt_line(self, kind: str, message: str) -> None:
        """Halts the line for a defect outside any round; `Wait.ANSWER` waits for the answer."""
        # If the line is in a halt already, this worker waits for that one's answer.
        self._defect = None if self.state.halt is not None else (kind, message)
        self._reported_on = None

    def answered(self) -> bool:
        """Whether somebody answered that; False: the run is over, and nobody will."""
        given_up, self._defect = self._defect is not None, None
        return not given_up

    def abandon(self, message: str) -> list[Effect]:
        """Gives the present round up: all workers will try the step again."""
        if self.state.phase is not RoundPhase.OPEN:
            return []
        return self._give_up(message)

    def make_up(self) -> Assigned | None:
        """A round to make up between two local steps, as one that it only attends; None: none is.

        It is one that the others have made since the line went on without this worker's share.
        `WorkerState.take_up_again` follows.
        """
        if self.state.phase is not RoundPhase.LATE:
            return None
        missed = self.attending.missed(self.state.head)
        if missed is not None:
            self.state.set_aside(missed)
        return missed

    def begin_turn(self) -> bool:
        """A share that is computed waits for a round; False: its own did not go on without it."""
        state = self.state
        if state.phase is RoundPhase.VOID and state.attends and self.attending.late:
            # An open round that it took up, and that was made void for what it has.
            state.phase = RoundPhase.LATE
        return state.phase is RoundPhase.LATE

    def reported(self) -> None:
        """The coordinator is told that all averages are here: the round may be committed now."""
        self.state.reported = True

    def begin_anew(self) -> list[Effect]:
        """The script asks for work; it may have left its round in the middle, by an exception.

        Nobody else ends such a round: this worker would never report it, and the others would wait.
        A round that was never begun is none: it is worked on again. Nor is one that was reported,
        since it may be committed already.
        """
        state = self.state
        begun = state.phase is RoundPhase.OPEN and state.begun
        held = state.phase is RoundPhase.HELD and not state.reported
        return self._give_up("its script left the step in the middle") if begun or held else []

    def _give_up(self, message: str) -> list[Effect]:
        # Nobody waits for a worker that only attends.
        if self.state.attends:
            return self.state.void(message)
        fault = self.state.own_fault("DATA_STREAM_LOST", message)
        return [ReportFault(fault), *self.state.void(message)]

    # ------------------------------------------------------------------ the wait

    @property
    def over(self) -> bool:
        """Whether what the script waits for is here, or can't come any more."""
        state, (head, epoch) = self.state, self._before
        if self.paused:
            return False
        match self.wait:
            case Wait.WEIGHTS:
                # A head that came with a checkpoint may be the line's already. Then no record
                # follows that would change it.
                return state.head != head or (head is not None and self.in_sync)
            case Wait.WORK:
                # `WorkerState.forget_round` took the last assignment away before this wait began.
                return state.assigned is not None
            case Wait.EPOCH_END:
                # A worker that is behind leaves the epoch by itself: a transfer will bring it to
                # where the line is, once it asks for work.
                return state.cursor.epoch != epoch or state.behind
            case Wait.AVERAGES | Wait.VERDICT:
                here = self.wait is Wait.AVERAGES and self._averages is not None
                return here or state.phase is not RoundPhase.OPEN
            case Wait.TURN | Wait.COMMIT:
                # What else than work ends a turn is looked at by the wait for work, which follows.
                return state.phase is not _PHASE_OF[self.wait]
            case Wait.NUMBER:
                return self._result is not None
            case Wait.ANSWER:
                return self._needs_no_answer
            case None:
                return True

    @property
    def _needs_no_answer(self) -> bool:
        # A run that is over can't be halted any more. To a learner it is over as soon as it was
        # told of the last step: those who made that wait for nothing but its leaving.
        ends = self.state.dismissed or self.attending.ends_run
        return self.state.halt is None and (self._defect is None or ends)

    def poll(self) -> list[Effect]:
        """What the wait needs done before the next event is taken."""
        state = self.state
        # First: to the wait it is as if what was kept for this moment came now.
        effects = self._say_where() or self._attend()
        if effects or self.over:
            return effects
        # Asked before the pause is looked at: a run that is over needs no answer to its halt.
        if self.may_leave and self._nothing_follows():
            return [EndRun(state.stop_reason)]
        if self.paused:
            return []
        match self.wait:
            case Wait.WORK:
                # In this order. If work has come already, `must_ask` knows that no request is
                # needed. `take_work` takes that knowledge away.
                asking = self._request(leaves_epoch=False)
                _, effects = state.take_work()
                return [*asking, *effects]
            case Wait.EPOCH_END:
                return self._request(leaves_epoch=True)
            case Wait.ANSWER if self._defect is not None and self._reported_on != self.stream:
                self._reported_on = self.stream
                return [ReportDefect(*self._defect)]
        return []

    @property
    def lacks_averages(self) -> bool:
        """Whether the script waits for averages that the others hold, while this worker learns."""
        return not self.over and self.attending.lacks_averages(self.state, self.wait)

    def waited_in_vain(self) -> list[Effect]:
        """They did not come in time."""
        return self._end_or_join_again(self.attending.missing().why) if self.lacks_averages else []

    def _nothing_follows(self) -> bool:
        """Whether the run is over, so that what is waited for never comes."""
        # After the last step only work is pointless: numbers are still averaged.
        last_step = bool(self.state.stop_reason) and self.wait in (Wait.WORK, Wait.EPOCH_END)
        return self.state.dismissed or (last_step and not self.paused)

    def _request(self, *, leaves_epoch: bool) -> list[Effect]:
        if not self.state.must_ask(self.stream):
            return []
        return [RequestWork(self.state.head, leaves_epoch, self.attending.voided)]

    # ------------------------------------------------------------------ what is received

    def receive(self, event: Event) -> list[Effect]:
        """Takes the next event of the inbox."""
        attending = self.attending
        voided = attending.voided
        kept = attending.keeps(event)
        if attending.voided != voided:
            # What was asked before may have been answered by that round.
            self.state.ask_again()
        return [] if kept else self._take(event)

    def _say_where(self) -> list[Effect]:
        """A worker that learns asks for work at each head, so that the line sees how far it is."""
        attending, asks = self.attending, self.wait in _ASKING and not self.paused
        # Not at the run's end: it would be sent away, and has everything that is left to make up.
        if not (asks and attending.learning) or attending.ends_run or self._nothing_follows():
            return []
        return self._request(leaves_epoch=False)

    def _attend(self) -> list[Effect]:
        """Takes what was kept for this moment, up to what has an effect, or ends the wait."""
        attending = self.attending
        while not self.over:
            event = attending.next(self.state, self.wait, self._number)
            if event is None:
                again = attending.mismatch(self.state, self.wait, self._number)
                return [] if again is None else [again]
            effects = self._take(event)
            if isinstance(event, Assigned) and not event.attends:
                effects = [*effects, StopListening()]
            if effects:
                return effects
        return []

    def _take(self, event: Event) -> list[Effect]:
        match event:
            case Committed() | Voided() | Assigned() | ExchangeFailed():
                return self.state.receive(event)
            case AveragesComplete():
                self._keep_averages(event)
            case ScalarAllReduceDone():
                self._keep_result(event)
            case Halted():
                return self._halted(event)
            case Resumed():
                return self._resumed()
            case TransferAsked() | LearningAsked() | LeftOut() | ListeningLost():
                return self._state_moves(event)
            case Dismissed():
                return self._dismissed(event)
            case ControlLost():
                return self._control_lost(event)
            case LeaveWanted():
                pass  # It only ends a take. Whoever waits then looks whether it is to leave.
        return []

    def _keep_averages(self, event: AveragesComplete) -> None:
        # Averages of a round that became void meanwhile must not be taken for the present one's.
        if self.state.phase is RoundPhase.OPEN and self.state.is_present(event.key):
            self._averages = event

    def _keep_result(self, event: ScalarAllReduceDone) -> None:
        # A number that was sent again may be answered after the head moved, when the same sequence
        # number means another call.
        if (event.head, event.sequence) == (self.state.head, self._number):
            # No number is open now: a second answer to one that was sent again is dropped.
            self._result, self._number = event, None

    def _dismissed(self, event: Dismissed) -> list[Effect]:
        self.attending.end()  # What was to be made up leads nowhere.
        if event.stop_reason:
            self.paused = False  # There is nothing left that an answer could change.
            return self.state.ended(event.stop_reason)
        self.dropped = True
        return [RaiseDropped(event.message, event.keep_state)]

    def _control_lost(self, event: ControlLost) -> list[Effect]:
        if event.stream != self.stream:
            return []
        if event.refusal is not None:
            return [RaiseRefused(event.refusal)]
        return self._end_or_join_again(f"lost the coordinator ({event.message})")

    def _end_or_join_again(self, why: str) -> list[Effect]:
        """Joins again, unless the run is over: then nobody is there any more."""
        over = self.attending.dismissed
        return [JoinAgain(why)] if over is None else self._dismissed(over)

    def _halted(self, event: Halted) -> list[Effect]:
        """The line was halted: the script hears of it, or its wait is paused."""
        news, effects = self.state.halted(event.evidence)
        if not news:
            return []
        self._defect = None  # Whatever this worker wanted to halt the line for: it is halted.
        # A newcomer has no step that could have failed, so it waits like one.
        raises = self.raises_halts and self.state.head is not None
        assert self.state.worker is not None
        # A script that catches the halt may change anything before it goes on.
        if raises or doubted(event.evidence, self.state.worker):
            self.doubts += 1
            # What was computed ahead began at weights that the doubted numbers are in.
            effects += self.state.drop_computed("its numbers are in doubt")
        if raises:
            # The exception is the last effect: those behind it would never be done.
            return [*effects, RaiseHalted(event.evidence)]
        self.paused = True
        return [*effects, AwaitAnswer(event.evidence)]

    def _resumed(self) -> list[Effect]:
        self.state.resumed()
        self.paused = False
        return [GoOn()]

    def _state_moves(
        self, event: TransferAsked | LearningAsked | LeftOut | ListeningLost
    ) -> list[Effect]:
        """State is to move, or this worker is to follow the others; or it can't any more."""
        match event:
            case LeftOut(key):
                self.attending.left_out(key)
                return [HearOn(), *self.state.left_out(key)]
            case TransferAsked():
                return self._transfer(event)
            case LearningAsked():
                self.attending.begin()
                return [Listen(event)]
            case ListeningLost(message):
                return self._end_or_join_again(message) if self.attending.learning else []

    def _transfer(self, asked: TransferAsked) -> list[Effect]:
        head = self.state.head
        # Rule 10: a sender is at the head that the transfer names.
        if asked.sends and asked.head != head:
            failure = f"this worker is at {head}, not at {asked.head}"
            return [ReportState(asked.transfer_id, head, failure)]
        if asked.sends and asked.beside_training:
            # What is computed beyond the head stays: its state lies beneath that.
            return [MoveState(asked)]
        # State is the head's, and nothing else.
        # In this order: MoveState packs the weights as they are then.
        return [*self.state.drop_computed("state moves"), MoveState(asked)]

    def moved(self, asked: TransferAsked, failure: str) -> list[Effect]:
        """A transfer is over at this end; an empty `failure` is success."""
        effects: list[Effect] = []
        if not failure and not asked.sends:
            self.doubts += 1
            effects += self.state.installed(asked)
            effects += self._learn_on(asked)
        # With the head that was just installed: the receiver counts as in sync only once it reports
        # the line's head (rule 10).
        return [*effects, ReportState(asked.transfer_id, self.state.head, failure)]

    def _learn_on(self, installed: TransferAsked) -> list[Effect]:
        """The state is here: the rounds after it can be made up, if any ran meanwhile."""
        if not self.attending.learning:
            return []
        if installed.beside_training:
            self.attending.installed()
            return []
        self.attending.end()
        return [StopListening()]

    # ------------------------------------------------------------------ between two streams

    def lost(self) -> list[Effect]:
        """The control stream is gone, and another is about to be opened."""
        self.attending.end()
        return self.state.lost()

    def joined(
        self, stream: int, *, in_sync: bool, behind: bool, worker: int, halted: bool
    ) -> list[Effect]:
        """The coordinator accepted the Join on control stream `stream`; `halted`: it is in a halt.

        The numbers given last are sent again, before anything else is said: another worker may
        still wait for a result that needs them, and a new coordinator knows none of them.
        """
        self.stream, self.in_sync = stream, in_sync
        effects = self.state.joined(in_sync=in_sync, behind=behind, worker=worker, halted=halted)
        again = [
            SendNumber(self.state.head, sequence, *given)
            for sequence, given in self.state.given.items()
        ]
        return [*effects, *again]
