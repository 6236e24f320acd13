"""Storms of faults around learners. ANDON_STORMS is the number of seeds; a test's id has its seed.

Without it there is one short storm for each way in which a line can be followed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from chaos.judge import judge
from chaos.learning_storm import STRIKES, plan_blows, strike
from chaos.model import Task
from chaos.reducers import reduced_line
from chaos.rig import ChaosLine, chaos_line
from chaos.schedules import SCHEDULES, LineSchedule

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

LONG = "ANDON_STORMS" in os.environ
SEEDS = range(1, 1 + int(os.environ.get("ANDON_STORMS", "1")))
BLOWS = 2 * len(STRIKES) if LONG else 4
PACE_S = 0.002
TASK = Task(blocks=(7, 64, 1, 33, 150_000), dataset=300)
"""A state that takes more than one message."""
FOLLOWED = [each for each in SCHEDULES if not each.local_steps]
PATHS = (("wire", "tcp", "shared-memory"), ("tcp",), ("shared-memory",))
"""A seed's storm takes one of them after another."""


@contextmanager
def _line(folder: Path, schedule: LineSchedule, seed: int) -> Iterator[ChaosLine]:
    """A line; every other one, by its seed, has two more reducers."""
    common: dict[str, Any] = {
        "schedule": schedule,
        "task": TASK,
        "pace_s": PACE_S,
        "paths": PATHS[seed % len(PATHS)],
        "numbers": 5,
        # Whoever learns waits for the answer to a halt, and so do the others.
        "variables": {"ANDON_ON_HALT": "wait"},
    }
    if seed % 2:
        with chaos_line(folder, 3, **common) as line:
            yield line
    else:
        with reduced_line(folder, 2, **common) as reduced:
            yield reduced.line


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "schedule", FOLLOWED if LONG else FOLLOWED[:1], ids=lambda schedule: schedule.name
)
def test_a_storm_around_learners_leaves_the_weights_that_the_journal_asks_for(
    tmp_path: Path, schedule: LineSchedule, seed: int
) -> None:
    with _line(tmp_path, schedule, seed) as line:
        line.slow_down(0)
        for blow in plan_blows(seed, BLOWS):
            strike(line, blow)
        line.finish()

    judge(line, cord=True)
    assert any(line.made_up(slot) for slot in line.workers), "nobody ever made up a step"
    assert any(line.averaged(slot) for slot in line.workers), "nobody ever averaged a number"
