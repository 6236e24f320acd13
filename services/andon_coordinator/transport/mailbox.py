"""The mailbox: the one bounded queue through which everything reaches the task that owns the core.

Streams and operators wait for room, first come first served, which is the back-pressure that a
flood meets. What the process says to itself (a tick, a journal's report, the end of a stream) is
bounded by its own nature, must not be lost, and never waits.
"""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

__all__ = ["Mailbox"]

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """Items in the order in which they were put."""

    def __init__(self, capacity: int) -> None:
        """Has room for `capacity` items from `put`."""
        self._room = asyncio.Semaphore(capacity)
        self._items: asyncio.Queue[tuple[Item, bool]] = asyncio.Queue()

    async def put(self, item: Item) -> None:
        """Puts an item, once there is room."""
        await self._room.acquire()
        self._items.put_nowait((item, True))

    def put_now(self, item: Item) -> None:
        """Puts an item of this process's own."""
        self._items.put_nowait((item, False))

    async def take(self) -> Item:
        """The next item, once there is one."""
        item, took_room = await self._items.get()
        if took_room:
            self._room.release()
        return item
