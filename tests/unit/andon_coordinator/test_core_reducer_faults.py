"""The core under random faults of reducers, too: no step holds what a lost reducer averaged."""

from __future__ import annotations

import os

import pytest

from andon.protocol.records import RecordKind
from andon_coordinator.core.effects import LineState
from scenarios.reduced_simulation import ReducedSimulation

_SEEDS = range(int(os.environ.get("ANDON_SEEDS", "40")) // 2)


@pytest.mark.parametrize("seed", _SEEDS)
def test_c_commit_001_reducers_come_and_go_and_the_run_still_ends_with_whole_steps(
    seed: int,
) -> None:
    simulation = ReducedSimulation(seed)

    simulation.run(actions=1500)
    simulation.finish()

    assert simulation.bench.line.state is LineState.COMPLETE
    steps = [record for record, _ in simulation.history if record.kind is RecordKind.STEP]
    assert len(steps) == 12


def test_reducers_were_lost_in_the_midst_of_rounds() -> None:
    losses = broken = 0
    for seed in list(_SEEDS)[:10]:
        simulation = ReducedSimulation(seed)
        simulation.run(actions=1500)
        losses += simulation.losses
        broken += len(simulation.broken)

    assert losses > 20
    assert broken > 5
