"""Sums have the bits that the protocol defines, whatever Python's own `sum` does."""

from __future__ import annotations

import pytest

from andon.protocol.sums import sum_in_order


@pytest.mark.parametrize(
    ("numbers", "total"),
    [([], 0.0), ([1.0, 1e100, 1.0, -1e100], 0.0), ([0.1] * 10, 0.9999999999999999)],
)
def test_numbers_are_added_one_after_the_other(numbers: list[float], total: float) -> None:
    assert sum_in_order(numbers) == total
