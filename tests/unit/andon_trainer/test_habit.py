"""The habit: whether a script goes straight from a commit to its next step."""

from __future__ import annotations

from andon_trainer.core.habit import Habit


def test_a_script_is_straight_once_it_was_so_after_a_commit() -> None:
    habit = Habit()
    habit.wants_work()
    first = habit.is_straight
    habit.committed()

    habit.wants_work()

    assert not first
    assert habit.is_straight


def test_a_script_that_did_something_else_after_its_last_commit_is_not() -> None:
    habit = Habit()
    habit.committed()
    habit.wants_work()
    habit.committed()
    habit.does_something_else()

    habit.wants_work()

    assert not habit.is_straight


def test_a_void_round_says_nothing_of_the_script() -> None:
    habit = Habit()
    habit.committed()
    habit.wants_work()

    habit.wants_work()

    assert habit.is_straight
