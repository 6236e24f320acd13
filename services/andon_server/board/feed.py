"""Feed: what happens on a line, from the coordinator's task to the threads that serve viewers.

Theory of operation. The task writes and never waits: not for a lock, not for a viewer. It numbers
what happens and puts each item into the next place of a ring. A viewer's thread looks a few times a
second, and takes what is newer than the number it saw last. If the ring has gone around since, the
viewer was too slow, and `since` says so: its stream ends, and its page begins anew.

An item is put before its number is published, and an item in the ring carries its own number. So a
reader takes an item for what it is even while the writer replaces it.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from andon.protocol.records import Key, RecordKind, accuracy_of
from andon_coordinator.core import effects, events
from andon_coordinator.core.status import LineSnapshot
from andon_server.board.view import NO_FACTS, LineFacts, event_view, state_view

__all__ = ["BoardFeed", "FeedItem", "LineNow"]

_KEPT = 16384
"""Items that are kept: enough for seconds, however many scalars a step has."""
_PACE_OVER = 50
"""Steps whose median is the present pace. A halt or a pause is one long step, and moves it not."""


@dataclass(frozen=True, slots=True)
class FeedItem:
    """An item of the feed: what kind it is, and its JSON."""

    number: int
    kind: str
    """`point` (a committed step), `scalar` or `event`."""
    value: Any


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LineNow:
    """The line as of its last snapshot. Nothing is made of it unless somebody looks."""

    number: int
    """Rises with each snapshot."""
    line: LineSnapshot
    facts: LineFacts
    paths: tuple[str, ...]
    pace_s: float | None
    at_unix_s: float

    def view(self) -> dict[str, Any]:
        """The line for the page."""
        return state_view(
            self.line,
            facts=self.facts,
            paths=self.paths,
            pace_s=self.pace_s,
            now_unix_s=self.at_unix_s,
        )


class BoardFeed:
    """Observes a line. Its task calls `observe`, `tick` and `show`; any thread may read."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        *,
        kept: int = _KEPT,
        facts: LineFacts = NO_FACTS,
        paths: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """Nothing has happened yet.

        Args:
            wall: the time since the Unix epoch.
            kept: so many of the last items can be read.
            facts: what does not change.
            paths: the ways that gradients took in the last round.
        """
        self._facts = facts
        self._paths = paths
        self._wall = wall
        self._pending: dict[Key, effects.SaveRecord] = {}
        self._committed_at: float | None = None
        self._gaps: deque[float] = deque(maxlen=_PACE_OVER)
        self._ring: list[FeedItem | None] = [None] * kept
        self.newest = 0
        """The number of the last item; 0: there is none."""
        self.now: LineNow | None = None
        """The line's last snapshot; None before the first. It is replaced as a whole."""

    def observe(self, event: events.Event, done: Sequence[effects.Effect], now: float) -> None:
        """Notes an event and its effects, at `now` of the line's clock."""
        match event:
            case events.RecordSaved(key):
                self._committed(key, now)
            case events.JournalFailed():
                self._pending.clear()
            case _:
                pass
        for effect in done:
            match effect:
                case effects.SaveRecord() if effect.result is not None:
                    self._pending[effect.record.key] = effect
                case effects.SaveScalars():
                    for each in effect.scalars:
                        value = [each.name, each.step, effect.worker, each.value]
                        self._put("scalar", value)
                case effects.SaveRunEvent():
                    self._put("event", event_view(effect.event))

    def tick(self, status: LineSnapshot) -> None:
        """Takes a snapshot of the line; called a few times a second."""
        self.show(status)

    def show(self, status: LineSnapshot) -> None:
        """Makes a snapshot the present one."""
        self.now = LineNow(
            number=1 if self.now is None else self.now.number + 1,
            line=status,
            facts=self._facts,
            paths=tuple(self._paths()),
            pace_s=statistics.median(self._gaps) if self._gaps else None,
            at_unix_s=self._wall(),
        )

    def since(self, number: int) -> list[FeedItem] | None:
        """What happened after the item with this number; None if some of it is lost."""
        newest = self.newest
        found: list[FeedItem] = []
        for wanted in range(number + 1, newest + 1):
            item = self._ring[wanted % len(self._ring)]
            if item is None or item.number != wanted:
                return None
            found.append(item)
        return found

    def _put(self, kind: str, value: Any) -> None:
        number = self.newest + 1
        self._ring[number % len(self._ring)] = FeedItem(number, kind, value)
        self.newest = number

    def _committed(self, key: Key, now: float) -> None:
        saved = self._pending.pop(key, None)
        if saved is None or saved.result is None or saved.record.kind is not RecordKind.STEP:
            return
        if self._committed_at is not None:
            self._gaps.append(now - self._committed_at)
        self._committed_at = now
        result = saved.result
        self._put(
            "point",
            [
                saved.record.step,
                result.loss,
                result.seconds,
                result.samples,
                accuracy_of(result.correct, result.samples),
                result.gradient_norm,
                self._wall(),
            ],
        )
