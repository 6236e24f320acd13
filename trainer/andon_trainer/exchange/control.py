"""The control stream: a worker's small messages to the coordinator, and what comes back.

Two threads serve it: one reads what the coordinator sends and puts it into the inbox, one sends
heartbeats. Neither decides anything.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc

from andon.protocol.limits import clipped
from andon.protocol.records import Key
from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon.wire import conversion
from andon_trainer.core.events import ControlLost, ExchangeFailed, Halted, Resumed
from andon_trainer.core.reports import NO_DIGEST, Digest, Joined, Joining, LeaveReport, StepReport
from andon_trainer.errors import AndonError, JoinRefused
from andon_trainer.exchange.channels import open_channel
from andon_trainer.exchange.path import Inbox
from andon_trainer.exchange.translation import (
    accepted_from,
    checkpoint_to,
    event_from,
    fault_to,
    join_to,
    leave_to,
    ready_to,
    refusal_from,
    scalar_all_reduce_to,
)

__all__ = ["ControlStream"]

log = logging.getLogger(__name__)


class ControlStream:
    """One Train stream, from Join to its end. It is never resumed: join again on a new one."""

    def __init__(self, address: str, inbox: Inbox, number: int, tls: Path | None = None) -> None:
        """Opens nothing yet; `number` tells this stream's end from an older one's.

        Raises:
            TlsError: the folder of certificates can't be used.
        """
        self._channel = open_channel(address, tls)
        self._inbox = inbox
        self._number = number
        self._outgoing: queue.SimpleQueue[pb.TrainRequest | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._activity = "ACTIVITY_IDLE"
        self._detail = ""
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()
        self._at_end: Callable[[], object] | None = None

    def at_end(self, act: Callable[[], object] | None) -> None:
        """Calls `act` once the stream has ended, from any thread; None: nothing any more."""
        self._at_end = act
        if act is not None and self._ended.is_set():
            act()

    def join(self, joining: Joining) -> Joined:
        """Joins and starts to read; into the inbox, first, what becomes of a halt.

        Raises:
            AndonError: the line refuses this worker; trying again is no use.
            grpc.RpcError: the coordinator can't be reached or went away.
        """
        self._outgoing.put(pb.TrainRequest(join=join_to(joining)))
        self._call = CoordinatorStub(self._channel).Train(iter(self._requests()))
        try:
            joined = accepted_from(next(self._call))
        except grpc.RpcError as error:
            refusal = refusal_from(error)
            if refusal is not None:
                raise refusal from None
            raise
        except (StopIteration, conversion.WireError) as error:
            raise JoinRefused("protocol", f"the peer is no coordinator: {error}") from None
        # Before anything that the coordinator says later: it may be the answer to this halt.
        if joined.halt is not None:
            self._inbox.put(Halted(joined.halt), self._number)
        elif joining.halt is not None:  # Answered while this worker was away.
            self._inbox.put(Resumed(joining.halt.id), self._number)
        self._start("andon-control", self._read)
        self._start("andon-heartbeat", lambda: self._beat(joined.liveness.heartbeat_s))
        return joined

    def request_work(
        self,
        head: Key | None,
        ring_address: str = "",
        *,
        leaves_epoch: bool = False,
        checkpoint: tuple[int, str] | None = None,
    ) -> None:
        """Asks for an assignment, and says where this worker's neighbour in a ring reaches it.

        With `leaves_epoch` it asks for the end of the head's epoch instead. `checkpoint` is the
        last one that this worker wrote, or goes on from.

        This and the following never block, and are silent on a stream that has ended: the inbox
        says so.
        """
        message = pb.RequestWork(
            head=conversion.key_to_proto(head),
            ring_address=ring_address,
            leaves_epoch=leaves_epoch,
            checkpoint=None if checkpoint is None else checkpoint_to(checkpoint),
        )
        self._outgoing.put(pb.TrainRequest(request_work=message))

    def report_step(self, report: StepReport) -> None:
        """Says that all averages of a round are here."""
        self._outgoing.put(pb.TrainRequest(step_ready=ready_to(report)))

    def report_fault(self, failed: ExchangeFailed) -> None:
        """Says what went wrong in a round."""
        self._outgoing.put(pb.TrainRequest(fault=fault_to(failed)))

    def report_crash(self, kind: str, message: str) -> None:
        """Says that the script raised."""
        fault = pb.Fault(
            kind=pb.FAULT_KIND_SCRIPT_RAISED, error_type=clipped(kind), message=clipped(message)
        )
        self._outgoing.put(pb.TrainRequest(fault=fault))

    def report_defect(self, kind: str, message: str) -> None:
        """Says what this worker saw outside any round: `kind` is a name of FaultKind."""
        fault = pb.Fault(kind=f"FAULT_KIND_{kind}", message=clipped(message))
        self._outgoing.put(pb.TrainRequest(fault=fault))

    def report_state(self, transfer_id: int, head: Key | None, failure: str = "") -> None:
        """Says how a state transfer ended at this end."""
        message = pb.StateReport(
            transfer_id=transfer_id, head=conversion.key_to_proto(head), failure=clipped(failure)
        )
        self._outgoing.put(pb.TrainRequest(state_report=message))

    def scalar_all_reduce(
        self,
        head: Key | None,
        sequence: int,
        value: float,
        weight: float,
        digest: Digest = NO_DIGEST,
    ) -> None:
        """Gives a number to average; with it, maybe, the digest of this worker's last weights."""
        message = scalar_all_reduce_to(head, sequence, value, weight, digest)
        self._outgoing.put(pb.TrainRequest(scalar_all_reduce=message))

    def leave(self, departure: LeaveReport) -> None:
        """Says good-bye; close the stream after it."""
        self._outgoing.put(pb.TrainRequest(leave=leave_to(departure)))

    def show(self, activity: str, detail: str = "") -> None:
        """What the next heartbeats say: `activity` is a name of `andon.v1.Activity`."""
        self._activity, self._detail = f"ACTIVITY_{activity}", clipped(detail)

    def close(self, *, after_s: float = 0.0) -> None:
        """Ends the stream, giving the coordinator up to `after_s` to take what was sent."""
        self._stop.set()
        self._outgoing.put(None)
        for thread in self._threads:
            thread.join(after_s)
        self._channel.close()

    def _start(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _requests(self) -> Iterator[pb.TrainRequest]:
        while (message := self._outgoing.get()) is not None:
            yield message

    def _read(self) -> None:
        reason = "the coordinator ended the stream"
        refusal: AndonError | None = None
        try:
            for response in self._call:
                event = event_from(response)
                if event is not None:
                    self._inbox.put(event, self._number)
        except grpc.RpcError as error:
            refusal = refusal_from(error)
            reason = _details(error)
        except conversion.WireError as error:
            reason = f"the coordinator sent what can't be: {error}"
            self._call.cancel()
        finally:
            if not self._stop.is_set():
                self._inbox.put(ControlLost(self._number, reason, refusal), self._number)
            self._stop.set()
            self._ended.set()
            act = self._at_end
            if act is not None:
                act()

    def _beat(self, every_s: float) -> None:
        sequence = 0
        while not self._stop.wait(every_s):
            sequence += 1
            self._outgoing.put(
                pb.TrainRequest(
                    heartbeat=pb.Heartbeat(
                        sequence=sequence, activity=self._activity, detail=self._detail
                    )
                )
            )


def _details(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}"
