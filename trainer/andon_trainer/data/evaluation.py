"""Evaluation: a loader's samples divided among the workers, each sample once."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from andon.protocol.order import splitmix64
from andon.protocol.records import PositionRange
from andon.protocol.shards import shard_of
from andon_trainer.data.loader import loading_options, move_to
from andon_trainer.data.loading_process import seed_generators
from andon_trainer.state import rng

__all__ = ["SplitCheck", "split_loader"]

log = logging.getLogger(__name__)


class SplitCheck:
    """Checks that all workers that `line.split` gave samples to are in the mean that follows."""

    def __init__(self) -> None:
        """No loader was split yet."""
        self._workers = 0

    def split(self, workers: int) -> None:
        """Notes that a loader was split among so many workers."""
        self._workers = workers

    def check(self, contributors: int) -> None:
        """Warns, once for each split, if a mean has fewer contributors: samples are missing."""
        if contributors < self._workers:
            log.warning(
                "line.mean is of %d workers, but line.split divided a loader among %d: the samples "
                "of the workers that were lost are not in the mean",
                contributors,
                self._workers,
            )
            self._workers = 0


def split_loader(
    loader: DataLoader[Any], rank: int, world_size: int, device: torch.device, *, seed: int
) -> Iterator[Any]:
    """This rank's contiguous share of what a loader loads, loaded in the same way.

    Samples come in the dataset's order, or in that of the loader's own sampler, which is drawn
    under `seed` so that it is the same on every worker. `shuffle=True` is ignored. The batches of
    a batch sampler are not divided: each goes to one worker.

    Raises:
        TypeError: the dataset has no length.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            f"line.split divides samples by their index, and a {type(loader.dataset).__name__} "
            "has none: give it a DataLoader over a map-style dataset, or evaluate the whole stream "
            "on every worker, without line.split"
        )
    by_batch = loader.batch_size is None and loader.batch_sampler is not None
    # Indices, or batches of indices.
    units: Any = _drawn(loader.batch_sampler, seed) if by_batch else _samples_of(loader, seed)
    share = shard_of(PositionRange(0, len(units)), rank, world_size)
    mine: Any = units[share.start : share.stop]
    options = loading_options(loader)
    if by_batch:
        local = DataLoader(loader.dataset, batch_sampler=mine, **options)
    elif loader.batch_size is None:
        local = DataLoader(loader.dataset, batch_size=None, sampler=mine, **options)
    else:
        batches = BatchSampler(mine, loader.batch_size, drop_last=False)
        local = DataLoader(loader.dataset, batch_sampler=batches, **options)
    for batch in local:
        yield move_to(device, batch)


def _samples_of(loader: DataLoader[Any], seed: int) -> Sequence[int]:
    """The indices that the loader's sampler yields, the same on every worker."""
    sampler = loader.sampler
    indices: Sequence[int]
    size = len(loader.dataset)  # type: ignore[arg-type]  # a map-style dataset has a length
    # By exact type: a subclass may yield other indices.
    if type(sampler) is SequentialSampler or _shuffles(sampler, size):
        indices = range(size)
    elif isinstance(sampler, DistributedSampler):
        log.warning("line.split assigns the samples itself: leave DistributedSampler out")
        indices = range(size)
    elif type(sampler) is SubsetRandomSampler:
        indices = list(sampler.indices)
    else:
        indices = _drawn(sampler, seed)
    if loader.drop_last and loader.batch_size is not None:
        indices = indices[: len(indices) - len(indices) % loader.batch_size]
    return indices


def _shuffles(sampler: Any, size: int) -> bool:
    """Whether a sampler is what `shuffle=True` makes."""
    return (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == size
    )


def _drawn(sampler: Any, seed: int) -> list[Any]:
    """What a sampler yields under a seed; the script's generators keep their states."""
    cpu = torch.device("cpu")
    states = rng.capture(cpu)
    own = getattr(sampler, "generator", None)
    kept = own.get_state() if isinstance(own, torch.Generator) else None
    try:
        seed_generators(splitmix64(seed))
        if own is not None and kept is not None:
            own.manual_seed(seed)
        return list(sampler)
    finally:
        rng.restore(states, cpu)
        if own is not None and kept is not None:
            own.set_state(kept)
