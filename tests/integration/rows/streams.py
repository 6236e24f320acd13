"""The row of a script whose data can only be iterated, and does not say how much there is."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from integration.rows.features import network, plain_body, sgd
from integration.rows.row import Parts, Row, Vectors

__all__ = ["STREAMS"]

_SIZES = (20, 16)
"""Items of even and odd epochs, in batches of 8. Of the last 4 of an even one rank 1 has none; an
odd one ends with its second batch."""


class Passing(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Vectors in another order in each epoch, which `set_epoch` tells."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        places = list(range(_SIZES[self.epoch % 2]))
        random.Random(self.epoch).shuffle(places)
        return places

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        data = Vectors()
        return (data[place] for place in self.order())


def passing_parts() -> Parts:
    model = network()
    return Parts(model, sgd(model), DataLoader(Passing(), 8, num_workers=1))


def passed(parts: Parts, epoch: int, positions: Sequence[int]) -> Any:
    """The union batch: what exists of these positions."""
    stream = parts.loader.dataset
    stream.set_epoch(epoch)
    data, places = Vectors(), stream.order()
    return default_collate([data[places[at]] for at in positions if at < len(places)])


STREAMS = {"stream": Row(passing_parts, plain_body, union=passed)}
