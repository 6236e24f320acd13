"""The streams from the rank before: a server for their calls, and the TCP lanes of these.

Theory of operation. The listener is a server on a port of its own, and beside it a port for lanes.
A thread reads each incoming stream, hands on what came, and reads on while there is room. The owner
of the listener decides who may send. A stream that was not admitted yet may be ended in favour of
newer ones, so that strangers can't occupy the listener.

A stream's messages come over its call or over its lane, and never over both: the first message
decides. The thread that reads the lane writes numbers to where they belong
(`core/ring_landing.py`). After `Incoming.fence` it writes nothing any more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from andon.host.keepalive import RingKeepalive
from andon.host.tls import ServerIdentity, add_port
from andon.protocol.limits import MAX_MESSAGE_BYTES, MAX_PAYLOAD_BYTES
from andon.protocol.messages import LaneReport, PassMessage, RingChunk
from andon.protocol.reasons import Reason
from andon.protocol.records import Key
from andon.tcp.connection import TcpConnection
from andon.tcp.framing import PREFIX_BYTES
from andon.tcp.listening import OpenOffer, TcpListener
from andon.tcp.proof import CAPABILITY, LaneDirection, LaneSession
from andon.tcp.receiving import FrameReader, TcpReceiver
from andon.v1 import reducer_pb2
from andon.v1 import ring_pb2 as pb
from andon.wire import conversion
from andon.wire.fields import FrameError
from andon.wire.frames import parse_pass, parse_pass_head, with_payload
from andon.wire.lane_reports import frame_report, read_asked
from andon.wire.statuses import status_of
from andon_trainer.core.ring_landing import (
    PIECE_BYTES,
    Arrived,
    Carrier,
    Landing,
    Landings,
    MeanLanding,
)
from andon_trainer.exchange.channels import close_in_children
from andon_trainer.exchange.ring.link import OFFER_METADATA, WANTED_METADATA

__all__ = ["Incoming", "PassEnded", "PassReceived", "RingListener"]

log = logging.getLogger(__name__)

_GRACE_S = 1.0
"""How long calls have to end by themselves once their streams are refused."""
_MOST_STREAMS = 16
_MOST_UNADMITTED = 4
_WINDOW_BYTES = 64 * 2**20
"""Reading stops while an admitted stream has so much that is not used, plus one message."""
_UNADMITTED_BYTES = 2**20
"""The same for other streams: before a round is begun here only headers may come."""


class Incoming:
    """One stream to this rank. Any thread may end it, and it ends once."""

    def __init__(self) -> None:
        """Nothing came yet."""
        self.admitted = False
        """Whether its token was right."""
        self.landings: Landings | None = None
        """Where its chunks may land. Set by the ring's thread while it is in the present round."""
        self._lane: _Lane | None = None
        self._by_call = False
        """Whether its messages come over the call, and a lane is of no use any more."""
        self._told = False
        """Whether its end was handed on."""
        self._room = threading.Condition()
        self._held_bytes = 0
        self._over = False
        self._verdict: tuple[Reason, str] | None = None
        self._greatest: Key | None = None

    def end(self) -> None:
        """Ends it: nothing more comes, or is read."""
        self._conclude(None, None)

    def refuse(self, reason: Reason, message: str) -> None:
        """Ends it with an error."""
        self._conclude((reason, message), None)

    def refuse_stale(self, greatest: Key) -> None:
        """Ends it: its round is older than `greatest`."""
        self._conclude(None, greatest)

    def free(self, size: int) -> None:
        """Gives back room: `size` bytes of what came are used."""
        with self._room:
            self._held_bytes -= size
            self._room.notify_all()

    def hold(self, size: int) -> bool:
        """Waits for room for `size` bytes; False if the stream is over."""
        with self._room:
            # Asked before the message is added: one that is larger than the window gets in, too.
            self._room.wait_for(lambda: self._over or self._held_bytes < self._window_bytes)
            self._held_bytes += size
            return not self._over

    def join(self, connection: TcpConnection, listener: RingListener) -> None:
        """Takes a lane, unless it is too late for one."""
        with self._room:
            # Decided by other threads, since the neighbour began to connect.
            if self._over or self._by_call:
                connection.close()
                return
            self._lane = _Lane(self, connection, listener)

    def use_call(self) -> bool:
        """Notes that a message came over the call; False if a lane has carried some already."""
        # Without the lock, as it never becomes False again.
        if self._by_call:
            return True
        with self._room:
            lane = self._lane
            if lane is not None and lane.used:
                return False
            # A neighbour that gave the lane up did so before it sent anything.
            self._by_call = True
        # Outside the lock: it waits for the lane's thread, which takes the lock in `hold`.
        self._close_lane()
        return True

    def is_of_call(self) -> bool:
        """Whether it goes on without its lane."""
        return self._by_call

    def fence(self) -> None:
        """Returns once nothing more is received. Only for a stream that is over."""
        assert self._over
        # `hold` lets the lane's thread go, since the stream is over.
        self._close_lane()

    def _close_lane(self) -> None:
        with self._room:
            lane = self._lane
        if lane is not None:
            lane.receiver.close()

    def report(self) -> LaneReport:
        """What came over its lane."""
        with self._room:
            lane = self._lane
        if lane is None:
            return LaneReport(0, reading=False, sent_bytes=0)
        return LaneReport(lane.receiver.received_bytes, lane.receiver.reading, sent_bytes=0)

    def tell_end(self) -> bool:
        """True for the first caller, who reports the stream's end; False for all others."""
        with self._room:
            told, self._told = self._told, True
        return not told

    @property
    def _window_bytes(self) -> int:
        return _WINDOW_BYTES if self.admitted else _UNADMITTED_BYTES

    def answer(self, context: Any) -> pb.PassResponse:
        """Waits until it is over; returns what its caller gets."""
        with self._room:
            self._room.wait_for(lambda: self._over)
            verdict, greatest = self._verdict, self._greatest
        if verdict is not None:
            context.abort_with_status(status_of(*verdict))
        return pb.PassResponse(greatest=conversion.key_to_proto(greatest))

    def _conclude(self, verdict: tuple[Reason, str] | None, greatest: Key | None) -> None:
        with self._room:
            if not self._over:  # The first verdict counts.
                self._over, self._verdict, self._greatest = True, verdict, greatest
                self._room.notify_all()


