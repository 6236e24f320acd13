"""Evaluation: what a loader loads is shared out, each sample once, in the loader's own way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from andon_trainer.data.evaluation import SplitCheck, split_loader
from andon_trainer.state import rng

SIZE = 23
CPU = torch.device("cpu")


class Numbers(Dataset[tuple[int, int]]):
    """The index itself, and the process that loaded it."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, os.getpid()


class Shuffled(Sampler[int]):
    """A sampler of the script's own, which draws from torch's generator."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SIZE)[:9].tolist())


def loader_of(**options: Any) -> DataLoader[Any]:
    settings: dict[str, Any] = {"batch_size": 4, "collate_fn": list}
    return DataLoader(Numbers(), **settings | options)


def shares(make: Callable[[], DataLoader[Any]], workers: int = 3) -> list[list[list[int]]]:
    """What each of the workers gets, each with a loader of its own, in batches of indices."""
    found = []
    for rank in range(workers):
        torch.manual_seed(rank)  # as little alike as workers are
        batches = split_loader(make(), rank, workers, CPU, seed=7)
        found.append([[index for index, _ in batch] for batch in batches])
    return found


def flat(shares: list[list[list[int]]]) -> list[int]:
    return [index for share in shares for batch in share for index in batch]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, list(range(SIZE))),
        ({"shuffle": True}, list(range(SIZE))),
        ({"drop_last": True}, list(range(20))),
        ({"sampler": SubsetRandomSampler([5, 3, 19, 2, 7])}, [5, 3, 19, 2, 7]),
        ({"sampler": DistributedSampler(Numbers(), 2, 1)}, list(range(SIZE))),
    ],
    ids=["in order", "shuffled", "drop_last", "subset", "distributed"],
)
def test_every_sample_of_the_loaders_sampler_comes_once(
    options: dict[str, Any], expected: list[int]
) -> None:
    found = shares(lambda: loader_of(**options))

    assert flat(found) == expected
    assert max(len(batch) for share in found for batch in share) <= 4


@pytest.mark.parametrize(
    "sampler",
    [
        Shuffled,
        lambda: WeightedRandomSampler([1.0] * SIZE, 9),
        lambda: WeightedRandomSampler([1.0] * SIZE, 9, generator=torch.Generator()),
        lambda: RandomSampler(Numbers(), num_samples=9),
    ],
    ids=["own", "weighted", "with a generator", "random part"],
)
def test_a_sampler_that_draws_is_drawn_alike_on_all_workers(
    sampler: Callable[[], Sampler[int]],
) -> None:
    before = rng.digests(rng.capture(CPU))
    _ = next(split_loader(loader_of(sampler=sampler()), 0, 1, CPU, seed=7))
    drawn_by_loading = rng.digests(rng.capture(CPU))

    found = flat(shares(lambda: loader_of(sampler=sampler())))
    alone = flat(shares(lambda: loader_of(sampler=sampler()), workers=1))

    assert found == alone
    assert len(found) == 9
    assert {name for name in before if before[name] != drawn_by_loading[name]} <= {"torch"}


def test_batches_of_a_batch_sampler_are_shared_out_whole() -> None:
    batches = [[0, 1, 2], [7], [9, 8], [4, 4]]

    found = shares(lambda: DataLoader(Numbers(), batch_sampler=batches, collate_fn=list))

    assert found == [[[0, 1, 2], [7]], [[9, 8]], [[4, 4]]]


def test_without_batches_samples_come_one_by_one() -> None:
    loader = DataLoader(Numbers(), batch_size=None)

    assert [index for index, _ in split_loader(loader, 1, 2, CPU, seed=7)] == list(range(12, 23))


def test_the_loaders_processes_load() -> None:
    (batch, *_rest) = split_loader(loader_of(num_workers=1), 0, 3, CPU, seed=7)

    assert os.getpid() not in {process for _, process in batch}


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_a_stream_is_refused_with_the_remedy() -> None:
    with pytest.raises(TypeError, match="evaluate the whole stream on every worker"):
        next(split_loader(DataLoader(Stream()), 0, 1, CPU, seed=7))


def test_a_mean_that_lacks_a_lost_workers_samples_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    coverage = SplitCheck()

    coverage.check(1)  # nothing was shared out
    coverage.split(3)
    coverage.check(3)
    assert caplog.messages == []
    coverage.check(2)
    coverage.check(2)

    assert len(caplog.messages) == 1
    assert "line.mean is of 2 workers" in caplog.messages[0]
