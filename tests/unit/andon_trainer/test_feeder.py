"""The feeder: which samples reach the loop, in which order, loaded by which processes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from andon.protocol.order import Order
from andon.protocol.records import PositionRange
from andon_trainer.data.feed import MicroBatch, Share
from andon_trainer.data.feeder import LoaderFeeder
from unit.andon_trainer import feeding
from unit.andon_trainer.feeding import BATCH, SEED, as_list, nothing, opened

SIZE = 23


class Numbers(Dataset[tuple[int, int, float]]):
    """The index itself, the process that loaded it, and something random."""

    def __init__(self, size: int = SIZE, *, poison: int | None = None) -> None:
        self.size = size
        self.poison = poison

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, int, float]:
        if index == self.poison:
            raise ValueError(f"sample {index} is damaged")
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return index, os.getpid(), noise


def loader_of(**options: Any) -> DataLoader[Any]:
    settings: dict[str, Any] = {
        "dataset": Numbers(),
        "batch_size": BATCH,
        "shuffle": True,
        "collate_fn": as_list,
    }
    return DataLoader(**settings | options)


shares = partial(feeding.shares, size=SIZE)


def started_anew() -> Iterator[Share]:
    raise AssertionError("the pipeline was started anew")


def expected(share: Share) -> list[int]:
    order = Order(SEED, share.epoch, SIZE)
    return [order[p] for part in share.ranges for p in range(part.start, part.stop)]


def indices(batches: Iterable[MicroBatch]) -> list[int]:
    return [sample[0] for each in batches for sample in each.batch]


@pytest.fixture
def feeders() -> Iterator[Callable[..., LoaderFeeder]]:
    with opened() as open_:
        yield lambda **options: open_(LoaderFeeder(loader_of(**options), SEED))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_endless_foresight_is_followed_no_further_than_torch_prefetches(
    feeders: Callable[..., LoaderFeeder], workers: int
) -> None:
    feeder = feeders(num_workers=workers)
    foreseen: list[Share] = []

    def endless() -> Iterator[Share]:
        for share in islice(shares(0, 1), 1, None):
            foreseen.append(share)
            yield share

    first = next(shares(0, 1))

    assert indices(feeder.batches(first, endless)) == expected(first)
    assert len(foreseen) == (4 if workers else 0)


def test_foreseen_batches_are_used_and_not_loaded_twice(
    feeders: Callable[..., LoaderFeeder],
) -> None:
    feeder = feeders(num_workers=2)
    plan = list(islice(shares(0, 1), 6))

    def once(at: int) -> Iterator[Share]:
        assert at == 0, "the pipeline was started anew"
        return islice(shares(0, 1), 1, None)

    for at, share in enumerate(plan):
        assert indices(feeder.batches(share, partial(once, at))) == expected(share)


def test_draining_leaks_no_memory_that_was_shared(feeders: Callable[..., LoaderFeeder]) -> None:
    feeder = feeders(
        dataset=TensorDataset(torch.randn(SIZE, 64)), collate_fn=default_collate, num_workers=2
    )
    share, open_files = next(shares(0, 1)), []

    for _ in range(12):  # each time three other batches are on their way, and dropped
        list(feeder.batches(share, lambda: islice(shares(0, 1), 1, None)))
        open_files.append(len(os.listdir("/proc/self/fd")))

    # A shared tensor is a file until it is freed; how many are on their way varies.
    assert max(open_files[6:]) <= max(open_files[:6]) + 4


def test_f_dp_006_missing_positions_are_loaded_in_small_pieces_and_the_new_roster_is_foreseen(
    feeders: Callable[..., LoaderFeeder],
) -> None:
    feeder = feeders(num_workers=2)
    first = next(shares(0, 4))
    missing = Share(first.epoch, (PositionRange(1, 4),), limit=2)
    later = list(islice(shares(0, 1), 1, 3))
    indices(feeder.batches(first, lambda: islice(shares(0, 4), 1, None)))

    batches = list(feeder.batches(missing, lambda: iter(later)))

    assert [len(each.batch) for each in batches] == [2, 1]
    assert indices(batches) == expected(missing)
    for share in later:
        assert indices(feeder.batches(share, started_anew)) == expected(share)


def test_a_damaged_sample_raises_where_it_is_asked_for_and_loading_goes_on(
    feeders: Callable[..., LoaderFeeder],
) -> None:
    first, second, third = islice(shares(0, 1), 3)
    feeder = feeders(dataset=Numbers(poison=expected(second)[1]), num_workers=2)

    assert indices(feeder.batches(first, lambda: iter((second, third)))) == expected(first)
    with pytest.raises(ValueError, match="is damaged"):
        list(feeder.batches(second, lambda: iter((third,))))
    assert indices(feeder.batches(third, nothing)) == expected(third)


def test_random_augmentation_does_not_depend_on_what_was_prefetched(
    feeders: Callable[..., LoaderFeeder],
) -> None:
    foreseeing, blind = feeders(num_workers=2), feeders(num_workers=2)
    plan = list(islice(shares(0, 1), 8))

    def noise(feeder: LoaderFeeder, upcoming: Callable[[int], Iterator[Share]]) -> list[float]:
        return [
            sample[2]
            for at, share in enumerate(plan)
            for each in feeder.batches(share, partial(upcoming, at))
            for sample in each.batch
        ]

    ahead = noise(foreseeing, lambda at: iter(plan[at + 1 :]))
    alone = noise(blind, lambda at: iter(()))

    assert ahead == alone
    assert len(set(ahead)) == len(ahead)


@pytest.mark.parametrize(("position", "borrowed"), [(11, [11, 12]), (SIZE - 1, [21, 22])])
def test_borrowing_loads_two_collated_samples_for_batchnorm_refuses_one(
    feeders: Callable[..., LoaderFeeder], position: int, borrowed: list[int]
) -> None:
    feeder = feeders(num_workers=2)

    samples = feeder.borrow(2, position)

    assert [index for index, _, _ in samples] == [Order(SEED, 2, SIZE)[p] for p in borrowed]
    assert {process for _, process, _ in samples} == {os.getpid()}


def test_borrowing_of_a_dataset_of_one_loads_that_one(feeders: Callable[..., LoaderFeeder]) -> None:
    assert len(feeders(dataset=Numbers(1)).borrow(0, 0)) == 1


def name_the_process(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Numbers)
    info.dataset.size = 1000 + worker


def sizes(samples: list[Any]) -> list[int]:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Numbers)
    return [info.dataset.size] * len(samples)


def test_the_loaders_own_ways_of_loading_are_kept(feeders: Callable[..., LoaderFeeder]) -> None:
    feeder = feeders(
        num_workers=2,
        worker_init_fn=name_the_process,
        collate_fn=sizes,
        prefetch_factor=1,
        timeout=60,
        multiprocessing_context="fork",
    )
    plan = list(islice(shares(0, 1), 3))

    batches = [
        each.batch for share in plan for each in feeder.batches(share, lambda: iter(plan[1:]))
    ]

    assert {size for batch in batches for size in batch} <= {1000, 1001}
