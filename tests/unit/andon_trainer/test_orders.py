"""Orders: what a position stands for, and the batches of a batch sampler on their positions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from andon.protocol.order import Order
from andon.protocol.records import PositionRange
from andon.protocol.shards import shard_of
from andon_trainer.data.feed import Share
from andon_trainer.data.orders import BatchOrders, Orders, orders_of

SIZE, SEED = 23, 5


def data(size: int = SIZE) -> TensorDataset:
    return TensorDataset(torch.arange(size))


def of(*, dataset: Any = None, **options: Any) -> Orders:
    return orders_of(DataLoader(data() if dataset is None else dataset, **options), SEED)[0]


def epoch_of(orders: Orders, epoch: int) -> list[Any]:
    """An epoch's samples, by position."""
    orders.enter(epoch)
    whole = Share(epoch, (PositionRange(0, orders.size),))
    return [index for piece in orders.pieces(whole, None) for index in piece.indices]


def distributed(shuffle: bool) -> DistributedSampler[Any]:
    return DistributedSampler(data(), num_replicas=2, rank=1, shuffle=shuffle)


LINES_OWN = list(Order(SEED, 2, SIZE))


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({"shuffle": True, "batch_size": 4}, LINES_OWN),
        ({"batch_sampler": BatchSampler(RandomSampler(data()), 4, False)}, LINES_OWN),
        ({"sampler": distributed(True), "batch_size": 4}, LINES_OWN),
        ({"batch_size": 4}, list(range(SIZE))),
        ({"sampler": distributed(False), "batch_size": 4}, list(range(SIZE))),
    ],
    ids=[
        *("shuffle", "torch's own batch sampler", "DistributedSampler"),
        *("no shuffle", "DistributedSampler without"),
    ],
)
def test_shuffling_is_the_lines_own_order_and_without_it_the_order_is_the_datasets(
    options: dict[str, Any], order: list[int]
) -> None:
    assert epoch_of(of(**options), 2) == order


def test_shuffled_positions_may_be_asked_for_in_any_order_and_number() -> None:
    # More than are looked up together, forwards, backwards, twice, and of another epoch.
    size = 3000
    orders = of(dataset=data(size), shuffle=True, batch_size=4)
    asked = [
        (0, 0, 4),
        (0, 4, 8),
        (0, 508, 516),
        (0, 0, 4),
        (1, 0, 4),
        (1, 2996, 3000),
        (0, 9, 999),
    ]

    for epoch, start, stop in asked:
        (piece,) = orders.pieces(Share(epoch, (PositionRange(start, stop),)), None)
        whole = Order(SEED, epoch, size)
        assert piece.indices == [whole[place] for place in range(start, stop)]


def test_taking_a_distributed_sampler_off_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        of(sampler=distributed(True), batch_size=4)

    assert "batch_size=4 is now the batch of all workers together" in caplog.text


def test_a_sampler_of_ones_own_says_how_long_an_epoch_is() -> None:
    orders = of(batch_size=4, sampler=WeightedRandomSampler([1.0] * SIZE, 50))

    assert (orders.size, orders.batch_size) == (50, 4)
    assert len(epoch_of(orders, 0)) == 50
    assert epoch_of(orders, 0) != epoch_of(orders, 1)


def test_the_digest_of_an_order_is_that_of_its_first_epoch() -> None:
    def digest(indices: list[int], **options: Any) -> bytes:
        orders = of(sampler=SubsetRandomSampler(indices), batch_size=2, **options)
        orders.enter(3)
        return orders.digest()

    assert digest([1, 2, 3]) == digest([1, 2, 3])
    assert digest([1, 2, 3]) != digest([1, 2, 4])
    assert of(batch_size=4, shuffle=True).digest() == b""


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


def test_with_a_sampler_the_dataset_needs_no_length() -> None:
    assert epoch_of(of(dataset=NoLength(), sampler=[5, 700, 6], batch_size=2), 1) == [5, 700, 6]


class Changing(Sampler[int]):
    """Yields what the test says, by epoch."""

    def __init__(self, *epochs: list[Any]) -> None:
        self.epochs, self.epoch = epochs, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = min(epoch, len(self.epochs) - 1)

    def __iter__(self) -> Iterator[int]:
        return iter(self.epochs[self.epoch])


