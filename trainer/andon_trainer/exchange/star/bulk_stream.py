"""A stream to one reducer over gRPC: it opens, carries bytes both ways, and ends.

gRPC's own sending thread takes messages out of a queue and frames them; a receiving thread hands on
what comes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc

from andon.protocol.messages import LaneReport, OpenRound, RoundOpened
from andon.wire.frames import FrameError, frame_request, parse_response
from andon.wire.lane_reports import REDUCER_METHOD
from andon_trainer.exchange.channels import open_channel
from andon_trainer.exchange.star.lane_watch import PATIENCE_S, asking

__all__ = ["OPENING_S", "REASON_S", "BulkStream", "ReducerAccess"]

OPENING_S = 20.0
"""How long a reducer has to answer OpenRound."""

REASON_S = 1.0
"""How long whatever carries a stream's messages beside gRPC waits, once it ended, for gRPC to say
why."""

_METHOD = "/andon.v1.Reducer/Reduce"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerAccess:
    """How a worker reaches its reducers."""

    opening_s: float = OPENING_S
    """How long each has to answer when its stream is opened."""
    shared_dir: Path | None = None
    """Where memory is shared with reducers of this host; None: nowhere."""
    tls: Path | None = None
    """The folder of certificates; None: streams are not encrypted."""
    lane_patience_s: float = PATIENCE_S
    """How long a TCP lane may stand still while the reducer answers over gRPC."""
    connections: int | None = None
    """How many connections each TCP lane has, if the reducer takes as many; None: what it says."""


class BulkStream:
    """One Reduce stream. `received` and `lost` are called on its receiving thread."""

    def __init__(
        self,
        address: str,
        opening: OpenRound,
        received: Callable[[bytes], None],
        lost: Callable[[str], None],
        access: ReducerAccess,
    ) -> None:
        """Opens the stream and waits until the reducer has answered.

        Raises:
            TlsError: the folder of certificates can't be used.
            grpc.RpcError: the reducer can't be reached, does not answer in time, or refuses.
            FrameError: its answer can't be read.
        """
        self._channel = open_channel(address, access.tls)
        # Not bounded: what waits are views of gradients that exist anyway, and one round's at most.
        self._outgoing: queue.SimpleQueue[Callable[[], bytes] | None] = queue.SimpleQueue()
        self._received = received
        self._lost = lost
        self._closing = threading.Event()
        self.alive = True
        self.ended = threading.Event()
        """Set once the stream's end was reported, or needs no report."""
        # Queued before the call exists: OpenRound must be its first message.
        self.send(lambda: frame_request(opening))
        exchange: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(
            _METHOD, request_serializer=None, response_deserializer=None
        )
        self._call = exchange(self._frames())
        try:
            self.opened = self._await_opened(access.opening_s)
        except BaseException:
            self._outgoing.put(None)  # Ends the sending thread.
            self._channel.close()
            raise
        self._thread = threading.Thread(target=self._read, name="andon-bulk", daemon=True)
        self._thread.start()

    def _await_opened(self, opening_s: float) -> RoundOpened:
        # Not a deadline of the call, which lives for many rounds. A process that was stopped
        # accepts connections, and never answers.
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
        """Sends what `frame` returns, if anything; it runs on the sending thread. Never blocks."""
        self._outgoing.put(frame)

    def asking(self, nonce: bytes, patience_s: float) -> Callable[[], LaneReport | None]:
        """What asks the reducer about the TCP lanes of an offer."""
        return asking(self._channel, REDUCER_METHOD, nonce, patience_s)

    def close(self) -> None:
        """Ends the stream; nothing is received after it returns."""
        self._closing.set()  # First, so that the end that follows is not reported as a loss.
        self._outgoing.put(None)
        self._call.cancel()
        self._thread.join()
        self._channel.close()

    def _frames(self) -> Iterator[bytes]:
        """Runs on gRPC's sending thread."""
        while (frame := self._outgoing.get()) is not None:
            if data := frame():
                yield data

    def _read(self) -> None:
        """Runs on the receiving thread."""
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
            # Before `lost` is called: whoever hears of the loss must find the stream dead.
            self.alive = False
            if not self._closing.is_set():
                self._lost(reason)
            # After `lost`: whoever waits for it goes by what was reported.
            self.ended.set()
