"""Loaders: what the script gives (a DataLoader), and what it gets for it (a `LineLoader`)."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

__all__ = ["LineLoader", "loading_options", "move_to", "rebuild_loader", "refuse_loader"]

_NO_SAMPLER = (
    "The line assigns the samples itself, in another order in each epoch: leave "
    "sampler.set_epoch(epoch) out"
)
_INSTEAD_OF = {"sampler": _NO_SAMPLER, "batch_sampler": _NO_SAMPLER}


class LineLoader:
    """The prepared loader: yields this worker's micro-batches, one epoch at a time.

    Attributes:
        batch_size: samples in one step, over all workers.
        dataset: the script's whole dataset; None if it has no loader.
    """

    def __init__(
        self,
        epoch: Callable[[], Iterator[Any]],
        size: int,
        batch_size: int,
        dataset: Any,
    ) -> None:
        """Iterates `epoch`, which yields the rest of the current epoch of `size` positions."""
        self._epoch = epoch
        self._steps = -(-size // batch_size)
        self.batch_size = batch_size
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        """The rest of the current epoch."""
        return self._epoch()

    def __len__(self) -> int:
        """Number of steps in an epoch; with micro-batches the loop body runs more often."""
        return self._steps

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError, saying what to write instead of an attribute of DataLoader."""
        raise AttributeError(
            f"the prepared loader has no {name}: it yields this worker's part of each step. "
            + _INSTEAD_OF.get(name, "Keep your own DataLoader under another name, and ask that")
        )


def refuse_loader(loader: DataLoader[Any]) -> None:
    """Refuses a training loader whose samples the line can't assign.

    Raises:
        TypeError: the dataset has no length and no indices.
        ValueError: the loader decides itself which samples come, or no batch is left of it.
    """
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise TypeError(
            f"{type(loader.dataset).__name__} has no length and no indices, so its samples can't "
            "be assigned to workers: give the DataLoader a map-style dataset, or use "
            "line.shards(n, batch_size=...)"
        )
    if isinstance(loader.sampler, DistributedSampler):
        raise ValueError(
            "the line itself assigns the samples: leave out sampler=DistributedSampler(...) and "
            "write DataLoader(dataset, batch_size=..., shuffle=True)"
        )
    if loader.batch_size is None:
        what = "batch_size=None" if loader.batch_sampler is None else "batch_sampler="
        raise ValueError(
            f"the line itself makes the batches: leave out {what} and write DataLoader(dataset, "
            "batch_size=..., shuffle=True)"
        )
    size = len(loader.dataset)
    if size < 1:
        raise ValueError("the dataset is empty: there is nothing to train on")
    if loader.drop_last and size < loader.batch_size:
        raise ValueError(
            f"drop_last=True leaves nothing of a dataset of {size} samples in batches of "
            f"{loader.batch_size}: leave it out, or make batch_size smaller"
        )
    sampler = loader.sampler
    if isinstance(sampler, RandomSampler):
        if sampler.replacement or sampler.num_samples != size:
            raise ValueError(
                "each sample belongs to exactly one step of its epoch: leave out the "
                "RandomSampler and write shuffle=True"
            )
    elif not isinstance(sampler, SequentialSampler):
        raise ValueError(
            f"the line itself chooses the order: leave out sampler={type(sampler).__name__}(...) "
            "and write shuffle=True, or leave shuffle out for the dataset's order"
        )


def rebuild_loader(
    loader: DataLoader[Any], sampler: Sampler[list[int]], seed: int
) -> DataLoader[Any]:
    """The script's loader over another batch sampler, with loading processes that stay."""
    options = loading_options(loader)
    if loader.num_workers > 0:
        options["persistent_workers"] = True
    # A DataLoader draws a seed each time that it is iterated. Without a generator of its own it
    # would draw from the script's, and change the model's random numbers.
    generator = torch.Generator()
    generator.manual_seed(seed)
    return DataLoader(loader.dataset, batch_sampler=sampler, generator=generator, **options)


def loading_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """How a loader loads, whatever it loads: arguments of `DataLoader`, by name."""
    options: dict[str, Any] = {
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        # Without a GPU torch would warn at each iteration.
        "pin_memory": loader.pin_memory and torch.cuda.is_available(),
    }
    if loader.num_workers > 0:
        options |= {
            "prefetch_factor": loader.prefetch_factor,
            "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    return options


def move_to(device: torch.device, batch: Any) -> Any:
    """The batch with its tensors on `device`.

    Tensors are found in tuples, lists, mappings and dataclasses; an object with a `to` method moves
    itself. Anything else stays as it is.
    """
    if isinstance(batch, torch.Tensor):
        # Only a copy from pinned memory is asynchronous; with other memory `non_blocking` is unsafe
        # if the script reuses it.
        return batch.to(device, non_blocking=device.type == "cuda" and batch.is_pinned())
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, MutableMapping):
        moved = copy.copy(batch)  # Keeps the class and its other attributes (BatchEncoding).
        moved.update((key, move_to(device, part)) for key, part in batch.items())
        return moved
    if isinstance(batch, Mapping):  # A read-only one.
        return {key: move_to(device, part) for key, part in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        twin: Any = copy.copy(batch)
        for each in dataclasses.fields(batch):
            # Also of a frozen one: the copy is nobody else's yet.
            object.__setattr__(twin, each.name, move_to(device, getattr(batch, each.name)))
        return twin
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_to(device, part) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)([move_to(device, part) for part in batch])
    return batch
