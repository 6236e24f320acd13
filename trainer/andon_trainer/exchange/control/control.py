"""The control stream: a worker's small messages to the coordinator, and what comes back.

Theory of operation. Messages leave through a queue, so that nothing here ever blocks the training
thread; gRPC's own thread takes them out. A second thread reads what the coordinator sends and puts
it into the inbox. A third sends heartbeats. None of them decides anything.

A coordinator of this host may offer a socket for what follows JoinAccepted. If it is used, what the
script's thread says leaves on that thread, and a thread of the socket reads. The rest, which other
threads and signal handlers say, still goes through the queue, and from there into the socket. The
call of gRPC stays, and says how the stream ended.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
from google.protobuf.message import DecodeError

from andon.host.arena import FILE_PREFIX
from andon.host.logs import LogEvent
from andon.protocol.limits import clipped
from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon.wire import conversion
from andon.wire.slowness import explanation_to_proto
from andon_trainer.core.effects import RequestWork
from andon_trainer.core.events import (
    Assigned,
    Committed,
    ControlLost,
    Dismissed,
    Event,
    Halted,
    LeftOut,
    Resumed,
    TransferAsked,
)
from andon_trainer.core.reports import (
    Joined,
    Joining,
    LeaveReport,
    StepReport,
    WrittenCheckpoint,
)
from andon_trainer.errors import AndonError, JoinRefused
from andon_trainer.exchange.channels import open_channel
from andon_trainer.exchange.control.explaining import Explainer
from andon_trainer.exchange.control.heartbeats import Heartbeats, ScalarOutbox
from andon_trainer.exchange.control.translation import (
    Report,
    accepted_from,
    event_from,
    join_to,
    leave_to,
    ready_to,
    refusal_from,
    request_to,
    work_to,
)
from andon_trainer.exchange.local_socket import LocalSocket
from andon_trainer.exchange.path import Inbox
from andon_trainer.timeline import Timeline

__all__ = ["ControlStream"]

log = logging.getLogger(__name__)


class ControlStream:
    """One Train stream, from Join to its end. It is never resumed: join again on a new one.

    What is sent on a stream that has ended is lost without an error; ControlLost is in the inbox
    then, or soon will be.
    """

    def __init__(
        self,
        address: str,
        inbox: Inbox,
        number: int,
        tls: Path | None = None,
        *,
        outbox: ScalarOutbox,
        timeline: Timeline | None = None,
    ) -> None:
        """Opens nothing yet; `number` tells this stream's events from an older one's.

        Heartbeats carry what is in `outbox`, and tell `timeline` the coordinator's time.

        Raises:
            TlsError: the folder of certificates can't be used.
        """
        self._channel = open_channel(address, tls)
        self._inbox = inbox
        self._number = number
        self._outgoing: queue.SimpleQueue[pb.TrainRequest | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._heartbeats = Heartbeats(self._outgoing.put, number, outbox, timeline)
        self._threads: list[threading.Thread] = []
        self.shared_dir: Path | None = None
        """Where the coordinator's socket is looked for; None: none is used."""
        self._socket: LocalSocket | None = None
        """What carries the messages after JoinAccepted; None: the call does."""
        self._unreadable: Exception | None = None
        """What came over the socket, and could not be read."""
        self.hear: Callable[[Assigned, int], bool] = lambda _assigned, _stream: False
        """Opens listening streams: a round goes on without this worker. False: it can't."""
        self.explainer: Explainer | None = None
        """Answers questions why this worker is late; None: nobody does."""
        self.failure: Exception | None = None
        """Why this end could not read the stream, if it was for a reason that nobody foresaw."""
        self._assigned: Assigned | None = None
        """The last round that this worker was to take part in."""
        self._transfer: int | None = None
        """The transfer that the coordinator asked for last; None: it is over, or there was none."""
        self._receives = False
        """Whether the state of that one comes here."""
        self._at_end: Callable[[], object] | None = None
        self._sending: dict[int, Callable[[], object] | None] = {}
        """What to call once it is over, by the transfer that is sent beside training."""
        self._beside: int | None = None
        """The last one of those."""

    def at_end(self, transfer_id: int, act: Callable[[], object] | None) -> None:
        """Calls `act` once this transfer is over for the coordinator; None: never any more.

        It is over when the stream ends, and when the coordinator assigns a round or begins another
        transfer: the receiver has reported then, whether it took the state or not. It is over, too,
        for its receiver once that is dismissed, and for both ends once the run is over. A transfer
        that is sent beside training is over when the stream ends, and when another one of its kind
        begins: the receiver is gone then. `act` is called from any thread.
        """
        if transfer_id in self._sending:
            self._sending[transfer_id] = act
            # Looked at after that, and `_read` does it the other way round: see below.
            if act is not None and (self._stop.is_set() or self._beside != transfer_id):
                act()
            return
        # Set before it is looked whether the transfer is over: if that happens in between, `act` is
        # called twice, and not never.
        self._at_end = act
        if act is not None and self._transfer != transfer_id:
            act()

    def join(self, joining: Joining) -> Joined:
        """Joins and starts to read.

        Raises:
            AndonError: the line refuses this worker; trying again would not help.
            grpc.RpcError: the coordinator can't be reached or went away.
        """
        # Queued before the stream exists: Join must be its first message.
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
        # Before the reading thread starts: what the coordinator sends later may be the answer to
        # this very halt.
        if joined.halt is not None:
            self._inbox.put(Halted(joined.halt), self._number)
        elif joining.halt is not None:  # It was answered while this worker was away.
            self._inbox.put(Resumed(joining.halt.id), self._number)
        offered = bool(joined.control_socket)
        if offered:
            self._socket = self._connected(joined)
        self._start("andon-control", lambda: self._read(joined.policy.fragments))
        # Not before JoinAccepted, ahead of which a worker sends nothing but its Join. One that was
        # offered a socket says at once whether it uses that: the coordinator waits for it.
        self._heartbeats.begin()
        every_s = joined.liveness.heartbeat_s
        self._start("andon-heartbeat", lambda: self._heartbeats.run(every_s, at_once=offered))
        if self.explainer is not None:
            watch = self.explainer.watch
            self._start("andon-watch", lambda: watch.run(self._stop))
        return joined

    def request_work(
        self,
        effect: RequestWork,
        ring_address: str,
        checkpoint: WrittenCheckpoint | None,
        checkpoint_begun: int,
    ) -> None:
        """Requests an assignment, or the end of the epoch.

        Args:
            effect: what the core wants.
            ring_address: where the rank before this worker would reach it; empty: no ring.
            checkpoint: the last one that this worker wrote or started from.
            checkpoint_begun: the step of one that is being written; 0: none is.
        """
        self._say(work_to(effect, ring_address, checkpoint, checkpoint_begun))

    def send(self, report: Report) -> None:
        """Sends what the core has to say."""
        self._say(request_to(report))

    def report_step(self, report: StepReport) -> None:
        """Says that this worker holds all averages of a round."""
        self._say(pb.TrainRequest(step_ready=ready_to(report)))

    def report_crash(self, kind: str, message: str) -> None:
        """Says that the script raised an exception of type `kind`."""
        fault = pb.Fault(
            kind=pb.FAULT_KIND_SCRIPT_RAISED, error_type=clipped(kind), message=clipped(message)
        )
        self._outgoing.put(pb.TrainRequest(fault=fault))

    def give_notice(self, why: str) -> None:
        """Says that this worker's machine is about to go; a signal handler may call it."""
        # A SimpleQueue may be put into at any moment, even in the middle of another put.
        self._outgoing.put(pb.TrainRequest(notice=pb.Notice(message=clipped(why))))

    def leave(self, departure: LeaveReport) -> None:
        """Says good-bye, behind all that the script logged; close the stream after it."""
        self._heartbeats.flush()
        self._outgoing.put(pb.TrainRequest(leave=leave_to(departure)))

    def show(self, activity: str, detail: str = "") -> None:
        """Sets what the next heartbeats say: `activity` is a name of `andon.v1.Activity`."""
        self._heartbeats.show(activity, detail)

    def close(self, *, after_s: float = 0.0) -> None:
        """Ends the stream, giving the coordinator up to `after_s` to take what was sent."""
        self._stop.set()  # First, so that the end that follows is not reported as a loss.
        self._heartbeats.stop()
        self._outgoing.put(None)
        # The coordinator ends a stream once it has taken Leave, and the reading thread ends then.
        for thread in self._threads:
            thread.join(after_s)
        self._channel.close()
        if self._socket is not None:
            self._socket.close()

    def _say(self, message: pb.TrainRequest) -> None:
        """Sends a message of the script's thread, which is no signal handler."""
        if self._socket is None:
            self._outgoing.put(message)
        else:
            self._socket.send(message.SerializeToString, small=True)

    def _connected(self, joined: Joined) -> LocalSocket | None:
        """The socket that JoinAccepted offers, if it can be used."""
        name = joined.control_socket
        if self.shared_dir is None or "/" in name or not name.startswith(FILE_PREFIX):
            return None
        try:
            return LocalSocket(
                self.shared_dir / name,
                lambda message: self._received(message, joined.policy.fragments),
                # The call of gRPC says how the stream ended.
                lambda _why: None,
                peer="coordinator",
            )
        except OSError:  # Then gRPC carries the same.
            return None

    def _start(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _requests(self) -> Iterator[pb.TrainRequest]:
        """Runs on gRPC's sending thread."""
        while (message := self._outgoing.get()) is not None:
            if self._socket is None:
                yield message
            else:
                self._socket.send(message.SerializeToString, small=True)

    def _received(self, message: bytes, fragments: int) -> None:
        """Runs on the socket's receiving thread."""
        if self._unreadable is not None:
            return
        try:
            self._take(pb.TrainResponse.FromString(message), fragments)
        except Exception as error:  # For the reading thread, which ends the stream.
            self._unreadable = error
            self._call.cancel()

    def _take_all(self, fragments: int) -> None:
        """Takes what comes over the call until it ends, and what came over the socket before."""
        try:
            for response in self._call:
                self._take(response, fragments)
        finally:
            if self._socket is not None:
                self._socket.close()
            if self._unreadable is not None:
                raise self._unreadable

    def _read(self, fragments: int = 1) -> None:
        """Runs on the reading thread, on a line whose policy has so many fragments."""
        reason = "the coordinator ended the stream"
        refusal: AndonError | None = None
        try:
            self._take_all(fragments)
        except grpc.RpcError as error:
            refusal = refusal_from(error)
            reason = f"{error.code().name}: {error.details()}"
        except (conversion.WireError, DecodeError) as error:
            reason = f"the coordinator sent an invalid message: {error}"
            self._call.cancel()
        except Exception as error:  # A mistake of ours; the script's thread decides what follows.
            log.exception(LogEvent("control_unreadable"))
            reason = f"what the coordinator sent could not be read: {error!r}"
            self.failure = error
            self._call.cancel()
        finally:
            # The event before the call: a transfer that is cut short by `act` returns to a thread
            # that then finds ControlLost in its inbox.
            if not self._stop.is_set():
                self._inbox.put(ControlLost(self._number, reason, refusal), self._number)
            self._stop.set()
            self._heartbeats.stop()
            self._end_transfer(None)
            for act in list(self._sending.values()):
                if act is not None:
                    act()

    def _take(self, response: pb.TrainResponse, fragments: int) -> None:
        """Answers a message here, or passes it on to the script's thread."""
        if response.HasField("probe"):
            # Here, and not in the inbox, which waits for the script.
            answer = pb.ProbeAnswer(number=response.probe.number)
            self._outgoing.put(pb.TrainRequest(probe_answer=answer))
            return
        if response.HasField("explain"):
            self._explain(response.explain.number)
            return
        if response.HasField("heartbeat_answer"):
            self._heartbeats.answered(response.heartbeat_answer)
        event = event_from(response, fragments=fragments)
        # Before the inbox has it: the transfer may be looked for at once.
        self._note_transfer(event)
        self._deliver(event)

    def _explain(self, number: int) -> None:
        """Has a question answered, from another thread than this one and the script's."""
        if self.explainer is not None:
            self.explainer.asked(
                number,
                lambda: self._heartbeats.detail,
                lambda answer: self._outgoing.put(
                    pb.TrainRequest(explanation=explanation_to_proto(answer))
                ),
            )

    def _deliver(self, event: Event | None) -> None:
        """Puts an event into the inbox, if it means anything to this worker."""
        if event is None or (isinstance(event, LeftOut) and not self._follows(event)):
            return
        self._inbox.put(event, self._number)

    def _follows(self, left_out: LeftOut) -> bool:
        """Sees to it that this worker hears the rounds that go on without it, and says so.

        Returns:
            False if it was not left out: the round is an old one. Or if it can't hear them: then
            the stream ends.
        """
        if self._assigned is None or left_out.key != self._assigned.key:
            return False
        # Here, too: the others wait for the answer, and the script may compute for long.
        if not self.hear(self._assigned, self._number):
            self._call.cancel()
            return False
        self._outgoing.put(pb.TrainRequest(listening=pb.Listening()))
        return True

    def _note_transfer(self, event: Event | None) -> None:
        """Notes which transfer an event begins or ends, and the round that was assigned."""
        match event:
            case TransferAsked(sends=True, beside_training=True):
                self._sending[event.transfer_id] = None
                self._end_sending(event.transfer_id)
            case TransferAsked():
                self._end_transfer(event)
            case Committed(next=Assigned(attends=False) as assigned):
                self._assigned = assigned
            case Assigned(attends=False):
                self._assigned = event
                # One that this worker only attends ends nothing: its state may be on its way.
                self._end_transfer(event)
            case Dismissed(stop_reason=over) if over or self._receives:
                # Its sender may be gone, and nobody else sends any more. A receiver is gone, too,
                # once the run is over.
                self._end_transfer(None)

    def _end_sending(self, by: int) -> None:
        """The coordinator has a worker send to one at a time: those before `by` are over."""
        # Noted before the acts are looked for, as below.
        self._beside = by
        for transfer_id, act in list(self._sending.items()):
            if transfer_id != by and act is not None:
                act()

    def _end_transfer(self, by: Assigned | TransferAsked | None) -> None:
        """The transfer before is over, and perhaps another begins."""
        # Noted before `act` is looked for. `at_end` does it the other way round, so one of the two
        # threads finds what the other one did.
        self._transfer = by.transfer_id if isinstance(by, TransferAsked) else None
        self._receives = isinstance(by, TransferAsked) and not by.sends
        act = self._at_end
        if act is not None:
            act()
