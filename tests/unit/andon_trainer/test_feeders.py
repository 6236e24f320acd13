"""What every feeder promises, of indices, of streams and of bare shards."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from andon.protocol.order import Order
from andon.protocol.records import PositionRange
from andon_trainer.data.feed import Feeder, MicroBatch, ShardFeeder, Share
from andon_trainer.data.stream_feeder import feeder_for
from unit.andon_trainer import feeding
from unit.andon_trainer.feeding import BATCH, SEED, as_list, nothing, opened
from unit.andon_trainer.streams import Sized

SIZE = 23


class Numbers(Dataset[int]):
    """The index itself."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index


def shuffled(epoch: int, position: int) -> int:
    return Order(SEED, epoch, SIZE)[position]


def counted(epoch: int, position: int) -> int:
    return position + 1000 * epoch


@dataclass(frozen=True)
class Kind:
    """One feeder: how it is made, and which sample lies at a position."""

    make: Callable[[int | None], Feeder]
    sample: Callable[[int, int], int]
    numbers: Callable[[Any], list[int]] = list

    def expected(self, share: Share) -> list[int]:
        return [
            self.sample(share.epoch, position)
            for part in share.ranges
            for position in range(part.start, part.stop)
        ]

    def read(self, batches: Iterator[MicroBatch]) -> list[int]:
        return [number for each in batches for number in self.numbers(each.batch)]


def of_indices(workers: int) -> Kind:
    loader = partial(
        DataLoader, Numbers(), BATCH, shuffle=True, collate_fn=as_list, num_workers=workers
    )
    return Kind(lambda micro: feeder_for(loader(), SEED, micro), shuffled)


def of_a_stream(workers: int) -> Kind:
    loader = partial(DataLoader, batch_size=BATCH, collate_fn=as_list, num_workers=workers)
    return Kind(lambda micro: feeder_for(loader(Sized(SIZE, SIZE)), SEED, micro), counted)


def of_shards(micro: int | None) -> Feeder:
    return ShardFeeder(SIZE, BATCH, seed=SEED, micro_batch_size=micro, step=lambda: 1)


KINDS = {
    "indices": of_indices(0),
    "indices, two processes": of_indices(2),
    "stream": of_a_stream(0),
    "stream, a process": of_a_stream(1),
    "shards": Kind(of_shards, shuffled, lambda shard: [int(index) for index in shard.indices]),
}


@pytest.fixture(params=list(KINDS.values()), ids=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def feeders(kind: Kind) -> Iterator[Callable[..., Feeder]]:
    with opened() as open_:
        yield lambda micro=None: open_(kind.make(micro))


shares = partial(feeding.shares, size=SIZE)


def rest(plan: Sequence[Share], at: int) -> Iterator[Share]:
    return iter(plan[at + 1 :])


@pytest.mark.parametrize("rank", [0, 1])
def test_f_dp_002_shares_hold_the_samples_of_their_positions_in_order(
    kind: Kind, feeders: Callable[..., Feeder], rank: int
) -> None:
    feeder = feeders()
    plan = list(islice(shares(rank, 2), 20))

    found = [
        kind.read(feeder.batches(share, partial(rest, plan, at))) for at, share in enumerate(plan)
    ]

    assert found == [kind.expected(share) for share in plan]
    assert {share.epoch for share in plan} == {0, 1, 2, 3}


def test_micro_batches_are_even_and_may_span_ranges(
    kind: Kind, feeders: Callable[..., Feeder]
) -> None:
    share = Share(0, (PositionRange(2, 9), PositionRange(9, 9), PositionRange(20, 22)))

    batches = list(feeders(3).batches(share, nothing))

    # Nine positions in as few batches as possible. One range after another would make four.
    assert [(each.positions, each.samples) for each in batches] == [(3, 3)] * 3
    assert kind.read(iter(batches)) == kind.expected(share)


def test_f_dp_006_missing_positions_come_in_pieces_no_larger_than_their_limit(
    kind: Kind, feeders: Callable[..., Feeder]
) -> None:
    missing = Share(0, (PositionRange(1, 4),), limit=2)

    batches = list(feeders().batches(missing, nothing))

    assert [each.positions for each in batches] == [2, 1]
    assert kind.read(iter(batches)) == kind.expected(missing)


@pytest.mark.parametrize("taken", [1, BATCH])
def test_a_share_is_given_again_from_its_beginning(
    kind: Kind, feeders: Callable[..., Feeder], taken: int
) -> None:
    feeder, share = feeders(1), next(shares(0, 1))
    for _ in range(2):
        left = feeder.batches(share, lambda: islice(shares(0, 1), 1, 4))
        assert len(list(islice(left, taken))) == taken

    again = kind.read(feeder.batches(share, nothing))

    assert again == kind.expected(share)


def test_c_shard_001_an_empty_share_yields_nothing_and_the_next_one_is_whole(
    kind: Kind, feeders: Callable[..., Feeder]
) -> None:
    feeder = feeders()
    first, second = islice(shares(0, 1), 2)
    empty = Share(0, (PositionRange(4, 4),), batch=second.batch)
    kind.read(feeder.batches(first, lambda: iter((empty, second))))

    nothing_here = list(feeder.batches(empty, nothing))

    assert nothing_here == []
    assert kind.read(feeder.batches(second, nothing)) == kind.expected(second)


def test_borrowing_takes_nothing_from_a_share(kind: Kind, feeders: Callable[..., Feeder]) -> None:
    feeder, share = feeders(), next(shares(0, 1))

    borrowed = [kind.numbers(feeder.borrow(0, at)) for at in (0, SIZE - 1)]

    assert [len(each) for each in borrowed] == [2, 2], "BatchNorm refuses a batch of one"
    assert kind.read(feeder.batches(share, nothing)) == kind.expected(share)


def test_sizes_and_counts_are_those_of_the_data(feeders: Callable[..., Feeder]) -> None:
    feeder = feeders(3)

    assert (feeder.dataset_size, feeder.epoch_size, feeder.batch_size) == (SIZE, SIZE, BATCH)
    assert (feeder.drop_last, feeder.sparse) == (False, False)
    assert feeder.samples_of(0, (PositionRange(2, 5), PositionRange(7, 8))) == 4
    assert feeder.end_of(0) is None
    # Alone, a batch of four is two micro-batches; of the last one three positions are left.
    assert feeder.loop_bodies(0, 0, 1) == 2 * 5 + 1


def test_a_closed_feeder_may_be_closed_again_midway_too(
    kind: Kind, feeders: Callable[..., Feeder]
) -> None:
    feeder = feeders(1)
    next(feeder.batches(next(shares(0, 1)), lambda: islice(shares(0, 1), 1, None)))

    feeder.close()
    feeder.close()

    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("name", ["indices, two processes", "stream, a process"])
def test_batches_before_open_and_after_close_are_refused(name: str) -> None:
    feeder = KINDS[name].make(None)

    with pytest.raises(RuntimeError, match="call open"):
        next(feeder.batches(next(shares(0, 1)), nothing))
    feeder.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(feeder.batches(next(shares(0, 1)), nothing))
    assert multiprocessing.active_children() == []


def test_a_micro_batch_of_no_samples_is_refused(kind: Kind) -> None:
    with pytest.raises(ValueError, match="micro_batch_size"):
        kind.make(0)
