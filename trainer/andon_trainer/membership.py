"""Membership: a worker's place on a line, from its Join to its Leave.

Theory of operation. The thread that trains owns everything here. The streams' threads only put
events into the inbox; they are taken wherever the training thread has to wait (for work, for
averages, for a commit), so that a halt or a lost stream is acted on there and state changes
nowhere else. The worker's head moves by records and transfers alone (rule 7), and whatever ends a
round other than its record leaves the weights as they were.
"""

from __future__ import annotations

import enum
import logging
import socket
import time
from dataclasses import dataclass

import grpc

from andon.halts import HaltEvidence
from andon.layout import Layout
from andon.messages import OpenRound
from andon.records import Cursor, Key, Record, RecordKind
from andon.terms import RunPlan
from andon_trainer.config import LineConfig
from andon_trainer.connection import Connection
from andon_trainer.errors import LineHalted, LineLost
from andon_trainer.exchange.bulk import WireExchange
from andon_trainer.exchange.calls import Call
from andon_trainer.exchange.events import (
    Assigned,
    AveragesComplete,
    Committed,
    ControlLost,
    Dismissed,
    Event,
    ExchangeFailed,
    Halted,
    Resumed,
    TallyDone,
    TransferAsked,
    Voided,
)
from andon_trainer.exchange.inbox import Inbox
from andon_trainer.exchange.joining import Joining
from andon_trainer.exchange.reports import Departure, StepReport
from andon_trainer.exchange.transfer import StateCorrupt, Ticket, receive_state, send_state
from andon_trainer.replica import Replica
from andon_trainer.telemetry import StepMeasured, Telemetry

__all__ = ["Candidate", "Membership"]

log = logging.getLogger(__name__)

