"""The core under random faults: what must hold whatever dies, and that the run still ends.

The last tests lose reducers, too: no step may hold what a lost reducer averaged.
"""

from __future__ import annotations

import os
from itertools import pairwise

import pytest

from andon.protocol.records import RecordKind
from andon_coordinator.core.effects import LineState
from scenarios.line_simulation import Simulation
from scenarios.overlapped_simulation import OverlappedSimulation
from scenarios.paced_simulation import PacedSimulation
from scenarios.reduced_simulation import ReducedSimulation
from scenarios.unnumbered_simulation import UnnumberedSimulation

_SEEDS = range(int(os.environ.get("ANDON_SEEDS", "40")))
_REDUCER_SEEDS = range(len(_SEEDS) // 2)


def positions_of(ended: Simulation) -> list[tuple[int, int]]:
    """Epoch and position of everything that a run committed or skipped, in order."""
    seen: list[tuple[int, int]] = []
    for record, result in ended.history:
        if result is not None:
            parts = sorted(part for each in result.contributions for part in each.positions)
            assert sum(len(part) for part in parts) == len(result.batch)
            seen += [(result.epoch, p) for part in parts for p in range(part.start, part.stop)]
        elif record.kind is RecordKind.MARK:
            skip = ended.skips[record.key]
            positions = range(skip.positions.start, skip.positions.stop)
            seen += [(skip.epoch, p) for p in positions]
    return seen


def each_once(ended: Simulation) -> list[tuple[int, int]]:
    """As many positions as the run took, each once."""
    size = ended.bench.plan.dataset_size
    assert size is not None
    return [divmod(index, size) for index in range(len(positions_of(ended)))]


@pytest.fixture(scope="module", params=_SEEDS, ids="seed={}".format)
def ended(request: pytest.FixtureRequest) -> Simulation:
    """A run that met random faults and then ended; every state on the way was checked."""
    simulation = Simulation(request.param)
    simulation.run(actions=1500)
    simulation.finish()
    return simulation


def test_f_dp_002_every_position_is_committed_once_or_skipped_through_any_faults(
    ended: Simulation,
) -> None:
    assert positions_of(ended) == each_once(ended)


def test_c_commit_001_workers_of_one_head_hold_one_history_through_any_faults(
    ended: Simulation,
) -> None:
    last = ended.history[-1][0].key
    final = [each.weights for each in ended.processes if each.head == last]

    ended.check()

    assert ended.bench.line.state is LineState.COMPLETE
    assert final
    assert all(weights == final[0] for weights in final)


def test_c_commit_001_the_journal_is_one_chain_of_growing_keys(ended: Simulation) -> None:
    records = [record for record, _ in ended.history]

    assert records[0].kind is RecordKind.INITIAL
    for parent, record in pairwise(records):
        assert record.parent == parent.key
        assert record.key > parent.key
        assert record.step == parent.step + (record.kind is RecordKind.STEP)
    assert sum(record.kind is RecordKind.STEP for record in records) == 12


def test_the_simulation_met_every_kind_of_fault() -> None:
    """The driver is worth something: over all seeds, every kind of history occurs."""
    kinds = set()
    voids = terms = 0
    for seed in list(_SEEDS)[:10]:
        simulation = Simulation(seed)
        simulation.run(actions=1500)
        records = [record for record, _ in simulation.history]
        kinds |= {record.kind for record in records}
        voids += len(simulation.rosters) - sum(each.kind is RecordKind.STEP for each in records)
        terms += simulation.bench.journal.term >> 32

    assert kinds == set(RecordKind)
    assert voids > 20
    assert terms > 20


@pytest.mark.parametrize("seed", _REDUCER_SEEDS)
def test_c_commit_001_reducers_come_and_go_and_the_run_still_ends_with_whole_steps(
    seed: int,
) -> None:
    simulation = ReducedSimulation(seed)

    simulation.run(actions=1500)
    simulation.finish()

    assert simulation.bench.line.state is LineState.COMPLETE
    steps = [record for record, _ in simulation.history if record.kind is RecordKind.STEP]
    assert len(steps) == 12


@pytest.mark.parametrize("seed", _REDUCER_SEEDS)
def test_f_dp_002_where_the_line_gives_the_slots_every_position_is_committed_once_too(
    seed: int,
) -> None:
    simulation = UnnumberedSimulation(seed)

    simulation.run(actions=1500)
    simulation.finish()

    assert simulation.bench.line.state is LineState.COMPLETE
    assert positions_of(simulation) == each_once(simulation)


def test_the_simulation_had_workers_whose_slot_a_newcomer_got() -> None:
    moved = 0
    for seed in list(_REDUCER_SEEDS)[:10]:
        simulation = UnnumberedSimulation(seed)
        simulation.run(actions=1500)
        moved += simulation.moved

    assert moved > 5


@pytest.mark.parametrize("seed", _REDUCER_SEEDS)
def test_f_dp_002_with_work_divided_by_speed_every_position_is_committed_once_through_any_faults(
    seed: int,
) -> None:
    simulation = PacedSimulation(seed)

    simulation.run(actions=1500)
    simulation.finish()

    assert simulation.bench.line.state is LineState.COMPLETE
    assert positions_of(simulation) == each_once(simulation)


def test_the_simulation_had_windows_of_many_sizes() -> None:
    sizes: set[int] = set()
    for seed in list(_REDUCER_SEEDS)[:10]:
        simulation = PacedSimulation(seed)
        simulation.run(actions=1500)
        sizes |= simulation.sizes

    assert len(sizes) > 10


@pytest.mark.parametrize("seed", _REDUCER_SEEDS)
def test_f_dp_002_with_overlap_every_average_is_of_its_records_positions_through_any_faults(
    seed: int,
) -> None:
    simulation = OverlappedSimulation(seed)

    simulation.run(actions=1500)
    simulation.finish()

    assert simulation.bench.line.state is LineState.COMPLETE
    steps = [record for record, _ in simulation.history if record.kind is RecordKind.STEP]
    assert len(steps) == 12


def test_the_simulation_kept_and_dropped_what_was_computed_ahead() -> None:
    kept = dropped = 0
    for seed in list(_REDUCER_SEEDS)[:10]:
        simulation = OverlappedSimulation(seed)
        simulation.run(actions=1500)
        kept += simulation.kept
        dropped += simulation.dropped

    assert kept > 100
    assert dropped > 0


def test_the_simulation_lost_reducers_during_rounds() -> None:
    losses = broken = 0
    for seed in list(_REDUCER_SEEDS)[:10]:
        simulation = ReducedSimulation(seed)
        simulation.run(actions=1500)
        losses += simulation.losses
        broken += len(simulation.broken)

    assert losses > 20
    assert broken > 5
