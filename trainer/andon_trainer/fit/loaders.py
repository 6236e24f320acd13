"""Loaders: a DataLoader for each set that `Trainer` was given, or the script's own as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from andon_trainer.fit.settings import Fit

__all__ = ["Collate", "Data", "training_loader", "validation_loader"]

Data = Dataset[Any] | DataLoader[Any]
Collate = Callable[[list[Any]], Any]

_OF_A_LOADER = {"batch_size": None, "loader_processes": 0, "drop_last": False}
"""Settings that a DataLoader of the script's own has itself, with what they are if not given."""


def training_loader(data: Data, fit: Fit, collate: Collate | None) -> DataLoader[Any]:
    """What `line.prepare` gets: shuffled, unless the data is a stream or has a loader already.

    Raises:
        ValueError: a setting is given both here and by the script's own loader, or nowhere.
    """
    if isinstance(data, DataLoader):
        twice = [name for name, unset in _OF_A_LOADER.items() if getattr(fit, name) != unset]
        if collate is not None:
            twice.append("collate_fn")
        if twice:
            raise ValueError(
                f"`data` returns a DataLoader, which has its own {', '.join(twice)}: give it to "
                "the DataLoader, and leave it out of Fit and Trainer"
            )
        return data
    if fit.batch_size is None:
        raise ValueError(
            "how many samples has a step? Write Fit(batch_size=...), or let `data` return a "
            "DataLoader in place of the training set"
        )
    return DataLoader(
        data,
        fit.batch_size,
        # A stream has the order that it comes in.
        shuffle=None if isinstance(data, IterableDataset) else True,
        drop_last=fit.drop_last,
        collate_fn=collate,
        num_workers=fit.loader_processes,
        persistent_workers=fit.loader_processes > 0,
        pin_memory=torch.cuda.is_available(),
    )


def validation_loader(
    data: Data | None, fit: Fit, training: DataLoader[Any], collate: Collate | None
) -> DataLoader[Any] | None:
    """What `line.split` gets: in the set's order; None if there is no validation set.

    Raises:
        ValueError: the settings ask for evaluations.
    """
    if data is None:
        if fit.evaluate_every:
            raise ValueError(
                "evaluate_every needs a validation set, and `data` returns None: return (training "
                "set, validation set), or leave evaluate_every out"
            )
        return None
    if isinstance(data, DataLoader):
        return data
    size = fit.micro_batch_size or fit.batch_size or training.batch_size or 1
    # Loaded in this process: others would be forked beside the line's threads. Those of the
    # training loader are forked before there are any.
    return DataLoader(data, size, collate_fn=collate or training.collate_fn)