_LEAVE_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What a worker brings to the line."""

    layout: Layout
    plan: RunPlan
    replica: Replica
    device: tuple[str, str, int]
    """Kind, name and memory in bytes."""


class _Phase(enum.Enum):
    """Where the worker stands in its round."""

    NONE = enum.auto()
    OPEN = enum.auto()
    """Assigned; averages are missing."""
    HELD = enum.auto()
    """All averages are here; the commit is missing."""
    VOID = enum.auto()
    """Over without a commit."""


class Membership:
    """One worker's place on the line at `config.address`. Used by one thread."""

    def __init__(self, config: LineConfig, candidate: Candidate, telemetry: Telemetry) -> None:
        """Opens nothing yet: `join` does."""
        self._config = config
        self._candidate = candidate
        self._telemetry = telemetry
        telemetry.metrics.follow(lambda: self.step)
        self._reported: StepReport | None = None
        self._assigned_at = self._reported_at = 0.0
        self._inbox = Inbox()
        self._link = Connection(config, self._inbox)
        self._asked: tuple[int, Key | None] | None = None
        self._waiting: Assigned | None = None
        """Work that came, and that the script's loop has not taken yet."""
        self._phase = _Phase.NONE
        self._begun = False
        self._commit: Committed | None = None
        self._tallies = 0
        self.head: Key | None = None
        self.cursor = Cursor(0, 0)
        self.step = 0
        self.assigned: Assigned | None = None
        self.halt: HaltEvidence | None = None
        self.stop_reason = ""

    # ------------------------------------------------------------------ joining

    def join(self) -> None:
        """Joins, and waits until this worker holds the line's weights, and while it is halted.

        Raises:
            JoinRefused: the line does not take this worker.
            LineLost: no coordinator answered within `reconnect_s`.
        """
        self._connect()
        policy = self._link.joined.policy
        self.exchange = WireExchange(self._candidate.layout, policy, self._inbox)
        while self.head is None:
            self._take()

    def _connect(self) -> None:
        joined = self._link.connect(self._joining())
        if joined.halt is not None:
            self._inbox.put(Halted(joined.halt))
        elif self.halt is not None:
            self._inbox.put(Resumed(self.halt.id))  # answered while this worker was away

    def _joining(self) -> Joining:
        candidate, link = self._candidate, self._link
        held = self.assigned.key if self.assigned and self._phase is _Phase.HELD else None
        return Joining(
            run_id=self._config.run_id,
            incarnation=link.incarnation,
            layout=candidate.layout,
            plan=candidate.plan,
            node_id=socket.gethostname(),
            launch_slot=link.slot,
            device=candidate.device,
            token=self._config.token,
            metrics_address=self._telemetry.address,
            head=self.head,
            cursor=self.cursor,
            step=self.step,
            held_key=held,
            greatest_term=link.greatest_term,
            halt=self.halt,
        )

    # ------------------------------------------------------------------ a step

    def next_round(self) -> Assigned:
        """Asks for work and waits for it.

        Raises:
            LineHalted: the line stopped, and `on_halt` is `raise`.
            LineLost: the line is gone, or dismissed this worker.
        """
        if self._phase is _Phase.OPEN and not self._begun:
            assert self.assigned is not None
            return self.assigned  # the script left its loop before it began this round
        self._phase = _Phase.NONE
        self.assigned = None
        while True:
            assigned, self._waiting = self._waiting, None
            if assigned is None:
                if self._asked != (self._link.number, self.head):
                    self._asked = (self._link.number, self.head)
                    self._link.control.request_work(self.head)
                self._take()
                continue
            if assigned.parent != self.head:  # rule 4
                log.warning("assigned work for another head: joining again")
                self._rejoin()
                continue
            self.assigned = assigned
            self._assigned_at = time.perf_counter()
            self._commit = None
            self._begun = False
            self._phase = _Phase.OPEN
            return assigned

    def begin(self, weight: float, call: Call | None = None) -> bool:
        """Starts the exchange of the present round, or one `call` of several; False if void."""
        assert self.assigned is not None
        if self._phase is not _Phase.OPEN:
            return False
        self._begun = True
        if not self.exchange.is_open:
            try:
                self.exchange.open(self._link.reducer_address, self._opening())
            except grpc.RpcError as error:
                text = f"no reducer at {self._link.reducer_address}: {error.code().name}"
                self._inbox.put(self._failed("DATA_STREAM_LOST", text))
        self.exchange.begin(self.assigned, weight, call)
        return True

    def abandon(self, message: str) -> None:
        """Gives the present round up, without waiting: everybody tries the step again."""
        if self._phase is _Phase.OPEN:
            self._link.control.report_fault(self._failed("DATA_STREAM_LOST", message))
            self._void(message)

    def report_loss(self, value: str) -> None:
        """Says that this worker's loss is `value`, which is not finite."""
        self._inbox.put(self._failed("NON_FINITE_LOSS", f"the loss is {value}", value))

    def await_averages(self, *, last: bool = True) -> AveragesComplete | None:
        """Waits for the exchange's averages; None if the round is void.

        With those of the round's `last` exchange, this worker holds all of them.

        Raises:
            LineHalted, LineLost: as in `next_round`.
        """
        while self._phase is _Phase.OPEN:
            event = self._take()
            if isinstance(event, AveragesComplete):
                assert self.assigned is not None
                if event.key == self.assigned.key:
                    if last:
                        self._phase = _Phase.HELD
                    return event
        return None

    def hold(self) -> bool:
        """Says that no exchange of the round is missing; False if it is void."""
        if self._phase is _Phase.OPEN:
            self._phase = _Phase.HELD
        return self._phase is _Phase.HELD

    def await_commit(self) -> Committed | None:
        """Waits for the round's record; None if it is void. Weights may move after it.

        Raises:
            LineHalted, LineLost: as in `next_round`.
        """
        while self._phase is _Phase.HELD:
            self._take()
        commit, self._commit = self._commit, None
        return commit

    def tally(self, value: float, weight: float) -> tuple[float, float]:
        """The weighted mean of `value` over the roster, and the total weight.

        Raises:
            LineHalted, LineLost: as in `next_round`.
        """
        sequence, head, sent_on = self._tallies, self.head, None
        self._tallies += 1
        while True:
            if sent_on != self._link.number:
                sent_on = self._link.number
                self._link.control.tally(head, sequence, value, weight)
            event = self._take()
            if isinstance(event, TallyDone) and event.sequence == sequence:
                return event.value, event.weight

    @property
    def digest_every(self) -> int:
        """Compare digests of the weights every so many steps; 0 is never."""
        return self._link.joined.policy.digest_every

    def show(self, activity: str, detail: str = "") -> None:
        """What the others see this worker do: a name of `andon.v1.Activity`."""
        self._link.control.show(activity, detail)

    def report(self, report: StepReport) -> None:
        """Says that this worker holds all averages."""
        self._reported, self._reported_at = report, time.perf_counter()
        self._link.control.report_step(report)

    def leave(self, departure: Departure) -> None:
        """Says good-bye and ends both streams."""
        if self._link.is_open:
            if departure.reason == "FAILED":
                self._link.control.report_crash(departure.error_type, departure.message)
            self._link.control.leave(departure)
            self._link.close(after_s=_LEAVE_PATIENCE_S)
        if hasattr(self, "exchange"):
            self.exchange.close()

    # ------------------------------------------------------------------ events

    def _take(self) -> Event:
        """The next event, after what it means for this worker was done."""
        event = self._inbox.take()
        assert event is not None
        match event:
            case Committed() | Voided() | Assigned() | ExchangeFailed():
                self._take_up(event)
            case Halted():
                self._stop(event.evidence)
            case Resumed():
                self.halt = None
                log.info("the halt was answered: the line goes on")
            case TransferAsked():
                self._transfer(event)
            case Dismissed():
                raise LineLost(event.message, self._config.address, self.step)
            case ControlLost() if event.stream == self._link.number:
                if event.refusal is not None:
                    raise event.refusal
                log.warning("lost the coordinator (%s): joining again", event.message)
                self._rejoin()
        return event

    def _take_up(self, event: Committed | Voided | Assigned | ExchangeFailed) -> None:
        """What an event means for the present round."""
        match event:
            case Committed():
                self._apply(event)
            case Voided():
                if self._waiting is not None and event.key == self._waiting.key:
                    self._waiting = None
                elif self._is_present(event.key):
                    self._void(event.message)
            case Assigned():
                self._waiting = event
                self._void("a new round was assigned")
            case ExchangeFailed() if self._is_present(event.key) and self._phase is _Phase.OPEN:
                self._link.control.report_fault(event)

    def _is_present(self, key: Key) -> bool:
        return self.assigned is not None and key == self.assigned.key

    def _apply(self, commit: Committed) -> None:
        """Moves the head by a record (rules 4, 7): a STEP only with its averages held."""
        record = commit.record
        applies = record.parent == self.head and (
            record.kind is not RecordKind.STEP
            or (self._phase is _Phase.HELD and self._is_present(record.key))
        )
        if not applies:
            if record.key != self.head:
                log.warning("got a record that can't be applied here: joining again")
                self._rejoin()
            return
        self._move(record)
        if record.kind is RecordKind.STEP:
            self._measure(record.key)
            self._commit = commit
            self._phase = _Phase.NONE
        self.stop_reason = commit.stop_reason or self.stop_reason

    def _move(self, record: Record) -> None:
        self.head, self.cursor, self.step = record.key, record.cursor, record.step
        self._tallies = 0

    def _measure(self, key: Key) -> None:
        """Counts the step that was committed under `key`."""
        report, now = self._reported, time.perf_counter()
        if report is None or report.key != key:
            return
        self._telemetry.metrics.committed(
            StepMeasured(
                report=report,
                seconds=now - self._assigned_at,
                commit_s=now - self._reported_at,
                sent_bytes=self.exchange.sent_bytes,
                received_bytes=self.exchange.received_bytes,
            )
        )

    def _void(self, message: str) -> None:
        if self._phase in (_Phase.OPEN, _Phase.HELD):
            log.info("step %d is tried again: %s", self.step + 1, message)
            self._phase = _Phase.VOID
            self.exchange.end()

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
        if self.halt is not None and self.halt.id == evidence.id:
            return  # told again, after this worker joined again
        self.halt = evidence
        self._waiting = None
        self._void(str(evidence))
        newcomer = self.head is None
        if self._config.on_halt == "raise" and not newcomer:
            raise LineHalted(evidence)
        log.error("%s. No weight moved. Waiting for the operator.", evidence)
        self._link.control.show("HALTED")
        while self.halt is not None:
            self._take()
        self._link.control.show("IDLE")

    def _rejoin(self) -> None:
        """Joins again; a round that waits for its commit may still get it, any other is void."""
        if self._phase is _Phase.OPEN:
            self._void("the coordinator was lost")
        self._waiting = None
        self._asked = None
        self._connect()
        self.exchange.close()
        if self._phase is _Phase.HELD and self._link.joined.in_sync:
            self._void("its record was not written")

    def _transfer(self, asked: TransferAsked) -> None:
        """Sends or receives state, while no round runs (rule 10)."""
        ticket = Ticket(
            address=self._link.reducer_address,
            run_id=self._config.run_id,
            worker=self._link.joined.worker,
            session_token=self._link.joined.session_token,
            transfer_id=asked.transfer_id,
            head=asked.head,
        )
        self._link.control.show("SYNCING")
        failure = ""
        try:
            if asked.sends:
                send_state(ticket, self._candidate.replica.pack())
            else:
                self._candidate.replica.install(receive_state(ticket))
                self.head, self.cursor, self.step = asked.head, asked.cursor, asked.step
                self._tallies = 0
                if self._phase is _Phase.HELD:
                    self._void("newer weights were installed")
        except (grpc.RpcError, StateCorrupt) as error:
            failure = f"{type(error).__name__}: {error}"
            log.warning("a state transfer failed: %s", failure)
        self._link.control.show("IDLE")
        self._link.control.report_state(asked.transfer_id, self.head, failure)

    def _opening(self) -> OpenRound:
        return OpenRound(
            self._config.run_id,
            self._link.joined.worker,
            self._link.joined.session_token,
        )
