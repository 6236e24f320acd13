"""Stream requests: what comes on a stream, from bytes to events of the core.

It comes over gRPC, over the socket beside shared memory, or over TCP lanes, whose threads have
parsed it. A message waits until its round is announced, and until the core lets its stream go on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from andon.protocol.messages import (
    Abstain,
    BlockGradient,
    OpenRound,
    Request,
    SharedMemoryMapped,
)
from andon.protocol.reasons import Reason
from andon.wire import checksums
from andon.wire.frames import FrameError, parse_requests
from andon_reducer.core.effects import CallRefusal, DataPath, Direction, ReducerObserver
from andon_reducer.core.events import Abstained, Event, GradientArrived, MemoryMapped
from andon_reducer.transport.admission import CallRefused
from andon_reducer.transport.announced import Announced
from andon_reducer.transport.arenas import StreamMemory
from andon_reducer.transport.reduce_stream import ReduceStream
from andon_reducer.transport.tcp_lanes import StreamLanes

__all__ = ["StreamRequests"]


class StreamRequests:
    """Reads the messages of all streams. Used on the event loop."""

    def __init__(
        self,
        announced: Announced,
        observer: ReducerObserver,
        *,
        receive: Callable[[Event], None],
        take_back: Callable[[ReduceStream], None],
    ) -> None:
        """Reads nothing yet.

        Args:
            announced: the rounds that coordinators have opened.
            observer: is told what came.
            receive: gives an event to the core, which acts at once.
            take_back: takes the offers of lanes and a socket back that a stream had.
        """
        self._announced = announced
        self._observer = observer
        self._receive = receive
        self._take_back = take_back

    async def read(
        self, stream: ReduceStream, messages: AsyncIterator[bytes], *, over_socket: bool = False
    ) -> None:
        """Takes what comes over gRPC, or over the socket beside shared memory."""
        try:
            async for data in messages:
                # The core, or another stream's message, may have ended this one during the await.
                if stream.refusal.done():
                    return
                for request in self._requests_in(stream, data, over_socket=over_socket):
                    # One message of a batch may pause the stream: the rest of it waits too.
                    if not stream.is_readable:
                        await stream.readable()
                    await self._until_announced(stream, request)
                    if stream.refusal.done():
                        return
                    self._take(stream, request)
        except FrameError as error:
            stream.refuse(CallRefusal(Reason.INVALID_MESSAGE, str(error)))
        except CallRefused as refused:
            stream.refuse(refused.refusal)

    def take_now(self, stream: ReduceStream, data: bytes) -> bool:
        """Takes a message of a stream's socket if it is small, and nothing has to be awaited."""
        if stream.refusal.done() or not stream.is_readable:
            return False
        try:
            request, *others = parse_requests(data)
        except FrameError:
            return False  # It is refused where it is read again.
        if others or not isinstance(request, BlockGradient | Abstain):
            return False
        if isinstance(request, BlockGradient) and request.slice is None:
            return False
        if not self._announced.is_announced(stream.run_id, request.key):
            return False
        try:
            _require_proof(stream, request)
            self._take(stream, request)
        except CallRefused as refused:
            stream.refuse(refused.refusal)
        return True

    def _requests_in(
        self, stream: ReduceStream, data: bytes, *, over_socket: bool
    ) -> list[Request]:
        """The messages in what came, counted.

        Raises:
            FrameError: the bytes are no message.
            CallRefused: they may not come this way.
        """
        if not over_socket:
            self._go_over_grpc(stream)
        requests = parse_requests(data)
        if over_socket:
            _require_proof(stream, requests[0])
        if any(isinstance(each, BlockGradient) and not each.slice for each in requests):
            path = DataPath.SHARED_MEMORY if over_socket else DataPath.WIRE
            self._observer.moved(Direction.UP, len(data), path)
        return requests

    def _go_over_grpc(self, stream: ReduceStream) -> None:
        """A message came over gRPC: the worker has decided to go on there.

        Raises:
            CallRefused: it had decided otherwise.
        """
        if stream.uses_lanes or stream.uses_socket:
            other = "TCP lanes" if stream.uses_lanes else "the socket beside its memory"
            text = f"a message over gRPC on a stream whose messages travel over {other}"
            raise CallRefused(Reason.INVALID_MESSAGE, text)
        self._take_back(stream)

    async def read_lanes(self, stream: ReduceStream, lanes: StreamLanes) -> None:
        """Takes what comes over a stream's lanes."""
        try:
            async for request, size in lanes.requests():
                if not stream.is_readable:
                    await stream.readable()
                await self._until_announced(stream, request)
                if stream.refusal.done():
                    return
                if isinstance(request, BlockGradient):
                    self._observer.moved(Direction.UP, size, DataPath.TCP)
                self._take(stream, request)
                # The name would keep the payload alive while this waits.
                del request
        except CallRefused as refused:
            stream.refuse(refused.refusal)

    async def _until_announced(self, stream: ReduceStream, request: Request) -> None:
        """Waits until the coordinator has opened the round of a message.

        The first message of a greater key frees all older rounds (rule 14). So the core must not
        see a key that a worker made up.

        Raises:
            CallRefused: there is no such round.
        """
        if not isinstance(request, BlockGradient | Abstain):
            return
        # Almost always the case, so nothing is awaited, and no other stream comes in between.
        if self._announced.is_announced(stream.run_id, request.key):
            return
        await self._announced.round_of(stream.run_id, request.key)

    def _take(self, stream: ReduceStream, request: Request) -> None:
        """One message of a worker.

        Raises:
            CallRefused: the stream must end with it.
        """
        match request:
            case BlockGradient(slice=None):
                self._receive(GradientArrived(stream.number, _as_agreed(stream, request)))
            case BlockGradient():
                gradient = _memory_of(stream).resolve(request)
                self._observer.moved(Direction.UP, gradient.payload.nbytes, DataPath.SHARED_MEMORY)
                self._receive(GradientArrived(stream.number, gradient))
            case Abstain():
                self._receive(Abstained(stream.number, request))
            case SharedMemoryMapped():
                _memory_of(stream).prove(request)
                self._receive(MemoryMapped(stream.number))
            case OpenRound():
                text = "OpenRound may only be the first message of a stream"
                raise CallRefused(Reason.INVALID_MESSAGE, text)


def _require_proof(stream: ReduceStream, request: Request) -> None:
    """Only who has mapped a stream's memory may speak on its socket.

    Raises:
        CallRefused: this is no proof, and none came before.
    """
    if not (_memory_of(stream).mapped or isinstance(request, SharedMemoryMapped)):
        text = "the first message on the socket beside shared memory is not SharedMemoryMapped"
        raise CallRefused(Reason.INVALID_MESSAGE, text)


def _memory_of(stream: ReduceStream) -> StreamMemory:
    if stream.memory is None:
        text = "the stream uses shared memory, though none was offered: send bytes"
        raise CallRefused(Reason.INVALID_MESSAGE, text)
    return stream.memory


def _as_agreed(stream: ReduceStream, gradient: BlockGradient) -> BlockGradient:
    """A chunk of bytes with a checksum if the stream was opened so, else without.

    Raises:
        CallRefused: it has none.
    """
    if not stream.checked:
        return gradient if gradient.crc32c is None else replace(gradient, crc32c=None)
    if gradient.crc32c is None:
        text = f"a chunk without crc32c on a stream that was opened with {checksums.CAPABILITY}"
        raise CallRefused(Reason.INVALID_MESSAGE, text)
    return gradient
