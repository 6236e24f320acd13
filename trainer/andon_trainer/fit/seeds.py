"""Seeds: the same for all workers where they must agree, each worker's own for dropout.

Theory of operation. Weights, splits and orders are made under the base seed, on every worker alike.
What a forward draws (dropout masks) must differ between the workers: with the same masks on all of
them a batch would see fewer masks, the more workers there are. So at the first micro-batch of a
step a worker seeds its generators by (seed, step, rank). By rank and not by launch slot, because
some launchers give no slot, and no two workers have the same rank. By step, because a resumed run
then draws what it would have drawn without a stop, on every rank. On a line of same bits the line
itself seeds each grain.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from andon.protocol.order import mixed, splitmix64

__all__ = ["WorkerSeeds", "seed_everything"]


def seed_everything(seed: int) -> None:
    """Seeds the generators of Python, NumPy and torch, on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class WorkerSeeds:
    """Seeds a worker's own random numbers, once a step."""

    def __init__(self, seed: int) -> None:
        """`seed` is the run's."""
        self._seed = seed
        self._seen: tuple[int, int] | None = None

    def begin(self, step: int, rank: int) -> None:
        """Seeds the generators, if this step was not begun under this rank yet.

        Args:
            step: number of committed steps.
            rank: this worker's.
        """
        if (step, rank) == self._seen:
            return  # The next micro-batch of the step draws further numbers.
        self._seen = step, rank
        seed_everything(splitmix64(mixed(self._seed, step) ^ rank) % 2**63)
