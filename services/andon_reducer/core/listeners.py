"""Listeners: the streams of a run that get averages and bring nothing.

Theory of operation. A round takes the listeners that are there when its first message comes, and
sends each of its averages to them, too. They are no part of it: nothing waits for them, they get no
verdict, and their end voids nothing.

So the window can't hold back what is on its way to a listener: a slow one would hold back every
rank. Instead it has a bound of its own. A listener that falls further behind is refused, and hears
nothing more. Its worker begins anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from andon.protocol.reasons import Reason
from andon_reducer.core.effects import CallRefusal, Effect, RefuseStream

__all__ = ["Listeners"]


@dataclass(slots=True, eq=False)
class Listeners:
    """The listeners of one run, and how far each is behind."""

    limit_bytes: int
    """Of averages on their way to one listener."""
    _behind: dict[int, int] = field(default_factory=dict)
    """By stream, the bytes of averages that it has not taken."""
    _refused: set[int] = field(default_factory=set)
    """Those that were refused, until they end."""

    @property
    def present(self) -> set[int]:
        """The streams that hear the next round."""
        return self._behind.keys() - self._refused

    def opened(self, stream: int) -> None:
        """A stream that listens was opened."""
        self._behind[stream] = 0

    def ended(self, stream: int) -> None:
        """A stream is over, whether it listened or not."""
        self._behind.pop(stream, None)
        self._refused.discard(stream)

    def of(self, streams: Iterable[int]) -> tuple[int, ...]:
        """Those of the streams that still listen, in order."""
        return tuple(sorted(self.present.intersection(streams)))

    def send(self, streams: Iterable[int], size: int, effects: list[Effect]) -> tuple[int, ...]:
        """Charges those that still listen with an average, and refuses whom it would be too much.

        Returns:
            The streams that get the average.
        """
        reached = []
        for stream in self.of(streams):
            if self._behind[stream] + size <= self.limit_bytes:
                self._behind[stream] += size
                reached.append(stream)
                continue
            # Its end may be reported much later, and it is not refused twice.
            self._refused.add(stream)
            text = (
                f"the listener has not read {self._behind[stream]} bytes of averages, and may be "
                f"{self.limit_bytes} behind: it reads more slowly than the line trains"
            )
            effects.append(RefuseStream(stream, CallRefusal(Reason.PEER_GONE, text)))
        return tuple(reached)

    def took(self, stream: int, size: int) -> None:
        """A listener took an average."""
        self._behind[stream] -= size
