"""Windows of a cadence that trains: they grow where it costs no loss, and stay where it would.

A quadratic is trained by SGD on gradients with noise, by the counts and learning rates that a
`Pacing` says. The network is so slow that windows always want to grow.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest

from andon.protocol.run_settings import Policy
from andon.protocol.schedules import Schedule
from andon_coordinator.core.events import StepTimings
from andon_coordinator.core.noise_scale import Contribution
from andon_coordinator.core.pacing import Pacing, WindowReport, reading_of
from andon_coordinator.core.settings import LearningRateScaling, PacingSettings
from unit.andon_coordinator.paced_line import PLAN as TEMPLATE
from unit.andon_coordinator.paced_line import members

PLAN = replace(TEMPLATE, dataset_size=10**6)
BATCHES = 400
"""Of the script, that are trained on."""
CURVATURES = [0.1, 0.2, 0.4, 1.0] * 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What came of a training."""

    loss: float
    steps: int
    largest: int
    """Samples of the largest window."""


def train(
    deviation: float,
    rate: float,
    cost: float,
    scaling: LearningRateScaling = LearningRateScaling.LINEAR,
) -> Trained:
    """Trains on `BATCHES` batches of samples, whose gradients deviate by so much in each element.

    The loss is the mean over the last quarter, without noise.
    """
    dice, roster = random.Random(5), members(2)
    settings = PacingSettings(
        schedule=Schedule.CADENCE, learning_rate_scaling=scaling, growth_cost=cost
    )
    pacing, weights = Pacing(settings, Policy()), [10.0] * len(CURVATURES)
    at = steps = largest = 0
    losses: list[tuple[int, float]] = []
    while at < BATCHES * PLAN.global_batch:
        window = pacing.window(roster, PLAN)
        share = window.size // 2
        true = [curve * weight for curve, weight in zip(CURVATURES, weights, strict=True)]
        loss = sum(slope * weight / 2 for slope, weight in zip(true, weights, strict=True))
        ranks = [
            [slope + dice.gauss(0.0, deviation / math.sqrt(share)) for slope in true]
            for _ in roster
        ]
        mean = [sum(each) / 2 for each in zip(*ranks, strict=True)]
        scaled = rate * window.learning_rate_scale(window.size, PLAN.global_batch)
        weights = [weight - scaled * slope for weight, slope in zip(weights, mean, strict=True)]
        report = WindowReport(
            readings=[reading_of(each, share, StepTimings(busy_s=share / 100)) for each in roster],
            wait_s=1.0,
            loss=loss,
            contributions=[Contribution(share, share, math.hypot(*each)) for each in ranks],
            mean_norm=math.hypot(*mean),
        )
        pacing.committed(pacing.learn(report, window, PLAN), 0.0)
        at, steps, largest = at + window.size, steps + 1, max(largest, window.size)
        losses += [(window.size, loss)] if at > 0.75 * BATCHES * PLAN.global_batch else []
    return Trained(
        loss=sum(size * loss for size, loss in losses) / sum(size for size, _ in losses),
        steps=steps,
        largest=largest,
    )


def test_much_noise_makes_windows_grow_at_the_same_loss_for_the_same_samples() -> None:
    script, free = train(120.0, rate=0.003, cost=1e-9), train(120.0, rate=0.003, cost=0.05)
    unscaled = train(120.0, rate=0.003, cost=1.0, scaling=LearningRateScaling.NONE)

    assert script.steps == BATCHES
    assert free.steps < 0.55 * BATCHES
    assert free.largest > 3 * PLAN.global_batch
    assert free.loss == pytest.approx(script.loss, rel=0.02)
    assert unscaled.loss > 2 * script.loss


def test_little_noise_keeps_windows_short_where_long_ones_would_ruin_the_loss() -> None:
    script, free = train(0.3, rate=0.3, cost=1e-9), train(0.3, rate=0.3, cost=0.05)
    unprotected = train(0.3, rate=0.3, cost=1.0)

    assert free.largest < 1.5 * PLAN.global_batch
    assert free.loss == pytest.approx(script.loss, rel=0.15)
    assert unprotected.loss > 1000 * script.loss
