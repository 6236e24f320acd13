"""Detectors: what counts as a spike, and what is usual."""

from __future__ import annotations

import math
import random

import pytest

from andon.protocol.halts import HaltReason
from andon.protocol.run_settings import Policy
from andon_coordinator.core.detectors import WARM_UP, WINDOW, SpikeDetector, in_norms
from andon_coordinator.core.settings import LineSettings


def watch(seen: list[float], factor: float | None = 5.0) -> SpikeDetector:
    made = SpikeDetector("loss", HaltReason.LOSS_SPIKE, factor)
    for value in seen:
        made.note(value)
    return made


def noise(count: int, *, mean: float = 2.0, deviation: float = 0.5) -> list[float]:
    generator = random.Random(7)
    return [generator.gauss(mean, deviation) for _ in range(count)]


def test_without_a_factor_nothing_is_a_spike() -> None:
    assert watch(noise(WINDOW), factor=None).judge(1e9) is None


def test_the_deviation_of_normal_noise_is_its_standard_deviation() -> None:
    baseline = watch(noise(WINDOW)).baseline

    assert baseline is not None
    assert baseline.median == pytest.approx(2.0, abs=0.2)
    assert baseline.deviation == pytest.approx(0.5, rel=0.3)


def test_only_a_value_above_the_limit_is_a_spike() -> None:
    watching = watch([1.0] * WARM_UP)  # deviation: 1 % of the median

    assert watching.judge(1.0 + 5 * 0.01) is None
    assert watching.judge(math.nextafter(1.0 + 5 * 0.01, 2.0)) is not None


def test_a_value_far_below_the_usual_is_no_spike() -> None:
    assert watch(noise(WINDOW)).judge(-100.0) is None


def test_spikes_that_were_accepted_hardly_move_what_is_usual() -> None:
    calm = watch(noise(WINDOW - 4)).baseline
    shaken = watch(noise(WINDOW - 4) + [1e6] * 4).baseline

    assert calm is not None
    assert shaken is not None
    assert shaken.limit(5.0) == pytest.approx(calm.limit(5.0), rel=0.1)


def test_the_baseline_follows_a_loss_that_falls() -> None:
    falling = watch([100.0] * WINDOW + [1.0] * WINDOW)

    assert falling.judge(2.0) is not None


def test_negative_losses_are_judged_alike() -> None:
    watching = watch([-value for value in noise(WINDOW)])

    assert watching.judge(-2.0) is None
    assert watching.judge(3.0) is not None


def test_steps_by_hand_whose_loss_is_always_0_are_not_judged() -> None:
    assert watch([0.0] * WINDOW).judge(0.1) is None


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, math.inf])
def test_a_factor_that_makes_no_sense_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="loss_spike must be above 0"):
        LineSettings(run_id="7f3a", loss_spike=factor)


def test_the_norm_is_judged_only_if_the_policy_asks_workers_for_it() -> None:
    with pytest.raises(ValueError, match="gradient_norm_spike needs a policy"):
        LineSettings(run_id="7f3a", gradient_norm_spike=5.0)

    LineSettings(run_id="7f3a", gradient_norm_spike=5.0, policy=Policy(gradient_norm=True))


def test_one_workers_norm_is_compared_with_the_median_of_the_others() -> None:
    usual = {0: 1.0, 1: 2.0, 2: 3.0}

    within = in_norms({**usual, 3: 20.0}, 10.0)
    above = in_norms({**usual, 3: math.nextafter(20.0, 21.0)}, 10.0)

    assert within is None
    assert above is not None
    assert (above.reason, above.worker) == (HaltReason.GRADIENT_NORM_SPIKE, 3)


def test_no_norm_is_judged_without_others_or_if_theirs_is_0() -> None:
    assert in_norms({}, 10.0) is None
    assert in_norms({0: 1e9}, 10.0) is None
    assert in_norms({0: 1e9, 1: 0.0}, 10.0) is None


def test_judging_workers_needs_a_policy_that_asks_them_for_norms() -> None:
    with pytest.raises(ValueError, match="own_gradient_norm"):
        LineSettings(run_id="7f3a", worker_gradient_norm=10.0)
