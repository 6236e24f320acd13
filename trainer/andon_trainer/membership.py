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
import random
import secrets
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
from andon_trainer.errors import LineHalted, LineLost
from andon_trainer.exchange.bulk import WireExchange
from andon_trainer.exchange.control import ControlStream
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
from andon_trainer.exchange.joining import Joined, Joining
from andon_trainer.exchange.reports import Departure, StepReport
from andon_trainer.exchange.transfer import StateCorrupt, Ticket, receive_state, send_state
from andon_trainer.replica import Replica

__all__ = ["Candidate", "Membership"]

log = logging.getLogger(__name__)

_LEAVE_PATIENCE_S = 5.0
_LONGEST_BACKOFF_S = 2.0


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

    def __init__(self, config: LineConfig, candidate: Candidate) -> None:
        """Opens nothing yet: `join` does."""
        self._config = config
        self._candidate = candidate
        self._inbox = Inbox()
        self._incarnation = secrets.randbits(64)
        self._control: ControlStream | None = None
        self._stream = 0
        self._joined: Joined | None = None
        self._asked: tuple[int, Key | None] | None = None
        self._early: Assigned | None = None
        self._phase = _Phase.NONE
        self._begun = False
        self._commit: Committed | None = None
        self._tallies = 0
        self._greatest_term = 0
        self.head: Key | None = None
        self.cursor = Cursor(0, 0)
        self.step = 0
        self.assigned: Assigned | None = None
        self.halt: HaltEvidence | None = None
        self.stop_reason = ""

    @property
    def joined(self) -> Joined:
        """The coordinator's latest answer to Join."""
        assert self._joined is not None, "not joined yet"
        return self._joined

    @property
    def control(self) -> ControlStream:
        """The present control stream."""
        assert self._control is not None, "not joined yet"
        return self._control

    # ------------------------------------------------------------------ joining

    def join(self) -> None:
        """Joins, and waits until this worker holds the line's weights.

        Raises:
            JoinRefused: the line does not take this worker.
            LineLost: no coordinator answered within `reconnect_s`.
            LineHalted: the line is halted, and `on_halt` is `raise`.
        """
        self._connect()
        self.exchange = WireExchange(self._candidate.layout, self.joined.policy, self._inbox)
        while self.head is None:
            self._take()

    def _connect(self) -> None:
        """Joins on a new stream; tries again, with jittered back-off, while that may help."""
        patience_s = self._joined.liveness.reconnect_s if self._joined else 300.0
        deadline = time.monotonic() + patience_s
        wait_s = 0.05
        while True:
            self._stream += 1
            stream = ControlStream(self._config.address, self._inbox, self._stream)
            try:
                self._joined = stream.join(self._joining())
            except grpc.RpcError as error:
                stream.close()
                if time.monotonic() + wait_s > deadline:
                    raise LineLost(
                        f"no coordinator answered at {self._config.address} for "
                        f"{patience_s:.0f} s ({error.code().name}): start one with `andon serve`",
                        self._config.address,
                        self.step,
                    ) from None
                log.info("waiting for the coordinator at %s", self._config.address)
                time.sleep(wait_s * random.uniform(0.5, 1.5))
                wait_s = min(2 * wait_s, _LONGEST_BACKOFF_S)
            except BaseException:
                stream.close()
                raise
            else:
                break
        self._control = stream
        self._greatest_term = max(self._greatest_term, self._joined.term)
        if self._joined.in_sync and self._joined.head != self.head:
            raise LineLost(
                "the coordinator calls this worker in sync with a head that it does not have",
                self._config.address,
                self.step,
            )

    def _joining(self) -> Joining:
        config, candidate = self._config, self._candidate
        held = self.assigned.key if self.assigned and self._phase is _Phase.HELD else None
        return Joining(
            run_id=config.run_id,
            incarnation=self._incarnation,
            layout=candidate.layout,
            plan=candidate.plan,
            node_id=socket.gethostname(),
            launch_slot=config.launch_slot if self._joined is None else self._joined.worker,
            device=candidate.device,
            token=config.token,
            head=self.head,
            cursor=self.cursor,
            step=self.step,
            held_key=held,
            greatest_term=self._greatest_term,
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
            assigned, self._early = self._early, None
            if assigned is None:
                if self._asked != (self._stream, self.head):
                    self._asked = (self._stream, self.head)
                    self.control.request_work(self.head)
                event = self._take()
                assigned = event if isinstance(event, Assigned) else None
            if assigned is None:
                continue
            if assigned.parent != self.head:  # rule 4
                log.warning("assigned work for another head: joining again")
                self._rejoin()
                continue
            self.assigned = assigned
            self._commit = None
            self._begun = False
            self._phase = _Phase.OPEN
            return assigned

    def begin(self, weight: float) -> bool:
        """Starts the exchange of the present round; False if the round is void already."""
        assert self.assigned is not None
        if self._phase is not _Phase.OPEN:
            return False
        self._begun = True
        if not self.exchange.is_open:
            try:
                self.exchange.open(self._reducer_address, self._opening())
            except grpc.RpcError as error:
                self._fail("DATA_STREAM_LOST", f"no reducer at {self._reducer_address}: {error}")
        self.exchange.begin(self.assigned, weight)
        return True

    def abandon(self, message: str) -> None:
        """Gives the present round up: everybody tries the step again."""
        self._fail("DATA_STREAM_LOST", message)
        self.await_averages()

    def report_loss(self, value: str) -> None:
        """Says that this worker's loss is `value`, which is not finite."""
        self._fail("NON_FINITE_LOSS", f"the loss is {value}", value=value)

    def await_averages(self) -> AveragesComplete | None:
        """Waits for the round's averages; None if it is void.

        Raises:
            LineHalted, LineLost: as in `next_round`.
        """
        while self._phase is _Phase.OPEN:
            event = self._take()
            if isinstance(event, AveragesComplete):
                assert self.assigned is not None
                if event.key == self.assigned.key:
                    self._phase = _Phase.HELD
                    return event
        return None

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
            if sent_on != self._stream:
                sent_on = self._stream
                self.control.tally(head, sequence, value, weight)
            event = self._take()
            if isinstance(event, TallyDone) and event.sequence == sequence:
                return event.value, event.weight

    @property
    def digest_every(self) -> int:
        """Compare digests of the weights every so many steps; 0 is never."""
        return self.joined.policy.digest_every

    def show(self, activity: str, detail: str = "") -> None:
        """What the others see this worker do: a name of `andon.v1.Activity`."""
        self.control.show(activity, detail)

    def report(self, report: StepReport) -> None:
        """Says that this worker holds all averages."""
        self.control.report_step(report)

    def leave(self, departure: Departure) -> None:
        """Says good-bye and ends both streams."""
        if self._control is not None:
            if departure.reason == "FAILED":
                self._control.report_crash(departure.error_type, departure.message)
            self._control.leave(departure)
            self._control.close(after_s=_LEAVE_PATIENCE_S)
            self._control = None
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
            case ControlLost() if event.stream == self._stream:
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
            case Voided() if self._is_present(event.key):
                self._void(event.message)
            case Assigned() if self._phase in (_Phase.OPEN, _Phase.HELD):
                self._early = event
                self._void("a new round was assigned")
            case ExchangeFailed() if self._is_present(event.key) and self._phase is _Phase.OPEN:
                self.control.report_fault(event)

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
            self._commit = commit
            self._phase = _Phase.NONE
        self.stop_reason = commit.stop_reason or self.stop_reason

    def _move(self, record: Record) -> None:
        self.head, self.cursor, self.step = record.key, record.cursor, record.step
        self._tallies = 0

    def _void(self, message: str) -> None:
        if self._phase in (_Phase.OPEN, _Phase.HELD):
            log.info("step %d is tried again: %s", self.step + 1, message)
            self._phase = _Phase.VOID
            self.exchange.end()

    def _fail(self, kind: str, message: str, value: str = "") -> None:
        """Puts a fault of the present round before everything that is still to come."""
        assert self.assigned is not None
        self._inbox.put(
            ExchangeFailed(
                key=self.assigned.key,
                kind=kind,
                message=message,
                rank=self.assigned.rank,
                value=value,
            )
        )

    def _stop(self, evidence: HaltEvidence) -> None:
        """The line stopped: raises, or waits here for the answer."""
        self.halt = evidence
        self._void(str(evidence))
        if self._config.on_halt == "raise":
            raise LineHalted(evidence)
        log.error("%s. No weight moved. Waiting for the operator.", evidence)
        self.control.show("HALTED")
        while self.halt is not None:
            self._take()
        self.control.show("IDLE")

    def _rejoin(self) -> None:
        """Joins again; a round that waits for its commit may still get it, any other is void."""
        if self._phase is _Phase.OPEN:
            self._void("the coordinator was lost")
        self._early = None
        self._asked = None
        self.control.close()
        self._connect()
        self.exchange.close()
        if self._phase is _Phase.HELD and self.joined.in_sync:
            self._void("its record was not written")

    def _transfer(self, asked: TransferAsked) -> None:
        """Sends or receives state, while no round runs (rule 10)."""
        ticket = Ticket(
            address=self._reducer_address,
            run_id=self._config.run_id,
            worker=self.joined.worker,
            session_token=self.joined.session_token,
            transfer_id=asked.transfer_id,
            head=asked.head,
        )
        self.control.show("SYNCING")
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
        self.control.show("IDLE")
        self.control.report_state(asked.transfer_id, self.head, failure)

    @property
    def _reducer_address(self) -> str:
        return self.joined.reducer_address or self._config.address

    def _opening(self) -> OpenRound:
        return OpenRound(self._config.run_id, self.joined.worker, self.joined.session_token)
