"""Streams: data that can only be iterated, from the script's DataLoader to the training loop."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler

__all__ = ["is_stream", "length_of", "refuse_stream_loader"]


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be iterated: its samples have no indices."""
    if isinstance(dataset, IterableDataset):
        return True
    # `Dataset` itself has a `__getitem__`, which raises.
    by_index = getattr(type(dataset), "__getitem__", None)
    return by_index in (None, Dataset.__getitem__) and hasattr(dataset, "__iter__")


def refuse_stream_loader(loader: DataLoader[Any]) -> None:
    """Raises ValueError for a loader over a stream that the line can't follow."""
    stream, size = loader.dataset, length_of(loader.dataset)
    name = type(stream).__name__
    if loader.num_workers > 1:
        raise ValueError(
            f"num_workers={loader.num_workers}: a {name} is read in order, and each loading "
            "process would read all of it, or another part. Write num_workers=1; it reads ahead"
        )
    if loader.batch_size is None:
        raise ValueError(
            f"the line makes the batches of a {name}: let it yield single samples (without "
            ".batch(...) or .batched(...)), and write DataLoader(dataset, batch_size=...)"
        )
    # Of an IterableDataset torch takes no sampler itself.
    if not isinstance(stream, IterableDataset) and not isinstance(
        loader.sampler, SequentialSampler
    ):
        raise ValueError(
            f"a {name} has an order of its own: leave out "
            f"sampler={type(loader.sampler).__name__}(...) and shuffle=True, and shuffle in it"
        )
    if size is not None and size < 1:
        raise ValueError(f"len({name}) is {size}: there is nothing to train on")
    if size is not None and loader.drop_last and size < loader.batch_size:
        raise ValueError(
            f"drop_last=True leaves nothing of a {name} of {size} samples in batches of "
            f"{loader.batch_size}: leave it out, or make batch_size smaller"
        )


def length_of(stream: Any) -> int | None:
    """What a stream says of its length; None if it says nothing."""
    try:
        return len(stream)
    except (TypeError, NotImplementedError, AttributeError):
        return None  # Some have a `__len__` that raises.
