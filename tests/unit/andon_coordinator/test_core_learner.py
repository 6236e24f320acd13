"""How long the line waits for a learner that is one step behind."""

from __future__ import annotations

from itertools import pairwise

import pytest

from andon.protocol.records import Key
from andon_coordinator.core.learner import Learning


@pytest.mark.parametrize(
    ("step_s", "waits"),
    [
        pytest.param(0.01, [0.04, 0.04, 0.04, 0.04], id="short-steps"),
        pytest.param(0.2, [0.04, 0.08, 0.16, 0.2], id="up-to-a-steps-time"),
        pytest.param(1.5, [0.15, 0.3, 0.6, 1.2, 1.5, 1.5], id="a-tenth-of-a-longer-steps-time"),
        pytest.param(60.0, [2.0, 2.0], id="two-seconds-at-most"),
    ],
)
def test_each_wait_is_longer_and_comes_twice_as_many_steps_later(
    step_s: float, waits: list[float]
) -> None:
    learning, step = Learning(began_at=0.0), 0
    seen: list[float] = []
    chances: list[int] = []
    while len(seen) < len(waits):
        learning.give_chance(step, step_s)
        if learning.chance_s is not None:
            seen.append(learning.chance_s)
            chances.append(step)
            learning.was_late(step, 200.0)
        step += 1

    assert seen == pytest.approx(waits)
    between = [later - earlier for earlier, later in pairwise(chances)]
    assert between == [2**each for each in range(1, len(waits))]


@pytest.mark.parametrize(
    ("made_up_s", "since_s", "step", "near"),
    [
        pytest.param(None, 0.2, 5, False, id="has-made-up-none"),
        pytest.param(None, 0.3, 5, True, id="waits-since-the-others-began"),
        pytest.param(1.0, 0.97, 5, True, id="at-the-end-of-a-step"),
        pytest.param(1.0, 0.9, 5, False, id="too-far"),
        pytest.param(1.0, 5.0, 5, True, id="longer-than-its-last-one"),
        pytest.param(1.0, 0.1, 12, True, id="comes-no-nearer"),
    ],
)
def test_it_is_near_if_by_its_last_step_it_may_be_done_in_time(
    made_up_s: float | None, since_s: float, step: int, near: bool
) -> None:
    learning, now = Learning(began_at=0.0), 10.0
    learning.follow(4)
    learning.waits_at(Key(1, 1), now if made_up_s is None else now - made_up_s)
    if made_up_s is not None:
        learning.waits_at(Key(1, 2), now)

    assert learning.may_be_near(step, now + since_s, 0.5) is near


def test_a_request_at_the_same_head_is_no_step() -> None:
    learning = Learning(began_at=0.0)
    learning.follow(4)
    for at in (1.0, 1.1):
        learning.waits_at(Key(1, 1), at)

    assert not learning.may_be_near(5, 1.2, 0.5)


def test_one_that_asked_for_no_work_yet_is_not_near() -> None:
    learning = Learning(began_at=0.0)
    learning.waits_at(Key(1, 1), 1.0)
    learning.follow(4)

    assert not learning.may_be_near(5, 9.0, 0.5)


def test_its_time_begins_when_the_others_wait_for_the_round() -> None:
    learning = Learning(began_at=0.0)
    assert not learning.holds_up(1.0)
    learning.give_chance(5, step_s=0.2)

    assert [learning.holds_up(at) for at in (7.0, 7.03, 7.05)] == [True, True, False]

    learning.was_late(5, 7.05)
    assert learning.waited_s == pytest.approx(0.04)
    assert not learning.holds_up(7.06)
