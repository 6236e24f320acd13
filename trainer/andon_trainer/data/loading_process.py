"""What a loading process must know before it loads a batch: a seed, and the script's `set_epoch`.

Theory of operation. Loading processes start once and stay, so each has a copy of the dataset as it
was at the start. What must not stay as it was travels with each batch's indices: the seed for
random augmentation, and the latest arguments of `set_epoch` of the dataset or of a dataset in it.
The indices are pickled on their way to the loading process, and unpickling them there applies both.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from andon_trainer.data.digest import nested_datasets

__all__ = ["EpochCall", "EpochCalls", "Indices", "observe_set_epoch", "seed_generators"]

EpochCall = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of one call of `set_epoch`."""
EpochCalls = dict[int, EpochCall]
"""The latest call for each dataset, by its place among `nested_datasets`."""

_METHOD = "set_epoch"

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


def observe_set_epoch(dataset: Any, called: Callable[[int, EpochCall], None]) -> Callable[[], None]:
    """Calls `called` after each `set_epoch` of the dataset, or of a dataset in it.

    Args:
        dataset: the script's.
        called: gets the dataset's place among `nested_datasets`, and the arguments.

    Returns:
        A function that undoes it.
    """
    observed = []
    for place, part in enumerate(nested_datasets(dataset)):
        method = getattr(part, _METHOD, None)
        if callable(method) and hasattr(part, "__dict__"):
            setattr(part, _METHOD, _ObservedMethod(method, place, called))
            observed.append(part)

    def undo() -> None:
        for part in observed:
            vars(part).pop(_METHOD, None)

    return undo


class _ObservedMethod:
    """A dataset's `set_epoch` that reports its calls. Pickling restores the method."""

    def __init__(self, method: Any, place: int, called: Callable[[int, EpochCall], None]) -> None:
        self._method = method
        self._place = place
        self._called = called

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        answer = self._method(*arguments, **named)
        self._called(self._place, (arguments, named))
        return answer

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._method.__self__, _METHOD)


def _unpickle(seed: int, calls: EpochCalls, indices: list[int]) -> list[int]:
    """Unpickles a batch's indices; in a loading process, applies what came with them."""
    global _applied
    info = get_worker_info()
    if info is not None:
        seed_generators(seed)
        if calls != _applied:
            parts = list(nested_datasets(info.dataset))
            for place, (arguments, named) in calls.items():
                getattr(parts[place], _METHOD)(*arguments, **named)
            _applied = calls
    return indices
