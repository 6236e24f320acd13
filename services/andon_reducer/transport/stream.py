"""A stream as the adapter sees it: what leaves on it, and whether it is read."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from andon_reducer.core.effects import Refusal

__all__ = ["MAX_QUEUED", "Context", "Stream"]

Context = grpc.aio.ServicerContext[Any, Any]

MAX_QUEUED = 1024
"""Messages waiting to leave a stream beyond which it is not read."""


class Stream:
    """One call of Reduce. The core bounds the averages in its queue; not reading, all else."""

    def __init__(self, number: int, context: Context) -> None:
        """A stream that is read and has nothing to send."""
        self.number = number
        self.refusal: asyncio.Future[Refusal] = asyncio.get_running_loop().create_future()
        self._context = context
        self._queue: deque[tuple[bytes, int | None]] = deque()
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

    def send(self, frame: bytes, job: int | None = None) -> None:
        """Queues a message; `job` names the average that it is."""
        self._queue.append((frame, job))
        self._queued.set()
        if len(self._queue) >= MAX_QUEUED:
            self._room.clear()

    def close(self) -> None:
        """Sends nothing after what is queued."""
        self._closed = True
        self._queued.set()

    async def messages(self) -> AsyncIterator[bytes]:
        """What the worker sends, as far as it may be read, until it sends no more."""
        while True:
            await self._unpaused.wait()
            await self._room.wait()
            data = await self._context.read()
            if data is grpc.aio.EOF:
                return
            yield data

    async def write_all(self, sent: Callable[[int, int], None]) -> None:
        """Writes what is queued until closed; says `sent(size, job)` of each average."""
        while True:
            while self._queue:
                frame, job = self._queue.popleft()
                self._room.set()
                await self._context.write(frame)
                if job is not None:
                    sent(len(frame), job)
            if self._closed:
                return
            self._queued.clear()
            await self._queued.wait()
