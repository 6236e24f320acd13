"""The loss trend: a verdict on windows that noise does not change."""

from __future__ import annotations

import math
import random

from andon_coordinator.core.loss_trend import LossTrend, NudgeDown, Stable, SuppressGrowth


def test_noise_and_a_falling_loss_are_stable() -> None:
    generator = random.Random(11)

    for falling in (0.0, 0.002):
        trend = LossTrend()
        verdicts = [
            trend.observe(3.0 - falling * window + generator.gauss(0.0, 0.2))
            for window in range(500)
        ]

        assert sum(each != Stable() for each in verdicts) <= 5
        assert not any(isinstance(each, NudgeDown) for each in verdicts)


def test_a_rising_loss_first_suppresses_growth_and_then_nudges() -> None:
    trend, generator = LossTrend(), random.Random(5)
    for window in range(30):
        trend.observe(3.0 - 0.02 * window + generator.gauss(0.0, 0.02))

    verdicts = [trend.observe(2.4 + 0.05 * rise) for rise in range(20)]

    kinds = [type(each) for each in verdicts]
    assert kinds.index(Stable) < kinds.index(SuppressGrowth) < kinds.index(NudgeDown)


def test_a_window_without_a_loss_has_no_verdict() -> None:
    assert LossTrend().observe(math.nan) is None


def test_the_unit_and_the_sign_of_the_loss_do_not_matter() -> None:
    losses = [5.0 - 0.1 * window for window in range(20)] + [3.0 + 0.1 * rise for rise in range(40)]
    plain, scaled = LossTrend(), LossTrend()

    verdicts = [plain.observe(loss) for loss in losses]

    assert [scaled.observe(1000 * loss - 7000) for loss in losses] == verdicts
    assert any(isinstance(each, NudgeDown) for each in verdicts)
