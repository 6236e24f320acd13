"""The trend of a line's loss: whether it speaks against longer windows (`cadence`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["LossTrend", "NudgeDown", "Stable", "SuppressGrowth", "Verdict"]


@dataclass(frozen=True, slots=True)
class Stable:
    """The loss does not speak against longer windows."""


@dataclass(frozen=True, slots=True)
class SuppressGrowth:
    """The loss rises: no longer windows."""


@dataclass(frozen=True, slots=True)
class NudgeDown:
    """The loss goes on rising: shorter windows, by this factor from 0.1 to 1."""

    factor: float


Verdict = Stable | SuppressGrowth | NudgeDown


class LossTrend:
    """The verdict on a line's loss.

    Two averages follow the loss, a quick one and a slow one. The quick one is above the slow one
    while the loss rises. By how much is compared with the mean change from one window to the next,
    which is the noise: so neither the unit of the loss nor its sign matters. With pure noise the
    two averages differ by 0.4 deviations of it, and the limit is at 1.1.
    """

    QUICK, SLOW, NOISE = 0.3, 0.05, 0.05
    """Weights of the newest value in the averages."""
    WARM_UP = 5
    """With fewer losses than this, the verdict is Stable."""
    RISING, STILL_RISING = 3, 10
    """Windows in a row in which the loss must be above the trend: for no growth, for a nudge."""
    NUDGE = 0.5
    """The factor of a nudge."""

    def __init__(self) -> None:
        """Starts without losses."""
        self._seen = 0
        self._last = self._quick = self._slow = self._noise = 0.0
        self._rising = 0

    def observe(self, loss: float) -> Verdict | None:
        """The verdict after a window's loss; None if it has none (all workers abstained)."""
        if not math.isfinite(loss):
            return None
        if self._seen == 0:
            self._last = self._quick = self._slow = loss
        self._seen += 1
        change = abs(loss - self._last)
        # At first a plain mean, so that the first change does not stand for the noise for long.
        self._noise += max(self.NOISE, 1 / self._seen) * (change - self._noise)
        self._quick += max(self.QUICK, 1 / self._seen) * (loss - self._quick)
        self._slow += max(self.SLOW, 1 / self._seen) * (loss - self._slow)
        self._last = loss
        above = self._seen > self.WARM_UP and self._quick - self._slow > self._noise
        self._rising = self._rising + 1 if above else 0
        if self._rising >= self.STILL_RISING:
            self._rising = 0
            return NudgeDown(self.NUDGE)
        return SuppressGrowth() if self._rising >= self.RISING else Stable()
