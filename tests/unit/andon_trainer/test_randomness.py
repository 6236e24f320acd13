"""Random augmentation: a position's sample is the same whoever loads it, and however."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from andon.protocol.records import PositionRange
from andon.protocol.shards import shard_of
from andon_trainer.data.feed import Share
from andon_trainer.data.feeder import LoaderFeeder
from andon_trainer.state import rng

SIZE, SEED, CPU = 12, 5, torch.device("cpu")


class Noisy(Dataset[tuple[int, float]]):
    """A number of each generator, a different count of them for each sample."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, float]:
        for _ in range(index % 3):
            random.random()
        return index, random.random() + float(np.random.randn()) + float(torch.rand(()))


class Seldom(Noisy):
    """Needs a random number for one of its samples only."""

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(np.random.rand()) if index == 7 else 0.0


class SeldomNormal(Noisy):
    """Needs one number of a normal distribution, of which NumPy makes two at a time."""

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(np.random.randn()) if index == 7 else 0.0


class AtOnce(Noisy):
    """Loads and augments a whole batch."""

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        noise = torch.rand(len(indices)).tolist()
        return [(int(index), each) for index, each in zip(list(indices), noise, strict=True)]


class InTurn(Noisy):
    """Loads a whole batch, one sample after another."""

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        return [self[index] for index in indices]


def as_list(samples: list[Any]) -> list[Any]:
    random.random()  # Collating has random numbers of its own.
    return samples


def epoch_of(
    dataset: Dataset[Any], *, processes: int = 0, micro: int | None = None, workers: int = 1
) -> dict[int, float]:
    """The random part of all samples of epoch 1, by index."""
    seen: dict[int, float] = {}
    for rank in range(workers):
        loader = DataLoader(
            dataset, batch_size=6, shuffle=True, collate_fn=as_list, num_workers=processes
        )
        feeder = LoaderFeeder(loader, SEED, micro)
        feeder.open()
        for start in (0, 6):
            share = Share(1, (shard_of(PositionRange(start, start + 6), rank, workers),))
            for each in feeder.batches(share, lambda: iter(())):
                seen |= dict(each.batch)
        feeder.close()
    return dict(sorted(seen.items()))


@pytest.mark.parametrize(
    "dataset",
    [Noisy(), Seldom(), AtOnce(), InTurn(), Subset(Subset(Noisy(), range(SIZE)), range(SIZE))],
    ids=["one by one", "seldom random", "a batch at once", "a batch in turn", "nested subsets"],
)
def test_f_dp_005_augmentation_does_not_depend_on_who_loads_how_much_at_once(
    dataset: Dataset[Any],
) -> None:
    expected = epoch_of(dataset)

    assert len(expected) == SIZE
    for how in (
        {"micro": 1},
        {"micro": 4},
        {"workers": 3},
        {"processes": 2},
        {"processes": 1, "micro": 2, "workers": 2},
    ):
        assert epoch_of(dataset, **how) == expected, how


def test_each_position_has_random_numbers_of_its_own() -> None:
    noise = epoch_of(Noisy())

    assert len(set(noise.values())) == SIZE
    assert epoch_of(Seldom())[7] > 0


@pytest.mark.parametrize("kept", [False, True], ids=["", "NumPy keeps a second number"])
@pytest.mark.parametrize("dataset", [Noisy(), Seldom(), SeldomNormal(), AtOnce()])
def test_loading_in_the_scripts_process_leaves_its_generators_alone(
    dataset: Dataset[Any], kept: bool
) -> None:
    np.random.seed(3)
    for _ in range(3 if kept else 2):
        np.random.randn()
    before = rng.digests(rng.capture(CPU))

    for _ in range(2):
        epoch_of(dataset)

        assert rng.digests(rng.capture(CPU)) == before


def test_another_generator_of_numpy_is_left_alone_too() -> None:
    usual = np.random.get_bit_generator()  # type: ignore[attr-defined]  # not in its stubs
    np.random.set_bit_generator(np.random.PCG64(1))  # type: ignore[attr-defined]
    try:
        before = np.random.get_state(legacy=False)

        epoch_of(Seldom())

        assert np.random.get_state(legacy=False) == before
    finally:
        np.random.set_bit_generator(usual)  # type: ignore[attr-defined]


class Damaged(Noisy):
    def __getitem__(self, index: int) -> tuple[int, float]:
        random.random()
        raise OSError("the disk is gone")


def test_an_error_of_the_dataset_leaves_the_scripts_generators_alone_too() -> None:
    before = rng.digests(rng.capture(CPU))

    with pytest.raises(OSError, match="the disk is gone"):
        epoch_of(Damaged())

    assert rng.digests(rng.capture(CPU)) == before


class Recording(Noisy):
    """Notes in this process what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []


class Plain(Recording):
    def __getitem__(self, index: int) -> tuple[int, float]:
        self.asked.append(index)
        return index, 0.0


class RecordingAtOnce(Recording):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        self.asked.append(len(list(indices)))
        return [(index, random.random()) for index in list(indices)]


def test_a_dataset_without_random_numbers_is_loaded_once() -> None:
    data = Plain()

    epoch_of(data)

    assert sorted(data.asked) == list(range(SIZE))


def test_a_dataset_that_augments_whole_batches_is_asked_for_single_samples_from_then_on() -> None:
    data = RecordingAtOnce()

    epoch_of(data)

    assert data.asked == [6, *[1] * 12]


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []
