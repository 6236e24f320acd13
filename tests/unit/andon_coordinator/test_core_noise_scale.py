"""The noise scale of gradients: what norms tell of it, and what windows may cost by it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from andon_coordinator.core.growth import Growth
from andon_coordinator.core.loss_trend import Stable
from andon_coordinator.core.noise_scale import Contribution, NoiseScale, largest_batch

TRUE = (3.0, -4.0)
"""The gradient that every sample's differs from by noise: its squared norm is 25."""


def contribution(samples: int, gradient: Sequence[float]) -> Contribution:
    return Contribution(samples, float(samples), math.hypot(*gradient))


def train(
    scale: NoiseScale, shares: Sequence[int], deviation: float, steps: int, seed: int = 1
) -> None:
    """Steps of ranks with these shares, whose samples deviate by so much in each element."""
    dice = random.Random(seed)
    for _ in range(steps):
        ranks = [
            [each + dice.gauss(0.0, deviation / math.sqrt(samples)) for each in TRUE]
            for samples in shares
        ]
        mean = [
            sum(samples * gradient[at] for samples, gradient in zip(shares, ranks, strict=True))
            / sum(shares)
            for at in range(len(TRUE))
        ]
        scale.observe(
            [contribution(*each) for each in zip(shares, ranks, strict=True)], math.hypot(*mean)
        )


def known(noise: float, signal: float = 1.0) -> NoiseScale:
    """A noise scale that was reported exactly, by two ranks of one sample each."""
    scale = NoiseScale()
    alone, mean = math.sqrt(signal + noise), math.sqrt(signal + noise / 2)
    for _ in range(10):
        scale.observe([Contribution(1, 1.0, alone)] * 2, mean)
    return scale


@pytest.mark.parametrize(
    ("contributions", "mean_norm", "noise", "signal"),
    [
        # Single samples of norms 1 and 7 that are at right angles: a mean of norm sqrt(50) / 2.
        ([(1, 1.0, 1.0), (1, 1.0, 7.0)], math.sqrt(12.5), 25.0, 0.0),
        # (3, 4) of one sample and (0, 0) of three: the mean is a quarter of the former.
        ([(1, 1.0, 5.0), (3, 3.0, 0.0)], 1.25, 18.75, -3.125),
        # The same, weighted by something else than samples.
        ([(1, 3.0, 5.0), (3, 1.0, 0.0)], 3.75, 18.75, 3.125),
        # Equal gradients have no noise.
        ([(4, 4.0, 2.0), (8, 8.0, 2.0)], 2.0, 0.0, 4.0),
    ],
)
def test_norms_of_ranks_and_mean_give_noise_and_signal(
    contributions: list[tuple[int, float, float]], mean_norm: float, noise: float, signal: float
) -> None:
    scale = NoiseScale()

    scale.observe([Contribution(*each) for each in contributions], mean_norm)

    saved = scale.saved()
    assert (saved.noise, saved.signal) == pytest.approx((noise, signal))


@pytest.mark.parametrize("shares", [(4, 4, 4), (1, 3, 8)])
def test_uneven_shares_do_not_bias_the_noise_scale(shares: tuple[int, ...]) -> None:
    scale = NoiseScale()

    train(scale, shares, deviation=10.0, steps=4000)

    # Two elements of variance 100, over a squared norm of 25: 8 samples. The averages remember 39
    # steps, so they are a quarter off at most.
    assert scale.samples == pytest.approx(8.0, rel=0.25)
    assert 0 < scale.at_least < 8.0


def test_nothing_is_said_before_ten_steps() -> None:
    scale = NoiseScale()

    train(scale, (4, 4), deviation=10.0, steps=9)
    early = scale.samples, scale.at_least
    train(scale, (4, 4), deviation=10.0, steps=1)

    assert early == (None, 0.0)
    assert scale.samples is not None


@pytest.mark.parametrize(
    "contributions",
    [
        [],
        [(8, 8.0, 2.0)],
        [(8, 8.0, 2.0), (8, 8.0, math.nan)],
        [(8, 8.0, 2.0), (0, 8.0, 2.0)],
        [(8, 8.0, 2.0), (8, 8.0, 1e160)],
    ],
    ids=["nobody", "one rank", "no norm", "no samples", "overflow"],
)
def test_a_step_that_tells_nothing_changes_nothing(
    contributions: list[tuple[int, float, float]],
) -> None:
    scale = known(noise=100.0)
    before = scale.saved()

    scale.observe([Contribution(*each) for each in contributions], 1.0)

    assert scale.saved() == before


def test_a_batch_that_may_waste_a_twentieth_is_a_twentieth_of_the_noise_scale_larger() -> None:
    # Below the noise scale it may be many times as large, above it hardly larger at all.
    assert largest_batch(48, 864.0, 0.05) == pytest.approx(96.0)
    assert largest_batch(48, 14_400.0, 0.05) == pytest.approx(808.4, abs=0.1)
    assert largest_batch(48, 40.0, 0.05) == pytest.approx(52.6, abs=0.1)


# ------------------------------------------------------------------------------- growth


def growth(noise: float | None, *, cost: float = 0.05, scaled: bool = True) -> Growth:
    return Growth(cost, scaled=scaled, saved=None if noise is None else known(noise).saved())


def test_windows_grow_only_with_a_scaled_learning_rate_and_a_noise_scale_that_is_known() -> None:
    assert growth(864.0).largest(48) == pytest.approx(96.0)
    assert growth(864.0, scaled=False).largest(48) == 48
    assert growth(None).largest(48) == 48
    assert growth(None, cost=1.0, scaled=False).largest(48) == math.inf


def test_a_window_that_costs_twice_what_it_may_is_made_smaller() -> None:
    few = growth(864.0)

    # With 10 % a window of 149 would be allowed.
    assert few.too_large(48, 149) is None
    verdict = few.too_large(48, 160)
    assert verdict is not None
    assert verdict.factor == pytest.approx(96 / 160)


def test_a_loss_that_falls_slowly_is_no_verdict_against_growth_but_noise_is() -> None:
    """The trend alone let windows grow to 16 batches, and the loss ended 1.11 above."""
    small = growth(None)

    verdicts = []
    for step in range(40):
        contributions = [Contribution(1, 1.0, math.sqrt(41.0))] * 2
        verdicts.append(small.observe(2.3 * 0.999**step, contributions, math.sqrt(21.0)))

    assert set(verdicts) == {Stable()}
    assert small.largest(48) == pytest.approx(52.6, abs=0.1)
