"""The wire: one stream to one reducer, and the lane that sends chunks over it as bytes.

Theory of operation. The training thread queues chunks as views of the block's buffer, in the
layout's order, while backward still runs. gRPC's own sending thread takes them out and frames them,
so each chunk is copied once: into its frame. A receiving thread gives what comes back to the
collector. Both threads run at the same time, since a worker must read while it writes (rule 16).

A *lane* is what leads to one reducer. This one carries bytes; `shared.SharedLane` carries them
through memory that both processes map. Both use a `BulkStream`.

If worker and reducer both can, each chunk has a checksum, both ways. If one does not match, the
round is void: nothing of it is kept, and the step is tried again.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import grpc

from andon.protocol.encoding import Encoding, encode
from andon.protocol.layout import Chunk
from andon.protocol.messages import Abstain, AveragedBlock, BlockGradient, OpenRound, RoundOpened
from andon.protocol.run_settings import Policy
from andon.wire import checksums
from andon.wire.frames import FrameError, frame_request, parse_response
from andon_trainer.core.calls import Bytes, Floats
from andon_trainer.exchange.channels import open_channel
from andon_trainer.exchange.collector import Collector, OpenCall

__all__ = [
    "OPENING_S",
    "BulkStream",
    "Lane",
    "LanePart",
    "ReducerAccess",
    "ReducerUnfit",
    "WireLane",
]

log = logging.getLogger(__name__)

OPENING_S = 20.0
"""How long a reducer has to answer OpenRound."""

_METHOD = "/andon.v1.Reducer/Reduce"


class ReducerUnfit(ValueError):
    """A reducer that can't take what the policy asks for. Trying again would not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerAccess:
    """How a worker reaches its reducers."""

    opening_s: float = OPENING_S
    """How long each has to answer when its stream is opened."""
    shared_dir: Path | None = None
    """Where memory is shared with reducers of this host; None: nowhere."""
    tls: Path | None = None
    """The folder of certificates; None: streams are not encrypted."""


@dataclass(frozen=True, slots=True)
class LanePart:
    """What one lane carries, and how."""

    chunks: Sequence[Sequence[Chunk]]
    """The chunks of each block that go to this reducer, in rising order."""
    policy: Policy
    collector: Collector
    """Where its averages go. All lanes of an exchange have one."""
    access: ReducerAccess


class Lane(Protocol):
    """The way to one reducer. Used by the training thread alone."""

    @property
    def is_open(self) -> bool:
        """Whether its stream is alive, as far as this end knows."""

    @property
    def found_bad_value(self) -> bool:
        """Whether the reducer found a value in this worker's blocks that must not be averaged."""

    def open(self, address: str, opening: OpenRound) -> None:
        """Opens the stream, in place of what was open."""

    def begin(self, call: OpenCall) -> None:
        """Takes part in a call that the collector knows of."""

    def send(self, block: int, flat: Floats) -> None:
        """Sends the lane's chunks of a block; `flat` must stay as it is until the round is over."""

    def send_data(self, data: Bytes) -> None:
        """Sends a broadcast's bytes."""

    def abstain(self) -> None:
        """Tells the reducer that this rank gives nothing to the call."""

    def close(self) -> None:
        """Ends the stream."""


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


