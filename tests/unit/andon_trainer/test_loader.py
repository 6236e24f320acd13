"""Loaders: what a prepared one answers, and where a batch's tensors are moved."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import make_dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, TensorDataset, WeightedRandomSampler

from andon_trainer.data.loader import LineLoader, loading_options, move_to, rebuild_loader

SIZE = 23


def as_dataset(size: int = SIZE) -> TensorDataset:
    return TensorDataset(torch.arange(size))


def prepared(given: DataLoader[Any] | None) -> LineLoader:
    return LineLoader(lambda: iter("abc"), lambda: 6, steps=3, batch_size=8, given=given)


def test_a_prepared_loader_answers_what_scripts_ask_their_dataloader() -> None:
    data = as_dataset()
    given = DataLoader(
        data, batch_size=8, sampler=WeightedRandomSampler([1.0] * SIZE, 30), drop_last=True
    )

    loader = prepared(given)

    assert (len(loader), loader.steps, loader.batch_size, list(loader)) == (6, 3, 8, list("abc"))
    assert (loader.dataset, loader.sampler, loader.drop_last) == (data, given.sampler, True)
    assert (loader.num_workers, loader.collate_fn) == (0, given.collate_fn)
    assert not hasattr(loader, "no_such_thing")


def test_settings_of_a_prepared_loader_can_not_be_set_for_that_would_do_nothing() -> None:
    with pytest.raises(AttributeError, match=r"before line\.prepare"):
        prepared(None).batch_size = 4


def test_what_line_shards_yields_has_no_dataset() -> None:
    loader = prepared(None)

    assert loader.dataset is None
    with pytest.raises(AttributeError, match="yields indices"):
        _ = loader.sampler


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


def test_batches_of_training_come_in_order_and_others_as_the_script_wants_them() -> None:
    given = DataLoader(as_dataset(), batch_size=2, num_workers=2, in_order=False)

    rebuilt = rebuild_loader(given, BatchSampler(range(4), 2, False), 0)

    assert rebuilt.in_order
    assert not loading_options(given)["in_order"]
