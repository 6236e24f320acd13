"""A stream as the adapter sees it: what leaves on it, and whether it is read."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, NamedTuple

import grpc

from andon.tcp.framing import PREFIX_BYTES
from andon.wire.frames import batch_responses
from andon_reducer.core.effects import CallRefusal
from andon_reducer.transport.arenas import StreamMemory
from andon_reducer.transport.memory_socket import MemorySocket
from andon_reducer.transport.tcp_lanes import StreamLanes

__all__ = ["MAX_BATCH", "MAX_QUEUED", "Context", "OutgoingMessage", "ReduceStream"]

Context = grpc.aio.ServicerContext[Any, Any]

MAX_BATCH = 256
"""Slices in one message."""

MAX_QUEUED = 1024
"""A stream with this many queued messages is not read."""


class OutgoingMessage(NamedTuple):
    """A message that waits to be written."""

    frame: bytes
    job: int | None = None
    """Which average it is, if it is one."""
    shared_bytes: int = 0
    """How many bytes of shared memory it stands for; 0 if it holds its bytes itself."""
    payload: memoryview | None = None
    """What follows the frame on a TCP lane."""
    on_lane: bool = False
    """Whether it is framed for a TCP lane. A stream whose lanes came into use while an average was
    made gets that average over gRPC."""
    notice: bool = False
    """Whether it has no payload, so that its bytes are not counted."""

    @property
    def size(self) -> int:
        """Its bytes on the network."""
        if self.payload is None:
            return len(self.frame)
        return PREFIX_BYTES + len(self.frame) + self.payload.nbytes


class ReduceStream:
    """One call of Reduce, and the lanes that carry its messages if they are in use.

    Its queue is bounded twice. The core bounds averages, since it charges them until AverageSent.
    All other messages answer something that the worker sent, so not reading bounds them. One that
    only listens gets averages alone.
    """

    def __init__(self, number: int, context: Context) -> None:
        """A stream that is read and has nothing to send."""
        self.number = number
        self.refusal: asyncio.Future[CallRefusal] = asyncio.get_running_loop().create_future()
        """Why the stream must end, once it must."""
        self.context = context
        self.memory: StreamMemory | None = None
        """What it shares with the reducer."""
        self.socket: MemorySocket | None = None
        """Beside that memory, from its offer on, until it is taken back."""
        self.run_id = ""
        """The run of its worker, once it is opened."""
        self.latest_term = 2**64 - 1
        """Keys of greater terms are refused on it."""
        self.lanes: StreamLanes | None = None
        """Its TCP lanes, from their offer on, until they are taken back."""
        self.listens = False
        """Whether it only listens."""
        self.checked = False
        """Whether each chunk of bytes has a checksum, up and down."""
        self._queue: deque[OutgoingMessage] = deque()
        self._queued = asyncio.Event()
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._room = asyncio.Event()
        self._room.set()
        self._written: deque[OutgoingMessage] = deque()
        """What the lanes have written, and is not reported."""
        self._on_lanes = 0
        """How many messages the lanes have, and have not written."""
        self._closed = False
        self._sent: Callable[[OutgoingMessage], None] | None = None
        """Gets each average that was written, once there is a writer."""
        self._writing = False
        """Whether the writer waits for a write."""
        self._rest = b""
        """What the socket did not take of a message."""

    @property
    def uses_lanes(self) -> bool:
        """Whether messages travel over TCP lanes, both ways."""
        return self.lanes is not None and self.lanes.in_use

    @property
    def uses_socket(self) -> bool:
        """Whether messages travel over the socket beside the shared memory, both ways."""
        return self.socket is not None and self.socket.in_use

    def pause(self) -> None:
        """Stops reading."""
        self._unpaused.clear()

    def resume(self) -> None:
        """Reads again."""
        self._unpaused.set()

    def refuse(self, refusal: CallRefusal) -> None:
        """Ends the stream with an error; the first one counts."""
        if not self.refusal.done():
            self.refusal.set_result(refusal)

    def send(self, message: OutgoingMessage) -> None:
        """Queues a message.

        One that stands for bytes of shared memory waits for others of its kind: for a full batch,
        for another message behind it, or for `flush`. Lanes write each one at once, on their own
        thread.
        """
        if message.on_lane:
            assert self.lanes is not None, "lanes that are in use stay until the stream ends"
            # `write_all` does not end before each of these was written.
            self._on_lanes += 1
            self.lanes.send((message.frame, message.payload), partial(self._wrote, message))
        else:
            self._queue.append(message)
            if not message.shared_bytes or len(self._queue) >= MAX_BATCH:
                self._queued.set()
        if len(self._queue) + self._on_lanes >= MAX_QUEUED:
            self._room.clear()

    def _wrote(self, message: OutgoingMessage, _: int) -> None:
        self._on_lanes -= 1
        self._written.append(message)
        self._queued.set()

    def flush(self) -> None:
        """Sends what waits for a batch; not while effects of an event are left."""
        if self._queue and not self._write_now():
            self._queued.set()

    def _write_now(self) -> bool:
        """Writes what is queued, if its socket takes all of it without a wait."""
        if self._sent is None or self._writing or not self.uses_socket:
            return False
        assert self.socket is not None
        while self._queue and not self._rest:
            messages = self._next()
            self._rest = self.socket.write_now(batch_responses([each.frame for each in messages]))
            # What is left of it, if anything, is no more than this message.
            self._report(messages)
        return not self._rest

    def _report(self, messages: list[OutgoingMessage]) -> None:
        self._room.set()
        for each in messages:
            if each.job is not None and self._sent is not None:
                self._sent(each)

    def close(self) -> None:
        """Sends nothing after what is queued."""
        self._closed = True
        self._queued.set()

    @property
    def is_readable(self) -> bool:
        """Whether it may be read now: almost always, and then nothing has to be awaited."""
        return self._unpaused.is_set() and self._room.is_set()

    async def readable(self) -> None:
        """Returns once the stream may be read."""
        await self._unpaused.wait()
        await self._room.wait()

    async def messages(self) -> AsyncIterator[bytes]:
        """What the worker sends over gRPC, while it may be read, until it sends no more."""
        while True:
            if not self.is_readable:
                await self.readable()
            # gRPC grants its window as messages are read: while this waits above, the worker's
            # sends come to a stop. That is the back-pressure.
            data = await self.context.read()
            if data is grpc.aio.EOF:
                return
            yield data

    async def write_all(self, sent: Callable[[OutgoingMessage], None]) -> None:
        """Writes what is queued until closed; calls `sent` for each average, of lanes too."""
        self._sent = sent
        while True:
            await self._queued.wait()
            # Cleared before the queue is read: a message queued during a write below sets it again,
            # so none is missed.
            self._queued.clear()
            while self._queue or self._rest:
                await self._write()
            while self._written:
                self._report([self._written.popleft()])
            if self._closed and not self._on_lanes:
                return

    async def _write(self) -> None:
        """Writes the rest of a message, or the next one."""
        self._writing = True
        messages: list[OutgoingMessage] = []
        if not self._rest:
            messages = self._next()
            data = batch_responses([each.frame for each in messages])
            self._room.set()
            if self.uses_socket:
                assert self.socket is not None
                self._rest = self.socket.write_now(data)
            else:
                await self.context.write(data)
        if self._rest and self.socket is not None:
            await self.socket.write(self._rest)
        self._rest = b""
        self._writing = False
        # After the write, which waits while the worker does not read: until then the average is
        # held, and the core must charge it.
        self._report(messages)

    def _next(self) -> list[OutgoingMessage]:
        """The next message; if it is a slice, with the slices behind it."""
        messages = [self._queue.popleft()]
        while (
            messages[-1].shared_bytes
            and self._queue
            and self._queue[0].shared_bytes
            and len(messages) < MAX_BATCH
        ):
            messages.append(self._queue.popleft())
        return messages
