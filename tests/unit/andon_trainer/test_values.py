"""F-DP-003 at the worker's end: what must not be sent is found before it is, and named."""

from __future__ import annotations

import math

import numpy as np
import pytest

from andon.protocol.encoding import Encoding
from andon.protocol.halts import describe_value
from andon_trainer.core.values import BadValue, bad_value_of

FLOATING = [
    Encoding.FLOAT32,
    Encoding.FLOAT16,
    Encoding.BFLOAT16,
    Encoding.INT8_BLOCK,
    Encoding.INT4_BLOCK,
]


@pytest.mark.parametrize("encoding", FLOATING)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_f_dp_003_the_first_value_that_is_not_finite_is_found(
    encoding: Encoding, value: float
) -> None:
    flat = np.ones(150_000, np.float32)
    flat[[131_072, 149_999]] = value

    assert bad_value_of(flat, encoding) == BadValue(
        "NON_FINITE_GRADIENT", 131_072, describe_value(value)
    )


@pytest.mark.parametrize(
    ("encoding", "value"),
    [(Encoding.FLOAT16, 7e4), (Encoding.BFLOAT16, -3.4e38), (Encoding.INT8_BLOCK, 1.4e36)],
)
def test_the_first_finite_value_beyond_the_encoding_is_found(
    encoding: Encoding, value: float
) -> None:
    flat = np.ones(150_000, np.float32)
    flat[[70_000, 140_000]] = value

    defect = bad_value_of(flat, encoding)

    assert defect is not None
    assert (defect.kind, defect.element) == ("ENCODING_OVERFLOW", 70_000)


@pytest.mark.parametrize("encoding", FLOATING[1:])
def test_f_dp_003_a_nan_is_told_before_an_overflow(encoding: Encoding) -> None:
    flat = np.array([1.0, 3.4e38, math.nan], np.float32)

    defect = bad_value_of(flat, encoding)

    assert defect is not None
    assert (defect.kind, defect.element) == ("NON_FINITE_GRADIENT", 2)


def test_finite_numbers_whose_sum_is_not_are_no_defect() -> None:
    flat = np.full(1000, 3.4e38, np.float32)

    assert bad_value_of(flat, Encoding.FLOAT32) is None


@pytest.mark.parametrize("encoding", FLOATING)
def test_nothing_has_no_defect(encoding: Encoding) -> None:
    assert bad_value_of(np.empty(0, np.float32), encoding) is None
