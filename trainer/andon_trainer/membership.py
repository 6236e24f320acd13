"""Membership: a worker's place on a line, from its Join to its Leave.

Theory of operation. The thread that trains owns everything here. The streams' threads only put
events into the inbox; they are taken wherever the training thread has to wait (for work, for
averages, for a commit), so that a halt or a lost stream is acted on there and state changes
nowhere else. What an event means is `WorkerState`'s to say; here it is done.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

import grpc

from andon.host.manifest import CheckpointFacts
from andon.host.tls import TlsError
from andon.protocol.halts import HaltEvidence
from andon.protocol.layout import Layout
from andon.protocol.records import Cursor, Key
from andon.protocol.run_settings import RunPlan
from andon.wire.frames import FrameError
from andon_trainer.config import LineConfig
from andon_trainer.connection import Connection
from andon_trainer.core.calls import Call
from andon_trainer.core.events import (
    Assigned,
    AveragesComplete,
    Committed,
    ControlLost,
    Dismissed,
    Event,
    ExchangeFailed,
    Halted,
    LeaveWanted,
    Resumed,
    ScalarAllReduceDone,
    TransferAsked,
    Voided,
)
from andon_trainer.core.keeping import doubted
from andon_trainer.core.reports import NO_DIGEST, Digest, Joining, LeaveReport, StepReport
from andon_trainer.core.worker_state import (
    Deed,
    EndExchange,
    JoinAgain,
    Phase,
    ReportFault,
    StepDone,
    WorkerState,
)
from andon_trainer.errors import JoinRefused, LineHalted, LineLost, RunOver, WorkerDropped
from andon_trainer.exchange.bulk import ReducerUnfit
from andon_trainer.exchange.choice import ring_address_of
from andon_trainer.exchange.inbox import Inbox
from andon_trainer.exchange.path import Exchange
from andon_trainer.exchange.route import Route
from andon_trainer.exchange.striped import ReducerAway, WrongMap
from andon_trainer.exchange.unreachable import tls_trouble
from andon_trainer.moving import State, StateMover
from andon_trainer.telemetry import Telemetry
from andon_trainer.termination import Leaving

__all__ = ["Candidate", "Membership"]

log = logging.getLogger(__name__)

_LEAVE_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What a worker brings to the line."""

    layout: Layout
    plan: RunPlan
    replica: State
    device: tuple[str, str, int]
    """Kind, name and memory in bytes."""
    origin: CheckpointFacts | None = None
    """Where the checkpoint stands that it loaded; None: it comes with initial weights."""


