"""Tallies: evaluations whose bits don't depend on who computed which batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from andon_trainer.data.evaluation import EvaluationShare, Splitting
from andon_trainer.line.tallies import Tallies


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


def of(*batches: tuple[int, float, float]) -> Tallies:
    tallies = Tallies()
    for number, value, n in batches:
        tallies.begin_batch(number)
        tallies.add({"loss": value}, n)
    return tallies


@pytest.mark.parametrize("owners", ["0000", "0101", "1100"])
def test_sums_are_added_in_the_order_of_the_batches(owners: str) -> None:
    sums = [0.1, 1e16, -1e16, 0.3]
    everybody = Tallies()
    for owner in "10":
        mine = [(i, sums[i], 2.0) for i in range(4) if owners[i] == owner]
        everybody.take(of(*mine).packed())
    everybody.end()

    assert everybody.means() == {"loss": (((0.1 + 1e16) - 1e16) + 0.3) / 8}


def test_batches_of_a_lost_worker_are_missing() -> None:
    tallies = of((1, 1.0, 1.0), (3, 1.0, 1.0))

    assert tallies.missing(5) == [0, 2, 4]
    with pytest.raises(RuntimeError, match="to its end"):
        tallies.means()


def test_sums_that_another_worker_has_otherwise_are_told_of() -> None:
    mine = of((0, math.nan, 1.0), (1, 1.0, 1.0), (2, 1.0, 2.0))

    assert mine.differing(of((0, math.nan, 1.0), (1, 1.5, 1.0), (2, 1.0, 2.5)).packed()) == [1, 2]
    assert mine.differing(of((3, 1.0, 1.0)).packed()) == []


def test_a_batch_is_tallied_once() -> None:
    tallies = of((0, 1.0, 1.0))

    with pytest.raises(RuntimeError, match="once for each batch"):
        tallies.add(1.0, 1.0)


def test_a_mean_over_nothing_is_nan() -> None:
    tallies = Tallies()
    tallies.end()

    mean = tallies.means()

    assert isinstance(mean, float)
    assert math.isnan(mean)


@pytest.mark.parametrize("data", [TensorDataset(torch.arange(20)), Stream()], ids=["map", "stream"])
def test_whole_batches_are_dealt_each_once_and_missing_ones_again(data: Dataset[Any]) -> None:
    loader = DataLoader(data, 6)
    splitting = Splitting(torch.device("cpu"))
    expected = dict(enumerate(loader))

    workers = [splitting.whole_batches(loader, seed=0) for _ in range(3)]
    first = [dict(each.deal(EvaluationShare(n, 3))) for n, each in enumerate(workers)]
    left = enumerate(workers[:2])
    again = [dict(each.deal(EvaluationShare(n, 2), [0, 1, 3])) for n, each in left]

    assert [each.count for each in workers] == [4, 4, 4]
    assert sorted(n for each in first for n in each) == [0, 1, 2, 3]
    assert sorted(n for each in again for n in each) == [0, 1, 3]
    for each in (*first, *again):
        for number, batch in each.items():
            assert torch.equal(torch.as_tensor(batch[0]), torch.as_tensor(expected[number][0]))
