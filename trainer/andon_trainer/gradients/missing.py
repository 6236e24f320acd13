"""Absence: how a worker says, within the numbers, that a parameter has no gradient.

Theory of operation. An optimizer passes a parameter without a gradient by: no weight decay, no
momentum. On a line only all workers together know whether anybody had one. So a worker that has
none sends -0.0 in each of its elements. A sum is -0.0 only if every term is, and a product of -0.0
with a share of the weight is -0.0: the mean is -0.0 in all elements exactly if everybody's
contribution was, and every worker reads that from the same bytes, however they came. A gradient
that is there, and is -0.0 in all its elements, is sent with +0.0 in the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import nn

from andon_trainer.gradients.model_layout import ModelPlan

__all__ = ["ABSENT", "Absence"]

ABSENT = -0.0
"""What each element of a parameter without a gradient is sent as."""

_BITS = 0x80000000  # of -0.0 in float32


class Absence:
    """Finds the parameters of a block that nobody has a gradient of."""

    def __init__(self, plan: ModelPlan) -> None:
        """Notes where in its block each parameter begins."""
        self._places = [
            list(pairwise(accumulate((part.numel() for part in parameters), initial=0)))
            for parameters in plan.parameters
        ]

    def of(self, block: int, flat: torch.Tensor) -> list[int]:
        """Indices of the parameters that have -0.0 in all their elements.

        Args:
            block: its index in the layout.
            flat: float32 in host memory, shape (elements of the block,).
        """
        bits = flat.numpy().view(np.uint32)
        return [
            index
            for index, (start, stop) in enumerate(self._places[block])
            # Almost always a look at its first element is all there is to do.
            if bits.item(start) == _BITS and (bits[start:stop] == _BITS).all()
        ]

    def tell_apart(
        self, block: int, flat: torch.Tensor, parameters: Sequence[nn.Parameter]
    ) -> None:
        """Makes a gradient that is there, and -0.0 throughout, unlike one that is not."""
        for index in self.of(block, flat):
            if parameters[index].grad is not None:
                flat[self._places[block][index][0]] = 0.0