@dataclass(frozen=True, slots=True)
class PassReceived:
    """A message came; `free(arrived.size)` is to be called once its bytes are used."""

    stream: Incoming
    arrived: Arrived


@dataclass(frozen=True, slots=True)
class PassEnded:
    """A stream brings no more; `end` is to be called once everything that it brought was judged."""

    stream: Incoming
    message: str


class _Lane:
    """Receives the frames of one stream; everything runs on the receiving thread."""

    def __init__(self, stream: Incoming, connection: TcpConnection, listener: RingListener) -> None:
        """Starts the thread."""
        self.used = False
        """Whether a frame came."""
        self._stream, self._listener = stream, listener
        self._head = b""
        self._landing: Landing | None = None
        self._room = np.empty(PIECE_BYTES, dtype=np.uint8).data
        """For sums, which are added piece by piece."""
        reading = FrameReader(
            parse=self._parse,
            place=self._place,
            received=self._received,
            ended=self._ended,
            max_payload_bytes=MAX_PAYLOAD_BYTES,
        )
        # Last: its thread starts at once, and uses all of the above.
        self.receiver = TcpReceiver[PassMessage](connection, reading, "andon-ring-read")

    def _parse(self, head: memoryview, payload_bytes: int) -> PassMessage:
        # Before the frame is handed on: from here on a message over the call breaks the protocol.
        self.used = True
        self._head = bytes(head)
        return parse_pass_head(head, payload_bytes)

    def _place(self, message: PassMessage, size: int) -> memoryview | Iterator[memoryview]:
        # Waits for room, and does not read on meanwhile: the rank before waits in its kernel.
        if not self._stream.hold(size):
            raise ConnectionAbortedError("the stream is over")
        # Read once: the ring's thread may take it away.
        landings = self._stream.landings
        self._landing = None if landings is None else landings.take(message)
        if self._landing is None:
            return np.empty(size, dtype=np.uint8).data
        return self._landing.pieces(self._room)

    def _received(self, message: PassMessage, payload: memoryview, size: int) -> None:
        landing, self._landing = self._landing, None
        # A frame without a payload never came by `_place`, so its room is taken here.
        held = size - len(self._head) - PREFIX_BYTES
        if not held:
            held = size
            if not self._stream.hold(held):
                raise ConnectionAbortedError("the stream is over")
        if isinstance(landing, MeanLanding):
            payload = landing.place.view(np.uint8).data
        if isinstance(message, RingChunk):
            message = with_payload(message, payload)
        self._listener.hear(
            PassReceived(self._stream, Arrived(message, self._head, held, Carrier.LANE, landing))
        )

    def _ended(self, error: Exception | None) -> None:
        if self._stream.is_of_call():
            return
        if isinstance(error, FrameError):
            self._listener.read_nonsense(self._stream, error)
        elif self.used:
            self._listener.read_end(self._stream, "the lane of the rank before this one broke")


