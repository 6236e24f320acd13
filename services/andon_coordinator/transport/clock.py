"""The line's clock: monotonic seconds in which this process was able to listen.

A coordinator that was stopped (SIGSTOP, a suspended host) wakes up to hear its own ticker before
the heartbeats that lie in its sockets. Time in which it could not listen proves nothing about the
workers, so it does not count.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["LineClock"]


class LineClock:
    """Monotonic time without the gaps in which the process did not run."""

    def __init__(self, monotonic: Callable[[], float], longest_gap_s: float) -> None:
        """Counts at most `longest_gap_s` between two ticks."""
        self._monotonic = monotonic
        self._longest_gap_s = longest_gap_s
        self._ticked_at = monotonic()
        self._lost_s = 0.0

    def tick(self) -> None:
        """Notes that the process runs; what was slept through is left out from here on."""
        at = self._monotonic()
        self._lost_s += max(0.0, at - self._ticked_at - self._longest_gap_s)
        self._ticked_at = at

    def now(self) -> float:
        """The line's time, in seconds."""
        listened = min(self._monotonic(), self._ticked_at + self._longest_gap_s)
        return listened - self._lost_s
