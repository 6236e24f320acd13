"""Evaluation: what a loader loads is shared out, each sample once, in the loader's own way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
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

from andon.protocol.records import Key
from andon_trainer.data.evaluation import Coverage, EvaluationShare, Splitting
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


def split_loader(loader: DataLoader[Any], rank: int, workers: int) -> Iterator[Any]:
    _, batches = Splitting(CPU).split(loader, EvaluationShare(rank, workers), seed=7)
    return batches


def loader_of(**options: Any) -> DataLoader[Any]:
    settings: dict[str, Any] = {"batch_size": 4, "collate_fn": list}
    return DataLoader(Numbers(), **settings | options)


def shares(make: Callable[[], DataLoader[Any]], workers: int = 3) -> list[list[list[int]]]:
    """What each of the workers gets, each with a loader of its own, in batches of indices."""
    found = []
    for rank in range(workers):
        torch.manual_seed(rank)  # as little alike as workers are
        batches = split_loader(make(), rank, workers)
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
    _ = next(split_loader(loader_of(sampler=sampler()), 0, 1))
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

    assert [index for index, _ in split_loader(loader, 1, 2)] == list(range(12, 23))


def test_the_loaders_processes_load() -> None:
    (batch, *_rest) = split_loader(loader_of(num_workers=1), 0, 3)

    assert os.getpid() not in {process for _, process in batch}


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


def test_every_batch_of_a_stream_goes_to_one_worker() -> None:
    found = shares(
        lambda: DataLoader(Stream(), 4, collate_fn=lambda items: [(i, 0) for i in items])
    )

    assert sorted(flat(found)) == list(range(SIZE))
    assert found[1] == [[4, 5, 6, 7], [16, 17, 18, 19]]


def test_persistent_processes_stay_from_one_evaluation_to_the_next_until_the_end() -> None:
    splitting = Splitting(CPU)
    loader = loader_of(num_workers=1, persistent_workers=True)

    def evaluated(rank: int) -> tuple[list[int], set[int]]:
        _, batches = splitting.split(loader, EvaluationShare(rank, 2), seed=7)
        pairs = [pair for batch in batches for pair in batch]
        return [index for index, _ in pairs], {process for _, process in pairs}

    first, second = evaluated(0), evaluated(1)
    splitting.close()

    assert (first[0], second[0]) == (list(range(12)), list(range(12, SIZE)))
    assert first[1] == second[1] != {os.getpid()}
    assert not any(Path(f"/proc/{process}").exists() for process in first[1])


ROUND = Key(1, 7)
LATER = Key(1, 8)


def test_a_mean_that_lacks_a_lost_workers_samples_names_them_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    coverage = Coverage()

    assert not coverage.lacks(1, ROUND)  # nothing was shared out
    assert coverage.place(2, 3, ROUND) == EvaluationShare(2, 3)
    coverage.divided(SIZE)
    assert not coverage.lacks(3, ROUND)
    assert not coverage.lacks(2, LATER)  # of a later step: a worker that came since has no share
    assert coverage.lacks(2, ROUND)
    coverage.lost([0, 2], ROUND)

    assert not coverage.lacks(2, ROUND)  # a gather of the same evaluation
    assert not coverage.complete
    assert len(caplog.messages) == 1
    assert "divided a loader among 3: 8 of 23 (from 8 on, those of rank 1)" in caplog.text


def test_the_workers_that_are_left_divide_everything_until_there_is_a_new_roster() -> None:
    coverage = Coverage()
    coverage.place(2, 3, ROUND)
    coverage.lost([0, 2], ROUND)

    again, complete = coverage.place(2, 3, ROUND), not coverage.lacks(2, ROUND)
    later = coverage.place(1, 3, LATER)

    assert (again, complete, later) == (EvaluationShare(1, 2), True, EvaluationShare(1, 3))


def test_a_worker_that_only_attends_sees_what_the_others_divide() -> None:
    coverage = Coverage()

    assert coverage.place(None, 3, ROUND) == EvaluationShare(0, 3)
    assert coverage.lacks(2, ROUND)
    coverage.lost([1, 2], ROUND)
    assert coverage.place(None, 3, ROUND) == EvaluationShare(0, 2)
