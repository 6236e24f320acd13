"""Norms: how large the averaged gradients of a step are. It needs no PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["l2_norm"]


def l2_norm(blocks: Iterable[np.ndarray[Any, np.dtype[np.float32]]]) -> float:
    """The L2 norm of all blocks together; squares and sums are computed in float64.

    NumPy widens a buffer of some thousand elements at a time, so no copy of a block is made.
    """
    squares = (float(np.einsum("i,i->", block, block, dtype=np.float64)) for block in blocks)
    return math.sqrt(sum(squares, 0.0))
