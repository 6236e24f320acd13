"""Which workers are slow for long, and what is to be done about them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from andon_coordinator.core.eviction import EvictionRules, SlowStep, SlowWorkers
from andon_coordinator.core.readings import PacedProcess, Reading

RULES = EvictionRules(slower_than=3.0)


def process(worker: int) -> PacedProcess:
    return PacedProcess(worker, 100 + worker)


class Line:
    """Workers that compute at the speeds that a test gives, a step a second."""

    def __init__(self, workers: int = 4, *, by_speed: bool = False, batches: int = 1) -> None:
        self.slow = SlowWorkers(RULES, batches=batches, by_speed=by_speed)
        self.roster = [process(worker) for worker in range(workers)]
        self.now = 0.0

    def step(
        self, speeds: Iterable[float], parts: Iterable[int] | None = None, s: float = 1.0
    ) -> None:
        self.now += s
        targets = self.slow.targets(self.roster)
        given = parts or [targets.get(each.worker, 10_000) for each in self.roster]
        readings = [
            Reading(process=each, computed=part, busy_s=part / speed)
            for each, part, speed in zip(self.roster, given, speeds, strict=True)
        ]
        self.slow.observe(readings, self.now)

    def steps(self, count: int, *speeds: float, s: float = 1.0) -> None:
        for _ in range(count):
            self.step(speeds, s=s)


def test_a_worker_that_is_slow_for_long_is_dealt_less_in_proportion_to_its_speed() -> None:
    line = Line()

    line.steps(21, 8, 8, 8, 2)

    ((whom, what, why),) = line.slow.news()
    assert (whom.worker, what) == (3, SlowStep.EASED)
    assert why == "4.0 times as slow as the others for 21 steps"
    assert line.slow.targets(line.roster) == {0: 10_000, 1: 10_000, 2: 10_000, 3: 2_500}
    assert line.slow.eased(process(3)) == why


def test_neither_many_short_steps_nor_few_long_ones_are_for_long() -> None:
    short, long = Line(), Line()

    short.steps(200, 8, 8, 8, 2, s=0.09)
    long.steps(19, 8, 8, 8, 2, s=100.0)

    assert not short.slow.news()
    assert not long.slow.news()


def test_hiccups_are_no_streak_and_a_single_fast_step_ends_none() -> None:
    hiccups, nearly = Line(), Line()

    for _ in range(100):
        hiccups.steps(2, 8, 8, 8, 1)
        hiccups.steps(1, 8, 8, 8, 8)
    nearly.steps(15, 8, 8, 8, 2)
    nearly.steps(1, 8, 8, 8, 8)
    nearly.steps(6, 8, 8, 8, 2)

    assert not hiccups.slow.news()
    assert [what for _, what, _ in nearly.slow.news()] == [SlowStep.EASED]


def test_whoever_was_dealt_less_and_holds_up_nobody_stays() -> None:
    line = Line()

    line.steps(300, 8, 8, 8, 2)

    assert not line.slow.should_follow


def test_whoever_holds_the_others_up_all_the_same_should_follow() -> None:
    line = Line()
    line.steps(30, 8, 8, 8, 2)

    line.steps(60, 8, 8, 8, 1)
    before = line.slow.should_follow
    line.steps(1, 8, 8, 8, 1)

    assert not before
    assert line.slow.should_follow == {process(3): "8.0 times as slow as the others for 61 steps"}


def test_shares_by_speed_ease_by_themselves_and_their_floor_is_no_help() -> None:
    line = Line(by_speed=True)

    for _ in range(100):
        line.step((8, 8, 8, 2), (4, 4, 4, 1))
    helped = line.slow.should_follow
    for _ in range(61):
        line.step((8, 8, 8, 0.1), (4, 4, 4, 1))

    assert not helped
    assert list(line.slow.should_follow) == [process(3)]
    assert not line.slow.news()
    assert not line.slow.targets(line.roster)


def test_a_worker_that_recovers_is_dealt_as_the_others_again() -> None:
    line = Line()
    line.steps(21, 8, 8, 8, 2)
    line.slow.news()

    line.steps(21, 8, 8, 8, 7)

    assert [what for _, what, _ in line.slow.news()] == [SlowStep.RECOVERED]
    assert not line.slow.targets(line.roster)


def test_of_two_workers_nobody_can_tell_who_is_slow() -> None:
    line = Line(workers=2)

    line.steps(200, 8, 1)

    assert not line.slow.news()


def test_a_new_process_in_the_slot_is_measured_anew() -> None:
    line = Line()
    line.steps(21, 8, 8, 8, 2)

    line.roster[3] = PacedProcess(3, 999)
    line.steps(1, 8, 8, 8, 2)

    assert not line.slow.targets(line.roster)
    assert not line.slow.eased(process(3))


def test_windows_count_as_the_steps_that_they_are_but_one_is_not_enough() -> None:
    line = Line(batches=16)

    line.steps(2, 8, 8, 8, 2, s=16.0)
    before = line.slow.news()
    line.steps(1, 8, 8, 8, 2, s=16.0)

    assert not before
    assert [what for _, what, _ in line.slow.news()] == [SlowStep.EASED]


@pytest.mark.parametrize("factor", [1.0, 0.5, float("nan"), float("inf")])
def test_a_factor_by_which_everybody_is_slow_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="slower_than must be above 1"):
        EvictionRules(slower_than=factor)
