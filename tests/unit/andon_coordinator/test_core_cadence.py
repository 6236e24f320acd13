"""Cadence: counts follow measured speeds, and the anchor follows the cost of exchanging."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from andon_coordinator.core.cadence import Cadence, CadenceRules, Phase
from andon_coordinator.core.loss_trend import NudgeDown, Stable, SuppressGrowth
from andon_coordinator.core.readings import PacedProcess
from unit.andon_coordinator.paced_line import processes, readings_of, windows


def started(
    anchor: int = 10, *, target: float = 0.1, most: int = 200, diff: int | None = None
) -> Cadence:
    """As the vectors of the seed start."""
    return Cadence(
        CadenceRules(
            initial_anchor=anchor, overhead_target=target, max_anchor=most, max_batch_diff=diff
        )
    )


def first_window(
    wall_ms: list[float], *, exchange_ms: float = 0.0, anchor: int = 10, most: int = 200
) -> tuple[Cadence, tuple[PacedProcess, ...]]:
    """A cadence after its first window, in which each rank computed `anchor` micro-batches."""
    cadence, roster = started(anchor, most=most), processes(len(wall_ms))
    computed = cadence.counts(roster)
    seconds = [wall / 1000 for wall in wall_ms]
    cadence.report(readings_of(roster, computed, seconds), exchange_s=exchange_ms / 1000, unit=1)
    return cadence, roster


# --------------------------------------------------------------------- the seed's vectors


@pytest.mark.parametrize(
    ("wall_ms", "counts"),
    [
        ([500, 1000], (20, 10)),
        ([730, 1640], (22, 10)),
        ([333, 500, 1000], (30, 20, 10)),
        ([1000, 1000], (10, 10)),
    ],
)
def test_the_first_window_sets_the_counts(wall_ms: list[float], counts: tuple[int, ...]) -> None:
    cadence, roster = first_window(wall_ms)

    assert cadence.counts(roster) == counts


@pytest.mark.parametrize(
    ("wall_ms", "exchange_ms", "most", "older"),
    [
        ([1000, 1000], 500, 200, (50, 50)),
        ([500, 1000], 400, 200, (80, 40)),
        ([500, 1000], 400, 30, (60, 30)),
    ],
)
def test_growth_is_staged_where_the_older_algorithm_jumped(
    wall_ms: list[float], exchange_ms: float, most: int, older: tuple[int, ...]
) -> None:
    # The older algorithm multiplied the anchor by overhead over target in the first window. The
    # newer one waits for the second window, doubles at most, and asks for a verdict. Its overhead
    # is a part of the whole window, not of the computing alone: 500 of 1500, not of 1000.
    cadence, roster = first_window(wall_ms, exchange_ms=exchange_ms, most=most)
    times = {each: wall / 10_000 for each, wall in zip(roster, wall_ms, strict=True)}
    slowest_first = cadence.counts(roster)[-1]

    seen = windows(cadence, times, 8, exchange_s=exchange_ms / 1000)

    assert slowest_first == 10
    assert seen[0][-1] == 10
    assert seen[1][-1] == 20
    # The older one's aim is an upper limit: the newer one stops once the target is met.
    assert seen[1] < seen[-1] <= older
    fixed = exchange_ms / 1000
    computing = seen[-1][-1] * times[roster[-1]]
    assert seen[-1][-1] == most or fixed / (computing + fixed) <= 2 * 0.1


def test_halving_an_anchor_of_20_gives_20_and_10() -> None:
    cadence, roster = first_window([500 * 2, 1000 * 2], anchor=20)

    cadence.judge(NudgeDown(0.5))

    assert cadence.anchor == 10
    assert cadence.counts(roster) == (20, 10)


def test_a_second_reading_of_75_ms_after_50_gives_62_5_and_16() -> None:
    cadence, (fast, slow) = first_window([500, 1000])
    computed = cadence.counts((fast, slow))

    cadence.report(readings_of((fast, slow), computed, [20 * 0.075, 1.0]), exchange_s=0.0, unit=1)

    assert cadence.times()[fast] == pytest.approx(0.0625)
    assert cadence.counts((fast, slow)) == (16, 10)


def test_one_outlier_has_a_fifth_of_the_weight() -> None:
    # The older algorithm gave an outlier up to 0.8 of the weight: the more it was off, the more.
    fast, slow = processes(2)
    cadence = started()
    windows(cadence, {fast: 0.05, slow: 0.1}, 5)

    cadence.report(readings_of((fast, slow), (20, 10), [20 * 0.1, 1.0]), exchange_s=0.0, unit=1)

    assert cadence.times()[fast] == pytest.approx(0.06)


def test_a_reversal_moves_a_count_by_the_permitted_difference_at_most() -> None:
    first, second = processes(2)
    cadence = started(diff=3)
    assert windows(cadence, {first: 0.05, second: 0.01}, 1)[-1] == (10, 50)

    seen = windows(cadence, {first: 0.01, second: 0.05}, 6)

    falls = [before[1] - after[1] for before, after in itertools.pairwise(seen)]
    assert max(falls) == 3
    assert all(count >= 47 - 3 * late for late, (_, count) in enumerate(seen))


def test_a_hint_sets_the_first_counts_and_is_unlearnt() -> None:
    roster = processes(2, w0=3.0)
    cadence = started()

    seen = windows(cadence, dict.fromkeys(roster, 0.1), 1)

    assert seen == [(30, 10), (10, 10)]


# ------------------------------------------------------------------------ who the anchor is


def test_equally_slow_workers_do_not_take_turns_as_the_anchor() -> None:
    roster, generator = processes(3), random.Random(3)
    cadence = started()
    anchors = set()

    for _ in range(40):
        times = {each: 0.1 * generator.uniform(0.97, 1.03) for each in roster}
        windows(cadence, times, 1)
        anchors.add(cadence.anchor_process)

    assert anchors == {roster[0]}


def test_a_challenger_must_be_a_tenth_slower() -> None:
    first, second = processes(2)
    cadence = started()
    windows(cadence, {first: 0.1, second: 0.1}, 8)

    windows(cadence, {first: 0.1, second: 0.109}, 8)
    within_the_margin = cadence.anchor_process
    windows(cadence, {first: 0.1, second: 0.112}, 8)

    assert within_the_margin == first
    assert cadence.anchor_process == second


def test_a_silent_anchor_is_replaced_after_five_reports() -> None:
    fast, slow = processes(2)
    cadence = started()
    windows(cadence, {fast: 0.05, slow: 0.1}, 1)
    anchors = []

    for _ in range(5):
        counts = cadence.counts((fast, slow))
        cadence.report(
            readings_of((fast, slow), counts, [0.05 * counts[0], math.nan]), exchange_s=0.0, unit=1
        )
        anchors.append(cadence.anchor_process)

    assert anchors == [slow] * 4 + [fast]
    assert slow not in cadence.times()


def test_the_phases_follow_the_reports() -> None:
    cadence, roster = started(), processes(2)
    phases = [cadence.phase]

    for _ in range(21):
        windows(cadence, dict.fromkeys(roster, 0.1), 1)
        phases.append(cadence.phase)

    assert phases[0] is Phase.PROBE
    assert set(phases[1:6]) == {Phase.WARMUP}
    assert set(phases[6:21]) == {Phase.STABLE}
    assert phases[21] is Phase.MATURE


# ------------------------------------------------------------------------- growing, nudging


def test_growth_waits_for_a_stable_verdict() -> None:
    cadence, roster = first_window([1000, 1000], exchange_ms=500)
    cadence.judge(Stable())
    cadence.report(readings_of(roster, (10, 10), [1.0, 1.0]), exchange_s=0.5, unit=1)

    assert (cadence.anchor, cadence.proposal) == (10, 20)

    cadence.judge(None)

    assert (cadence.anchor, cadence.proposal) == (10, None)


def test_a_rising_loss_drops_the_proposal_and_five_calm_windows_allow_growth_again() -> None:
    roster = processes(2)
    cadence = started()
    times = dict.fromkeys(roster, 0.1)

    suppressed = windows(cadence, times, 3, exchange_s=0.5, verdict=SuppressGrowth())
    calm = windows(cadence, times, 6, exchange_s=0.5)

    assert {counts[0] for counts in suppressed} == {10}
    assert [counts[0] for counts in calm] == [10, 10, 10, 10, 10, 10, 20]


def test_a_nudge_takes_the_present_anchor_and_not_the_proposal() -> None:
    cadence, roster = first_window([1000, 1000], exchange_ms=500)
    cadence.report(readings_of(roster, (10, 10), [1.0, 1.0]), exchange_s=0.5, unit=1)

    cadence.judge(NudgeDown(0.5))

    assert cadence.anchor == 5


@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf])
def test_a_nudge_that_is_no_number_leaves_the_anchor(factor: float) -> None:
    cadence, _ = first_window([1000, 1000])

    cadence.judge(NudgeDown(factor))

    assert cadence.anchor == 10


def test_a_lowered_anchor_climbs_back_one_by_one_once_the_line_is_mature() -> None:
    roster = processes(2)
    cadence = started(anchor=10)
    times = dict.fromkeys(roster, 0.1)
    windows(cadence, times, 21)
    cadence.judge(NudgeDown(0.5))

    seen = [counts[0] for counts in windows(cadence, times, 12)]

    # Four calm windows come first; the fifth allows growth.
    assert seen == [5, 5, 5, 5, 5, 6, 7, 8, 9, 10, 10, 10, 10]


def test_a_climb_that_would_part_the_counts_too_far_does_not_happen() -> None:
    fast, slow = processes(2)
    cadence = started(anchor=4, diff=6)
    times = {fast: 0.04, slow: 0.1}
    windows(cadence, times, 21)
    cadence.judge(NudgeDown(0.5))

    windows(cadence, times, 12)

    # At 5 the counts would be 13 and 5, and at 4 they are 10 and 4.
    assert cadence.anchor == 4


def test_one_slow_exchange_does_not_lengthen_the_windows() -> None:
    roster = processes(2)
    cadence = started()
    times = dict.fromkeys(roster, 0.1)
    windows(cadence, times, 4)

    windows(cadence, times, 1, exchange_s=60.0)
    windows(cadence, times, 4)

    assert cadence.anchor == 10


def test_no_verdict_makes_an_anchor_grow_beyond_its_limit() -> None:
    cadence, roster = first_window([1000, 1000], exchange_ms=5000)
    anchors = []

    for most in (9, 13, 13, 60):
        cadence.report(readings_of(roster, (10, 10), [1.0, 1.0]), exchange_s=5.0, unit=1)
        cadence.judge(Stable(), most)
        anchors.append(cadence.anchor)

    assert anchors == [10, 13, 13, 26]


def test_an_anchor_that_climbs_back_stops_at_the_limit() -> None:
    roster = processes(2)
    cadence = started(anchor=10)
    times = dict.fromkeys(roster, 0.1)
    windows(cadence, times, 21)
    cadence.judge(NudgeDown(0.5))

    for _ in range(12):
        cadence.report(readings_of(roster, (5, 5), [0.5, 0.5]), exchange_s=0.0, unit=1)
        cadence.judge(Stable(), 7)

    assert cadence.anchor == 7


# -------------------------------------------------------------------------- rosters, saving


def test_survivors_keep_their_readings_when_a_worker_goes_and_one_comes() -> None:
    roster = processes(4)
    fast, middle, slow, newcomer = roster
    cadence = started(anchor=1)
    windows(cadence, {fast: 0.1, middle: 0.16, slow: 0.3}, 3)

    without_the_slowest = cadence.counts((fast, middle))
    with_a_newcomer = cadence.counts((fast, slow, newcomer))

    assert without_the_slowest == (2, 1)
    # Nothing is known of the newcomer: it gets as little as the slowest.
    assert with_a_newcomer == (3, 1, 1)


def test_what_was_saved_gives_the_same_counts_again() -> None:
    roster = processes(3)
    cadence, restored = started(anchor=2), started(anchor=1)
    windows(cadence, dict(zip(roster, [0.1, 0.15, 0.3], strict=True)), 8)

    restored.restore(
        cadence.saved(),
        roster=3,
        anchor=cadence.anchor,
        anchor_process=cadence.anchor_process,
        reports=cadence.reports,
    )

    assert restored.counts(roster) == cadence.counts(roster) == (6, 4, 2)
    assert (restored.phase, restored.times()) == (cadence.phase, cadence.times())


def test_new_processes_on_the_same_machines_go_on_at_the_same_pace() -> None:
    roster = processes(2)
    cadence, restored = started(anchor=1), started(anchor=1)
    windows(cadence, dict(zip(roster, [0.1, 0.3], strict=True)), 3)
    restored.restore(
        cadence.saved(), roster=2, anchor=1, anchor_process=cadence.anchor_process, reports=3
    )

    again = tuple(PacedProcess(each.worker, 900 + each.worker, each.machine) for each in roster)

    assert restored.counts(again) == (3, 1)
