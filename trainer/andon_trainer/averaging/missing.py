"""Missing gradients: how a worker says, within the numbers, that a parameter has no gradient.

Theory of operation. An optimizer skips a parameter without a gradient: no weight decay, no
momentum. On a line only all workers together know whether anybody had a gradient for it. So a
worker without one sends -0.0 in each of its elements. A sum is -0.0 only if every term is, and
-0.0 times a share of the weight is -0.0. So the mean is -0.0 in all elements exactly if every
worker's contribution was, and every worker reads that from the same bytes, whichever way they came.
A real gradient that is -0.0 in all its elements is sent with +0.0 in the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import nn

from andon_trainer.model.layout import ModelPlan

__all__ = ["MISSING", "MissingGradients"]

MISSING = -0.0
"""What is sent for each element of a parameter without a gradient."""

_MISSING_BITS = 0x80000000  # -0.0 in float32; == would also find +0.0.


class MissingGradients:
    """Finds the parameters of a block that no worker has a gradient for."""

    def __init__(self, plan: ModelPlan) -> None:
        """Computes where each parameter lies in its block."""
        self._places = [
            list(pairwise(accumulate((part.numel() for part in parameters), initial=0)))
            for parameters in plan.parameters
        ]

    def find(self, block: int, flat: torch.Tensor) -> list[int]:
        """Indices of the parameters that are -0.0 in all their elements.

        Args:
            block: its index in the layout.
            flat: the block's vector, float32 in host memory, shape (elements of the block,).
        """
        bits = flat.numpy().view(np.uint32)
        return [
            index
            for index, (start, stop) in enumerate(self._places[block])
            # The first element almost always decides; the whole vector is seldom read.
            if bits.item(start) == _MISSING_BITS and (bits[start:stop] == _MISSING_BITS).all()
        ]

    def mark_present(
        self, block: int, flat: torch.Tensor, parameters: Sequence[nn.Parameter]
    ) -> None:
        """Sets the first element to +0.0 where a real gradient is -0.0 in all its elements."""
        for index in self.find(block, flat):
            if parameters[index].grad is not None:
                flat[self._places[block][index][0]] = 0.0
