"""A bulk stream: frames up and frames down over a channel of its own, each on its own thread."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc

from andon.protocol.messages import OpenRound, RoundOpened
from andon.wire.frames import FrameError, frame_request, parse_response
from andon_trainer.exchange.control import open_channel

__all__ = ["OPENING_S", "BulkStream"]

log = logging.getLogger(__name__)

OPENING_S = 20.0
"""How long a reducer has to answer OpenRound."""

_METHOD = "/andon.v1.Reducer/Reduce"


class BulkStream:
    """One Reduce stream. `received` and `lost` are called on its receiving thread."""

    def __init__(
        self,
        address: str,
        opening: OpenRound,
        received: Callable[[bytes], None],
        lost: Callable[[str], None],
        *,
        opening_s: float,
        tls: Path | None = None,
    ) -> None:
        """Opens the stream and waits until the reducer has answered, at most `opening_s`.

        Raises:
            TlsError: `tls`, the folder of certificates, can't be used.
            grpc.RpcError: the reducer can't be reached or refuses the stream.
        """
        self._channel = open_channel(address, tls)
        self._outgoing: queue.SimpleQueue[Callable[[], bytes] | None] = queue.SimpleQueue()
        self._received = received
        self._lost = lost
        self._closing = threading.Event()
        self.alive = True
        self.send(lambda: frame_request(opening))
        exchange: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(
            _METHOD, request_serializer=None, response_deserializer=None
        )
        self._call = exchange(self._frames())
        try:
            self.opened = self._await_opened(opening_s)
        except BaseException:
            self._outgoing.put(None)  # so that the thread that sends can end
            self._channel.close()
            raise
        self._thread = threading.Thread(target=self._read, name="andon-bulk", daemon=True)
        self._thread.start()

    def _await_opened(self, opening_s: float) -> RoundOpened:
        # A process that was stopped takes connections, and never answers.
        patience = threading.Timer(opening_s, self._call.cancel)
        patience.start()
        try:
            answer = next(self._call)
        finally:
            patience.cancel()
        opened = parse_response(answer)
        if not isinstance(opened, RoundOpened):
            raise FrameError("the reducer did not answer OpenRound with RoundOpened")
        return opened

    def send(self, frame: Callable[[], bytes]) -> None:
        """Sends what `frame` returns, if anything, on the sending thread. Never blocks."""
        self._outgoing.put(frame)

    def close(self) -> None:
        """Ends the stream; nothing is received after it returns."""
        self._closing.set()
        self._outgoing.put(None)
        self._call.cancel()
        self._thread.join()
        self._channel.close()

    def _frames(self) -> Iterator[bytes]:
        while (frame := self._outgoing.get()) is not None:
            if data := frame():
                yield data

    def _read(self) -> None:
        reason = "the reducer ended the stream"
        try:
            for data in self._call:
                self._received(data)
        except grpc.RpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except FrameError as error:
            reason = f"the reducer sent what can't be read: {error}"
            self._call.cancel()
        finally:
            self.alive = False
            if not self._closing.is_set():
                self._lost(reason)
