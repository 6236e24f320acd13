"""The ring's two streams at one rank: one to the next rank, and those from the rank before.

Theory of operation. The link to the next rank is a call over a channel of its own; frames are made
on gRPC's sending thread. The listener is a server on a port of its own. A thread reads each
incoming stream, hands on what came, and reads on while there is room. The owner of the listener
decides who may send. A stream that was not admitted yet may be ended in favour of newer ones, so
that strangers can't occupy the listener.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from andon.host.keepalive import RingKeepalive
from andon.host.tls import ServerIdentity, add_port, open_channel
from andon.protocol.limits import MAX_MESSAGE_BYTES
from andon.protocol.messages import PassMessage
from andon.protocol.reasons import Reason
from andon.protocol.records import Key
from andon.v1 import ring_pb2 as pb
from andon.wire import conversion
from andon.wire.fields import FrameError
from andon.wire.frames import parse_pass
from andon.wire.statuses import status_of
from andon_trainer.exchange.channels import close_in_children

__all__ = ["Incoming", "PassEnded", "PassReceived", "RingLink", "RingListener"]

_METHOD = "/andon.v1.Ring/Pass"


class RingLink:
    """One Pass stream to the next rank. `lost` is called once, by gRPC, unless it was closed."""

    def __init__(
        self,
        address: str,
        keepalive: RingKeepalive,
        sent: Callable[[int], None],
        lost: Callable[[RingLink, str, Key | None], None],
        tls: Path | None = None,
    ) -> None:
        """Opens the stream, without waiting for it.

        Args:
            address: where the next rank listens.
            keepalive: how often a silent connection is pinged, and when it is given up.
            sent: called on the sending thread with the size of each message.
            lost: called with this link, why it ended, and the greatest key there if the round of
                this link is older.
            tls: the folder of certificates; None: it is not encrypted.

        Raises:
            TlsError: the folder can't be used.
        """
        self.address = address
        self.alive = True
        self._sent = sent
        self._lost = lost
        self._closed = False
        self._outgoing: queue.SimpleQueue[Callable[[], bytes] | None] = queue.SimpleQueue()
        close_in_children(address)
        self._channel = open_channel(
            address,
            (
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.enable_retries", 0),
                *keepalive.client_options(),
                ("grpc.enable_http_proxy", 0),
            ),
            tls,
        )
        call: grpc.StreamUnaryMultiCallable[bytes, bytes] = self._channel.stream_unary(
            _METHOD, request_serializer=None, response_deserializer=None
        )
        self._call = call.future(self._frames())
        self._call.add_done_callback(self._ended)

    def send(self, frame: Callable[[], bytes]) -> None:
        """Sends what `frame` returns; it runs on the sending thread. Never blocks."""
        self._outgoing.put(frame)

    def close(self) -> None:
        """Ends the stream; what was not sent yet is dropped."""
        self._closed = True  # First: `_ended` must not report the end that follows.
        self.alive = False
        self._outgoing.put(None)
        self._call.cancel()
        self._channel.close()

    def _frames(self) -> Iterator[bytes]:
        """Runs on gRPC's sending thread."""
        # `_closed` is looked at too: what was queued before the end must not be framed in vain.
        while (frame := self._outgoing.get()) is not None and not self._closed:
            data = frame()
            self._sent(len(data))
            yield data

    def _ended(self, call: grpc.Future[bytes]) -> None:
        """Runs on a thread of gRPC's, once the call is over, whoever ended it."""
        self.alive = False
        self._outgoing.put(None)  # Ends the sending thread.
        if self._closed:
            return
        why, greatest = f"the next rank, at {self.address}, ended the stream", None
        try:
            message = pb.PassResponse.FromString(call.result())
            greatest = conversion.optional_key_from_proto(message.greatest)
        except grpc.RpcError as error:
            why = f"the next rank, at {self.address}: {error.code().name}: {error.details()}"
        except (grpc.FutureCancelledError, ValueError) as error:
            why = f"{why} ({type(error).__name__})"
        self._lost(self, why, greatest)


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
            self._room.wait_for(lambda: self._over or self._held_bytes < self._window_bytes)
            self._held_bytes += size
            return not self._over

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
    """A message came; `free(len(data))` is to be called once its bytes are used."""

    stream: Incoming
    message: PassMessage
    data: bytes


@dataclass(frozen=True, slots=True)
class PassEnded:
    """A stream brings no more; `end` is to be called once everything that it brought was judged."""

    stream: Incoming
    message: str


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

    def __init__(
        self,
        host: str,
        port: int,
        hear: Callable[[PassReceived | PassEnded], None],
        keepalive: RingKeepalive,
        tls: Path | None = None,
    ) -> None:
        """Starts to listen.

        Args:
            host: an address of this machine.
            port: 0 is any free one.
            hear: called by the stream's thread.
            keepalive: how often a silent connection is pinged.
            tls: the folder of certificates; None: streams are not encrypted.

        Raises:
            TlsError: the folder can't be used.
            ValueError: it can't listen there.
        """
        self._hear = hear
        self._lock = threading.Lock()
        self._streams: list[Incoming] = []
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
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("andon.v1.Ring", {"Pass": handler}),)
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
        self._server.start()

    def close(self) -> None:
        """Ends all streams and stops listening."""
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.refuse(Reason.SERVICE_LEAVING, "the worker is going away")
        # Calls that are cut, not answered, make gRPC complain at the neighbour's.
        self._server.stop(_GRACE_S).wait()

    def _pass(self, requests: Iterator[bytes], context: Any) -> pb.PassResponse:
        """One call. It can be answered at any time, since another thread reads."""
        stream = Incoming()
        self._enter(stream)
        reader = threading.Thread(
            target=self._read, args=(stream, requests), name="andon-ring-read", daemon=True
        )
        reader.start()
        try:
            return stream.answer(context)
        finally:
            self._leave(stream)

    def _read(self, stream: Incoming, requests: Iterator[bytes]) -> None:
        why = "the rank before this one ended its stream"
        try:
            for data in requests:
                # Waits for room, and does not read on meanwhile: gRPC's own flow control then makes
                # the rank before wait.
                if not stream.hold(len(data)):
                    break
                self._hear(PassReceived(stream, parse_pass(data), data))
        except grpc.RpcError:
            why = "the stream of the rank before this one broke"
        except FrameError as error:
            why = f"the rank before this one sent what can't be read: {error}"
            stream.refuse(Reason.INVALID_MESSAGE, str(error))
        finally:
            self._hear(PassEnded(stream, why))

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
