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
