"""Loaders: what the script gives (a DataLoader), and what it gets for it (a `LineLoader`)."""

from __future__ import annotations

import copy
import dataclasses
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from andon_trainer.data.loading_process import Beginning, Collating

__all__ = [
    "LineLoader",
    "loader_of_script",
    "loading_options",
    "move_to",
    "processes_stay",
    "rebuild_loader",
]


class LineLoader:
    """The prepared loader: yields this worker's micro-batches, one epoch at a time.

    After the end of the run it is a plain loader: it yields the whole data set, each time.

    What a script asks its DataLoader (`dataset`, `sampler`, `collate_fn`, `num_workers`, ...) it
    may ask this too, and gets the answer of its own DataLoader.
    """

    __slots__ = ("_epoch", "_given", "_loop_bodies", "batch_size", "steps")

    _epoch: Callable[[], Iterator[Any]]
    _given: DataLoader[Any] | None
    _loop_bodies: Callable[[], int]
    batch_size: int | None
    """Number of samples in one step, over all workers; None with a batch sampler."""
    steps: int | None
    """Number of optimizer steps in an epoch; None if the length of the data is unknown."""

    def __init__(
        self,
        epoch: Callable[[], Iterator[Any]],
        loop_bodies: Callable[[], int],
        *,
        steps: int | None,
        batch_size: int | None,
        given: DataLoader[Any] | None,
    ) -> None:
        """Iterates what `epoch` returns.

        Args:
            epoch: yields the rest of the current epoch, and after the end of the run all samples.
            loop_bodies: says how often the loop body runs in an epoch.
            steps: number of optimizer steps in an epoch; None: unknown.
            batch_size: as the script's loader has it.
            given: the script's loader; None if it has none.
        """
        values = (epoch, given, loop_bodies, batch_size, steps)
        for name, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(self, name, value)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the current epoch; after the end of the run the whole data set."""
        return self._epoch()

    def __len__(self) -> int:
        """How often the loop body runs in an epoch on this worker, as its share is now.

        Without micro-batches this is the number of steps.

        Raises:
            TypeError: the dataset is a stream that does not say its length.
        """
        return self._loop_bodies()

    @property
    def dataset(self) -> Any:
        """The script's dataset; None if it has no loader."""
        return None if self._given is None else self._given.dataset

    def __getattr__(self, name: str) -> Any:
        """The answer of the script's own DataLoader."""
        if name.startswith("_"):
            raise AttributeError(name)
        if self._given is None:
            raise AttributeError(f"line.shards has no {name}: it yields indices of samples")
        return getattr(self._given, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises AttributeError: the line has read all settings."""
        raise AttributeError(
            f"{name} of a prepared loader can't be set: give it to DataLoader(...) before "
            "line.prepare. loader.dataset is your own, and you may change that"
        )


def loader_of_script(loader: DataLoader[Any] | LineLoader) -> DataLoader[Any]:
    """The DataLoader that the script made, also if it is given what `line.prepare` returned.

    Raises:
        TypeError: it is what `line.shards` returned, and the script made none.
    """
    if not isinstance(loader, LineLoader):
        return loader
    if loader._given is None:
        raise TypeError("line.shards yields indices, which line.split can't load: give it a loader")
    return loader._given


def rebuild_loader(
    loader: DataLoader[Any], sampler: Sampler[list[int]], seed: int
) -> DataLoader[Any]:
    """The script's loader over another batch sampler, with loading processes that stay."""
    options = loading_options(loader)
    # The line counts batches, so they must come in order.
    options.pop("in_order", None)
    if loader.num_workers > 0:
        options["persistent_workers"] = True
    # A DataLoader draws a seed each time that it is iterated. Without a generator of its own it
    # would draw from the script's, and change the model's random numbers.
    generator = torch.Generator()
    generator.manual_seed(seed)
    options["collate_fn"] = Collating(loader.collate_fn)
    return DataLoader(loader.dataset, batch_sampler=sampler, generator=generator, **options)


def processes_stay(loader: DataLoader[Any]) -> bool:
    """Whether loading processes stay for the whole run, and not for an epoch.

    A process that is forked while this one is on the line inherits gRPC's state, and may be killed
    by it. So forked ones start before there is any, and stay. Others inherit nothing.
    """
    context = loader.multiprocessing_context or multiprocessing
    method = context.get_start_method()
    return bool(loader.persistent_workers) or method == "fork"


def loading_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """How a loader loads, whatever it loads: arguments of `DataLoader`, by name."""
    options: dict[str, Any] = {
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        # Without a GPU torch would warn at each iteration.
        "pin_memory": loader.pin_memory and torch.cuda.is_available(),
    }
    if loader.pin_memory_device:
        options["pin_memory_device"] = loader.pin_memory_device
    if not getattr(loader, "in_order", True):
        options["in_order"] = False
    if loader.num_workers > 0:
        options |= {
            "prefetch_factor": loader.prefetch_factor,
            "timeout": loader.timeout,
            "worker_init_fn": Beginning(loader.worker_init_fn),
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
