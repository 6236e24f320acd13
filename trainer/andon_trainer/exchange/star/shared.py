"""Shared memory: the lane to a reducer of this host. Blocks lie where it reads them.

Theory of operation. Gradients are written into memory that the reducer maps too, and a message only
says which elements are there. Everything that waits when the stream is free goes in one message, so
that many blocks cost about as much as one. The reducer checks the values in the same pass that
averages them; nothing is checked here.

A worker begins another exchange only after it has read the averages of the one before, and sends
nothing of it earlier. So once a reducer has a part of the new exchange from every rank, it may
overwrite the old averages. docs/shared-memory.md proves that.

If the reducer listens on a socket beside the memory, the messages travel there, else over gRPC.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from andon.host.arena import (
    CAPABILITY,
    ITEM_BYTES,
    SOCKET_CAPABILITY,
    ArenaLayout,
    SharedMemoryUnavailable,
    folder_identity,
    map_offer,
    socket_of,
)
from andon.protocol.capabilities import SAME_BITS
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
    RoundOpened,
    SharedMemoryMapped,
    Slice,
)
from andon.protocol.run_settings import Policy
from andon.wire.frames import FrameError, batch_requests, frame_request, parse_responses
from andon_trainer.core.calls import Bytes, Floats
from andon_trainer.exchange.collector import OpenCall
from andon_trainer.exchange.local_socket import LocalSocket
from andon_trainer.exchange.star.bulk_stream import REASON_S, BulkStream
from andon_trainer.exchange.star.reducer_path import LanePart

__all__ = ["SPAN_ELEMENTS", "SharedLane", "SharedMemory", "suits"]

SPAN_ELEMENTS = 2**24
"""About so many elements are announced at once: 64 MiB. Most blocks are one message."""

_CLEARED_BYTES_PER_S = 2**25
"""For how long a reducer may prepare the memory, by the model's size: it clears twice that for the
first worker of a host, and it serves all workers of the host one after the other."""

_MAX_BATCH = 256


def suits(policy: Policy) -> bool:
    """Whether a line exchanges what shared memory is for: float32, both ways."""
    answers = policy.answer_encoding or policy.encoding
    return policy.encoding is answers is Encoding.FLOAT32


class _Window:
    """Numbers of a mapping, as NumPy takes them; an array made of it keeps the mapping alive."""

    def __init__(self, mapping: mmap.mmap, start: int, count: int) -> None:
        self._mapping = mapping
        address = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
        # Claims to be writable, since PyTorch warns of arrays that are not. The pages of averages
        # are read-only all the same: to write there is a defect, and ends the process.
        self.__array_interface__: dict[str, Any] = {
            "data": (address + start, False),
            "shape": (count,),
            "typestr": "<f4",
            "version": 3,
        }


class SharedMemory:
    """What one stream shares with the reducer.

    Attributes:
        contributions: float32, by area one vector a block; the worker writes them. There is an
            area for each of its contributions, up to a limit.
        averages: float32, one vector a block; only to be read.
        memory: all bytes of the mapping that `contributions` are a part of.
        generation: counts the exchanges that this worker has begun in it.
    """

    def __init__(
        self, folder: Path, opened: RoundOpened, places: ArenaLayout, areas: int = 1
    ) -> None:
        """Maps what was offered; `areas` is how many were asked for.

        Raises:
            SharedMemoryUnavailable: nothing was offered, or it can't be mapped.
        """
        if opened.contributions is None or opened.averages is None:
            raise SharedMemoryUnavailable(
                opened.shared_memory_refused or "the reducer shares no memory: use one version"
            )
        mine, my_nonce = map_offer(folder, opened.contributions, places, writable=True, areas=areas)
        theirs, their_nonce = map_offer(folder, opened.averages, places, writable=False)
        self.proof = SharedMemoryMapped(my_nonce, their_nonce)
        self.memory: Bytes = np.frombuffer(mine, np.uint8)
        self.contributions = [
            _vectors(mine, places, area * places.size_bytes) for area in range(areas)
        ]
        self.averages = _vectors(theirs, places)
        self.generation = 0
        self._places = places
        self._theirs = 0
        """The generation of the averages that were read last."""

    def holds(self, average: AveragedBlock) -> bool:
        """Whether an average is at its place, and not older than what was read before."""
        at = self._places.offset_of(average.block, average.offset, average.count)
        found = average.slice
        if found is None or found.offset != at or found.generation < max(1, self._theirs):
            return False
        self._theirs = found.generation
        return True


def _vectors(mapping: mmap.mmap, places: ArenaLayout, at: int = 0) -> list[Floats]:
    return [
        np.asarray(_Window(mapping, at + start, count))
        for start, count in zip(places.starts, places.elements, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Span:
    """Consecutive chunks of a block, announced by one message."""

    offset: int
    count: int
    at: int
    """Its first byte in an area."""


class SharedLane:
    """A `Lane` through memory that the reducer maps too."""

    def __init__(self, part: LanePart, layout: Layout, folder: Path, *, in_place: bool) -> None:
        """Opens nothing yet.

        Args:
            part: what it carries.
            layout: of the whole model.
            folder: where memory is shared.
            in_place: whether the collector reads averages where they lie, which takes a lane that
                carries everything; False: they are given to it as numbers.
        """
        self._part = part
        self._folder = folder
        self._in_place = in_place
        self._places = ArenaLayout(tuple(block.elements for block in layout.blocks))
        clearing_s = self._places.size_bytes / _CLEARED_BYTES_PER_S
        self._access = replace(part.access, opening_s=part.access.opening_s + clearing_s)
        step = part.policy.chunk_elements
        many = max(1, SPAN_ELEMENTS // step) * step
        self._spans = [self._spans_of(block, many) for block in range(len(part.chunks))]
        self._memory: SharedMemory | None = None
        self._stream: BulkStream | None = None
        self._socket: LocalSocket | None = None
        """Carries the stream's messages in place of gRPC."""
        self._call: OpenCall | None = None
        self._waiting: deque[Request] = deque()
        """What the training thread appended, and the sending thread has not taken yet."""
        self.found_bad_value = False
        # The training thread alone writes the one, and the receiving thread alone the other.
        self.sent_bytes = self.received_bytes = 0

    def open(self, address: str, opening: OpenRound) -> None:
        """See `Lane`.

        Raises:
            SharedMemoryUnavailable: there is no memory to share; nothing is open.
            TlsError, grpc.RpcError, FrameError: as `BulkStream`.
        """
        self.close()
        if not suits(self._part.policy):
            raise SharedMemoryUnavailable(
                "the line's encoding is not float32, which shared memory is for"
            )
        needed = (SAME_BITS,) if SAME_BITS in opening.capabilities else ()
        asking = replace(
            opening,
            # No checksums: nothing of it leaves this host.
            capabilities=(CAPABILITY, SOCKET_CAPABILITY, *needed),
            block_elements=self._places.elements,
            shared_folder=folder_identity(self._folder),
        )

        def lost(why: str) -> None:
            self._part.collector.lost(f"the reducer at {address}: {why}")

        stream = BulkStream(address, asking, self._received, lost, self._access)
        try:
            if not set(needed) <= set(stream.opened.capabilities):
                # Asked once more over the wire, whose lane says what to do.
                raise SharedMemoryUnavailable("the reducer does not know the tree of grains")
            areas = opening.contribution_areas or 1
            memory = SharedMemory(self._folder, stream.opened, self._places, areas)
        except BaseException:
            stream.close()
            raise
        # A new deque: the sending thread of the old stream may still look at the old one.
        self._stream, self._memory, self._waiting = stream, memory, deque()
        if self._in_place:
            self._part.collector.read_from(memory)
        self._socket = self._connected(stream, lost)
        # Until the reducer has this proof it takes no slice.
        self._send(memory.proof)

    @property
    def is_open(self) -> bool:
        """See `Lane`."""
        if self._stream is None or not self._stream.alive:
            return False
        return self._socket is None or self._socket.alive

    def lend(self, block: int, area: int = 0) -> tuple[Floats, Bytes] | None:
        """See `Exchange`."""
        memory = self._memory
        if memory is None or self._stream is None or area >= len(memory.contributions):
            return None
        return memory.contributions[area][block], memory.memory

    def begin(self, call: OpenCall) -> None:
        """See `Lane`."""
        # The receiving thread sets it for the present call only. Nothing more comes of the call
        # before: it is complete, or its stream was closed (rule 16).
        self.found_bad_value = False
        if self._memory is not None:
            # One more for each exchange: the reducer refuses a slice whose generation falls.
            self._memory.generation += 1
        self._call = call

    def send(self, block: int, flats: Sequence[Floats], *, keeps_loss: bool) -> None:
        """See `Lane`; a vector that is not the lent one is copied there."""
        assert not keeps_loss, "shared memory carries float32, which loses nothing"
        call, memory = self._call, self._memory
        assert call is not None
        if self._stream is None or memory is None:
            return
        spans = self._spans[block]
        if len(flats) > len(memory.contributions):
            # Bytes travel chunk by chunk, and what lies in memory may not be ahead of them.
            spans = self._spans_of(block, self._part.policy.chunk_elements)
        for span in spans:
            for number, (flat, whose) in enumerate(zip(flats, call.contributions, strict=True)):
                weight, node = whose
                message = BlockGradient(
                    key=call.key,
                    rank=call.rank,
                    world_size=call.world_size,
                    block=block,
                    offset=span.offset,
                    count=span.count,
                    weight=weight,
                    sequence=call.call.sequence,
                    operation=call.call.mean,
                    node=node,
                )
                self._send(self._with_contribution(message, memory, span, number, flat))
                self.sent_bytes += span.count * ITEM_BYTES

    def _with_contribution(
        self, message: BlockGradient, memory: SharedMemory, span: _Span, number: int, flat: Floats
    ) -> BlockGradient:
        """A message with the numbers of contribution `number`: in its area, or as bytes."""
        part = slice(span.offset, span.offset + span.count)
        if number >= len(memory.contributions):
            return replace(message, payload=flat[part].view(np.uint8).data)
        mine = memory.contributions[number][message.block]
        if flat.__array_interface__["data"] != mine.__array_interface__["data"]:
            # Written before it is announced: the reducer may read it at once.
            np.copyto(mine[part], flat[part])
        at = number * self._places.size_bytes + span.at
        return replace(message, slice=Slice(at, span.count * ITEM_BYTES, memory.generation))

    def send_data(self, data: Bytes) -> None:
        """See `Lane`: a broadcast's bytes travel as on the wire."""
        call, step = self._call, self._part.policy.chunk_elements
        assert call is not None
        for offset in range(0, data.size, step):
            part = data[offset : offset + step]
            self._send(
                BlockGradient(
                    key=call.key,
                    rank=call.rank,
                    world_size=call.world_size,
                    block=0,
                    offset=offset,
                    count=part.size,
                    weight=call.weight,
                    sequence=call.call.sequence,
                    operation=Operation.BROADCAST,
                    payload=part.data,
                    encoding=Encoding.UINT8,
                )
            )
            self.sent_bytes += part.size

    def abstain(self) -> None:
        """See `Lane`."""
        call = self._call
        assert call is not None
        self._send(
            Abstain(
                key=call.key,
                rank=call.rank,
                world_size=call.world_size,
                sequence=call.call.sequence,
            )
        )

    def close(self) -> None:
        """See `Lane`. What was lent, and the averages, stay as they are while somebody has them."""
        # The call first: the socket ends with it, and that is no loss.
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connected(self, stream: BulkStream, lost: Callable[[str], None]) -> LocalSocket | None:
        """The socket beside the memory, if the reducer listens on one that can be reached."""
        offer = stream.opened.contributions
        if SOCKET_CAPABILITY not in stream.opened.capabilities or offer is None:
            return None

        def ended(why: str) -> None:
            # The reducer ends the socket together with the call, and only the call says why.
            if not stream.ended.wait(REASON_S):
                lost(why)

        try:
            path = socket_of(self._folder / offer.name)
            return LocalSocket(path, self._received, ended, peer="reducer")
        except OSError:  # Then gRPC carries the same.
            return None

    def _spans_of(self, block: int, step: int) -> list[_Span]:
        """Spans of up to `step` elements, a multiple of a chunk's."""
        start = self._places.starts[block]
        return [
            _Span(offset, min(step, stop - offset), start + offset * ITEM_BYTES)
            for begin, stop in _runs(self._part.chunks[block])
            for offset in range(begin, stop, step)
        ]

    def _send(self, message: Request) -> None:
        if self._socket is not None:
            self._socket.send(partial(frame_request, message), small=not _is_bulk(message))
        elif self._stream is not None:
            # One wake-up a message; the first one takes all that waits by then, the others find
            # nothing. The message is appended first, so that none is left behind.
            self._waiting.append(message)
            self._stream.send(partial(_framed, self._waiting))

    def _received(self, data: bytes) -> None:
        """Runs on the receiving thread."""
        for message in parse_responses(data):
            call = self._call
            if isinstance(message, AveragedBlock):
                self.received_bytes += message.encoding.payload_bytes(message.count)
                if not self._in_place:
                    message = self._with_numbers(message)
            elif isinstance(message, BlockFault) and call is not None:
                mine = (message.key, message.rank) == (call.key, call.rank)
                self.found_bad_value = self.found_bad_value or mine
            self._part.collector.receive(message)

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
    """What waits for a stream, as one message; nothing if it went with an earlier one.

    Runs on the stream's sending thread, and only that takes from what waits.
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
