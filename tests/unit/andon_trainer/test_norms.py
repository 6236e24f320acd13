"""Norms of averaged gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest

from andon_trainer.gradients.norms import l2_norm


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
