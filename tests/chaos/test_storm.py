"""Storms of faults. ANDON_STORMS is the number of seeds; a test's id contains its seed.

Without it the storms are short, and those under the other schedules few.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from chaos.judge import judge
from chaos.model import Task
from chaos.rig import chaos_line
from chaos.schedules import EVERY_STEP, SCHEDULES, LineSchedule
from chaos.storm import CALM, WILD, plan_storm, strike, strike_unevenly
from unit.andon.certificates import certify

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

LONG = "ANDON_STORMS" in os.environ
SEEDS = range(1, 1 + int(os.environ.get("ANDON_STORMS", "1")))
FAULTS, STEPS = (30, 100) if LONG else (12, 40)
ALL_KINDS = 2
"""A seed whose first 12 faults are of all kinds."""
CALM_FAULTS = 6
PACE_S = 0.002
"""Compute time of one position: a step of 12 positions on 3 workers takes at least 8 ms."""
SHORT = 6
"""Faults of a short storm."""
SCHEDULED = [each for each in SCHEDULES if each is not EVERY_STEP]
IN_SHORT = [
    each for each in SCHEDULED if each.name in ("cadence-linear", "fragments", "overlapped-ring")
]
SCHEDULED_PATHS = (("tcp",), ("wire",), ("shared-memory",))
"""A schedule's storms take one of them after another."""
REORDERED = 1e-5
"""Tolerance of weights whose float32 numbers were added in another order."""


@pytest.mark.parametrize("seed", SEEDS if LONG else [ALL_KINDS])
def test_a_storm_leaves_the_weights_of_an_undisturbed_run_up_to_the_order_of_sums(
    tmp_path: Path, seed: int
) -> None:
    paths = ("tcp", "wire", "shared-memory")
    with chaos_line(tmp_path, pace_s=PACE_S, paths=paths) as line:
        for fault in plan_storm(seed, FAULTS, WILD):
            strike(line, fault)
        line.await_progress()
        line.await_step(STEPS)
        assert all(line.moved_over(path) > 0 for path in paths)
        line.finish()

    verdict = judge(line)
    undisturbed = line.task.undisturbed(verdict.bootstrap_worker, verdict.steps, line.expected)
    assert verdict.resplit
    np.testing.assert_allclose(verdict.weights, undisturbed, rtol=0, atol=REORDERED)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_storm_that_changes_no_shares_leaves_the_weights_bit_identical(
    tmp_path: Path, seed: int
) -> None:
    # The others go on without a stopped worker if it can learn what it missed.
    with chaos_line(tmp_path, pace_s=PACE_S, paths=("tcp",), learns=False) as line:
        for fault in plan_storm(seed, CALM_FAULTS, CALM):
            strike(line, fault)
        line.await_step(STEPS)
        assert line.moved_over("tcp") > 0
        line.finish()

    verdict = judge(line)
    undisturbed = line.task.undisturbed(verdict.bootstrap_worker, verdict.steps, line.expected)
    assert verdict.resplit == frozenset()
    assert verdict.weights.tobytes() == undisturbed.tobytes()


@pytest.mark.skipif(not LONG, reason="a minute a seed: `make soak` runs it, with ANDON_STORMS=10")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_storm_under_tls_ends_no_process_but_those_that_are_killed(
    tmp_path: Path, seed: int
) -> None:
    certs = certify(tmp_path / "ca", tmp_path / "certs", "127.0.0.1")
    with chaos_line(tmp_path, pace_s=PACE_S, paths=("wire", "tcp"), certs=certs) as line:
        for fault in plan_storm(seed, FAULTS, WILD):
            strike(line, fault)
        line.await_progress()
        line.await_step(STEPS)
        assert all(line.moved_over(path) > 0 for path in ("wire", "tcp"))
        line.finish()

    judge(line)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "schedule", SCHEDULED if LONG else IN_SHORT, ids=lambda schedule: schedule.name
)
def test_a_storm_under_another_schedule_leaves_the_weights_that_the_journal_asks_for(
    tmp_path: Path, schedule: LineSchedule, seed: int
) -> None:
    task = Task(dataset=300)
    paths = SCHEDULED_PATHS[(SCHEDULED.index(schedule) + seed) % len(SCHEDULED_PATHS)]
    with chaos_line(tmp_path, schedule=schedule, task=task, pace_s=PACE_S, paths=paths) as line:
        strike_unevenly(line, plan_storm(seed, FAULTS if LONG else SHORT, WILD))
        line.await_progress()
        line.finish()

    verdict = judge(line)
    assert verdict.chain[-1].record.cursor.epoch, "no epoch ended"
    assert schedule.even or len(verdict.divisions) > 1, "nobody's share ever moved"
    if not (schedule.cadence or schedule.local_steps):
        undisturbed = task.undisturbed(verdict.bootstrap_worker, verdict.steps, line.expected)
        np.testing.assert_allclose(verdict.weights, undisturbed, rtol=0, atol=REORDERED)