class WireLane:
    """A `Lane` that sends chunks as bytes."""

    def __init__(self, part: LanePart) -> None:
        """Opens nothing yet."""
        self._part = part
        self._call: OpenCall | None = None
        self._stream: BulkStream | None = None
        self._checked = False
        """Whether chunks have checksums on the present stream."""
        self.found_bad_value = False
        """Never: what goes over a wire is checked before it is sent."""
        # The sending thread alone writes the one, and the receiving thread alone the other.
        self.sent_bytes = self.received_bytes = 0

    def open(self, address: str, opening: OpenRound) -> None:
        """See `Lane`.

        Raises:
            ReducerUnfit: the reducer takes no payload as large as a chunk.
            TlsError, grpc.RpcError, FrameError: as `BulkStream`.
        """
        self.close()

        def lost(why: str) -> None:
            self._part.collector.lost(f"the reducer at {address}: {why}")

        self._stream = BulkStream(address, opening, self._received, lost, self._part.access)
        self._refuse_small_payloads(address, self._stream.opened.max_payload_bytes)
        # Set after the receiving thread was started. That is in time: no average comes before
        # something is sent.
        self._checked = checksums.CAPABILITY in self._stream.opened.capabilities

    def _refuse_small_payloads(self, address: str, most: int) -> None:
        """Refuses a reducer that takes no payload as large as a chunk; `most` of 0: unknown."""
        counts = (chunk.count for chunks in self._part.chunks for chunk in chunks)
        largest = max(counts, default=0) * self._part.policy.encoding.itemsize
        if not 0 < most < largest:
            return
        self.close()
        raise ReducerUnfit(
            f"the reducer at {address} takes payloads of {most} bytes, and this model's chunks "
            f"have {largest}: serve the line with a lower --chunk-elements, or the reducer with a "
            "higher --max-message-bytes"
        )

    @property
    def is_open(self) -> bool:
        """See `Lane`."""
        return self._stream is not None and self._stream.alive

    def begin(self, call: OpenCall) -> None:
        """See `Lane`."""
        self._call = call

    def send(self, block: int, flat: Floats) -> None:
        """See `Lane`."""
        call, policy = self._call, self._part.policy
        assert call is not None
        if self._stream is None:
            return
        for chunk in self._part.chunks[block]:
            numbers = flat[chunk.offset : chunk.offset + chunk.count]
            self._stream.send(
                partial(self._frame, call, chunk, numbers, policy.encoding, policy.answer_encoding)
            )

    def send_data(self, data: Bytes) -> None:
        """See `Lane`: the bytes travel as a block of single bytes."""
        call, step = self._call, self._part.policy.chunk_elements
        assert call is not None
        if self._stream is None:
            return
        for offset in range(0, data.size, step):
            chunk = Chunk(0, offset, min(step, data.size - offset))
            part = data[offset : offset + step].data
            self._stream.send(partial(self._frame, call, chunk, part, Encoding.UINT8, None))

    def abstain(self) -> None:
        """See `Lane`."""
        call = self._call
        assert call is not None
        if self._stream is None:
            return
        message = Abstain(
            key=call.key,
            rank=call.rank,
            world_size=call.world_size,
            sequence=call.call.sequence,
        )
        self._stream.send(lambda: frame_request(message, checksums=self._checked))

    def close(self) -> None:
        """See `Lane`."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _frame(
        self,
        call: OpenCall,
        chunk: Chunk,
        part: Floats | memoryview,
        encoding: Encoding,
        answer: Encoding | None,
    ) -> bytes:
        """One chunk as a frame. Runs on the sending thread."""
        assert call.operation is not None
        gradient = BlockGradient(
            key=call.key,
            rank=call.rank,
            world_size=call.world_size,
            block=chunk.block,
            offset=chunk.offset,
            count=chunk.count,
            weight=call.weight,
            sequence=call.call.sequence,
            operation=call.operation,
            payload=part if isinstance(part, memoryview) else encode(part, encoding),
            encoding=encoding,
            answer_encoding=answer,
        )
        data = frame_request(gradient, checksums=self._checked)
        self.sent_bytes += len(data)
        return data

    def _received(self, data: bytes) -> None:
        """Runs on the receiving thread."""
        message = parse_response(data)
        if isinstance(message, AveragedBlock):
            self.received_bytes += len(data)
            # Before its key is looked at: if the key is what was changed, the average would be
            # dropped as another round's, and be waited for for ever.
            if self._checked and not checksums.is_intact(message):
                self._part.collector.refuse_corrupt(message)
                return
        self._part.collector.receive(message)
