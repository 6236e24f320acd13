"""Norms: how large gradients are, and how they are kept below a limit. It needs no PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from andon.protocol.sums import sum_in_order

__all__ = ["l2_norm", "limiting_factor", "sum_of_squares"]

_LEAST = float(np.finfo(np.float32).tiny)

_Block = np.ndarray[Any, np.dtype[np.float32]]


def sum_of_squares(block: _Block) -> float:
    """The sum of a block's squares; squares and sums are computed in float64.

    NumPy widens a buffer of some thousand elements at a time, so no copy of a block is made.
    """
    return float(np.einsum("i,i->", block, block, dtype=np.float64))


def l2_norm(blocks: Iterable[_Block]) -> float:
    """The L2 norm of all blocks together, computed in float64."""
    return math.sqrt(sum_in_order(map(sum_of_squares, blocks)))


def limiting_factor(norm: float, limit: float) -> float | None:
    """What a gradient must be multiplied with to have the norm `limit`; a float32 number above 0.

    None if it needs no factor, since its norm is not greater. None too if the norm is not finite: a
    factor would turn the value that must be found into another one.
    """
    if not norm > limit or not math.isfinite(norm):
        return None
    # Below this float32 loses bits, and at last the number itself.
    return float(np.float32(max(limit / norm, _LEAST)))
