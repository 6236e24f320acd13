"""Arriving: what a loading process takes note of before it loads a batch.

Loading processes start once and stay, so each has a copy of the dataset as it was then. With each
batch's indices travels what must not be as it was then: the seed for what is random in loading, and
what the script last told `set_epoch` of its dataset.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from andon_trainer.data.digest import datasets_in

__all__ = ["Call", "Indices", "Told", "listen", "seed_generators"]

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments by place, and by name."""
Told = dict[int, Call]
"""The last `set_epoch` of each dataset in the dataset that has it, by its place."""

_METHOD = "set_epoch"

_applied: Told = {}
"""What this loading process was told last."""


class Indices(list[int]):
    """One batch's indices, with what a loading process needs to know."""

    def __init__(self, indices: list[int], seed: int, told: Told) -> None:
        """`seed` is for what is random in loading them."""
        super().__init__(indices)
        self.seed = seed
        self.told = told

    def __reduce__(self) -> tuple[Callable[..., list[int]], tuple[int, Told, list[int]]]:
        """Unpickled they are a plain list, and what they came with is done."""
        return _arrive, (self.seed, self.told, list(self))


def seed_generators(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's generators of the CPU."""
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    # Not torch.manual_seed: it also prepares the accelerators, which a fork must not touch.
    torch.default_generator.manual_seed(seed)


def listen(dataset: Any, tell: Callable[[int, Call], None]) -> Callable[[], None]:
    """Has `tell` called after each `set_epoch` of the dataset, or of one in it.

    Args:
        dataset: as the script has it.
        tell: gets the place among `datasets_in`, and the arguments.

    Returns:
        What makes the dataset as it was.
    """
    heard = []
    for place, part in enumerate(datasets_in(dataset)):
        method = getattr(part, _METHOD, None)
        if callable(method) and hasattr(part, "__dict__"):
            setattr(part, _METHOD, _Heard(method, place, tell))
            heard.append(part)

    def forget() -> None:
        for part in heard:
            vars(part).pop(_METHOD, None)

    return forget


class _Heard:
    """A dataset's `set_epoch`, listened to. A pickled dataset has its own again."""

    def __init__(self, method: Any, place: int, tell: Callable[[int, Call], None]) -> None:
        self._method = method
        self._place = place
        self._tell = tell

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        answer = self._method(*arguments, **named)
        self._tell(self._place, (arguments, named))
        return answer

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._method.__self__, _METHOD)


def _arrive(seed: int, told: Told, indices: list[int]) -> list[int]:
    """Unpickles a batch's indices; in a loading process, takes note of what came with them."""
    global _applied
    info = get_worker_info()
    if info is not None:
        seed_generators(seed)
        if told != _applied:
            parts = list(datasets_in(info.dataset))
            for place, (arguments, named) in told.items():
                getattr(parts[place], _METHOD)(*arguments, **named)
            _applied = told
    return indices
