"""Loaders: which DataLoaders a line refuses, and where a batch's tensors are moved."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import make_dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from andon_trainer.data.loader import move_to, refuse_loader

SIZE = 23


def as_dataset(size: int = SIZE) -> TensorDataset:
    return TensorDataset(torch.arange(size))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("loader", "error", "remedy"),
    [
        (lambda: DataLoader(Endless(), batch_size=2), TypeError, r"line\.shards"),
        (lambda: DataLoader(NoLength(), sampler=range(3)), TypeError, "has no length"),
        (
            lambda: DataLoader(
                as_dataset(), sampler=DistributedSampler(as_dataset(), num_replicas=2, rank=0)
            ),
            ValueError,
            "leave out sampler=DistributedSampler",
        ),
        (
            lambda: DataLoader(as_dataset(), batch_sampler=[[0, 1], [2]]),
            ValueError,
            "leave out batch_sampler=",
        ),
        (
            lambda: DataLoader(as_dataset(), batch_size=None),
            ValueError,
            "leave out batch_size=None",
        ),
        (
            lambda: DataLoader(as_dataset(), drop_last=True, batch_size=SIZE + 1),
            ValueError,
            "drop_last=True leaves nothing",
        ),
        (
            lambda: DataLoader(
                as_dataset(), batch_size=4, sampler=WeightedRandomSampler([1.0] * SIZE, SIZE)
            ),
            ValueError,
            "leave out sampler=WeightedRandomSampler",
        ),
        (
            lambda: DataLoader(
                as_dataset(), batch_size=4, sampler=RandomSampler(as_dataset(), replacement=True)
            ),
            ValueError,
            "shuffle=True",
        ),
        (lambda: DataLoader(as_dataset(0), batch_size=2), ValueError, "empty"),
    ],
)
def test_a_loader_that_deals_samples_out_itself_is_refused_with_the_remedy(
    loader: Callable[[], DataLoader[Any]], error: type[Exception], remedy: str
) -> None:
    with pytest.raises(error, match=remedy):
        refuse_loader(loader())


Pair = namedtuple("Pair", "left right")


def test_tensors_are_moved_wherever_they_are() -> None:
    meta = torch.device("meta")
    tensor = torch.zeros(2)
    batch = OrderedDict(a=tensor, b=[Pair(tensor, "text"), (tensor, 1)], c=None)

    moved = move_to(meta, batch)

    assert isinstance(moved, OrderedDict)
    assert moved["a"].device == meta
    assert isinstance(moved["b"][0], Pair)
    assert moved["b"][0].left.device == moved["b"][1][0].device == meta
    assert (moved["b"][0].right, moved["b"][1][1], moved["c"]) == ("text", 1, None)
    assert batch["a"] is tensor


def test_a_frozen_dataclass_and_a_read_only_mapping_are_moved_as_copies() -> None:
    meta, tensor = torch.device("meta"), torch.ones(2)
    encoded = make_dataclass("Encoded", [("x", Any)], frozen=True)

    frozen, mapping = move_to(meta, [encoded([tensor]), MappingProxyType({"x": tensor})])

    assert frozen.x[0].device == mapping["x"].device == meta
    assert tensor.device == torch.device("cpu")


def test_what_has_a_to_of_its_own_moves_itself() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])

    moved = move_to(torch.device("cpu"), [packed])

    assert isinstance(moved[0], torch.nn.utils.rnn.PackedSequence)
