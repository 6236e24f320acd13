"""A simulated line whose work is divided by speed: speeds change, and some reports are lies."""

from __future__ import annotations

import math
from dataclasses import replace

from andon.protocol.records import Key
from andon.protocol.run_settings import RunPlan
from andon.protocol.schedules import Schedule
from andon_coordinator.core import effects as do
from andon_coordinator.core import events as on
from andon_coordinator.core.settings import History, PacingSettings
from scenarios.line_simulation import Process, Simulation

__all__ = ["PacedSimulation"]

_LIES = (0.0, -1.0, math.nan, math.inf, 1e-300, 1e300)


class PacedSimulation(Simulation):
    """Balanced shares or a cadence, contiguous or interleaved."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, steps=20)
        self.bench.plan = RunPlan(global_batch=4, dataset_size=70)
        cadence = self.random.random() < 0.7
        self.bench.settings = replace(
            self.bench.settings,
            policy=replace(self.bench.settings.policy, max_steps=20),
            pacing=PacingSettings(
                schedule=Schedule.CADENCE if cadence else Schedule.EVERY_STEP,
                balanced=True,
                interleaved=self.random.random() < 0.5,
                growth_cost=1.0,
            ),
        )
        self.bench.line = self.bench._start(History())
        self.speeds = [self.random.uniform(0.5, 8.0) for _ in range(3)]
        self.targets: dict[Key, dict[int, int]] = {}
        """What each worker had in a round."""
        self.sizes: set[int] = set()
        """Of all windows."""

    def _timings(self, process: Process, samples: int) -> on.StepTimings:
        if self.random.random() < 0.1:
            self.random.shuffle(self.speeds)
        busy_s = samples / self.speeds[process.slot]
        if self.random.random() < 0.05:
            busy_s, samples = self.random.choice(_LIES), self.random.choice([0, samples, 2**53])
        return on.StepTimings(busy_s=busy_s, computed=samples, wait_s=self.random.choice([0, 0.3]))

    def _note(self, assignment: do.Assignment) -> None:
        super()._note(assignment)
        key, targets = assignment.key, assignment.split.targets
        self.sizes.add(len(assignment.batch))
        mine = dict(zip(assignment.roster, targets, strict=True)) if targets else {}
        assert self.targets.setdefault(key, mine) == mine, "all ranks hear the same"
        before = self.before.get(key)
        if before is not None:
            for worker in mine.keys() & self.targets[before].keys():
                assert mine[worker] == self.targets[before][worker], "targets stand until a commit"
