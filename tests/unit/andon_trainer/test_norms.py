"""Norms of averaged gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest

from andon_trainer.averaging.norms import l2_norm, limiting_factor


def test_the_norm_is_over_all_blocks_together() -> None:
    blocks = [np.full(9, 1.0, dtype=np.float32), np.full(16, -1.0, dtype=np.float32)]

    assert l2_norm(blocks) == 5.0


def test_squares_and_sums_are_taken_in_float64() -> None:
    # In float32 the squares would overflow, or the small ones be lost in the sum.
    huge = np.full(4, 3e38, dtype=np.float32)
    uneven = np.concatenate([np.array([4096.0]), np.full(2**20, 2.0**-10)]).astype(np.float32)

    assert l2_norm([huge]) == pytest.approx(2 * float(np.float32(3e38)), rel=1e-15)
    assert l2_norm([uneven]) == math.sqrt(4096.0**2 + 1.0)


def test_no_gradients_have_the_norm_0() -> None:
    assert l2_norm([]) == 0.0


@pytest.mark.parametrize("norm", [0.0, 1.9, 2.0, math.inf, math.nan])
def test_a_norm_that_is_not_above_the_limit_or_not_finite_needs_no_factor(norm: float) -> None:
    assert limiting_factor(norm, 2.0) is None


def test_a_greater_norm_is_brought_down_to_the_limit() -> None:
    assert limiting_factor(8.0, 2.0) == 0.25
    assert limiting_factor(3.0, 1.0) == float(np.float32(1 / 3))


def test_a_factor_is_never_0() -> None:
    assert limiting_factor(1e38, 1e-30) == float(np.finfo(np.float32).tiny)
