"""Rows: scripts of one feature each, run by plain PyTorch, and on a line that loses a worker.

A row says what a script prepares and what its loop body does. The body is the same both times; the
plain run passes it a `PlainLine`, whose `backward` is PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from andon.protocol.order import Order

__all__ = ["Parts", "PlainLine", "Row", "Vectors", "shuffled"]

WIDTH, CLASSES = 6, 4


@dataclass
class Parts:
    """What a script gives to `line.prepare`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Any
    others: list[Any] = field(default_factory=list)
    """Schedulers and a scaler, in the order in which the body wants them."""


class PlainLine:
    """What a loop body calls, without a line."""

    committed = True

    def __init__(self) -> None:
        self.step = 0

    def gather(self, value: Any) -> Any:
        """The batch is the union of all workers'."""
        return value

    def backward(self, loss: torch.Tensor, weight: float | None = None, **options: Any) -> None:
        """PyTorch's own backward: the batch is the union of all workers'."""
        loss.backward(**options)  # type: ignore[no-untyped-call]  # torch's own signature


def shuffled(parts: Parts, epoch: int, positions: Sequence[int]) -> Any:
    """The union batch at these positions of an epoch of `shuffle=True` under seed 0."""
    data = parts.loader.dataset
    order = Order(0, epoch, len(data))
    samples = [data[int(order[position])] for position in positions]
    return (parts.loader.collate_fn or torch.utils.data.default_collate)(samples)


@dataclass(frozen=True)
class Row:
    """A feature, and a script that uses it."""

    make: Callable[[], Parts]
    """Called after seeding; the same on all workers."""
    body: Callable[[Parts, Any, Any], None]
    """The loop body: parts, a batch, and the line."""
    steps: int = 12
    micro_batch_size: int | None = None
    union: Callable[[Parts, int, Sequence[int]], Any] = shuffled
    """The batch that the optimizer of one process sees: parts, epoch, positions."""
    around: Callable[[Any], Any] | None = None
    """A context around each body of the run on the line; it gets the line."""
    plain: Callable[[Parts, list[Any], bool], None] | None = None
    """One step of the plain run, if the body can't be it: parts, the workers' batches in rank
    order, and whether one worker computed all of them, one after the other."""
    fit: Callable[[Parts, int, Callable[[nn.Module, Any], None]], int] | None = None
    """The run on the line, if its loop is not `row.py`'s: parts, steps, and what to call with model
    and line once the worker has joined. It returns the number of committed steps."""
    tolerance: float = 1e-6
    flags: tuple[str, ...] = ()
    """Flags of the service."""

    @contextmanager
    def surrounded(self, line: Any) -> Iterator[None]:
        """The context of one body."""
        if self.around is None:
            yield
        else:
            with self.around(line):
                yield


class Vectors(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Made-up vectors and their classes."""

    def __init__(self, size: int = 60) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(size, WIDTH, generator=generator)
        self.y = (self.x[:, 0] > 0).long() + 2 * (self.x[:, 1] > 0).long()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def loader_of(data: Dataset[Any], batch_size: int = 8, **options: Any) -> DataLoader[Any]:
    """A shuffling loader."""
    return DataLoader(data, batch_size, shuffle=True, **options)
