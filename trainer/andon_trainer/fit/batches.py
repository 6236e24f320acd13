"""Batches: how a model is called with one, how many samples it holds, what its loss means."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["call_model", "samples_in", "weighted"]


def call_model(model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch: a mapping is passed by name, a sequence in order."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return model(**dict(_named_parts(batch)))
    if isinstance(batch, list | tuple):
        return model(*batch)
    return model(batch)


def weighted(result: Any, what: str) -> tuple[Any, float | None]:
    """What a loss or a metric returned: the mean, and its weight if there is one.

    Args:
        result: a mean; a mean and its weight; or an output with a `loss`, as an attribute or an
            item, such as transformers' models return.
        what: what returned it, for the error.

    Raises:
        TypeError: it is none of these.
    """
    weight = None
    if isinstance(result, tuple) and len(result) == 2 and not hasattr(result, "loss"):
        result, weight = result
    if isinstance(result, Mapping) and "loss" in result:
        result = result["loss"]
    elif not isinstance(result, torch.Tensor | int | float):
        result = getattr(result, "loss", result)
    if not isinstance(result, torch.Tensor | int | float):
        hint = " (a transformers model computes it if the batch has `labels`)"
        raise TypeError(
            f"{what} returned {type(result).__name__}: return the mean, a scalar; (mean, weight); "
            f"or the output of a model that has a .loss{hint}"
        )
    return result, None if weight is None else float(weight)


def samples_in(batch: Any) -> int:
    """The number of samples in a collated batch: the length of its first tensor.

    Raises:
        TypeError: it holds no tensor that has a length.
    """
    tensor = _first_tensor(batch)
    if tensor is None:
        raise TypeError(
            f"a {type(batch).__name__} holds no tensor whose length is the number of samples: let "
            "`loss` return (mean, weight)"
        )
    return len(tensor)


def _parts_of(batch: Any) -> Iterator[Any]:
    """What a mapping, a sequence or a dataclass consists of; nothing for anything else."""
    if isinstance(batch, Mapping):  # Also a BatchEncoding, which is no dict.
        yield from batch.values()
    elif isinstance(batch, list | tuple):
        yield from batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        yield from (part for _, part in _named_parts(batch))


def _named_parts(batch: Any) -> Iterator[tuple[str, Any]]:
    for each in dataclasses.fields(batch):
        yield each.name, getattr(batch, each.name)


def _first_tensor(part: Any) -> torch.Tensor | None:
    if isinstance(part, torch.Tensor):
        return part if part.dim() else None
    found = (_first_tensor(each) for each in _parts_of(part))
    return next((tensor for tensor in found if tensor is not None), None)
