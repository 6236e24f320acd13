"""The inbox: events from the streams' threads, read by the training thread alone."""

from __future__ import annotations

import queue
import time

from andon_trainer.core.events import Event

__all__ = ["Inbox"]


class Inbox:
    """First in, first out. Threads put; the thread that trains takes, and owns all state.

    Of control streams it holds the present one's events alone: a stream is never resumed (rule 5),
    and what an older one brought would be taken for the line's word of now.
    """

    def __init__(self) -> None:
        """An empty inbox."""
        self._events: queue.SimpleQueue[tuple[Event, int | None]] = queue.SimpleQueue()
        self._stream: int | None = None

    def follow(self, stream: int) -> None:
        """From now on control stream `stream` is the present one. For the taker alone."""
        self._stream = stream

    def put(self, event: Event, stream: int | None = None) -> None:
        """Adds an event; never blocks. `stream` is the control stream that brought it, if any."""
        self._events.put((event, stream))

    def take(self, timeout_s: float | None = None) -> Event | None:
        """The oldest event; None if none comes within `timeout_s` (None: waits for ever)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                event, stream = self._events.get(timeout=left_s)
            except queue.Empty:
                return None
            if stream is None or stream == self._stream:
                return event
