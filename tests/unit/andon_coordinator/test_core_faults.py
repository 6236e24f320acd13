"""The core under random faults: what must hold whatever dies, and that the run still ends.

Every kind of line meets them: one whose launcher numbers the workers and one that numbers them
itself, one that divides work by speed, one of overlapped windows, one of grains, and one whose
reducers come and go. No step may hold what a lost reducer averaged.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any, TypeVar

import pytest

from andon.protocol.records import RecordKind
from andon_coordinator.core.line_state import LineState
from scenarios.grain_simulation import GrainSimulation
from scenarios.line_simulation import Simulation
from scenarios.overlapped_simulation import OverlappedSimulation
from scenarios.paced_simulation import PacedSimulation
from scenarios.reduced_simulation import ReducedSimulation
from scenarios.unnumbered_simulation import UnnumberedSimulation

SEEDS = range(int(os.environ.get("ANDON_SEEDS", "24")))
FEWER = range(len(SEEDS) // 2)
WORTH = list(FEWER)[:10]
"""The seeds of which it is asked what they met."""
LINES = [
    *((Simulation, seed) for seed in SEEDS),
    *(
        (kind, seed)
        for kind in (
            UnnumberedSimulation, PacedSimulation, OverlappedSimulation, ReducedSimulation
        )
        for seed in FEWER
    ),
    *((GrainSimulation, seed) for seed in WORTH),
]  # fmt: skip
_Kind = TypeVar("_Kind", bound=Simulation)


_ENDED: dict[object, Any] = {}


def ended(kind: type[_Kind], seed: int) -> _Kind:
    """A run that met random faults and then ended; every state on the way was checked."""
    if (kind, seed) not in _ENDED:
        simulation = kind(seed)
        simulation.run(actions=1500)
        simulation.finish()
        _ENDED[kind, seed] = simulation
    known: _Kind = _ENDED[kind, seed]
    return known


def positions_of(simulation: Simulation) -> list[tuple[int, int]]:
    """Epoch and position of everything that a run committed or skipped, in order."""
    seen: list[tuple[int, int]] = []
    for record, result in simulation.history:
        if result is not None:
            parts = sorted(part for each in result.contributions for part in each.positions)
            assert sum(len(part) for part in parts) == len(result.batch)
            seen += [(result.epoch, p) for part in parts for p in range(part.start, part.stop)]
        elif record.kind is RecordKind.MARK:
            skip = simulation.skips[record.key]
            positions = range(skip.positions.start, skip.positions.stop)
            seen += [(skip.epoch, p) for p in positions]
    return seen


@pytest.mark.parametrize(("kind", "seed"), LINES)
def test_f_dp_002_c_commit_001_a_line_ends_with_one_history_of_every_position_through_any_faults(
    kind: type[Simulation], seed: int
) -> None:
    simulation = ended(kind, seed)

    simulation.check()

    assert simulation.bench.line.state is LineState.COMPLETE
    size, positions = simulation.bench.plan.dataset_size, positions_of(simulation)
    assert size is not None
    assert positions == [divmod(index, size) for index in range(len(positions))], "each once"
    last = simulation.history[-1][0].key
    final = [each.weights for each in simulation.processes if each.head == last]
    assert final
    assert all(weights == final[0] for weights in final)
    records = [record for record, _ in simulation.history]
    assert records[0].kind is RecordKind.INITIAL
    for parent, record in pairwise(records):
        assert record.parent == parent.key
        assert record.key > parent.key
        assert record.step == parent.step + (record.kind is RecordKind.STEP)
    steps = sum(record.kind is RecordKind.STEP for record in records)
    assert steps == simulation.bench.settings.policy.max_steps


def test_the_simulations_are_worth_something_since_all_that_they_are_for_happens() -> None:
    usual = [ended(Simulation, seed) for seed in WORTH]
    records = [[record for record, _ in each.history] for each in usual]
    steps = sum(record.kind is RecordKind.STEP for each in records for record in each)
    overlapped = [ended(OverlappedSimulation, seed) for seed in WORTH]
    reduced = [ended(ReducedSimulation, seed) for seed in WORTH]

    assert {record.kind for each in records for record in each} == set(RecordKind)
    assert sum(len(each.rosters) for each in usual) - steps > 20, "void rounds"
    assert sum(each.bench.journal.term >> 32 for each in usual) > 20, "coordinators"
    assert sum(ended(UnnumberedSimulation, seed).moved for seed in WORTH) > 5, "other slots"
    assert len(set().union(*(ended(PacedSimulation, seed).sizes for seed in WORTH))) > 10
    assert sum(ended(GrainSimulation, seed).redealt for seed in WORTH) > 10
    assert sum(each.kept for each in overlapped) > 100
    assert sum(each.dropped for each in overlapped) > 0
    assert sum(each.losses for each in reduced) > 20
    assert sum(len(each.broken) for each in reduced) > 5
