"""Balance: shares follow measured throughput, and nothing else."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.protocol.records import PositionRange
from andon.protocol.shards import Split, deal
from andon_coordinator.core.balance import (
    CALIBRATION,
    INTERVAL,
    PATIENCE,
    Balance,
    shares_of,
    targets_of,
)
from andon_coordinator.core.readings import (
    PacedProcess,
    Reading,
    estimated_speeds,
    round_half_away,
    seconds_per_sample,
)
from unit.andon.strategies import BOUNDED
from unit.andon_coordinator.paced_line import processes, readings_of


def train(
    balance: Balance, roster: Sequence[PacedProcess], speeds: Sequence[float], steps: int
) -> None:
    """Steps in which each rank computes what it was dealt of 1,200 positions, at its speed."""
    for _ in range(steps):
        targets = balance.targets(roster)
        computed = [max(1, 1200 * target // sum(targets)) for target in targets]
        seconds = [number / speed for number, speed in zip(computed, speeds, strict=True)]
        balance.observe(readings_of(roster, computed, seconds))


def shares(balance: Balance, roster: Sequence[PacedProcess]) -> list[float]:
    targets = balance.targets(roster)
    return [target / sum(targets) for target in targets]


@pytest.mark.parametrize(
    ("ratios", "batch", "sizes"),
    [
        ([0.5, 0.5], 10, [5, 5]),
        ([0.5, 0.5], 11, [6, 5]),
        ([0.5, 0.5], 3, [2, 1]),
        ([0.7, 0.3], 10, [7, 3]),
        # The seed makes shards of [-1, 1, 1] of this.
        ([0.4, 0.3, 0.3], 1, [1, 0, 0]),
    ],
)
def test_ratios_deal_the_shard_sizes_of_the_seed(
    ratios: list[float], batch: int, sizes: list[int]
) -> None:
    dealt = deal(PositionRange(0, batch), Split(targets_of(ratios)), len(ratios))

    assert [sum(map(len, ranges)) for ranges in dealt] == sizes


def test_throughput_20_after_10_is_smoothed_to_13() -> None:
    roster, balance = processes(1), Balance()
    balance.targets(roster)

    balance.observe(readings_of(roster, [10], [1.0]))
    balance.observe(readings_of(roster, [20], [1.0]))

    assert balance.throughputs[roster[0]] == pytest.approx(13)


def test_throughputs_30_and_10_give_three_quarters_and_one() -> None:
    assert shares_of([30.0, 10.0]) == [0.75, 0.25]
    assert targets_of([0.75, 0.25]) == (7500, 2500)


def test_shares_are_set_after_10_steps_and_then_every_50() -> None:
    roster, balance = processes(2), Balance()

    changed_at, before = [], balance.targets(roster)
    for step in range(1, CALIBRATION + 2 * INTERVAL + 1):
        # Slowly drifting, and never wrong by a quarter.
        train(balance, roster, [1.0 + step / 500, 1.0], 1)
        after = balance.targets(roster)
        changed_at += [step] if after != before else []
        before = after

    assert changed_at == [CALIBRATION, CALIBRATION + INTERVAL, CALIBRATION + 2 * INTERVAL]


def test_shares_that_are_clearly_wrong_are_set_early() -> None:
    roster, balance = processes(3), Balance()
    train(balance, roster, [3.0, 1.0, 2.0], CALIBRATION)

    train(balance, roster, [1.0, 3.0, 2.0], PATIENCE)  # The slow and the fast one swap.

    assert shares(balance, roster) == pytest.approx([1 / 6, 3 / 6, 2 / 6], rel=0.01)


def test_steps_that_are_slow_in_turns_do_not_change_the_shares() -> None:
    roster, balance = processes(3), Balance()
    train(balance, roster, [1.0, 1.0, 1.0], CALIBRATION)

    for step in range(INTERVAL - 1):
        speeds = [1.0, 1.0, 1.0]
        speeds[step % 3] = 0.5
        train(balance, roster, speeds, 1)

        assert shares(balance, roster) == pytest.approx([1 / 3, 1 / 3, 1 / 3], rel=0.01)


def test_a_window_of_many_local_steps_counts_as_so_many_steps() -> None:
    roster, balance = processes(3), Balance(batches=8)

    train(balance, roster, [3.0, 1.0, 2.0], 1)
    assert shares(balance, roster) == pytest.approx([3 / 6, 1 / 6, 2 / 6], rel=0.01)

    train(balance, roster, [1.0, 3.0, 2.0], 1)
    assert shares(balance, roster) == pytest.approx([1 / 6, 3 / 6, 2 / 6], rel=0.01)


def test_a_worker_at_the_floor_does_not_cause_one_rebalance_after_another() -> None:
    roster, balance = processes(2), Balance()
    train(balance, roster, [1000.0, 1.0], CALIBRATION)
    at_the_floor = balance.targets(roster)

    for _ in range(INTERVAL - 1):
        train(balance, roster, [1000.0 + random.Random(1).random(), 1.0], 1)
        assert balance.targets(roster) == at_the_floor

    assert shares(balance, roster)[1] == pytest.approx(0.05, rel=0.01)


def test_the_floor_leaves_room_for_balance_on_a_line_of_40() -> None:
    part = shares_of([2.0] * 20 + [1.0] * 20)

    assert part[0] == pytest.approx(2 * part[-1])


def test_waiting_is_never_part_of_a_throughput() -> None:
    fast, slow = processes(2)

    measured = seconds_per_sample(
        [
            Reading(process=fast, computed=10, busy_s=1.0),
            Reading(process=slow, computed=10, busy_s=5.0),
        ]
    )

    assert measured == {fast: 0.1, slow: 0.5}


def test_waits_for_data_count_only_if_every_worker_with_samples_reports_them() -> None:
    first, second, idle = processes(3)
    with_data = Reading(process=first, computed=10, busy_s=1.0, data_s=1.0)
    nothing = Reading(process=idle, computed=0, busy_s=0.0)

    all_report = [with_data, Reading(process=second, computed=10, busy_s=2.0, data_s=0.5), nothing]
    one_does_not = [with_data, Reading(process=second, computed=10, busy_s=2.0), nothing]

    assert seconds_per_sample(all_report) == {first: 0.2, second: 0.25}
    assert seconds_per_sample(one_does_not) == {first: 0.1, second: 0.2}


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, -math.inf, 1e300, 1e-300])
def test_impossible_times_give_no_reading(seconds: float) -> None:
    (process,) = processes(1)

    assert seconds_per_sample([Reading(process=process, computed=4, busy_s=seconds)]) == {}


def test_a_step_without_computed_samples_leaves_the_throughputs() -> None:
    roster, balance = processes(2), Balance()
    train(balance, roster, [2.0, 1.0], 3)
    before = dict(balance.throughputs)

    balance.observe(readings_of(roster, [0, 0], [1.0, 1.0]))

    assert balance.throughputs == before


def test_a_wrong_hint_is_unlearnt() -> None:
    roster, balance = processes(2, w0=8.0), Balance()
    hinted = shares(balance, roster)

    train(balance, roster, [1.0, 1.0], CALIBRATION)

    assert hinted == pytest.approx([8 / 9, 1 / 9], rel=0.01)
    assert shares(balance, roster) == [0.5, 0.5]


def test_a_newcomer_without_a_hint_gets_the_median_share() -> None:
    roster, balance = processes(4), Balance()
    train(balance, roster[:3], [1.0, 2.0, 5.0], CALIBRATION)

    assert shares(balance, roster) == pytest.approx([0.1, 0.2, 0.5, 0.2], rel=0.01)


def test_a_newcomers_hint_is_brought_to_the_scale_of_measured_speeds() -> None:
    roster = processes(3, w0=1.0, w1=2.0, w2=4.0)
    measured = {roster[0]: 100.0, roster[1]: 200.0}

    assert estimated_speeds(roster, measured)[roster[2]] == 400.0


def test_a_new_process_in_a_slot_starts_anew_unless_it_is_on_the_same_machine() -> None:
    roster, balance = processes(2), Balance()
    train(balance, roster, [3.0, 1.0], CALIBRATION)

    same = (roster[0], PacedProcess(1, 777, roster[1].machine))
    other = (roster[0], PacedProcess(1, 777, "another"))

    assert shares(balance, same) == pytest.approx([0.75, 0.25])
    assert shares(balance, other) == [0.5, 0.5]


def test_processes_that_come_and_go_in_a_slot_do_not_fill_the_memory() -> None:
    balance = Balance()

    for incarnation in range(50):
        roster = (PacedProcess(0, incarnation), PacedProcess(1, incarnation))
        train(balance, roster, [1.0, 2.0], 2)

    assert len(balance.throughputs) <= 4


def test_what_was_saved_gives_the_same_shares_again() -> None:
    roster, balance, restored = processes(3), Balance(), Balance()
    train(balance, roster, [3.0, 1.0, 2.0], CALIBRATION + 5)

    restored.restore(balance.saved())

    assert restored.targets(roster) == balance.targets(roster)
    assert restored.throughputs == balance.throughputs


def test_halves_are_rounded_away_from_zero() -> None:
    assert [round_half_away(value) for value in (0.5, 1.5, 2.5, -2.5, 0.49999999999999994)] == [
        1,
        2,
        3,
        -3,
        0,
    ]


@BOUNDED
@given(st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=64))
def test_shares_have_the_sum_1_and_respect_the_floor(speeds: list[float]) -> None:
    part = shares_of(speeds)

    assert sum(part) == pytest.approx(1.0)
    assert min(part) >= 0.8 * min(0.05, 0.25 / len(speeds))
    assert min(targets_of(part)) >= 1


@BOUNDED
@given(
    st.lists(
        st.lists(st.tuples(st.integers(-3, 5), st.floats(), st.floats()), min_size=3, max_size=3),
        max_size=30,
    )
)
def test_no_timings_of_hostile_workers_break_the_shares(
    steps: list[list[tuple[int, float, float]]],
) -> None:
    roster, balance = processes(3), Balance()

    for step in steps:
        targets = balance.targets(roster)
        balance.observe(
            Reading(process=process, computed=computed, busy_s=busy, data_s=data)
            for process, (computed, busy, data) in zip(roster, step, strict=True)
        )

        assert all(1 <= target <= 10_000 for target in targets)
