"""How long the line waits for a learner that is one step behind."""

from __future__ import annotations

from itertools import pairwise

import pytest

from andon_coordinator.core.learner import Learning


@pytest.mark.parametrize(
    ("step_s", "waits"),
    [
        pytest.param(0.01, [0.04, 0.04, 0.04, 0.04], id="short-steps"),
        pytest.param(0.2, [0.04, 0.08, 0.16, 0.2], id="up-to-a-steps-time"),
        pytest.param(
            60.0, [0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.0, 2.0], id="two-seconds-at-most"
        ),
    ],
)
def test_each_wait_is_longer_and_comes_twice_as_many_steps_later(
    step_s: float, waits: list[float]
) -> None:
    learning, step = Learning(began_at=0.0), 0
    seen: list[float] = []
    chances: list[int] = []
    while len(seen) < len(waits):
        learning.give_chance(step, 100.0, step_s)
        if learning.patience_until is not None:
            seen.append(learning.patience_until - 100.0)
            chances.append(step)
            learning.was_late(step, 200.0)
        step += 1

    assert seen == pytest.approx(waits)
    between = [later - earlier for earlier, later in pairwise(chances)]
    assert between == [2**each for each in range(1, len(waits))]


@pytest.mark.parametrize(
    ("asked_at", "step", "near"),
    [
        pytest.param(None, 5, False, id="has-made-up-none"),
        pytest.param(9.0, 5, True, id="from-the-beginning"),
        pytest.param(9.6, 5, False, id="late-in-the-step"),
        pytest.param(9.6, 12, True, id="comes-no-nearer"),
    ],
)
def test_it_is_near_if_it_was_at_its_step_in_the_first_half_of_the_others_time(
    asked_at: float | None, step: int, near: bool
) -> None:
    learning = Learning(began_at=0.0)
    learning.follow(4)
    learning.asked_at = asked_at

    assert learning.may_be_near(step, 10.0, 1.0) is near
