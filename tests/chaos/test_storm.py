"""Storms of faults. ANDON_STORMS is the number of seeds; a test's id contains its seed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from chaos.judge import judge
from chaos.rig import chaos_line
from chaos.storm import CALM, WILD, plan_storm, strike

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

SEEDS = range(1, 1 + int(os.environ.get("ANDON_STORMS", "1")))
FAULTS = 30
STEPS = 100
PACE_S = 0.002
"""Compute time of one position: a step of 12 positions on 3 workers takes at least 8 ms."""
REORDERED = 1e-5
"""Tolerance of weights whose float32 numbers were added in another order."""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_storm_leaves_the_weights_of_an_undisturbed_run_up_to_the_order_of_sums(
    tmp_path: Path, seed: int
) -> None:
    with chaos_line(tmp_path, pace_s=PACE_S) as line:
        for fault in plan_storm(seed, FAULTS, WILD):
            strike(line, fault)
        line.await_progress()
        line.await_step(STEPS)
        line.finish()

    verdict = judge(line)
    undisturbed = line.task.undisturbed(verdict.bootstrap_worker, verdict.steps, line.expected)
    assert verdict.resplit
    np.testing.assert_allclose(verdict.weights, undisturbed, rtol=0, atol=REORDERED)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_storm_that_changes_no_shares_leaves_the_weights_bit_identical(
    tmp_path: Path, seed: int
) -> None:
    with chaos_line(tmp_path, pace_s=PACE_S) as line:
        for fault in plan_storm(seed, FAULTS // 5, CALM):
            strike(line, fault)
        line.await_step(STEPS)
        line.finish()

    verdict = judge(line)
    undisturbed = line.task.undisturbed(verdict.bootstrap_worker, verdict.steps, line.expected)
    assert verdict.resplit == frozenset()
    assert verdict.weights.tobytes() == undisturbed.tobytes()
