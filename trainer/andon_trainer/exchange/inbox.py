"""The inbox: events from the streams' threads, read by the training thread alone."""

from __future__ import annotations

import queue

from andon_trainer.exchange.events import Event

__all__ = ["Inbox"]


class Inbox:
    """First in, first out. Threads put; the thread that trains takes, and owns all state."""

    def __init__(self) -> None:
        """An empty inbox."""
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def put(self, event: Event) -> None:
        """Adds an event; never blocks."""
        self._events.put(event)

    def take(self, timeout_s: float | None = None) -> Event | None:
        """The oldest event; None if none comes within `timeout_s` (None: waits for ever)."""
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
