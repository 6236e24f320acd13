"""Evaluation: a loader's samples shared out over the workers, each position once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from andon.records import PositionRange
from andon.shards import share_of
from andon_trainer.feeder import move_to

__all__ = ["share_of_loader"]


def share_of_loader(
    loader: DataLoader[Any], rank: int, world_size: int, device: torch.device
) -> Iterator[Any]:
    """This rank's contiguous share of a loader's dataset, in order, in the loader's batches.

    It loads in this process: processes started now would inherit the line's connections.

    Raises:
        TypeError: the dataset has no length, or the loader no batch size.
    """
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        raise TypeError(
            "line.split needs a DataLoader over a dataset with a length, made with batch_size="
        )
    size = len(loader.dataset)  # type: ignore[arg-type]  # a map-style dataset has a length
    share = share_of(PositionRange(0, size), rank, world_size)
    local = DataLoader(
        Subset(loader.dataset, range(share.start, share.stop)),
        batch_size=loader.batch_size,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
    )
    for batch in local:
        yield move_to(device, batch)
