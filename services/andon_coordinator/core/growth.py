"""Growth: how large a cadence's windows may be, so that the loss does not pay for them.

Theory of operation. A window of k batches is one optimizer step in the place of k. That its loss
still falls says nothing: it falls more slowly. What tells what a larger batch is worth, before
anybody has paid for it, is the noise scale of the gradients (`noise_scale`). A window may be so
large that, by that model, no more than `cost` of its samples are wasted. A window that wastes twice
as much, because the noise has become less, is made smaller. In between it stays.

The model compares batches that each have the learning rate that fits them. With the learning rate
of the script, a window of k batches moves as far as one of them, whatever the noise is, and wastes
most of the rest. So without a scaled learning rate windows do not grow at all. A `cost` of 1 says
that an operator does not want to be protected.

The trend of the loss (`loss_trend`) is asked as well. It finds what no model expects: a loss that
really rises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from andon_coordinator.core.loss_trend import LossTrend, NudgeDown, Verdict
from andon_coordinator.core.noise_scale import (
    Contribution,
    NoiseScale,
    SavedNoise,
    largest_batch,
)

__all__ = ["Growth"]

_TOO_MUCH = 2.0
"""A window that costs so many times more than it may is made smaller."""


class Growth:
    """What is known of a run's loss and noise, and how large a window may be by it."""

    def __init__(self, cost: float, *, scaled: bool, saved: SavedNoise | None = None) -> None:
        """Goes on from what was saved, or starts knowing nothing.

        Args:
            cost: the part of samples that windows may waste; 1: any.
            scaled: whether learning rates follow the size of a window.
            saved: of the noise.
        """
        self._cost = cost
        self._scaled = scaled
        self.noise = NoiseScale(saved)
        """The noise scale of the run."""
        self._trend = LossTrend()

    def observe(
        self, loss: float, contributions: Sequence[Contribution], mean_norm: float | None
    ) -> Verdict | None:
        """Learns from a committed window; returns the verdict of the loss on it.

        Args:
            loss: NaN if it has none.
            contributions: of its ranks with a weight; a norm that is not known is NaN.
            mean_norm: of the averaged gradient; None if it was not reported.
        """
        if mean_norm is not None:
            self.noise.observe(contributions, mean_norm)
        return self._trend.observe(loss)

    def largest(self, batch: int) -> float:
        """The largest window, in samples, if the script's batch is `batch`; never below that."""
        return self._largest(batch, self._cost)

    def too_large(self, batch: int, window: int) -> NudgeDown | None:
        """The verdict on a window that costs far more than it may; None if it does not."""
        if window <= self._largest(batch, min(1.0, _TOO_MUCH * self._cost)):
            return None
        return NudgeDown(self.largest(batch) / window)

    def _largest(self, batch: int, cost: float) -> float:
        if cost >= 1:
            return math.inf
        known = self.noise.at_least
        if not self._scaled or known <= 0:
            return batch
        return largest_batch(batch, known, cost)
