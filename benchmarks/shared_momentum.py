"""Shared momentum: each window begins with the momentum of all workers' mean change.

Theory of operation. At a window's end all workers take the same weights, but each keeps its own
Adam, whose momentum goes on in the direction that this worker came from. Adam moves a weight by
rate * m / sqrt(v). So the mean change of a window, divided by the sum of its rates, is about the
workers' mean of m / sqrt(v). All of them know it, and nothing more need travel: each makes it an m
by its own v.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["SharedMomentum"]


class SharedMomentum:
    """The momentum of one worker's Adam or AdamW."""

    def __init__(self, optimizer: Optimizer) -> None:
        """A window begins, at weights that all workers hold."""
        self._optimizer = optimizer
        self._start = self._weights()
        self._moved = 0.0

    def stepping(self) -> None:
        """A local step is about to be made with the present rate."""
        self._moved += self._optimizer.param_groups[0]["lr"]

    @torch.no_grad()
    def committed(self) -> None:
        """The weights are the line's again: the momentum is that of their change."""
        starts = iter(self._start)
        for group in self._optimizer.param_groups:
            beta1, beta2 = group["betas"]
            for weights in group["params"]:
                own, start = self._optimizer.state[weights], next(starts)
                steps = own["step"]
                size = (own["exp_avg_sq"] / (1 - beta2**steps)).sqrt() + group["eps"]
                own["exp_avg"].copy_((start - weights) / self._moved * size * (1 - beta1**steps))
        self._start, self._moved = self._weights(), 0.0

    def _weights(self) -> list[Tensor]:
        groups = self._optimizer.param_groups
        return [part.detach().clone() for group in groups for part in group["params"]]
