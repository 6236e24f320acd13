"""A stream as the adapter sees it: what leaves on it, and whether it is read."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import grpc

from andon.wire.frames import batch_responses
from andon_reducer.core.effects import Refusal
from andon_reducer.transport.arenas import Session

__all__ = ["MAX_BATCH", "MAX_QUEUED", "Context", "Outgoing", "Stream"]

Context = grpc.aio.ServicerContext[Any, Any]

MAX_BATCH = 256
"""Slices in one message."""

MAX_QUEUED = 1024
"""Messages waiting to leave a stream beyond which it is not read."""


class Outgoing(NamedTuple):
    """A message that waits to be written."""

    frame: bytes
    job: int | None
    """Which average it is, if it is one."""
    shared_bytes: int
    """How much it stands for that lies in shared memory."""


class Stream:
    """One call of Reduce. The core bounds the averages in its queue; not reading, all else."""

    def __init__(self, number: int, context: Context) -> None:
        """A stream that is read and has nothing to send."""
        self.number = number
        self.refusal: asyncio.Future[Refusal] = asyncio.get_running_loop().create_future()
        self.context = context
        self.session: Session | None = None
        """What it shares with the reducer."""
        self.latest_term = 2**64 - 1
        """No key of a greater term can come on it."""
        self.checked = False
        """Whether each chunk of bytes has a checksum, up and down."""
        self._queue: deque[Outgoing] = deque()
        self._queued = asyncio.Event()
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._room = asyncio.Event()
        self._room.set()
        self._closed = False

    def pause(self) -> None:
        """Reads nothing more."""
        self._unpaused.clear()

    def resume(self) -> None:
        """Reads on."""
        self._unpaused.set()

    def refuse(self, refusal: Refusal) -> None:
        """Ends the stream with an error; the first one counts."""
        if not self.refusal.done():
            self.refusal.set_result(refusal)

    def send(self, frame: bytes, job: int | None = None, shared_bytes: int = 0) -> None:
        """Queues a message; `job` names the average that it is.

        `shared_bytes` of it lie in shared memory; 0: the message holds them. Such a message waits
        for another kind, for a batch, or for `flush`.
        """
        self._queue.append(Outgoing(frame, job, shared_bytes))
        if not shared_bytes or len(self._queue) >= MAX_BATCH:
            self._queued.set()
        if len(self._queue) >= MAX_QUEUED:
            self._room.clear()

    def flush(self) -> None:
        """Lets nothing wait any longer."""
        if self._queue:
            self._queued.set()

    def close(self) -> None:
        """Sends nothing after what is queued."""
        self._closed = True
        self._queued.set()

    async def readable(self) -> None:
        """Returns once the stream may be read on: what is left of a batch waits too."""
        await self._unpaused.wait()

    async def messages(self) -> AsyncIterator[bytes]:
        """What the worker sends, as far as it may be read, until it sends no more."""
        while True:
            await self._unpaused.wait()
            await self._room.wait()
            data = await self.context.read()
            if data is grpc.aio.EOF:
                return
            yield data

    async def write_all(self, sent: Callable[[Outgoing], None]) -> None:
        """Writes what is queued until closed; says `sent` of each average."""
        while True:
            await self._queued.wait()
            self._queued.clear()
            while self._queue:
                messages = self._next()
                self._room.set()
                await self.context.write(batch_responses([each.frame for each in messages]))
                for each in messages:
                    if each.job is not None:
                        sent(each)
            if self._closed:
                return

    def _next(self) -> list[Outgoing]:
        """The next message; with it, slices that wait behind it."""
        messages = [self._queue.popleft()]
        while (
            messages[-1].shared_bytes
            and self._queue
            and self._queue[0].shared_bytes
            and len(messages) < MAX_BATCH
        ):
            messages.append(self._queue.popleft())
        return messages
