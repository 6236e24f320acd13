"""The shared-memory exchange: blocks lie where the reducer reads them, averages where it wrote.

Theory of operation. Gradients are laid into memory that the reducer maps too, and a message says
which elements are there. What waits to be sent when the stream is free goes in one message, so that
many blocks cost about as much as one. The reducer looks for values that must not be averaged in the
pass that averages; nothing is looked at here.

A worker begins another exchange only after it has read the averages of the one before, and sends
nothing of it earlier: so a reducer that has a part of the new exchange from every rank may write
over the old averages. docs/shared-memory.md says why that holds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from andon.host.arena import (
    CAPABILITY,
    ITEM_BYTES,
    ArenaLayout,
    SharedMemoryUnavailable,
    folder_identity,
)
from andon.protocol.encoding import Encoding
from andon.protocol.layout import Chunk, Layout
from andon.protocol.messages import (
    Abstain,
    AveragedBlock,
    BlockFault,
    BlockGradient,
    OpenRound,
    Operation,
    Request,
    Slice,
)
from andon.protocol.run_settings import Policy
from andon.wire.frames import FrameError, batch_requests, frame_request, parse_responses
from andon_trainer.core.calls import Bytes, Call, Floats
from andon_trainer.core.events import Assigned
from andon_trainer.exchange.collector import Collector, Round
from andon_trainer.exchange.inbox import Inbox
from andon_trainer.exchange.lane import Lane
from andon_trainer.exchange.shared_memory import SharedMemory
from andon_trainer.exchange.stream import OPENING_S, BulkStream
from andon_trainer.exchange.traffic import Traffic

__all__ = ["SPAN_ELEMENTS", "SharedExchange"]

SPAN_ELEMENTS = 2**24
"""About so many elements are told of at once: 64 MiB. Most blocks are one message."""

_CLEARED_BYTES_PER_S = 2**25
"""How long a reducer may take for the memory, by the model's size: it clears twice that for the
first worker of a host, and for all of them one after the other."""

_MAX_BATCH = 256


@dataclass(frozen=True, slots=True)
class _Span:
    """A part of a block that one message is about: some chunks, one after the other."""

    offset: int
    count: int
    at: int
    """Its first byte in the memory."""


class _Averages(Collector):
    """Collects averages that lie in shared memory."""

    memory: SharedMemory | None = None

    def _clear(self, call: Call) -> None:
        self.averages = list(self.averages)
        for block in call.blocks:
            self.averages[block] = np.zeros_like(self.averages[block])

    def _keep(self, message: AveragedBlock, call: Call) -> None:
        if call.data is not None:
            super()._keep(message, call)
        elif self.memory is None or not self.memory.holds(message):
            raise FrameError("an average is not where it must be in the shared memory")


class SharedExchange:
    """One stream to one reducer of this host; an `Exchange`, a `Lender`, and a `Carrier`."""

    def __init__(
        self,
        layout: Layout,
        policy: Policy,
        inbox: Inbox,
        folder: Path,
        lane: Lane | None = None,
        *,
        tls: Path | None = None,
    ) -> None:
        """Opens nothing yet.

        Args:
            layout: what is exchanged.
            policy: how.
            inbox: is told what comes of it.
            folder: where memory is shared.
            lane: what it carries, and who takes the averages out of the memory; None: everything,
                and averages stay there.
            tls: the folder of certificates of its stream; None: that is not encrypted.
        """
        self._tls = tls
        self._folder = folder
        self._chunk_elements = policy.chunk_elements
        self._float32 = policy.encoding is Encoding.FLOAT32 and policy.answer_encoding in (
            None,
            Encoding.FLOAT32,
        )
        self._places = ArenaLayout(tuple(block.elements for block in layout.blocks))
        opening_s = OPENING_S if lane is None else lane.opening_s
        self._opening_s = opening_s + self._places.size_bytes / _CLEARED_BYTES_PER_S
        self._spans = [
            self._spans_of(block, None if lane is None else lane.chunks[block])
            for block in range(len(layout.blocks))
        ]
        self._whole = Call(name="line.backward", blocks=range(len(layout.blocks)))
        own = _Averages(Layout(()), inbox)
        self._own = own if lane is None else None
        self._collector: Collector = own if lane is None else lane.collector
        self._memory: SharedMemory | None = None
        self._stream: BulkStream | None = None
        self._round: Round | None = None
        self._waiting: deque[Request] = deque()
        self._faulty = False
        self.first_sent: float | None = None
        self.sent_bytes = self.received_bytes = 0
        # One thread sends and counts, another receives and counts.

    def open(self, address: str, opening: OpenRound) -> None:
        """See `Exchange`.

        Raises:
            SharedMemoryUnavailable: there is no memory to share; nothing is open.
            grpc.RpcError: the reducer can't be reached, or refuses.
        """
        self.close()
        if not self._float32:
            raise SharedMemoryUnavailable(
                "the line's encoding is not float32, which shared memory is for"
            )
        asking = replace(
            opening,
            capabilities=(CAPABILITY,),  # No checksums: nothing of it leaves this host.
            block_elements=self._places.elements,
            shared_folder=folder_identity(self._folder),
        )

        def lost(why: str) -> None:
            self._collector.lost(f"the reducer at {address}: {why}")

        stream = BulkStream(
            address, asking, self._received, lost, opening_s=self._opening_s, tls=self._tls
        )
        try:
            memory = SharedMemory(self._folder, stream.opened, self._places)
        except BaseException:
            stream.close()
            raise
        self._stream, self._memory, self._waiting = stream, memory, deque()
        if self._own is not None:
            self._own.memory, self._own.averages = memory, memory.averages
        self._send(memory.proof)

    @property
    def averages(self) -> list[Floats]:
        """See `Exchange`."""
        return self._collector.averages

    @property
    def traffic(self) -> Traffic:
        """See `Exchange`."""
        return Traffic.over("shared-memory", self.sent_bytes, self.received_bytes)

    @property
    def is_open(self) -> bool:
        """See `Exchange`."""
        return self._stream is not None and self._stream.alive

    @property
    def refused(self) -> bool:
        """See `Exchange`: the reducer found such a value in what this worker gave."""
        return self._faulty

    def lend(self, block: int) -> tuple[Floats, Bytes] | None:
        """See `Lender`."""
        if self._memory is None or self._stream is None:
            return None
        return self._memory.contributions[block], self._memory.memory

    def begin(self, assigned: Assigned, weight: float, call: Call | None = None) -> None:
        """See `Exchange`."""
        call = call or self._whole
        if call.data is None:
            missing = sum(self._places.elements[block] for block in call.blocks)
        else:
            missing = call.data.size
        current = Round(assigned.key, assigned.rank, assigned.world_size, weight, call, missing)
        self.carry(current)
        if self._own is not None and self._memory is not None:
            self._own.averages = self._memory.averages
        self._collector.begin(current)

    def carry(self, current: Round) -> None:
        """See `Carrier`."""
        self._faulty = False
        self.first_sent = None
        if self._memory is not None:
            self._memory.generation += 1
        self._round = current

    def submit(self, block: int, flat: Floats) -> None:
        """See `Exchange`; a vector that is not the lent one is copied there."""
        self.send(block, flat)

    def send(self, block: int, flat: Floats) -> None:
        """See `Carrier`."""
        current, memory = self._round, self._memory
        assert current is not None
        if self._stream is None or memory is None:
            return
        mine = memory.contributions[block]
        lent = flat.__array_interface__["data"] == mine.__array_interface__["data"]
        if self.first_sent is None:
            self.first_sent = time.perf_counter()
        for span in self._spans[block]:
            length = span.count * ITEM_BYTES
            if not lent:
                part = slice(span.offset, span.offset + span.count)
                np.copyto(mine[part], flat[part])
            self._send(
                BlockGradient(
                    key=current.key,
                    rank=current.rank,
                    world_size=current.world_size,
                    block=block,
                    offset=span.offset,
                    count=span.count,
                    weight=current.weight,
                    sequence=current.call.sequence,
                    slice=Slice(span.at, length, memory.generation),
                )
            )
            self.sent_bytes += length

    def submit_data(self) -> None:
        """See `Exchange`: bytes of a broadcast travel as on the wire."""
        current = self._round
        assert current is not None
        data = current.call.data
        assert data is not None
        self.first_sent = time.perf_counter()
        for offset in range(0, data.size, self._chunk_elements):
            part = data[offset : offset + self._chunk_elements]
            self._send(
                BlockGradient(
                    key=current.key,
                    rank=current.rank,
                    world_size=current.world_size,
                    block=0,
                    offset=offset,
                    count=part.size,
                    weight=current.weight,
                    sequence=current.call.sequence,
                    operation=Operation.BROADCAST,
                    payload=part.data,
                    encoding=Encoding.UINT8,
                )
            )
            self.sent_bytes += part.size

    def abstain(self) -> None:
        """See `Exchange`."""
        current = self._round
        assert current is not None
        self._send(
            Abstain(
                key=current.key,
                rank=current.rank,
                world_size=current.world_size,
                sequence=current.call.sequence,
            )
        )

    def end(self) -> None:
        """See `Exchange`; the stream goes too if something of the round may be on the way."""
        current, self._round = self._round, None
        self._collector.end()
        if current is not None and current.missing and self.first_sent is not None:
            self.close()

    def close(self) -> None:
        """Ends the stream. What was lent, and the averages, stay as they are while held."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _spans_of(self, block: int, chunks: Sequence[Chunk] | None) -> list[_Span]:
        start = self._places.starts[block]
        step = max(1, SPAN_ELEMENTS // self._chunk_elements) * self._chunk_elements
        runs = [(0, self._places.elements[block])] if chunks is None else _runs(chunks)
        return [
            _Span(offset, min(step, stop - offset), start + offset * ITEM_BYTES)
            for begin, stop in runs
            for offset in range(begin, stop, step)
        ]

    def _send(self, message: Request) -> None:
        if self._stream is not None:
            self._waiting.append(message)
            self._stream.send(partial(_framed, self._waiting))

    def _received(self, data: bytes) -> None:
        """Runs on the receiving thread."""
        for message in parse_responses(data):
            current = self._round
            if isinstance(message, AveragedBlock):
                self.received_bytes += message.count * message.encoding.itemsize
            elif isinstance(message, BlockFault) and current is not None:
                mine = (message.key, message.rank) == (current.key, current.rank)
                self._faulty = self._faulty or mine
            if self._own is None and isinstance(message, AveragedBlock):
                message = self._with_numbers(message)
            self._collector.receive(message)

    def _with_numbers(self, average: AveragedBlock) -> AveragedBlock:
        """An average as it would come over the wire."""
        if average.slice is None:
            return average
        if self._memory is None or not self._memory.holds(average):
            raise FrameError("an average is not where it must be in the shared memory")
        numbers = self._memory.averages[average.block]
        numbers = numbers[average.offset : average.offset + average.count]
        return replace(average, slice=None, payload=numbers.view(np.uint8).data)


def _runs(chunks: Sequence[Chunk]) -> list[tuple[int, int]]:
    """First element and end of each stretch of chunks without a gap."""
    runs: list[tuple[int, int]] = []
    for chunk in chunks:
        begin = chunk.offset
        if runs and runs[-1][1] == begin:
            begin = runs.pop()[0]
        runs.append((begin, chunk.offset + chunk.count))
    return runs


def _framed(waiting: deque[Request]) -> bytes:
    """What waits for a stream, as one message; nothing if it has gone with an earlier one.

    Runs on the stream's sending thread, which alone takes from what waits.
    """
    frames: list[bytes] = []
    while waiting and len(frames) < _MAX_BATCH:
        if frames and _is_bulk(waiting[0]):
            break
        message = waiting.popleft()
        frames.append(frame_request(message))
        if _is_bulk(message):
            break
    return batch_requests(frames) if frames else b""


def _is_bulk(message: Request) -> bool:
    return isinstance(message, BlockGradient) and message.slice is None
