"""The scalar log: what a script logged, until the coordinator has it. Sans-IO.

Theory of operation. Scalars travel with heartbeats, and a heartbeat's answer acknowledges those of
it. One heartbeat with scalars is unanswered at a time, so a coordinator that is slow is sent less.
What was not acknowledged when a stream ended is sent again on the next one: the coordinator takes a
scalar twice without harm. So a scalar may arrive twice, and is lost only if the script logs faster
than the line takes for long, or if the stream breaks at the very end, behind the last Leave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from andon.protocol.limits import MAX_SCALARS
from andon.protocol.scalars import Scalar

__all__ = ["MOST_KEPT", "ScalarLog"]

MOST_KEPT = 16 * MAX_SCALARS
"""So many scalars wait at most; of more the oldest are given up."""


class ScalarLog:
    """The scalars of a worker, across its streams."""

    def __init__(self) -> None:
        """Has none, and no stream."""
        self._waiting: deque[Scalar] = deque()
        self._sent: tuple[Scalar, ...] = ()
        """Those of the heartbeat that is not answered yet."""
        self._sequence = 0
        """That heartbeat."""
        self._stream = 0
        self.lost = 0
        """How many were given up."""

    @property
    def ready(self) -> bool:
        """Whether a heartbeat should be sent soon."""
        return bool(self._waiting) and not self._sent

    def add(self, scalars: Iterable[Scalar]) -> None:
        """Keeps what the script logged, to be sent."""
        self._waiting.extend(scalars)
        # What was sent is never given up here: its answer may be on the way.
        while len(self._waiting) + len(self._sent) > MOST_KEPT and self._waiting:
            self._waiting.popleft()
            self.lost += 1

    def joined(self, stream: int) -> None:
        """Goes on with a new stream, first with what the last one did not acknowledge."""
        self._stream = stream
        # In front of the others, the oldest first: `extendleft` turns the order around.
        self._waiting.extendleft(reversed(self._sent))
        self._sent = ()

    def take(self, stream: int, sequence: int) -> tuple[Scalar, ...]:
        """What goes with the heartbeat `sequence`; nothing while another one is unanswered."""
        # The thread of a stream that was closed may still ask.
        if stream != self._stream or self._sent:
            return ()
        count = min(len(self._waiting), MAX_SCALARS)
        self._sent = tuple(self._waiting.popleft() for _ in range(count))
        self._sequence = sequence
        return self._sent

    def answered(self, stream: int, sequence: int) -> None:
        """The coordinator answered a heartbeat.

        It answers one with scalars once it has them on disk, and later ones perhaps sooner: the
        answer to another heartbeat says nothing of these.
        """
        if stream == self._stream and sequence == self._sequence:
            self._sent = ()

    def rest(self, stream: int) -> Iterator[tuple[Scalar, ...]]:
        """What is left, in as many heartbeats as it takes: the worker leaves, and won't resend."""
        while stream == self._stream and self._waiting:
            count = min(len(self._waiting), MAX_SCALARS)
            yield tuple(self._waiting.popleft() for _ in range(count))
