"""The habit: whether a script goes straight from a commit to its next step."""

from __future__ import annotations

import pytest

from andon_trainer.core.habit import Habit


@pytest.mark.parametrize(
    ("happened", "straight"),
    [
        ("wants_work", False),
        ("wants_work committed wants_work", True),
        ("committed wants_work committed does_something_else wants_work", False),
        ("committed wants_work wants_work", True),  # A void round says nothing of the script.
    ],
)
def test_a_script_is_straight_if_it_asked_for_work_at_once_after_its_last_commit(
    happened: str, *, straight: bool
) -> None:
    habit = Habit()

    for each in happened.split():
        getattr(habit, each)()

    assert habit.is_straight is straight
