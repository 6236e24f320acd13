"""Sums of float64 that have the same bits with every Python."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import reduce

__all__ = ["sum_in_order"]


def sum_in_order(numbers: Iterable[float]) -> float:
    """The numbers, added one after the other, each sum rounded to float64; 0.0 if there are none.

    `sum` does the same up to Python 3.11, and makes up for the rounding since 3.12: with it, what
    two workers or reducers compute would depend on their Pythons.
    """
    return reduce(operator.add, numbers, 0.0)
