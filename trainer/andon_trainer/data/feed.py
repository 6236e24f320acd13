"""Loaders: what a training loop iterates over, one epoch an iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from andon.protocol.order import Order
from andon_trainer.data.feeder import Share

__all__ = ["Feed", "LineLoader", "Shard", "ShardFeeder"]


_NO_SAMPLER = (
    "The line deals the samples out, in another order each epoch: leave "
    "sampler.set_epoch(epoch) out"
)
_IN_PLACE_OF = {"sampler": _NO_SAMPLER, "batch_sampler": _NO_SAMPLER}


class LineLoader:
    """This worker's micro-batches of one epoch at a time, on its device."""

    def __init__(
        self,
        epoch: Callable[[], Iterator[Any]],
        size: int,
        batch_size: int,
        dataset: Any,
    ) -> None:
        """`epoch` begins the present epoch, or goes on in it; it has `size` positions."""
        self._epoch = epoch
        self._steps = -(-size // batch_size)
        self.batch_size = batch_size
        """Samples in one step of the whole line."""
        self.dataset = dataset
        """The script's own, whole; None if it has no loader."""

    def __iter__(self) -> Iterator[Any]:
        """The rest of the present epoch."""
        return self._epoch()

    def __len__(self) -> int:
        """Steps in an epoch."""
        return self._steps

    def __getattr__(self, name: str) -> Any:
        """Says what to write in place of what only a DataLoader has."""
        raise AttributeError(
            f"the prepared loader has no {name}: it yields this worker's part of each step. "
            + _IN_PLACE_OF.get(name, "Ask your own DataLoader, by a name of its own")
        )


class Feed(Protocol):
    """Where samples come from: a `Feeder` over a DataLoader, or indices alone."""

    @property
    def dataset_size(self) -> int:
        """Samples in the training set."""

    @property
    def epoch_size(self) -> int:
        """Positions that an epoch deals out."""

    @property
    def batch_size(self) -> int:
        """Samples in one step of the whole line."""

    @property
    def drop_last(self) -> bool:
        """Whether an epoch ends with its last whole batch."""

    def open(self) -> None:
        """Starts the loading processes, before any channel exists."""

    def digest(self, device: torch.device) -> str:
        """SHA-256 of what the dataset is, hexadecimal; empty if that can't be told."""

    def batches(
        self, share: Share, upcoming: Callable[[], Iterator[Share]]
    ) -> Iterator[tuple[Any, int]]:
        """The share's micro-batches, each with its number of samples."""

    def borrow(self, epoch: int, position: int) -> Any:
        """A batch for a rank with nothing to compute."""

    def close(self) -> None:
        """Ends the loading processes."""


@dataclass(frozen=True, slots=True)
class Shard:
    """This worker's samples of one micro-batch."""

    indices: torch.Tensor
    """Sample indices, int64, shape (samples,)."""
    step: int
    epoch: int


class ShardFeeder:
    """Feeds sample indices alone, for scripts that have no loader."""

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        seed: int,
        micro_batch_size: int | None,
        step: Callable[[], int],
    ) -> None:
        """Deals out the positions of `size` samples; `step` tells which step they are for.

        Raises:
            ValueError: a size is below 1.
        """
        if min(size, batch_size, micro_batch_size or 1) < 1:
            raise ValueError("a number of samples must be at least 1")
        self._seed = seed
        self._micro = micro_batch_size
        self.dataset_size = self.epoch_size = size
        self.batch_size = batch_size
        self.drop_last = False
        self._step = step

    def open(self) -> None:
        """Nothing loads."""

    def digest(self, device: torch.device) -> str:
        """Empty: what the script makes of an index is its own."""
        return ""

    def batches(
        self, share: Share, upcoming: Callable[[], Iterator[Share]]
    ) -> Iterator[tuple[Shard, int]]:
        """The share's indices, cut into micro-batches."""
        order = Order(self._seed, share.epoch, self.dataset_size)
        for piece in share.pieces(self._micro):
            indices = torch.from_numpy(order.indices(piece.start, piece.stop))
            yield Shard(indices, self._step(), share.epoch), len(piece)

    def borrow(self, epoch: int, position: int) -> Shard:
        """Two samples' indices, for a rank without samples."""
        order = Order(self._seed, epoch, self.dataset_size)
        start = max(0, min(position, self.dataset_size - 2))
        indices = order.indices(start, min(start + 2, self.dataset_size))
        return Shard(torch.from_numpy(indices), self._step(), epoch)

    def close(self) -> None:
        """Nothing to end."""
