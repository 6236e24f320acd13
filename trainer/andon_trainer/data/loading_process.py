"""What a loading process must know before it loads a batch: a seed, and the script's `set_epoch`.

Theory of operation. Loading processes start once and stay, so each has a copy of the dataset as it
was at the start. What must not stay as it was travels with each batch's indices: the seed for
random augmentation, and the arguments of `set_epoch` of the dataset or of a dataset in it.
The indices are pickled on their way to the loading process, and unpickling them there applies both.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from torch.utils.data import get_worker_info

from andon_trainer.data.dataset_epochs import METHOD, EpochCalls
from andon_trainer.data.digest import nested_datasets

__all__ = ["Indices", "seed_generators"]

_applied: EpochCalls = {}
"""The calls that this loading process has made."""


class Indices(list[int]):
    """One batch's indices, with what a loading process must apply before it loads them."""

    def __init__(self, indices: list[int], seed: int, calls: EpochCalls) -> None:
        """`seed` is for random augmentation of this batch."""
        super().__init__(indices)
        self.seed = seed
        self.calls = calls

    def __reduce__(self) -> tuple[Callable[..., list[int]], tuple[int, EpochCalls, list[int]]]:
        """Unpickles to a plain list, after applying seed and calls in that process."""
        return _unpickle, (self.seed, self.calls, list(self))


def seed_generators(seed: int) -> None:
    """Seeds the CPU generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    # Not torch.manual_seed, which also prepares the accelerators: a forked child must not touch
    # them.
    torch.default_generator.manual_seed(seed)


def _unpickle(seed: int, calls: EpochCalls, indices: list[int]) -> list[int]:
    """Unpickles a batch's indices; in a loading process, applies what came with them."""
    global _applied
    info = get_worker_info()
    if info is not None:
        seed_generators(seed)
        if calls != _applied:
            parts = list(nested_datasets(info.dataset))
            for place, (arguments, named) in calls.items():
                getattr(parts[place], METHOD)(*arguments, **named)
            _applied = calls
    return indices