class Membership:
    """One worker's place on the line at `config.address`. Used by one thread."""

    def __init__(self, config: LineConfig, candidate: Candidate, telemetry: Telemetry) -> None:
        """Opens nothing yet: `join` does."""
        self._config = config
        self._candidate = candidate
        self._telemetry = telemetry
        telemetry.metrics.follow(lambda: self.step)
        self._inbox = Inbox()
        self._link = Connection(config, self._inbox)
        origin = candidate.origin
        self._mover = StateMover(self._link, candidate.replica)
        self._route = Route(candidate.layout, self._inbox, config)
        self.doubts = 0
        """How often what this worker computed became worthless for another try."""
        self._leaving = Leaving()
        self._sent_away = False
        """Whether the line dismissed this worker alone."""
        self._checkpoint = (origin.step, str(config.resume)) if origin is not None else None
        """Step and folder of the last checkpoint that this worker wrote, or goes on from."""
        self._mid_script = False
        """Whether the script is between two waits for the line: state must not change under it."""
        self._scalar_all_reduce: tuple[int, ScalarAllReduceDone | None] | None = None
        """The open scalar all-reduce and its answer, which may come during a halt."""
        self._standing = (
            WorkerState()
            if origin is None
            else WorkerState(origin.head, origin.cursor, origin.step)
        )

    @property
    def exchange(self) -> Exchange:
        """What carries its rounds; there is none before `join`."""
        return self._route.exchange

    @property
    def head(self) -> Key | None:
        """The key of the last record that this worker applied; None before it holds weights."""
        return self._standing.head

    @property
    def cursor(self) -> Cursor:
        """The next position of the line's data."""
        return self._standing.cursor

    @property
    def step(self) -> int:
        """Steps committed."""
        return self._standing.step

    @property
    def installed_from(self) -> TransferAsked | None:
        """The transfer that brought the state which was installed last; None: its own."""
        return self._standing.installed_from

    @property
    def assigned(self) -> Assigned | None:
        """The present round."""
        return self._standing.assigned

    @property
    def stop_reason(self) -> str:
        """Why the run is over; empty if it is not."""
        return self._standing.stop_reason

    # ------------------------------------------------------------------ joining

    def join(self) -> None:
        """Joins, and waits until this worker holds the line's weights, and while it is halted.

        Raises:
            JoinRefused: the line does not take this worker.
            LineLost: no coordinator answered within `reconnect_s`.
        """
        self._connect()
        try:
            self._route.take(self._link.joined)
        except WrongMap as error:
            raise JoinRefused("protocol", str(error)) from None
        except TlsError as error:  # A ring's worker is a server, too.
            raise JoinRefused("tls", str(error)) from None
        self._stand()
        before = self.head
        while self.head == before and (before is None or not self._link.joined.in_sync):
            self._refuse_to_wait()
            self._take()
        self._mid_script = True

    def _connect(self) -> None:
        with self._leaving.at_once():
            self._link.connect(self._joining())
        self._leaving.joined()

    def _joining(self) -> Joining:
        candidate, link, standing = self._candidate, self._link, self._standing
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
            head=standing.head,
            cursor=standing.cursor,
            step=standing.step,
            held_key=standing.held_key,
            mid_script=self._mid_script,
            checkpoints=self._config.checkpoints,
            greatest_term=link.greatest_term,
            halt=standing.halt,
            capabilities=self._config.capabilities,
        )

    # ------------------------------------------------------------------ a step

    def next_round(self) -> Assigned:
        """Asks for work and waits for it.

        Raises:
            LineHalted: the line stopped, and `on_halt` is `raise`.
            LineLost: the line is gone, or dismissed this worker; RunOver: it dismissed everybody.
            Terminated: this process was told to terminate.
        """
        standing = self._standing
        left = standing.forget_round()
        if left is not None:
            return left  # the script left its loop before it began this round
        self._mid_script = False
        try:
            while True:
                self._refuse_to_wait(over=bool(standing.stop_reason))
                if standing.must_ask(self._link.number):
                    self._link.control.request_work(
                        standing.head,
                        ring_address_of(self.exchange),
                        checkpoint=self._checkpoint,
                    )
                assigned, deeds = standing.take_work()
                self._do(deeds)
                if assigned is not None:
                    self._telemetry.clock.assigned()
                    return assigned
                if not deeds:
                    self._take()
        finally:
            self._mid_script = True

    def leave_epoch(self) -> None:
        """Has the present epoch ended for everybody; returns once it is.

        A worker that the line left behind leaves it alone: its state comes when it asks for work.

        Raises:
            LineHalted, LineLost, RunOver, Terminated: as in `next_round`.
        """
        standing, epoch = self._standing, self.cursor.epoch
        self._do(standing.leave_epoch())
        while self.cursor.epoch == epoch and not standing.behind:
            self._refuse_to_wait(over=bool(standing.stop_reason))
            if standing.must_ask(self._link.number):
                address = ring_address_of(self.exchange)
                self._link.control.request_work(standing.head, address, leaves_epoch=True)
            self._take()

    def begin(self, weight: float, call: Call | None = None) -> bool:
        """Starts the exchange of the present round, or one `call` of several; False if void."""
        assert self.assigned is not None
        if self._standing.phase is not Phase.OPEN:
            return False
        self._standing.begun = True
        try:
            self._route.follow(self._link.joined, self.assigned, self._link.address)
        except (WrongMap, ReducerUnfit) as error:
            self._inbox.put(self._failed("PROTOCOL", str(error)))
        except (ReducerAway, FrameError) as error:
            self._inbox.put(self._failed("DATA_STREAM_LOST", str(error)))
        except (grpc.RpcError, TlsError) as error:
            why = tls_trouble(error, self._link.address, self._link.tls)
            if not why and isinstance(error, grpc.RpcError):
                why = error.code().name
            text = f"no reducer at {self._link.address}: {why}"
            self._inbox.put(self._failed("DATA_STREAM_LOST", text))
        self.exchange.begin(self.assigned, weight, call)
        return True

    def abandon(self, message: str) -> None:
        """Gives the present round up, without waiting: everybody tries the step again."""
        if self._standing.phase is Phase.OPEN:
            self._link.control.report_fault(self._failed("DATA_STREAM_LOST", message))
            self._do(self._standing.void(message))

    def report_loss(self, value: str) -> None:
        """Says that this worker's loss is `value`, which is not finite."""
        self._inbox.put(self._failed("NON_FINITE_LOSS", f"the loss is {value}", value))

    def stop_line(self, kind: str, message: str) -> None:
        """Halts the line for what this worker can't mend, between two steps.

        Returns once a person has answered.

        Raises:
            LineHalted, LineLost: as in `next_round`.
        """
        standing, told_on = self._standing, 0
        while standing.halt is None:
            if told_on != self._link.number:
                told_on = self._link.number
                self._link.control.report_defect(kind, message)
            if isinstance(self._take(), Halted):
                return  # and was answered
        while standing.halt is not None:
            self._take()

    def await_averages(self, *, last: bool = True) -> AveragesComplete | None:
        """Waits for the exchange's averages; None if the round is void.

        With those of the round's `last` exchange, this worker holds all of them.

        Raises:
            LineHalted, LineLost: as in `next_round`.
        """
        while self._standing.phase is Phase.OPEN:
            event = self._take()
            if isinstance(event, AveragesComplete):
                assert self.assigned is not None
                if event.key == self.assigned.key:
                    if last:
                        self._standing.hold(event.key)
                    return event
        return None

    def hold(self) -> bool:
        """Says that no exchange of the round is missing; False if it is void."""
        assigned = self._standing.assigned
        return assigned is not None and self._standing.hold(assigned.key)

    def await_commit(self) -> Committed | None:
        """Waits for the round's record; None if it is void. Weights may move after it.

        Raises:
            LineHalted, LineLost: as in `next_round`.
        """
        while self._standing.phase is Phase.HELD:
            self._take()
        return self._standing.take_commit()

    def scalar_all_reduce(
        self, value: float, weight: float, digest: Digest = NO_DIGEST
    ) -> tuple[float, float, int]:
        """The weighted mean of `value` over the roster, the total weight, and how many gave one.

        A worker that the line has left behind gets its own number: there is nobody left to pair
        it with. It gets the line's state once it asks for work.

        Raises:
            LineHalted, LineLost: as in `next_round`.
        """
        sequence = self._standing.scalar_all_reduce(value, weight, digest)
        self._link.control.scalar_all_reduce(self.head, sequence, value, weight, digest)
        self._scalar_all_reduce = sequence, None
        try:
            while (answer := self._scalar_all_reduce[1]) is None:
                self._refuse_to_wait()
                self._take()
        finally:
            self._scalar_all_reduce = None
        return answer.value, answer.weight, answer.contributors

    def compare(self, digest: Digest) -> None:
        """Has the weights that this worker's loop ended with compared with all others'.

        Raises:
            LineHalted: they differ, and `on_halt` is `raise`.
            LineLost: an operator dropped this worker.
        """
        try:
            while self._standing.halt is not None:
                self._take()
            self.scalar_all_reduce(0.0, 0.0, digest)
        except RunOver:
            pass  # The line sent everybody away: their last words say what they hold.
        except (JoinRefused, LineLost) as error:
            # The run is done, and its end must not fail by an answer that nobody is left to give.
            if self._sent_away:
                raise
            log.warning("the last weights were not compared with the others': %s", error)

    @property
    def digest_every(self) -> int:
        """Compare digests of the weights every so many steps; 0 is never."""
        return self._link.joined.policy.digest_every

    @property
    def wants_gradient_norm(self) -> bool:
        """Whether the line wants to know the norm of each step's averaged gradients."""
        return self._link.joined.policy.gradient_norm

    def wrote(self, step: int, folder: str) -> None:
        """Says with the next words that a checkpoint was written."""
        self._checkpoint = step, folder

    def show(self, activity: str, detail: str = "") -> None:
        """What the others see this worker do: a name of `andon.v1.Activity`."""
        self._link.control.show(activity, detail)

    def report(self, report: StepReport) -> None:
        """Says that this worker holds all averages."""
        self._telemetry.clock.reported(report)
        self._link.control.report_step(report)

    def ask_to_leave(self) -> bool:
        """Makes this worker leave once its step is over; any wait for work ends now.

        A signal's handler calls this, in the midst of anything: it puts an event and sets a flag.

        Returns:
            Whether it will; if not, there is no step to finish.
        """
        self._inbox.put(LeaveWanted())
        return self._leaving.want()

    def leave(self, departure: LeaveReport) -> None:
        """Says good-bye and ends both streams."""
        if self._link.is_open:
            if departure.reason == "FAILED":
                self._link.control.report_crash(departure.error_type, departure.message)
            self._link.control.leave(replace(departure, checkpoint=self._checkpoint))
            self._link.close(after_s=_LEAVE_PATIENCE_S)
        if hasattr(self, "exchange"):
            self.exchange.close()

    # ------------------------------------------------------------------ events

    def _take(self) -> Event:
        """The next event, after what it means for this worker was done."""
        event = self._inbox.take()
        assert event is not None
        standing = self._standing
        match event:
            case Committed() | Voided() | Assigned() | ExchangeFailed():
                self._do(standing.receive(event))
            case Halted():
                self._stop(event.evidence)
            case Resumed():
                standing.resumed()
                log.info("the halt was answered: the line goes on")
            case TransferAsked():
                self._transfer(event)
            case ScalarAllReduceDone():
                self._tallied(event)
            case Dismissed() if event.stop_reason:
                self._do(standing.ended(event.stop_reason))
            case Dismissed():
                self._sent_away = True
                raise WorkerDropped(
                    f"dropped after step {self.step}: {event.message}",
                    self._config.address,
                    self.step,
                )
            case ControlLost() if event.stream == self._link.number:
                if event.refusal is not None:
                    raise event.refusal
                self._do([JoinAgain(f"lost the coordinator ({event.message})")])
        return event

    def _tallied(self, done: ScalarAllReduceDone) -> None:
        """Takes the open scalar all-reduce's answer.

        A number that was said again of older weights may be answered after the head moved.
        """
        if self._scalar_all_reduce is not None and (self.head, self._scalar_all_reduce[0]) == (
            done.head,
            done.sequence,
        ):
            self._scalar_all_reduce = done.sequence, done

    def _do(self, deeds: Sequence[Deed]) -> None:
        for deed in deeds:
            match deed:
                case EndExchange():
                    log.info("step %d is tried again: %s", self.step + 1, deed.message)
                    self.exchange.end()
                case JoinAgain():
                    log.warning("%s: joining again", deed.why)
                    self._rejoin()
                case ReportFault():
                    if deed.fault.kind == "CORRUPT_CHUNK":
                        # The line mends it by itself, and somebody has to mend the hardware.
                        log.warning("step %d: %s", self.step + 1, deed.fault.message)
                    self._link.control.report_fault(deed.fault)
                case StepDone():
                    self._telemetry.clock.committed(deed.key, self._route.traffic)

    def _failed(self, kind: str, message: str, value: str = "") -> ExchangeFailed:
        """What this worker itself saw go wrong in the present round."""
        assert self.assigned is not None
        return ExchangeFailed(
            key=self.assigned.key,
            kind=kind,
            message=message,
            rank=self.assigned.rank,
            value=value,
        )

    def _stop(self, evidence: HaltEvidence) -> None:
        """The line stopped: raises, or waits here for the answer, as any newcomer does."""
        standing = self._standing
        news, deeds = standing.halted(evidence)
        if not news:
            return  # told again, after this worker joined again
        self._do(deeds)
        newcomer = standing.head is None
        raises = self._config.on_halt == "raise" and not newcomer
        # A script that catches the halt may change anything before it goes on.
        self.doubts += raises or doubted(evidence, self._link.joined.worker)
        if raises:
            raise LineHalted(evidence)
        log.error("%s. %s Waiting for the operator.", evidence, evidence.outcome)
        self._link.control.show("HALTED")
        while standing.halt is not None:
            self._refuse_to_wait()
            self._take()
        self._link.control.show("IDLE")

    def _refuse_to_wait(self, *, over: bool = False) -> None:
        """Raises, between steps, if nothing is worth waiting for."""
        self._leaving.refuse_to_wait()
        if over or self._standing.dismissed:
            text = f"the run is over: {self.stop_reason}"
            raise RunOver(text, self._config.address, self.step)

    def _rejoin(self) -> None:
        """Joins again on a new stream."""
        self._do(self._standing.lost())
        mine = self._link.joined.policy.topology
        self._connect()
        theirs = self._link.joined.policy.topology
        if theirs is not mine:
            raise JoinRefused(
                "topology",
                f"the line was a {mine.name.lower()} and now is a {theirs.name.lower()}: start its "
                "workers anew, from a checkpoint",
                component="topology",
                mine=mine.name,
                theirs=theirs.name,
            )
        self.exchange.close()
        self._stand()
        # Before anything else is said: who still waits for an answer may need these numbers.
        for sequence, (value, weight, digest) in self._standing.given.items():
            self._link.control.scalar_all_reduce(self.head, sequence, value, weight, digest)

    def _stand(self) -> None:
        """Stands where the answer to Join says."""
        joined = self._link.joined
        self._do(
            self._standing.joined(
                in_sync=joined.in_sync,
                behind=joined.behind,
                worker=joined.worker,
                halted=joined.halt is not None,
            )
        )

    def _transfer(self, asked: TransferAsked) -> None:
        """Sends or receives state, while no round runs (rule 10)."""
        self.show("SYNCING")
        with self._leaving.at_once():
            failure = self._mover.move(asked, self.head)
        if not failure and not asked.sends:
            self.doubts += 1
            self._do(self._standing.installed(asked))
        self.show("IDLE")
        self._link.control.report_state(asked.transfer_id, self.head, failure)
