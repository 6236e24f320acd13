"""Membership: a worker's place on a line, from its Join to its Leave.

Theory of operation. The thread that trains owns everything here. The streams' threads only put
events into the inbox. They are taken wherever the training thread has to wait (for work, for
averages, for a record), so a halt or a lost stream is acted on there, and state changes nowhere
else. `Conversation` decides what an event means, and `Driver` does what it decides; this module has
what a script may ask for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from andon.host.logs import LogEvent
from andon.host.trace import Track
from andon.protocol.capabilities import NOTICE, STANDING
from andon.protocol.grains import Grains
from andon.protocol.run_settings import Policy, RunPlan
from andon_trainer.config import LineConfig
from andon_trainer.core.calls import Call
from andon_trainer.core.computed import Computed
from andon_trainer.core.conversation import Wait
from andon_trainer.core.effects import ReportComputed
from andon_trainer.core.events import (
    Assigned,
    AveragesComplete,
    Committed,
    ExchangeFailed,
    LeaveWanted,
)
from andon_trainer.core.reports import NO_DIGEST, Digest, LeaveReport, Standing, StepReport
from andon_trainer.core.worker_state import RoundPhase
from andon_trainer.errors import JoinRefused, LineLost, RunOver
from andon_trainer.exchange.path import Exchange
from andon_trainer.exchange.route import ring_address_of
from andon_trainer.place.candidate import Candidate
from andon_trainer.place.driver import Driver
from andon_trainer.place.position import Position
from andon_trainer.telemetry import Telemetry

__all__ = ["Membership"]

log = logging.getLogger(__name__)

_LEAVE_PATIENCE_S = 5.0


class Membership:
    """One worker's place on the line at `config.address`. Used by one thread.

    Every method that waits may raise:
        LineHalted: the line was halted, and `on_halt` is `raise`.
        LineLost: the coordinator is gone for too long, or dismissed this worker.
        JoinRefused: the coordinator refuses this worker for good.
    And between two steps also:
        RunOver: the run is over for everybody.
        Terminated: this process was asked to terminate.
    """

    def __init__(self, config: LineConfig, candidate: Candidate, telemetry: Telemetry) -> None:
        """Opens nothing yet; `join` does."""
        self._config = config
        self._telemetry = telemetry
        self.on_drop: Callable[[], None] = lambda: None
        """Makes the weights the head's again, if this worker makes local steps."""
        self.on_last: Callable[[], None] = lambda: None
        """Writes the line's state, which nobody else holds, before this worker leaves."""
        self._driver = driver = Driver(
            config,
            candidate,
            telemetry,
            on_drop=lambda: self.on_drop(),
            on_last=lambda: self.on_last(),
        )
        self.timeline, self.talk = driver.timeline, driver.talk
        self._state, self._conversation = driver.state, driver.conversation
        self._link, self._leaving, self._habit = driver.link, driver.leaving, driver.habit
        telemetry.metrics.follow(lambda: self._state.step)
        self._stop_refused = False
        """Whether the script was told that it may not end the run."""
        self._wants_stop = ""
        """Why the script wants the run to end with the reported round; empty: it does not."""

    @property
    def exchange(self) -> Exchange:
        """The exchange that carries its rounds; there is none before `join`."""
        return self._driver.exchange

    @property
    def position(self) -> Position:
        """Where this worker stands now. Any thread may ask, for a line of a log."""
        state, link = self._state, self._link
        return Position(
            worker=link.slot,
            head=state.head,
            cursor=state.cursor,
            step=state.step,
            assigned=state.assigned,
            stop_reason=state.stop_reason,
            doubts=self._conversation.doubts,
            installed_from=state.installed_from,
            pacing=state.pacing,
            digest_every=link.policy.digest_every,
            halt=state.halt,
            coordinator_can=link.coordinator_can,
        )

    @property
    def computed(self) -> Computed:
        """What this worker has computed beyond its head; local steps add to it."""
        return self._state.computed

    @property
    def plan(self) -> RunPlan:
        """What the line intends, by the answer to the latest Join."""
        return self._link.joined.plan

    @property
    def policy(self) -> Policy:
        """How the line works, by the answer to the latest Join."""
        return self._link.policy

    # ------------------------------------------------------------------ joining and leaving

    def join(self) -> None:
        """Joins, and waits until this worker holds the line's weights, and for as long as a halt.

        Raises:
            JoinRefused: the line does not take this worker.
            LineLost: no coordinator answered within `reconnect_s`.
        """
        began = time.perf_counter()
        self._driver.join()
        self._driver.wait(Wait.WEIGHTS)
        if self.timeline is not None:
            self.timeline.span("join", began)

    @property
    def leaves(self) -> bool:
        """Whether this worker was asked to leave."""
        return self._leaving.wanted

    def ask_to_leave(self, why: str = "SIGTERM") -> bool:
        """Makes this worker leave once the line has all that it has to give.

        A line that takes no notice is left once the present step is over. A signal handler calls
        this at any moment, so it only puts an event and a message, and sets flags.

        Args:
            why: what the line is told.

        Returns:
            Whether it will leave by itself; False: there is no step to finish.
        """
        # The flag first: the event wakes the thread that waits, and that looks at the flag then.
        again, finishes = self._leaving.wanted, self._leaving.want()
        if finishes and not again and NOTICE in self._link.coordinator_can:
            self._leaving.give_notice(self._config.notice_grace_s)
            self._link.control.give_notice(why)
        self._driver.inbox.put(LeaveWanted())
        return finishes

    def leave(self, departure: LeaveReport) -> None:
        """Says good-bye and ends both streams."""
        if self._link.is_open:
            # The protocol wants them in this order: Fault SCRIPT_RAISED, then Leave FAILED.
            if departure.reason == "FAILED":
                self._link.control.report_crash(departure.error_type, departure.message)
            self._link.control.leave(replace(departure, checkpoint=self.talk.checkpoint))
            self._link.close(after_s=_LEAVE_PATIENCE_S)
        self._driver.close(_LEAVE_PATIENCE_S)

    @property
    def run_id(self) -> str:
        """The run that it joined."""
        return self._link.run_id

    # ------------------------------------------------------------------ a step

    def next_round(self) -> Assigned:
        """Requests work and waits for it."""
        if self.timeline is not None:
            self.timeline.step_over("void")  # If it was not committed, it was in vain.
        self._driver.moves.tidy()
        # Before `forget_round`, which takes the assignment away: the Fault names its key and rank.
        self._driver.do(self._conversation.begin_anew())
        left = self._state.forget_round()
        if left is not None:
            return left
        began = time.perf_counter()
        self._habit.wants_work()
        self._driver.wait(Wait.WORK)
        assigned = self._state.assigned
        assert assigned is not None
        self._refuse_part_of_grain(assigned)
        if self.timeline is not None:
            self.timeline.span("wait for work", began)
        self._began(assigned)
        return assigned

    def _began(self, assigned: Assigned) -> None:
        """It works on this round from now on."""
        if assigned.rank == 0 and not ring_address_of(self.exchange):  # On a ring nobody learns.
            self._driver.moves.get_ready()
        self._telemetry.clock.assigned()
        if self.timeline is not None:
            self.timeline.step_began(assigned.step, assigned.attempt)

    def _refuse_part_of_grain(self, assigned: Assigned) -> None:
        """Halts a line that assigns a part of a grain, which would be another number."""
        if not self.plan.grain:
            return
        try:
            Grains(assigned.batch, self.plan.grain).of(assigned.positions)
        except ValueError as error:
            self._refuse(self._state.own_fault("PROTOCOL", f"the coordinator's {error}"))

    def catch_up(self) -> None:
        """Gets the line's state, if the line has gone on without this worker; else returns at once.

        The script calls it between two epochs, so that it begins the epoch which the line is in.
        """
        if self.left_behind():
            # State comes to whoever asks for work. The work is taken by the next call.
            self.next_round()

    def left_behind(self) -> bool:
        """Takes what has come, and returns whether the line has gone on without this worker."""
        # If nothing has come, the line is where this worker is, as far as it knows.
        self._driver.take_all()
        return self._state.behind

    def leave_epoch(self) -> None:
        """Ends the present epoch for everybody; returns once it has ended.

        A worker that the line left behind just returns: it gets the line's state when it requests
        work.
        """
        self._driver.do(self._state.leave_epoch())
        self._driver.wait(Wait.EPOCH_END)

    def begin(self, weight: float, call: Call | None = None) -> bool:
        """Begins the exchange of the present round, or one `call` of several; False if void."""
        assigned = self._state.assigned
        assert assigned is not None
        first = not self._state.begun
        if not self._conversation.begin():
            return False
        self._driver.reach(assigned)
        # Also after a failure: an exchange that is not open sends nothing.
        self.exchange.begin(assigned, weight, call)
        if first and self.policy.quorum and not assigned.attends:
            self._driver.send(ReportComputed(assigned.key))
        return True

    def abandon(self, message: str) -> None:
        """Gives the present round up, without waiting: all workers will try the step again."""
        self._driver.do(self._conversation.abandon(message))

    def refuse_loss(self, value: str) -> None:
        """Reports that this worker's loss is `value`, which is not finite; waits for the halt."""
        self._refuse(self._state.own_fault("NON_FINITE_LOSS", f"the loss is {value}", value))

    def refuse_gradient(self, block: int, element: int, value: str) -> None:
        """Reports that an element of its gradient is `value`, not finite; waits for the halt."""
        fault = self._state.own_fault("NON_FINITE_GRADIENT", "", value)
        self._refuse(replace(fault, block=block, element=element))

    def _refuse(self, fault: ExchangeFailed) -> None:
        if self._state.phase is RoundPhase.LATE or self._state.attends:
            # Of what it owes, in no round yet: nobody waits for a Fault of the others' round.
            where = (
                "" if fault.block is None else f"element {fault.element} of block {fault.block} "
            )
            self.stop_line(fault.kind, fault.message or f"{where}is {fault.value}")
            return
        self._driver.do(self._conversation.refuse(fault))
        self._driver.wait(Wait.VERDICT)

    def stop_line(self, kind: str, message: str) -> bool:
        """Halts the line, between two steps, for what this worker can't fix.

        Returns once an operator has answered; False: the run is over, and nobody will.
        """
        self._conversation.halt_line(kind, message)
        self._driver.wait(Wait.ANSWER)
        return self._conversation.answered()

    def await_averages(self, *, last: bool = True) -> AveragesComplete | None:
        """Waits for the exchange's averages; None if the round is void.

        With those of the round's `last` exchange this worker holds all of them.
        """
        began = time.perf_counter()
        self._driver.wait(Wait.AVERAGES)
        if self.timeline is not None:
            self.timeline.span("wait for averages", began)
            first = self.exchange.first_sent
            self.timeline.span_on(Track.EXCHANGE, "exchange", began if first is None else first)
        return self._conversation.take_averages(last=last)

    def hold(self) -> bool:
        """Says that no exchange of the round is missing; False if it is void."""
        assigned = self._state.assigned
        return assigned is not None and self._state.hold(assigned.key)

    def report(self, report: StepReport) -> None:
        """Tells the coordinator that this worker holds all averages.

        If the script's habit is to go straight on to its next step, that is asked for too.
        """
        self._telemetry.clock.reported(report)
        goes_on = self._habit.is_straight and not self._state.is_midway
        goes_on = goes_on and not (report.stop_reason or report.end_of_data)
        # A worker that is about to leave would only void the round that it asked for.
        if goes_on and STANDING in self._link.coordinator_can and not self._leaving.wanted:
            talk = self.talk
            standing = Standing(ring_address_of(self.exchange), talk.checkpoint, talk.writing)
            report = replace(report, standing=standing)
        # Before it is sent: from then on the round may be committed, and must not be given up.
        self._conversation.reported()
        self._link.control.report_step(report)
        # What is left over is committed first, and the run ends after that. A worker that
        # only attends is not asked; it says so again in a step of its own.
        assigned = self._state.assigned
        at_once = assigned is not None and not (assigned.attends or assigned.leaves_over)
        at_once = at_once and not self.policy.quorum  # What others owe is committed first, too.
        # `await_commit` compares it with the record: the coordinator may not let the script end the
        # run.
        self._wants_stop = report.stop_reason if at_once else ""

    def await_commit(self) -> Committed | None:
        """Waits for the round's record; None if the round is void. Then the weights may move."""
        began = time.perf_counter()
        self._driver.wait(Wait.COMMIT)
        commit = self._state.take_commit()
        self._habit.committed()
        if commit is not None and self._wants_stop and not commit.stop_reason:
            self._warn_that_it_goes_on()
        if self.timeline is not None:
            self.timeline.span("wait for commit", began)
            if commit is not None:
                self.timeline.step_over("committed")
        return commit

    def _warn_that_it_goes_on(self) -> None:
        if not self._stop_refused:
            self._stop_refused = True
            text = (
                f"the script wanted to end the run ({self._wants_stop}), and the line goes on: "
                "only operators may end it (--may-stop operators). Ask one for `andon drain`; a "
                "script that leaves its loop ends this worker alone"
            )
            log.warning(LogEvent("stop_refused", text, step=self._state.step))

    def look(self) -> bool:
        """Takes what has come, without waiting, between two local steps.

        Returns:
            Whether its share of the present round is still wanted: it is if the round is open, and
            if that went on without this worker. If not, nothing more of it is worth computing.
        """
        while self._state.phase in (RoundPhase.OPEN, RoundPhase.LATE):
            event = self._driver.inbox.take(0.0)
            if event is None:
                return True
            self._driver.do(self._conversation.receive(event))
        return False

    @contextmanager
    def making_up(self) -> Iterator[Assigned | None]:
        """Between two local steps: a round that the others have made, while this worker is late.

        Within it that is the round which it works on. None: there is none.
        """
        missed = self._conversation.make_up()
        if missed is None:
            yield None
            return
        if self.timeline is not None:
            self.timeline.step_over("void")
        self._began(missed)
        try:
            yield missed
        finally:
            self._state.take_up_again()

    def take_turn(self) -> Assigned | None:
        """Waits for the round that takes up the share of a late worker, which is computed.

        Returns:
            That round, or one of the others' before it, which may become void for what this worker
            has. None: it is not late, there is more to compute, or something else came; then
            `next_round` follows.
        """
        if not self._conversation.begin_turn():
            return None
        if self.timeline is not None:
            self.timeline.step_over("void")
        began = time.perf_counter()
        self._driver.wait(Wait.TURN)
        if self.timeline is not None:
            self.timeline.span("wait for work", began)
        assigned = self._state.take_computed()
        if assigned is not None:
            self._began(assigned)
        return assigned

    def stepped_locally(self) -> None:
        """Counts an optimizer step between two exchanges."""
        self._telemetry.metrics.stepped_locally()

    def drop_computed(self, why: str) -> None:
        """Makes the weights the head's again, before they are looked at outside a round."""
        self._driver.do(self._state.drop_computed(why))

    def scalar_all_reduce(
        self, value: float, weight: float, digest: Digest = NO_DIGEST
    ) -> tuple[float, float, int]:
        """Returns the roster's weighted mean of `value`, the total weight and the contributors.

        A worker that the line has left behind gets its own number back, since there is nobody left
        to pair it with. It gets the line's state once it requests work.
        """
        self._driver.do(self._conversation.give(value, weight, digest))
        self._driver.wait(Wait.NUMBER)
        result = self._conversation.take_result()
        return result.value, result.weight, result.contributors

    def all_gather(self, data: bytes) -> tuple[bytes, ...]:
        """Returns what each worker of the roster gives, in the same order on all of them.

        A worker that the line has left behind gets only its own back.
        """
        self._driver.do(self._conversation.give(0.0, 0.0, data=data))
        self._driver.wait(Wait.NUMBER)
        result = self._conversation.take_result()
        if not result.data:
            raise RuntimeError(
                "the service of this line is older than this worker, and passes no data from "
                "worker to worker: update it"
            )
        return result.data

    def compare(self, digest: Digest) -> None:
        """Has the weights that this worker's loop ended with compared with all others'.

        Raises:
            LineHalted: they differ, and `on_halt` is `raise`; or the line is in a halt that the
                script was told of, and ended without going on.
            LineLost: an operator dropped this worker.
        """
        self._driver.refuse_unanswered()
        try:
            self._driver.wait(Wait.ANSWER)
            self.scalar_all_reduce(0.0, 0.0, digest)
        except RunOver:
            pass  # The line sent everybody away. Their Leave has the digest, too.
        except (JoinRefused, LineLost) as error:
            # The run is done. It must not fail at its end for want of an answer that nobody is left
            # to give.
            if self._conversation.dropped:
                raise
            log.warning("the last weights were not compared with the others': %s", error)
