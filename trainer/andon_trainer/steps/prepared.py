"""What a script gives to `line.prepare`, sorted by what it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

__all__ = ["Prepared"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Models, optimizers, schedulers and at most one training loader."""

    models: list[nn.Module]
    optimizers: list[Optimizer]
    schedulers: list[LRScheduler]
    loader: DataLoader[Any] | None

    @classmethod
    def sort(cls, objects: Sequence[Any]) -> Prepared:
        """Sorts what `prepare` was given.

        Raises:
            TypeError: something is none of these, there is no model, or more than one loader, or a
                model is wrapped in what averages gradients itself.
        """
        for thing in objects:
            _refuse_wrapped(thing)
        loaders = [thing for thing in objects if isinstance(thing, DataLoader)]
        found = cls(
            [thing for thing in objects if isinstance(thing, nn.Module)],
            [thing for thing in objects if isinstance(thing, Optimizer)],
            [thing for thing in objects if isinstance(thing, LRScheduler)],
            loaders[0] if loaders else None,
        )
        if len(loaders) > 1:
            raise TypeError(
                "line.prepare takes one training DataLoader: leave the others as they are, and "
                "iterate line.split(loader) where you evaluate"
            )
        known = len(found.models) + len(found.optimizers) + len(found.schedulers) + len(loaders)
        if known != len(objects) or not found.models:
            raise TypeError(
                "line.prepare takes models, optimizers, schedulers and at most one training "
                f"DataLoader, not {', '.join(type(thing).__name__ for thing in objects)}"
            )
        return found


def _refuse_wrapped(thing: Any) -> None:
    """Raises if a model, or a part of it, is spread over workers or devices by another wrapper."""
    for part in thing.modules() if isinstance(thing, nn.Module) else ():
        if isinstance(part, DataParallel | DistributedDataParallel):
            name = type(part).__name__
            raise TypeError(
                f"the line averages gradients itself: leave {name}(...) out, and give line.prepare "
                "the model that is in it; no_sync and .module go with it"
            )