def refused(first: list[Any], **options: Any) -> Callable[[], Any]:
    return lambda: of(sampler=Changing(first), batch_size=2, **options)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (refused([]), "yields nothing"),
        (refused([0, SIZE]), "the index 23 in epoch 0, and the dataset has 23 samples"),
        (refused([0, -SIZE - 1]), "the index -24"),
        (refused([1], drop_last=True), "drop_last=True leaves nothing"),
        (lambda: of(batch_size=None, sampler=[1, 2]), "batch_size=None leaves batches"),
        (lambda: of(dataset=data(0), batch_size=2), "the dataset is empty"),
        (lambda: of(batch_size=24, drop_last=True), "drop_last=True leaves nothing"),
        (lambda: of(batch_sampler=[[1], []]), r"yields \[\] as batch 1 of epoch 0"),
        (lambda: of(batch_sampler=[1, 2]), "yields 1 as batch 0"),
        (lambda: of(batch_sampler=[[1, SIZE]]), "the index 23"),
        (
            lambda: of(sampler=type("Own", (DistributedSampler,), {})(data(), 2, 0), batch_size=2),
            "yields the samples of one rank",
        ),
    ],
)
def test_what_can_not_be_an_epoch_is_refused_with_the_reason(
    make: Callable[[], Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_a_sampler_that_yields_fewer_later_is_an_error_when_that_epoch_begins() -> None:
    orders = of(sampler=Changing([1, 2, 3], [1, 2, 3], [1, 2]), batch_size=2)

    assert orders.enter(1)
    assert not orders.foresee(2)  # Loading ahead must not raise in epoch 1.
    with pytest.raises(ValueError, match="yields 2 in epoch 2, and 3 in the first"):
        orders.enter(2)


def test_an_epoch_that_was_foreseen_is_drawn_again_when_it_begins() -> None:
    sampler = SubsetRandomSampler([1, 2, 3])
    orders = of(sampler=sampler, batch_size=2)
    orders.enter(0)
    assert orders.foresee(1)
    assert orders.foresee(2)

    sampler.indices = [4, 5, 6]  # Where the script's first epoch ends.

    assert not orders.enter(1)
    assert sorted(epoch_of(orders, 1)) == [4, 5, 6]
    assert not orders.enter(2)
    assert orders.enter(2)


def test_sequential_and_random_samplers_of_other_data_are_drawn() -> None:
    assert epoch_of(of(batch_size=2, sampler=SequentialSampler(range(3))), 0) == [0, 1, 2]
    assert sorted(epoch_of(of(batch_size=2, sampler=RandomSampler(range(3))), 0)) == [0, 1, 2]


# ----------------------------------------------------------------------- batches


def pieces_of(orders: Orders, share: Share, most: int | None = None) -> list[list[Any]]:
    return [piece.indices for piece in orders.pieces(share, most)]


def shares(orders: Orders, batch: int, world_size: int) -> list[Share]:
    whole = PositionRange(batch * orders.batch_size, (batch + 1) * orders.batch_size)
    return [Share(0, (shard_of(whole, rank, world_size),)) for rank in range(world_size)]


def test_a_batch_is_shared_out_and_nothing_of_another_one_comes_with_it() -> None:
    batches = [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10], [11]]
    orders = of(batch_sampler=batches)

    dealt = [[pieces_of(orders, share) for share in shares(orders, batch, 2)] for batch in range(3)]

    assert (orders.size, orders.batch_size) == (24, 8)
    # Of three samples the first lies at slot 0, the others at 2 and 5: the second half has one.
    assert dealt == [[[[0, 1, 2, 3]], [[4, 5, 6, 7]]], [[[8, 9]], [[10]]], [[[11]], []]]


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(1, 4),
    st.none() | st.integers(1, 5),
)
def test_every_sample_is_dealt_once_and_in_shares_of_about_one_size(
    sizes: list[int], world_size: int, parts: int, most: int | None
) -> None:
    samples = iter(range(sum(sizes)))
    batches = [[next(samples) for _ in range(size)] for size in sizes]
    orders = BatchOrders(batches, data(sum(sizes)), SEED)

    for number, batch in enumerate(batches):
        dealt, counts = [], []
        for share in shares(orders, number, world_size):
            split = Share(0, share.ranges, parts=parts)
            pieces = list(orders.pieces(split, most))
            here = [index for piece in pieces for index in piece.indices]
            dealt += here
            counts.append(len(here))
            assert orders.samples_of(0, share.ranges) == len(here)
            assert all(1 <= len(piece.indices) <= (most or 12) for piece in pieces)
            if parts == 1 and pieces:
                assert sum(piece.positions for piece in pieces) == len(share)
        assert dealt == batch
        assert max(counts) - min(counts) <= 2
        places = [
            p for s in shares(orders, number, 1) for e in orders.pieces(s, most) for p in e.places
        ]
        assert len(set(places)) == len(batch)


def test_a_micro_batch_never_holds_samples_of_two_batches() -> None:
    orders = of(batch_sampler=[[0, 1, 2, 3], [4, 5], [6, 7, 8]])

    window = Share(0, (PositionRange(2, 12),))

    assert pieces_of(orders, window) == [[2, 3], [4, 5], [6, 7, 8]]
    assert pieces_of(orders, window, 2) == [[2, 3], [4, 5], [6, 7], [8]]


def test_the_positions_of_a_batch_may_be_dealt_one_by_one() -> None:
    orders = of(batch_sampler=[[0, 1, 2, 3], [4, 5]])

    odd = Share(0, tuple(PositionRange(p, p + 1) for p in (1, 3, 4, 6)))

    assert pieces_of(orders, odd) == [[1, 3], [4, 5]]


def test_a_later_batch_may_be_larger_than_any_of_the_first_epoch() -> None:
    sampler = Changing([[0, 1], [2, 3]], [[4, 5, 6, 7, 8], [9]])
    orders = of(batch_sampler=sampler)
    orders.enter(1)

    halves = [Share(1, (PositionRange(p, p + 1),)) for p in (0, 1, 2, 3)]

    assert [pieces_of(orders, half) for half in halves] == [[[4, 5, 6]], [[7, 8]], [[9]], []]


@pytest.mark.parametrize(("position", "borrowed"), [(5, [8, 9]), (10, [11])])
def test_borrowed_samples_are_of_the_steps_own_batch(position: int, borrowed: list[int]) -> None:
    orders = of(batch_sampler=[[1, 2, 3, 4], [8, 9, 10], [11]])

    assert orders.near(0, position).indices == borrowed
