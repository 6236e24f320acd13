"""The transcript: everything that one client did, in the order in which the judge saw it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from andon_conformance.judge.checks import Overdue

__all__ = ["ENDED", "EXITED", "HEARTBEAT", "OPENED", "Event", "Transcript"]

OPENED = "opened"
"""A stream began."""
ENDED = "ended"
"""The client ended a stream, or its connection broke. `message` is None."""
EXITED = "exited"
"""The client's process ended; `message` is its exit code."""
HEARTBEAT = "heartbeat"

_QUIET_BEATS = 2
_QUIET_AT_MOST_S = 5.0
_LAG_AT_MOST_S = 3.0


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that the client did."""

    at: float
    """Monotonic clock, in seconds."""
    kind: str
    """OPENED, ENDED, EXITED, or the name of the message's case, such as `step_ready`."""
    stream: Any
    """The stream that it happened on; None for EXITED."""
    message: Any = None

    def __str__(self) -> str:
        """A short name, for evidence."""
        return f"{self.kind} on {self.stream}" if self.stream is not None else self.kind


Test = Callable[[Event], bool]


class Transcript:
    """The events of one client. Not thread-safe: use it on one event loop."""

    def __init__(self, patience_s: float, quiet_s: float) -> None:
        """Waits up to `patience_s` for an event, and `quiet_s` for one that must not come."""
        self.quiet_s = quiet_s
        self.events: list[Event] = []
        self.patience_s = patience_s
        self.exit_code: int | None = None
        self._news = asyncio.Event()
        self._lag_s = 0.0
        """The longest that the client took for anything, after its first event."""

    @property
    def now(self) -> int:
        """The end of the transcript so far: events after this place are still to come."""
        return len(self.events)

    def add(self, kind: str, stream: object, message: object = None) -> None:
        """Records an event."""
        self.events.append(Event(time.monotonic(), kind, stream, message))
        if kind == EXITED:
            assert isinstance(message, int)
            self.exit_code = message
        self._news.set()

    def find(self, test: Test, since: int = 0) -> list[Event]:
        """The events since a place that pass a test."""
        return [event for event in self.events[since:] if test(event)]

    async def wait(
        self, what: str, test: Test, since: int = 0, *, patience_s: float | None = None
    ) -> Event:
        """Waits for the first event since a place that passes a test; `what` is for evidence."""
        patience_s = self.patience_s if patience_s is None else patience_s
        began, begun = time.monotonic(), bool(self.events)
        try:
            async with asyncio.timeout(patience_s):
                while True:
                    # From the beginning of what is new: the event may be there already.
                    for event in self.events[since:]:
                        if test(event):
                            took_s = time.monotonic() - began if begun else 0.0
                            self._lag_s = max(self._lag_s, min(took_s, _LAG_AT_MOST_S))
                            return event
                    # No event is tested twice: a test may count what it sees.
                    since = max(since, self.now)
                    # Only after a last look: an exit may stand behind the event that was waited
                    # for.
                    if self.exit_code is not None:
                        break
                    # Nothing is awaited between the look and this line, so no event can be missed.
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise Overdue(f"{what} did not come within {patience_s:g} s; {self._last()}") from None
        raise Overdue(f"{what} did not come: the client ended with exit code {self.exit_code}")

    async def pause(
        self, least_s: float | None = None, *, beats: int = _QUIET_BEATS
    ) -> Sequence[Event]:
        """Gives the client time for mistakes; returns all events but heartbeats.

        Waits at least `least_s` (or `quiet_s`), at least as long as the client ever took before,
        and for `beats` heartbeats, so that a slow machine does not hide a mistake. Ends early if
        the process ends.
        """
        # A client that was slow before may be slow with its mistake, too.
        least_s = max(self.quiet_s if least_s is None else least_s, self._lag_s)
        since, began = self.now, time.monotonic()
        while self.exit_code is None and time.monotonic() - began < _QUIET_AT_MOST_S:
            seen = len(self.find(lambda event: event.kind == HEARTBEAT, since))
            # Heartbeats show that the client lives: silence of a client that is stuck proves
            # nothing.
            if seen >= beats and time.monotonic() - began >= least_s:
                break
            await asyncio.sleep(0.02)
        return self.find(lambda event: event.kind != HEARTBEAT, since)

    def _last(self) -> str:
        recent = [str(event) for event in self.events if event.kind != HEARTBEAT][-3:]
        return f"the last events: {', '.join(recent)}" if recent else "there were no events"
