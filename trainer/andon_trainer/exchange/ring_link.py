"""The ring's link: this rank's stream to the next one, over a channel of its own."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc

from andon.host.keepalive import RingKeepalive
from andon.host.tls import open_channel
from andon.protocol.limits import MAX_MESSAGE_BYTES
from andon.protocol.records import Key
from andon.v1 import ring_pb2 as pb
from andon.wire import conversion
from andon_trainer.exchange.forks import close_in_children

__all__ = ["RingLink"]

_METHOD = "/andon.v1.Ring/Pass"


class RingLink:
    """One Pass stream. `lost` is called once, on a thread of gRPC, unless it was closed."""

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
            sent: told the length of each message, on the sending thread.
            lost: told this link, why it ended, and the greatest key there if it is too old.
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
        """Sends what `frame` returns; it is called on the sending thread. Never blocks."""
        self._outgoing.put(frame)

    def close(self) -> None:
        """Ends the stream; what was not sent yet is forgotten."""
        self._closed = True
        self.alive = False
        self._outgoing.put(None)
        self._call.cancel()
        self._channel.close()

    def _frames(self) -> Iterator[bytes]:
        while (frame := self._outgoing.get()) is not None and not self._closed:
            data = frame()
            self._sent(len(data))
            yield data

    def _ended(self, call: grpc.Future[bytes]) -> None:
        self.alive = False
        self._outgoing.put(None)
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
