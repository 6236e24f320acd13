"""The gradient noise scale of a run: the batch above which a sample brings less and less.

Theory of operation. The gradient of a batch of B samples is the true one, of squared norm `signal`,
and noise of squared norm `noise` / B, where `noise` is the variance of a single sample's gradient,
all elements together. Their ratio, in samples, is the simple noise scale of S. McCandlish et al.
(An Empirical Model of Large-Batch Training, arXiv:1812.06162, appendix A.1). Far below it, a batch
twice as large is worth twice as much; far above it, hardly more than the smaller one. By their
model a run with the batch B needs (B + scale) / (b + scale) times as many samples as one with the
batch b, if each has the learning rate that fits it.

Both parts are known from norms that a step may have. Let rank i contribute g_i, the mean over b_i
samples, with the part w_i of the weight. Then the mean over the ranks of ||g_i||² is, on average,
signal + noise * sum(w_i / b_i), and that of the mean gradient signal + noise * sum(w_i² / b_i). Two
equations, two unknowns, and no bias for any shares, as long as samples are drawn independently. One
step's answer is very noisy, and a ratio of two noisy numbers is biased. So both are smoothed, and
divided afterwards.

The mean square of what single steps differ by says how far to trust that. `at_least` divides the
noise less two of its standard errors by the signal plus two of its own. What is decided by it errs
towards small batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "NOISE_LOGGED_EVERY",
    "NOISE_SCALAR",
    "Contribution",
    "NoiseScale",
    "SavedNoise",
    "largest_batch",
]

NEWEST = 0.05
"""The weight of the newest step in the averages, once they are old enough."""
LEAST = 10
"""Steps that are needed before anything is said."""
NOISE_SCALAR = "andon/noise_scale"
"""The name under which the journal keeps it, beside what scripts log."""
NOISE_LOGGED_EVERY = 10
"""Steps between two of its values there: an average over twenty steps does not change faster."""
ERRORS = 2.0
"""Standard errors by which `at_least` stays on the safe side."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one rank gave to a step's mean gradient."""

    samples: int
    """Samples that its gradient is the mean of."""
    weight: float
    """Its weight in the mean."""
    norm: float
    """The L2 norm of its gradient; NaN if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedNoise:
    """A noise scale as it is kept: the averages, and the mean squares of what steps differ by."""

    steps: int = 0
    noise: float = 0.0
    signal: float = 0.0
    noise_spread: float = 0.0
    signal_spread: float = 0.0


class NoiseScale:
    """Follows a run's noise scale by what its steps report."""

    def __init__(self, saved: SavedNoise | None = None) -> None:
        """Goes on from what was saved, or starts without steps."""
        self._known = saved or SavedNoise()

    @property
    def samples(self) -> float | None:
        """The noise scale, in samples; None if it is not known, or greater than can be told."""
        known = self._known
        if known.steps < LEAST or known.signal <= 0:
            return None
        return max(0.0, known.noise) / known.signal

    @property
    def at_least(self) -> float:
        """What the noise scale is not below, in samples; 0 if nothing is known."""
        known = self._known
        if known.steps < LEAST:
            return 0.0
        # Of an exponential average: the part of a single step's variance that is left in it.
        left = max(NEWEST / (2 - NEWEST), 1 / known.steps)
        noise = known.noise - ERRORS * math.sqrt(left * known.noise_spread)
        signal = known.signal + ERRORS * math.sqrt(left * known.signal_spread)
        return noise / signal if noise > 0 and signal > 0 else 0.0

    def observe(self, contributions: Sequence[Contribution], mean_norm: float) -> None:
        """Learns from a committed step.

        It says nothing if it has one contribution only, or if a norm of one is not known.

        Args:
            contributions: those with a weight, one for each rank.
            mean_norm: the L2 norm of their weighted mean.
        """
        noise, signal = _parts(contributions, mean_norm)
        # The squares of norms that a worker made up may overflow.
        if not (math.isfinite(noise * noise) and math.isfinite(signal * signal)):
            return
        known = self._known
        steps = known.steps + 1
        newest = max(NEWEST, 1 / steps)
        by_noise, by_signal = noise - known.noise, signal - known.signal
        # The first step differs from nothing.
        spread = 0.0 if steps == 1 else newest * (1 - newest)
        kept = 0.0 if steps == 1 else 1 - newest
        self._known = SavedNoise(
            steps=steps,
            noise=known.noise + newest * by_noise,
            signal=known.signal + newest * by_signal,
            noise_spread=kept * known.noise_spread + spread * by_noise**2,
            signal_spread=kept * known.signal_spread + spread * by_signal**2,
        )

    def saved(self) -> SavedNoise:
        """What the next coordinator goes on from."""
        return self._known


def _parts(contributions: Sequence[Contribution], mean_norm: float) -> tuple[float, float]:
    """Noise and signal of one step, without bias; NaN if it can't tell them."""
    whole = math.fsum(each.weight for each in contributions)
    if len(contributions) < 2 or not whole > 0 or min(each.samples for each in contributions) < 1:
        return math.nan, math.nan
    parts = [each.weight / whole for each in contributions]
    alone = sum(
        part * each.norm * each.norm for part, each in zip(parts, contributions, strict=True)
    )
    # How much of a sample's variance is left in one rank's gradient, and in the mean of all.
    in_ranks = sum(part / each.samples for part, each in zip(parts, contributions, strict=True))
    in_mean = sum(part**2 / each.samples for part, each in zip(parts, contributions, strict=True))
    if not in_ranks > in_mean:
        return math.nan, math.nan
    together = mean_norm * mean_norm
    noise = (alone - together) / (in_ranks - in_mean)
    return noise, together - noise * in_mean


def largest_batch(batch: int, noise_scale: float, cost: float) -> float:
    """The batch that wastes no more than `cost` of its samples, compared with a smaller one.

    Args:
        batch: the smaller one, in samples.
        noise_scale: in samples; see the theory of operation.
        cost: the part of samples that may be wasted, below 1.
    """
    return (batch + cost * noise_scale) / (1 - cost)
