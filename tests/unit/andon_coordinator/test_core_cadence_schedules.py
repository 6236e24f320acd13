"""Cadence under random schedules: it settles, stays settled, and survives any timings."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from andon_coordinator.core.cadence import Cadence, CadenceRules
from andon_coordinator.core.loss_trend import LossTrend
from andon_coordinator.core.readings import PacedProcess, Reading
from unit.andon.strategies import BOUNDED
from unit.andon_coordinator.paced_line import processes, windows

speeds = st.lists(st.floats(0.01, 0.5), min_size=2, max_size=6)


@BOUNDED
@given(speeds)
def test_constant_speeds_settle_within_five_windows_for_good(seconds: list[float]) -> None:
    roster = processes(len(seconds))
    cadence = Cadence(CadenceRules())

    seen = windows(cadence, dict(zip(roster, seconds, strict=True)), 30)

    assert len(set(seen[5:])) == 1
    assert all(1 <= count <= 64 for counts in seen for count in counts)


@BOUNDED
@given(speeds, st.integers(1, 12))
def test_counts_settle_within_eight_windows_after_a_swap(seconds: list[float], before: int) -> None:
    roster = processes(len(seconds))
    cadence, fresh = Cadence(CadenceRules()), Cadence(CadenceRules())
    windows(cadence, dict(zip(roster, seconds, strict=True)), before)
    swapped = dict(zip(roster, reversed(seconds), strict=True))

    seen = windows(cadence, swapped, 20)

    assert len(set(seen[8:])) == 1
    ideal = windows(fresh, swapped, 5)[-1]
    # Among equally slow workers another one may be the anchor: up to 15 % and the dead zone.
    assert all(
        abs(count - best) <= 1 + 0.25 * best for count, best in zip(seen[-1], ideal, strict=True)
    )


@BOUNDED
@given(speeds, st.integers(0, 2**32))
def test_noise_does_not_make_counts_oscillate(seconds: list[float], seed: int) -> None:
    roster, generator = processes(len(seconds)), random.Random(seed)
    cadence = Cadence(CadenceRules())
    windows(cadence, dict(zip(roster, seconds, strict=True)), 8)

    turns = 0
    last: dict[PacedProcess, int] = {}
    counts = dict(zip(roster, cadence.counts(roster), strict=True))
    for _ in range(60):
        noisy = {
            each: second * generator.uniform(0.98, 1.02)
            for each, second in zip(roster, seconds, strict=True)
        }
        after = dict(zip(roster, windows(cadence, noisy, 1)[-1], strict=True))
        for each in roster:
            change = after[each] - counts[each]
            turns += change * last.get(each, 0) < 0
            last[each] = change or last.get(each, 0)
        counts = after

    assert turns == 0


@BOUNDED
@given(
    st.lists(
        st.lists(st.tuples(st.integers(-3, 5), st.floats(), st.floats()), min_size=3, max_size=3),
        max_size=30,
    ),
    st.floats(),
)
def test_no_timings_of_hostile_workers_break_the_counts(
    reports: list[list[tuple[int, float, float]]], exchange_s: float
) -> None:
    roster, trend = processes(3), LossTrend()
    cadence = Cadence(CadenceRules())

    for number, report in enumerate(reports):
        counts = cadence.counts(roster)
        cadence.report(
            [
                Reading(process=process, computed=computed, busy_s=busy, data_s=data)
                for process, (computed, busy, data) in zip(roster, report, strict=True)
            ],
            exchange_s=exchange_s,
            unit=4,
        )
        cadence.judge(trend.observe(report[0][1] if number % 2 else 1.0))

        assert all(1 <= count <= 64 * 16 for count in counts)
        assert 1 <= cadence.anchor <= 16
