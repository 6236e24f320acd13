"""The driver: runs a worker's conversation over real streams.

Theory of operation. `Conversation` decides what an event means, and says so as effects. The driver
takes events out of the inbox and does the effects: it sends, joins again, moves state, opens and
ends exchanges, and raises what the script must know. It does that on the thread that trains, while
the script waits, and nowhere else.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from andon.host.logs import LogEvent
from andon.host.tls import TlsError
from andon.protocol.capabilities import BACK, NOTICE
from andon_trainer.config import LineConfig
from andon_trainer.core.conversation import Conversation, Wait
from andon_trainer.core.effects import (
    AwaitAnswer,
    DropComputed,
    Effect,
    EndExchange,
    EndRun,
    GoOn,
    HearOn,
    JoinAgain,
    Listen,
    MoveState,
    RaiseDropped,
    RaiseHalted,
    RaiseRefused,
    ReportFault,
    ReportListening,
    RequestWork,
    StepDone,
    StopListening,
)
from andon_trainer.core.events import Assigned, TransferAsked
from andon_trainer.core.habit import Habit
from andon_trainer.core.reports import Joining, WrittenCheckpoint
from andon_trainer.core.worker_state import WorkerState
from andon_trainer.errors import JoinRefused, LineHalted, RunOver, WorkerDropped
from andon_trainer.exchange.control.connection import Connection
from andon_trainer.exchange.control.translation import Report
from andon_trainer.exchange.path import Exchange, Inbox
from andon_trainer.exchange.route import Route, RouteFailed, ring_address_of
from andon_trainer.exchange.star.star import WrongMap
from andon_trainer.place.candidate import Candidate, refuse_other_policy
from andon_trainer.place.learner import Learner, doing
from andon_trainer.place.moving import StateMoves
from andon_trainer.place.talk import LineTalk
from andon_trainer.telemetry import Telemetry
from andon_trainer.termination import Leaving, Terminated
from andon_trainer.timeline import record_effect

__all__ = ["Driver"]

log = logging.getLogger(__name__)

_OF_STEPS = frozenset({Wait.WORK, Wait.TURN, Wait.AVERAGES, Wait.VERDICT, Wait.COMMIT})
"""The waits of a script that makes one step after the other."""


class Driver:
    """What one worker has open on the line at `config.address`. Used by one thread.

    `join` and `wait` may raise what `Membership` says.
    """

    def __init__(
        self,
        config: LineConfig,
        candidate: Candidate,
        telemetry: Telemetry,
        *,
        on_drop: Callable[[], None],
        on_last: Callable[[], None],
    ) -> None:
        """Opens nothing yet; `join` does.

        Args:
            config: where the line is.
            candidate: the worker.
            telemetry: where it shows what it does.
            on_drop: makes the weights the head's again.
            on_last: writes the line's state, which nobody else holds.
        """
        self._config = config
        self._candidate = candidate
        self._telemetry = telemetry
        self._on_drop, self._on_last = on_drop, on_last
        self.timeline = telemetry.timeline
        self.inbox = Inbox()
        self.link = Connection(config, self.inbox, self.timeline)
        self._route = Route(candidate.layout, self.inbox, config)
        self._learner = Learner(self.link, self._route, self.inbox)
        self.link.hear = self._learner.hear
        self.leaving = Leaving()
        origin = candidate.origin
        state, written = WorkerState(), None
        if origin is not None:
            state = WorkerState(origin.head, origin.cursor, origin.step, pacing=origin.pacing)
            written = WrittenCheckpoint(origin.step, str(config.resume), origin.head)
        self.state = state
        self.conversation = Conversation(state, raises_halts=config.on_halt == "raise")
        self.habit = Habit()
        self.talk = LineTalk(
            self.link, self.habit, written, lambda: doing(self.conversation.attending)
        )
        self.moves = StateMoves(self.link, candidate, config.shared_dir, self.talk, self.timeline)
        self._raised: RaiseHalted | RaiseDropped | None = None
        """What ended the script's training; its answer may not have come yet.

        Not the exception, whose frames would keep the script's tensors.
        """

    @property
    def exchange(self) -> Exchange:
        """The exchange that carries its rounds; there is none before `join`."""
        heard = self._learner.exchange if self.state.attends else None
        return heard or self._route.exchange

    # ------------------------------------------------------------------ streams

    def join(self) -> None:
        """Joins, and does what the answer means.

        Raises:
            JoinRefused: the line does not take this worker.
            LineLost: no coordinator answered within `reconnect_s`.
        """
        self._connect()
        try:
            # Before the first wait: a request for work names the address at which a ring's exchange
            # listens.
            self._route.take(self.link.joined)
        except WrongMap as error:
            raise JoinRefused("protocol", str(error)) from None
        except TlsError as error:  # A ring's worker is a server, too.
            raise JoinRefused("tls", str(error)) from None
        self._take_answer()

    def reach(self, assigned: Assigned) -> None:
        """Has the exchange open that a round needs; a failure comes by way of the inbox."""
        try:
            if assigned.attends:
                # Nothing of it must go to a reducer: this worker is no member of the round.
                assert self._learner.exchange is not None
                self._learner.attend(assigned)
            else:
                self._route.follow(self.link.joined, assigned, self.link.address)
        except RouteFailed as failed:
            # Behind what came before: the round may be void already.
            self.inbox.put(self.state.own_fault(failed.kind, str(failed)))

    def close(self, patience_s: float) -> None:
        """Ends all streams but the control stream; waits so long for state that moves."""
        self.moves.close(patience_s)
        self._learner.close()
        # There is none if the Join failed.
        if hasattr(self._route, "exchange"):
            self._route.exchange.close()

    def _connect(self) -> None:
        # Nothing is in progress that could be finished: a worker that is asked to terminate while
        # it looks for the coordinator leaves at once.
        with self.leaving.at_once():
            self.link.connect(self._joining())
        self.leaving.joined()

    def _joining(self) -> Joining:
        candidate, link, state = self._candidate, self.link, self.state
        return Joining(
            run_id=link.run_id,
            incarnation=link.incarnation,
            layout=candidate.layout,
            plan=candidate.plan,
            node_id=socket.gethostname(),
            launch_slot=link.slot,
            device=candidate.device,
            token=self._config.token,
            metrics_address=self._telemetry.address,
            head=state.head,
            cursor=state.cursor,
            step=state.step,
            held_key=state.held_key,
            mid_script=self.conversation.mid_script,
            checkpoints=self._config.checkpoints,
            greatest_term=link.greatest_term,
            halt=state.halt,
            capabilities=self._learner.able(
                (
                    *self._config.capabilities,
                    *candidate.capabilities,
                    *(() if candidate.restore is None else (BACK,)),
                )
            ),
            speed_hint=self._config.speed_hint,
            spare=self._config.spare,
            arithmetic=candidate.arithmetic,
            pacing=state.pacing,
        )

    def _rejoin(self) -> None:
        """Joins again on a new stream."""
        # First: it ends an open round, and the Join reports what is left (`held_key`).
        self.do(self.conversation.lost())
        before = self.link.policy
        self._connect()
        # Before the answer is acted on: nothing may be applied for a line that works in another
        # way.
        refuse_other_policy(before, self.link.policy)
        # Its streams were opened with the session token of the Join before. The next round opens
        # others.
        self._route.exchange.close()
        self._learner.close()
        self._take_answer()

    def _take_answer(self) -> None:
        """Does what the answer to Join means."""
        joined = self.link.joined
        if self.timeline is not None:
            self.timeline.joined(joined.worker)
        self.do(
            self.conversation.joined(
                self.link.number,
                in_sync=joined.in_sync,
                behind=joined.behind,
                worker=joined.worker,
                halted=joined.halt is not None,
            )
        )

    # ------------------------------------------------------------------ events

    def take_all(self) -> None:
        """Takes what has come, without a wait."""
        while (event := self.inbox.take(0.0)) is not None:
            self.do(self.conversation.receive(event))

    def wait(self, wait: Wait) -> None:
        """Takes events until what the script waits for is here, or can't come any more."""
        conversation = self.conversation
        conversation.wait_for(wait)
        if wait not in _OF_STEPS:
            self.habit.does_something_else()
        try:
            while not conversation.over:
                self._hear()
                if conversation.may_leave and not self.leaving.release_in_s:
                    # The signal's handler sets a flag, and the exception comes from here: between
                    # two steps nothing is left half done.
                    self.leaving.refuse_to_wait()
                effects = conversation.poll()
                self.do(effects)
                # Look again before taking an event: the poll may have taken the work that came,
                # and after an effect everything may be different.
                if not effects and not conversation.over:
                    self.do(self._next())
        finally:
            conversation.wait = None  # The script runs, even if it was an exception that ended it.

    def _next(self) -> list[Effect]:
        """Waits for the next event, and for what a learner lacks no longer than it may take."""
        conversation = self.conversation
        lacks = conversation.lacks_averages
        patience_s = self._learner.patience_s(lacks=lacks, now=time.monotonic())
        release_in_s = self.leaving.release_in_s if conversation.may_leave else None
        if release_in_s is not None and (patience_s is None or release_in_s < patience_s):
            event = self.inbox.take(release_in_s)
            return [] if event is None else conversation.receive(event)
        event = self.inbox.take(patience_s)
        if event is not None:
            return conversation.receive(event)
        # Something older may have come meanwhile.
        left_s = self._learner.patience_s(lacks=lacks, now=time.monotonic())
        return [] if left_s else conversation.waited_in_vain()

    def _hear(self) -> None:
        """Takes all that came while this worker learns: it must know how far the line is."""
        while self.conversation.attending.learning:
            event = self.inbox.take(0.0)
            if event is None:
                return
            self.do(self.conversation.receive(event))

    # ------------------------------------------------------------------ effects

    def do(self, effects: Sequence[Effect]) -> None:
        """Does what the conversation has decided, in order."""
        state = self.state
        for effect in effects:
            if self.timeline is not None:
                record_effect(self.timeline, effect)
            match effect:
                case EndExchange():
                    text = f"step {state.step + 1} is tried again: {effect.message}"
                    log.info(LogEvent("step_retried", text, why=effect.message))
                    self.exchange.end()
                    self._telemetry.metrics.voided()
                case DropComputed():
                    text = f"what was computed after step {state.step} is dropped: {effect.why}"
                    log.info(LogEvent("computed_dropped", text, why=effect.why))
                    self._on_drop()
                case JoinAgain():
                    text = f"{effect.why}: joining again{self._advice()}"
                    log.warning(LogEvent("rejoining", text, why=effect.why))
                    self._telemetry.metrics.rejoins()
                    self._rejoin()
                case StepDone():
                    traffic = self._route.traffic + self._learner.traffic
                    self._telemetry.clock.committed(effect.key, state.step, traffic)
                    self._learner.made_up(effect.key, self.conversation.attending.behind)
                case MoveState() | Listen() | HearOn() | StopListening():
                    self._get_in_step(effect)
                case AwaitAnswer() | GoOn():
                    self._show_halt(effect)
                case RaiseHalted() | RaiseDropped() | RaiseRefused() | EndRun():
                    # Always the last of the effects, so none is left out.
                    raise self._exception_of(effect)
                case _:
                    self.send(effect)

    def _advice(self) -> str:
        """What would help a learner that joins again, if its link is too slow; else empty."""
        attending = self.conversation.attending
        if not attending.learning:
            return ""
        encoding = self.link.policy.answer_encoding or self.link.policy.encoding
        step_bytes = encoding.payload_bytes(self._candidate.layout.elements)
        advice = self._learner.advice(step_bytes, attending.behind, self.moves.arrived_bytes)
        return f". {advice}" if advice else ""

    def _show_halt(self, effect: AwaitAnswer | GoOn) -> None:
        """Tells people that the line is halted, or that it goes on."""
        match effect:
            case AwaitAnswer(evidence):
                text = f"{evidence}. {evidence.outcome} Waiting for the operator."
                reason = evidence.reason.label
                log.error(LogEvent("halted", text, id=str(evidence.id), reason=reason))
                self.talk.show("HALTED")
            case GoOn():
                log.info(LogEvent("halt_answered", "the halt was answered: the line goes on"))
                self.talk.show("IDLE")

    def send(self, effect: RequestWork | Report) -> None:
        """Sends a message to the coordinator."""
        control = self.link.control
        if isinstance(effect, RequestWork):
            checkpoint = None if effect.leaves_epoch else self.talk.checkpoint
            place = ring_address_of(self.exchange)
            control.request_work(effect, place, checkpoint, self.talk.writing)
            return
        if isinstance(effect, ReportFault) and effect.fault.kind == "CORRUPT_CHUNK":
            # The line recovers by itself; somebody has to look after the hardware.
            text = f"step {self.state.step + 1}: {effect.fault.message}"
            log.warning(LogEvent("corrupt_chunk", text))
        control.send(effect)

    def _exception_of(
        self, effect: RaiseHalted | RaiseDropped | RaiseRefused | EndRun
    ) -> BaseException:
        """The exception that the script gets."""
        match effect:
            case RaiseHalted(evidence):
                self._raised = effect
                return LineHalted(evidence)
            case RaiseDropped(keep_state=keeps) if self.leaving.wanted:
                if keeps:
                    self._on_last()
                return Terminated()  # The line has let it go, and has all that it had.
            case RaiseDropped(message):
                self._raised = effect
                text = f"dropped after step {self.state.step}: {message}"
                return WorkerDropped(text, self._config.address, self.state.step)
            case RaiseRefused(refusal):
                return refusal
            case EndRun(reason):
                text = f"the run is over: {reason}"
                return RunOver(text, self._config.address, self.state.step)

    def _get_in_step(self, effect: MoveState | Listen | HearOn | StopListening) -> None:
        """Does what brings a worker to where the line is."""
        match effect:
            case MoveState(asked):
                self._move(asked)
            case Listen(asked):
                if self._learner.listen(asked):
                    self.link.control.send(ReportListening())
                else:
                    self.do([JoinAgain("this worker does not learn")])
            case HearOn():
                self._learner.hear_on()
                text = f"the others went on after step {self.state.step} without this worker"
                log.info(LogEvent("late", f"{text}, which was late: it sends what it owes later"))
            case StopListening():
                self._learner.arrived()

    def _move(self, asked: TransferAsked) -> None:
        """Sends or receives state. No round runs meanwhile, or this worker hears it (rule 10)."""
        if asked.sends and asked.beside_training:
            self.moves.give(asked)
            return
        if asked.beside_training:
            self._learner.state_moves()
        # A transfer may take minutes, and there is no step to finish meanwhile. But a worker that
        # gave notice, or does so now, may be the only one to have the state.
        gives = asked.sends and NOTICE in self.link.coordinator_can
        with nullcontext() if gives else self.leaving.at_once():
            failure = self.moves.move(asked)
        self.do(self.conversation.moved(asked, failure))
        if self.state.head is not None:
            self._learner.forget(self.state.head)

    def refuse_unanswered(self) -> None:
        """Raises again what the script was told, unless it has been answered since."""
        raised = self._raised
        if isinstance(raised, RaiseHalted) and raised.evidence != self.state.halt:
            return
        if raised is not None:
            raise self._exception_of(raised)
