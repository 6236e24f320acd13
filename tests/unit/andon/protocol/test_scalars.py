"""Scalars: which names they may have, and how many names a run may have."""

from __future__ import annotations

import math

import pytest

from andon.protocol.limits import COUNT_LIMIT, MAX_SCALAR_NAMES, LimitExceeded
from andon.protocol.scalars import Scalar, ScalarNames


@pytest.mark.parametrize("name", ["val", "val/loss", "lr-1.group_0", "x" * 64])
def test_a_name_of_plain_characters_is_a_scalars(name: str) -> None:
    assert Scalar(name, 0, 1.0).name == name


@pytest.mark.parametrize("name", ["", "val loss", "<b>", "größe", "val\n", '"', "x\x00"])
def test_a_name_of_other_characters_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="letters, digits"):
        Scalar(name, 0, 1.0)


def test_a_long_name_is_refused() -> None:
    with pytest.raises(LimitExceeded, match="65 characters"):
        Scalar("x" * 65, 0, 1.0)


@pytest.mark.parametrize("step", [-1, COUNT_LIMIT])
def test_an_impossible_step_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match="step of a scalar"):
        Scalar("val", step, 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_any_number_is_a_value(value: float) -> None:
    assert repr(Scalar("val", 3, value).value) == repr(value)


def test_names_are_taken_until_there_are_too_many() -> None:
    names = ScalarNames(["known"])

    taken = [names.take(f"n{number}") for number in range(MAX_SCALAR_NAMES)]

    assert taken == [True] * (MAX_SCALAR_NAMES - 1) + [False]
    assert names.take("known")
    assert names.take("n0")


def test_a_refused_name_is_worth_one_warning_and_warnings_are_bounded() -> None:
    names = ScalarNames()

    warned = [names.refuse(f"n{number // 2}") for number in range(4 * MAX_SCALAR_NAMES)]

    assert warned[:4] == [True, False, True, False]
    assert sum(warned) == MAX_SCALAR_NAMES
