"""Streams for tests: data that can only be iterated, in the ways that scripts have them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

__all__ = ["Counting", "Plain", "Sized", "Skipping"]


class Counting(IterableDataset[int]):
    """Yields 0, 1, 2, ...; counts iterations and items, and remembers the epochs that it is told.

    An item is its position plus 1000 times its epoch.
    """

    def __init__(self, size: int, *, shuffled: bool = False, fails_at: int | None = None) -> None:
        self.size = size
        self.shuffled = shuffled
        self.fails_at = fails_at
        self.epoch = 0
        self.begun = 0
        self.read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        items = list(range(self.size))
        if self.shuffled:
            random.shuffle(items)
        for item in items:
            if item == self.fails_at:
                raise ValueError(f"item {item} is damaged")
            self.read += 1
            yield item + 1000 * self.epoch


class Sized(Counting):
    """Says a length, which need not be the true one."""

    def __init__(self, size: int, says: int) -> None:
        super().__init__(size)
        self.says = says

    def __len__(self) -> int:
        return self.says


class Skipping(Counting):
    """Skips as HF datasets do: `skip(n)` is a new dataset, in epoch 0, without the first items."""

    def __init__(self, size: int, first: int = 0, *, off_by: int = 0, log: Any = None) -> None:
        super().__init__(size)
        self.first = first
        self.off_by = off_by
        self.skips: list[int] = [] if log is None else log

    def skip(self, count: int) -> Skipping:
        self.skips.append(count)
        return Skipping(self.size, count + self.off_by, log=self.skips)

    def __iter__(self) -> Iterator[int]:
        for item in range(self.first, self.size):
            self.read += 1
            yield item + 1000 * self.epoch


class Plain:
    """Nothing but an `__iter__`, which yields rows for the small model."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(size, 5, generator=generator)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for row in self.x:
            yield row, row.sum(0, keepdim=True)
