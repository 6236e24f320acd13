"""A stream: the coordinator's end of one worker's Train call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from andon.v1 import coordinator_pb2 as pb
from andon_coordinator.transport.errors import LineError, RejoinNeeded

__all__ = ["Stream"]

CAPACITY = 256
"""Messages that wait for a worker to read; one that lets more pile up is cut off."""

_DEAF = "the worker does not read its stream: join again"


class Stream:
    """What waits to be sent on one call, and how the call is to end.

    The owner of the core calls `send` and `end`, which never block; the call's own task writes what
    `messages` yields, then ends the call with `error`.
    """

    def __init__(self, number: int, *, flush_s: float, capacity: int = CAPACITY) -> None:
        """Opens stream `number`, which no other stream ever was.

        Once it is over, its worker has `flush_s` to read what was sent before.
        """
        self.number = number
        self._flush_s = flush_s
        self.error: LineError | None = None
        self.joined = False
        """Whether the core was told of it."""
        self.cut: Callable[[], object] = lambda: None
        """Called when the peer does not read: whatever is being written is given up.

        A peer that keeps its window shut would otherwise keep the call for as long as it lives.
        """
        self._capacity = capacity
        self._waiting: deque[pb.TrainResponse] = deque()
        self._ended = False
        self._stirred = asyncio.Event()
        self._late: asyncio.TimerHandle | None = None

    def send(self, message: pb.TrainResponse) -> None:
        """Sends a message, unless the stream has ended; ends it if its peer does not read."""
        if self._ended:
            return
        if len(self._waiting) >= self._capacity:
            self._waiting.clear()
            self.end(RejoinNeeded(_DEAF))
            self.cut()
            return
        self._waiting.append(message)
        self._stirred.set()

    def end(self, error: LineError | None = None) -> None:
        """RunEnd the call once what waits was written, or time is up; the first word counts."""
        if not self._ended:
            self._ended = True
            self.error = error
            self._stirred.set()
            self._late = asyncio.get_running_loop().call_later(self._flush_s, self._give_up)

    def _give_up(self) -> None:
        self._waiting.clear()
        self.error = self.error or RejoinNeeded(_DEAF)
        self.cut()

    async def messages(self) -> AsyncIterator[pb.TrainResponse]:
        """Every message to write, until the stream ends."""
        while True:
            while self._waiting:
                yield self._waiting.popleft()
            if self._ended:
                if self._late is not None:
                    self._late.cancel()
                return
            self._stirred.clear()
            await self._stirred.wait()
