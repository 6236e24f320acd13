"""A simulated line with grains: shares are whole, and a node that a worker summed stays one."""

from __future__ import annotations

from dataclasses import replace

from andon.protocol.grains import Grains, Node, cover
from andon.protocol.run_settings import RunPlan
from andon.protocol.shards import Ranges
from andon_coordinator.core import effects as do
from andon_coordinator.core.settings import History, PacingSettings
from scenarios.line_simulation import Simulation

__all__ = ["GrainSimulation"]


class GrainSimulation(Simulation):
    """Equal or balanced shares of batches of eleven grains; the last one is short."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, steps=20)
        self.bench.plan = RunPlan(global_batch=21, dataset_size=100, grain=2, tree=1)
        self.bench.settings = replace(
            self.bench.settings,
            policy=replace(self.bench.settings.policy, max_steps=20),
            pacing=PacingSettings(balanced=self.random.random() < 0.5),
            same_bits=self.random.random() < 0.5,
        )
        self.bench.line = self.bench._start(History())
        self.redealt = 0
        """Attempts in which a worker got more than it had."""

    def _note(self, assignment: do.Assignment) -> None:
        super()._note(assignment)
        key, worker = assignment.key, assignment.roster[assignment.rank]
        mine = self._nodes(assignment, assignment.positions)
        assert assignment.micro_batches == 0
        assert not assignment.split.interleaved
        if key in self.before and self._survived(self.before[key], key, worker):
            kept = self.shares[self.before[key]].get(worker, ())
            self.redealt += kept != assignment.positions
            for summed in self._nodes(assignment, kept):
                assert any(
                    node.first <= summed.first and summed.stop <= node.stop for node in mine
                ), "what is summed is a part of a node that is sent"

    def _nodes(self, assignment: do.Assignment, positions: Ranges) -> tuple[Node, ...]:
        grains = Grains(assignment.batch, self.bench.plan.grain)
        return cover(grains.of(positions), grains.count)