class _Daemons(futures.ThreadPoolExecutor):
    """A thread for each call. Unlike a pool's threads, none keeps the process from ending."""

    def submit(self, act: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        """Starts it."""
        done: futures.Future[Any] = futures.Future()

        def run() -> None:
            try:
                done.set_result(act(*arguments, **named))
            except BaseException as error:  # The boundary of this thread: gRPC gets it.
                done.set_exception(error)

        threading.Thread(target=run, name="andon-ring-call", daemon=True).start()
        return done


class RingListener:
    """Serves `andon.v1.Ring`; calls `hear` on the threads that read its streams."""

    def __init__(  # where it listens, and how
        self,
        host: str,
        port: int,
        hear: Callable[[PassReceived | PassEnded], None],
        keepalive: RingKeepalive,
        tls: Path | None = None,
        *,
        lanes: bool = True,
    ) -> None:
        """Starts to listen.

        Args:
            host: an address of this machine.
            port: 0 is any free one. Lanes are always at another one, any that is free.
            hear: called by the stream's thread.
            keepalive: how often a silent connection is pinged.
            tls: the folder of certificates; None: streams are not encrypted.
            lanes: whether TCP lanes are offered.

        Raises:
            TlsError: the folder can't be used.
            ValueError: it can't listen there.
        """
        self.hear = hear
        self._lock = threading.Lock()
        self._streams: list[Incoming] = []
        self._offered: dict[bytes, Incoming] = {}
        """By the whole nonce of the offer of its lane."""
        self._server = grpc.server(
            _Daemons(),
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                *keepalive.server_options(),
            ),
            maximum_concurrent_rpcs=_MOST_STREAMS,
        )
        handler: grpc.RpcMethodHandler[bytes, pb.PassResponse] = (
            grpc.stream_unary_rpc_method_handler(
                self._pass, response_serializer=pb.PassResponse.SerializeToString
            )
        )
        reports: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(
            self._report_lane
        )
        calls: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Pass": handler,
            "ReportLane": reports,
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("andon.v1.Ring", calls),)
        )
        where = f"[{host}]" if ":" in host else host
        try:
            identity = None if tls is None else ServerIdentity(tls)
            self.port = add_port(self._server, f"{where}:{port}", identity)
        except RuntimeError as error:
            raise ValueError(
                f"this worker can't listen for its neighbour on {where}:{port} ({error}): set "
                "ANDON_RING_BIND to one of this machine's addresses, with no port for any free one"
            ) from error
        close_in_children(f"{where}:{self.port}")
        self.lanes: TcpListener | None = None
        """Listens for lanes; None: none are offered."""
        if lanes:
            self.lanes = TcpListener(host, identity=identity)
            close_in_children(f"{where}:{self.lanes.port}")
        self._server.start()

    def close(self) -> None:
        """Ends all streams and stops listening."""
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.refuse(Reason.SERVICE_LEAVING, "the worker is going away")
        # Calls that are cut, not answered, make gRPC complain at the neighbour's.
        self._server.stop(_GRACE_S).wait()
        if self.lanes is not None:
            self.lanes.close()

    def read_end(self, stream: Incoming, why: str) -> None:
        """A stream brings no more."""
        if stream.tell_end():
            self.hear(PassEnded(stream, why))

    def read_nonsense(self, stream: Incoming, error: FrameError) -> None:
        """A stream brought what can't be read."""
        stream.refuse(Reason.INVALID_MESSAGE, str(error))
        self.read_end(stream, f"the rank before this one sent what can't be read: {error}")

    def _pass(self, requests: Iterator[bytes], context: Any) -> pb.PassResponse:
        """One call. It can be answered at any time, since another thread reads."""
        stream = Incoming()
        self._enter(stream)
        offer = self._offer(stream, context)
        reader = threading.Thread(
            target=self._read, args=(stream, requests), name="andon-ring-read", daemon=True
        )
        reader.start()
        try:
            return stream.answer(context)
        finally:
            self._leave(stream)
            if self.lanes is not None and offer is not None:
                self.lanes.withdraw(offer)
                with self._lock:
                    del self._offered[offer.message.nonce]
            stream.fence()

    def _offer(self, stream: Incoming, context: Any) -> OpenOffer | None:
        """Offers a lane to a caller that asks for one."""
        if (WANTED_METADATA, CAPABILITY) not in context.invocation_metadata():
            return None

        def joined(_direction: LaneDirection, connection: TcpConnection) -> None:
            stream.join(connection, self)

        offer = None
        if self.lanes is not None:
            offer = self.lanes.offer(
                LaneSession(b""), joined, frozenset({LaneDirection.CLIENT_SENDS})
            )
        if offer is None:
            context.send_initial_metadata(())  # So that it need not wait to learn that.
            return None
        told = reducer_pb2.TcpOffer(
            port=offer.message.port, nonce=offer.message.nonce, reports=offer.message.reports
        )
        with self._lock:
            # Before the caller hears of it: it may ask about the lane at once.
            self._offered[offer.message.nonce] = stream
        context.send_initial_metadata(((OFFER_METADATA, told.SerializeToString()),))
        return offer

    def _report_lane(self, asked: bytes, context: Any) -> bytes:
        """One call of ReportLane."""
        try:
            nonce = read_asked(asked)
        except FrameError as error:
            context.abort_with_status(status_of(Reason.INVALID_MESSAGE, str(error)))
        with self._lock:
            stream = self._offered.get(nonce)
        if stream is None:
            text = "no open call has an offer of a lane with this nonce"
            context.abort_with_status(status_of(Reason.TOKEN, text))
        assert stream is not None, "to abort a call raises"
        return frame_report(stream.report())

    def _read(self, stream: Incoming, requests: Iterator[bytes]) -> None:
        why = "the rank before this one ended its stream"
        try:
            for data in requests:
                # Waits for room, and does not read on meanwhile: gRPC's own flow control then makes
                # the rank before wait.
                if not stream.hold(len(data)):
                    break
                if not stream.use_call():
                    raise FrameError("a message over gRPC, though the stream has a TCP lane")
                arrived = Arrived(parse_pass(data), data, len(data))
                self.hear(PassReceived(stream, arrived))
        except grpc.RpcError:
            why = "the stream of the rank before this one broke"
        except FrameError as error:
            self.read_nonsense(stream, error)
        finally:
            self.read_end(stream, why)

    def _enter(self, stream: Incoming) -> None:
        with self._lock:
            self._streams.append(stream)
            # The oldest of these are ended: a stranger's stream never gets admitted, and the rank
            # before this one opens another if it hits that one.
            unadmitted = [each for each in self._streams if not each.admitted]
        for each in unadmitted[:-_MOST_UNADMITTED]:
            each.refuse(Reason.REJOIN_NEEDED, "newer streams took this one's place")

    def _leave(self, stream: Incoming) -> None:
        with self._lock:
            self._streams.remove(stream)
