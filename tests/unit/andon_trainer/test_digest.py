"""The data's digest: other samples are found out, and random augmentation is no other sample."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split

from andon_trainer.data.feeder import LoaderFeeder
from andon_trainer.state import rng

SIZE = 40


def digest(dataset: Dataset[Any], workers: int = 0, micro: int | None = None) -> str:
    loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=workers)
    feeder = LoaderFeeder(loader, 5, micro)
    feeder.open()
    try:
        return feeder.digest(torch.device("cpu"))
    finally:
        feeder.close()


def numbers(start: int = 0) -> TensorDataset:
    return TensorDataset(torch.arange(start, start + SIZE), torch.full((SIZE, 3), 0.5))


class Augmented(Dataset[Any]):
    """Samples with noise of many sources, beside what is always the same."""

    def __init__(self, label: int = 0) -> None:
        self.label = label
        self.own = np.random.default_rng()

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "global": [random.random() < 0.5, float(np.random.rand()), torch.rand(2)],
            "own": float(self.own.random()),
            "label": self.label + index,
        }


def unseeded(base: Dataset[Any]) -> Subset[Any]:
    return random_split(base, [30, 10], torch.Generator().manual_seed(random.getrandbits(40)))[0]


@pytest.mark.parametrize(
    ("dataset", "micro", "expected"),
    [
        (numbers(), None, "e9bb6e7d32b8d73bfb897a37dc1f4237e906858c784232ef9c3a02c5cf3fe292"),
        (numbers(), 3, "e34cc516e4882aabf5e780a4ebdba2e72644a1fb77c74b068b4aed5f8b57643a"),
        (
            Subset(numbers(), list(range(3, 33))),
            None,
            "49c00a5eb33012d699e07d0e79728c04dd6bee1a1471a203c496691ea1cfd8c6",
        ),
        (
            ConcatDataset([numbers(), numbers()]),
            3,
            "9e93d3f21b9f7dcb7bdb7a254286a4938918657d2cf4cd9577ae8ef3ae02463f",
        ),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_digest_is_the_one_that_earlier_versions_compute(
    dataset: Dataset[Any], micro: int | None, expected: str, workers: int
) -> None:
    assert digest(dataset, workers, micro) == expected


def test_an_unseeded_split_of_the_same_length_has_another_digest() -> None:
    first, second = unseeded(numbers()), unseeded(numbers())

    assert len(first) == len(second)
    assert digest(first) != digest(second)


def test_indices_count_wherever_a_subset_is() -> None:
    # A stub that gives the same sample for every index: only indices tell the subsets apart.
    same = TensorDataset(torch.zeros(SIZE))
    rest = list(range(1, SIZE - 1))

    def joined(last: int) -> Dataset[Any]:
        return Subset(ConcatDataset([Subset(same, [*rest, last])]), range(SIZE - 1))

    assert digest(joined(0)) == digest(joined(0))
    assert digest(joined(0)) != digest(joined(SIZE - 1))


@pytest.mark.parametrize(
    "other",
    [
        lambda: numbers(1),
        lambda: TensorDataset(torch.arange(SIZE), torch.full((SIZE, 3), 0.25)),
        lambda: TensorDataset(torch.arange(SIZE).int(), torch.full((SIZE, 3), 0.5)),
        lambda: TensorDataset(torch.arange(SIZE - 1), torch.full((SIZE - 1, 3), 0.5)),
    ],
    ids=["values", "floats", "type", "length"],
)
def test_other_samples_have_another_digest(other: Callable[[], Dataset[Any]]) -> None:
    assert digest(other()) != digest(numbers())


@pytest.mark.parametrize("workers", [0, 2])
def test_random_augmentation_is_left_out_and_its_label_is_not(workers: int) -> None:
    random.seed(1)
    here = digest(Augmented(), workers)
    random.seed(2)
    there = digest(Augmented(), workers)

    assert here == there
    assert here != digest(Augmented(label=1), workers)


def test_it_draws_nothing_of_what_the_script_draws() -> None:
    before = rng.digests(rng.capture(torch.device("cpu")))

    digest(Augmented())

    assert rng.digests(rng.capture(torch.device("cpu"))) == before


class Counting(Dataset[int]):
    def __init__(self, poison: Sequence[int] = ()) -> None:
        self.poison = poison
        self.read: list[int] = []

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        if self.poison:
            raise OSError("the disk is gone")
        return index


def test_it_reads_sixteen_samples_twice_of_a_dataset_of_any_length() -> None:
    data = Counting()

    digest(data, micro=2)

    assert len(data.read) == 32
    assert len(set(data.read)) == 16


def test_samples_that_cannot_be_read_give_no_digest_and_stop_nobody() -> None:
    assert digest(Counting(poison=[1])) == ""
