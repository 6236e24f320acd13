"""The feeder of streams: its micro-batches, the loading process, the digest, what it refuses."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    get_worker_info,
)

from andon.protocol.records import Cursor, PositionRange
from andon_trainer.data.feed import Share
from andon_trainer.data.feeder import LoaderFeeder
from andon_trainer.data.stream_digest import StreamRefused
from andon_trainer.data.stream_feeder import StreamFeeder, feeder_for
from andon_trainer.data.streams import is_stream
from unit.andon_trainer import feeding
from unit.andon_trainer.feeding import BATCH, SEED, as_list, nothing, opened
from unit.andon_trainer.streams import Counting, Plain, Sized, Skipping

CPU = torch.device("cpu")


def loader_of(stream: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(stream, **{"batch_size": BATCH, "collate_fn": as_list, **options})


shares = partial(feeding.shares, size=None)


@pytest.fixture
def feeders() -> Iterator[Callable[..., StreamFeeder]]:
    with opened() as open_:
        yield lambda stream, micro=None, **options: open_(
            StreamFeeder(loader_of(stream, **options), SEED, micro)
        )


def epoch_of(feeder: StreamFeeder, rank: int, world_size: int, epoch: int = 0) -> list[Any]:
    """What a rank gets in the steps of an epoch, until it meets the end."""
    read = []
    for at, share in enumerate(shares(rank, world_size, Cursor(epoch, 0))):
        after = Cursor(epoch, (at + 1) * BATCH)
        found = list(feeder.batches(share, lambda after=after: shares(rank, world_size, after)))  # type: ignore[misc]  # binds the loop's value
        assert sum(each.positions for each in found) == (len(share) if found else 0)
        read.append([each.batch for each in found])
        end = feeder.end_of(epoch)
        if end is not None and end <= after.position:
            return read
    raise AssertionError


@pytest.mark.parametrize("workers", [0, 1])
def test_workers_read_the_items_of_a_stream_once_together(
    feeders: Callable[..., StreamFeeder], workers: int
) -> None:
    ranks = [feeders(Counting(10), num_workers=workers) for _ in range(2)]

    for epoch in (0, 1):
        read = [epoch_of(feeder, rank, 2, epoch) for rank, feeder in enumerate(ranks)]

        # Rank 0 has all items of its third share. That the epoch is over, rank 1 sees.
        base = 1000 * epoch
        assert read[0] == [[[base, base + 1]], [[base + 4, base + 5]], [[base + 8, base + 9]], []]
        assert read[1] == [[[base + 2, base + 3]], [[base + 6, base + 7]], []]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("size", [8, 9, 10, 11, 12])
def test_the_last_micro_batch_covers_what_is_left_of_its_share(
    feeders: Callable[..., StreamFeeder], workers: int, size: int
) -> None:
    feeder = feeders(Counting(size), 2, num_workers=workers)

    read = epoch_of(feeder, 0, 1)

    assert list(itertools.chain.from_iterable(read[-1])) == list(range((size - 1) // 4 * 4, size))
    assert feeder.end_of(0) == size
    assert feeder.samples_of(0, (PositionRange(6, 14),)) == size - 6


def test_the_process_reads_ahead_and_the_pipeline_goes_on(
    feeders: Callable[..., StreamFeeder],
) -> None:
    feeder = feeders(Counting(1000), num_workers=1)

    def once(at: int) -> Iterator[Share]:
        assert at == 0, "the pipeline was started anew"
        return islice(shares(0, 2), 1, None)

    for at, share in enumerate(islice(shares(0, 2), 12)):
        (found,) = feeder.batches(share, lambda at=at: once(at))  # type: ignore[misc]  # binds the loop's value
        assert found.batch == [4 * at, 4 * at + 1]


class Told(IterableDataset[tuple[int, int]]):
    """Yields the position, and how often the stream was begun in this process."""

    begun = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        Told.begun += 1
        return ((item, Told.begun) for item in range(1000))


def test_a_changed_roster_costs_no_new_iteration_of_what_was_read_ahead(
    feeders: Callable[..., StreamFeeder],
) -> None:
    feeder = feeders(Told(), num_workers=1)
    steps = shares(0, 3)
    share = next(steps)
    first = [each.batch for each in feeder.batches(share, lambda: steps)]
    batch = share.batch
    assert batch is not None

    # Ranks 1 and 2 are gone: their positions of this step, then all of the next.
    rest = Share(0, (PositionRange(2, 4),), batch=batch)
    alone = shares(0, 1, Cursor(0, 4))
    second = [each.batch for each in feeder.batches(rest, lambda: shares(0, 1, Cursor(0, 4)))]
    third = [each.batch for each in feeder.batches(next(alone), nothing)]

    found = [item for part in (first, second, third) for batch in part for item, _ in batch]
    assert found == list(range(8))
    assert {begun for part in (first, second, third) for row in part for _, begun in row} == {1}


def test_reading_in_this_process_leaves_the_scripts_generators_alone(
    feeders: Callable[..., StreamFeeder],
) -> None:
    feeder = feeders(Counting(40, shuffled=True))
    random.seed(4)
    torch.manual_seed(4)
    expected = random.random(), float(torch.rand(()))
    random.seed(4)
    torch.manual_seed(4)

    feeder.digest(CPU)
    list(feeder.batches(next(shares(0, 1)), nothing))
    feeder.borrow(0, 0)

    assert (random.random(), float(torch.rand(()))) == expected


def test_a_known_length_is_the_plans_and_drop_last_cuts_it(
    feeders: Callable[..., StreamFeeder],
) -> None:
    whole, cut = feeders(Sized(10, 10)), feeders(Sized(10, 10), drop_last=True)
    unknown = feeders(Counting(10), drop_last=True)

    assert (whole.dataset_size, whole.epoch_size, whole.drop_last) == (10, 10, False)
    assert (cut.dataset_size, cut.epoch_size, cut.drop_last) == (10, 8, True)
    assert (unknown.dataset_size, unknown.epoch_size, unknown.drop_last) == (None, None, False)


class Once(Counting):
    """Has its items the first time only."""

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        return iter(range(self.size if self.begun == 1 else 0))


def test_an_epoch_without_items_is_an_error_and_not_an_endless_run(
    feeders: Callable[..., StreamFeeder],
) -> None:
    with pytest.raises(ValueError, match="epoch 0 of the Counting has no item"):
        list(feeders(Counting(0)).batches(next(shares(0, 1)), nothing))
    with pytest.raises(ValueError, match="fewer than 4 items, and drop_last=True"):
        list(feeders(Counting(3), drop_last=True).batches(next(shares(0, 1)), nothing))

    feeder = feeders(Once(BATCH))
    list(feeder.batches(next(shares(0, 1)), nothing))
    with pytest.raises(ValueError, match="epoch 1 of the Once has no item: its __iter__ must"):
        list(feeder.batches(next(shares(0, 1, Cursor(1, 0))), nothing))


@pytest.mark.parametrize("workers", [0, 1])
def test_borrowing_gives_two_items_without_a_new_iteration_if_any_was_read(
    feeders: Callable[..., StreamFeeder], workers: int
) -> None:
    stream = Counting(40)
    feeder = feeders(stream, num_workers=workers)
    assert feeder.borrow(0, 30) == [0, 1]

    list(feeder.batches(next(shares(0, 1)), nothing))

    assert feeder.borrow(0, 30) == [0, 1]
    assert feeders(Counting(1)).borrow(0, 0) == [0, 0]
    other = Counting(40)
    used = feeders(other)
    list(used.batches(next(shares(0, 1)), nothing))
    used.borrow(0, 30)
    assert other.begun == 1


class Described(IterableDataset[tuple[int, str, int]]):
    """What the dataset sees of its process."""

    def __init__(self) -> None:
        self.named = "nobody"

    def __iter__(self) -> Iterator[tuple[int, str, int]]:
        info = get_worker_info()
        workers = info.num_workers if info else 0
        return ((os.getpid(), self.named, workers) for _ in range(8))


def name_it(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.named = f"worker {worker}"  # type: ignore[attr-defined]  # it is the script's


def test_the_loaders_own_ways_of_loading_are_kept(feeders: Callable[..., StreamFeeder]) -> None:
    feeder = feeders(Described(), num_workers=1, worker_init_fn=name_it, prefetch_factor=3)

    (found,) = feeder.batches(next(shares(0, 1)), nothing)

    pid, named, workers = found.batch[0]
    assert (named, workers) == ("worker 0", 1)
    assert pid != os.getpid()


@pytest.mark.parametrize("workers", [0, 1])
def test_the_digest_is_equal_for_equal_streams_and_reading_it_consumes_nothing(
    feeders: Callable[..., StreamFeeder], workers: int
) -> None:
    one, other = (feeders(Counting(30, shuffled=True), num_workers=workers) for _ in range(2))
    first = one.digest(CPU)

    assert len(first) == 64
    assert other.digest(CPU) == first
    assert feeders(Counting(33, shuffled=True)).digest(CPU) != first
    (found,) = one.batches(next(shares(0, 1)), nothing)
    (same,) = feeders(Counting(30, shuffled=True)).batches(next(shares(0, 1)), nothing)
    assert found.batch == same.batch


def test_drop_last_and_the_length_are_in_the_digest(feeders: Callable[..., StreamFeeder]) -> None:
    digests = {
        feeders(Counting(30)).digest(CPU),
        feeders(Counting(30), drop_last=True).digest(CPU),
        feeders(Sized(30, 30)).digest(CPU),
    }

    assert len(digests) == 3


def test_random_augmentation_that_nobody_seeded_is_left_out_of_the_digest(
    feeders: Callable[..., StreamFeeder],
) -> None:
    class Augmented(Counting):
        def __iter__(self) -> Iterator[Any]:
            noise = random.Random(time.perf_counter_ns())
            return ({"noise": noise.random(), "label": item} for item in range(30))

    assert feeders(Augmented(0)).digest(CPU) == feeders(Augmented(0)).digest(CPU)


def test_a_shuffle_that_nobody_seeded_is_refused(feeders: Callable[..., StreamFeeder]) -> None:
    class Unseeded(Counting):
        def __iter__(self) -> Iterator[Any]:
            places = random.Random(time.perf_counter_ns()).sample(range(10**6), 30)
            return ({"file": "a.tar", "place": place} for place in places)

    for workers in (0, 1):
        with pytest.raises(StreamRefused, match="yields other items each time"):
            feeders(Unseeded(0), num_workers=workers).digest(CPU)


def test_a_stream_without_items_or_for_one_iteration_is_refused(
    feeders: Callable[..., StreamFeeder],
) -> None:
    with pytest.raises(StreamRefused, match="yields no item"):
        feeders(Counting(0)).digest(CPU)
    with pytest.raises(StreamRefused, match="only the first time"):
        feeders(Once(20)).digest(CPU)


def test_a_skip_that_leaves_out_another_number_is_refused_and_a_right_one_is_not(
    feeders: Callable[..., StreamFeeder],
) -> None:
    class Noisy(Skipping):
        def skip(self, count: int) -> Noisy:
            return Noisy(self.size, count)

        def __iter__(self) -> Iterator[Any]:
            return ((item, random.random()) for item in range(self.first, self.size))

    assert feeders(Skipping(30)).digest(CPU)
    assert feeders(Noisy(30)).digest(CPU)  # its noise is drawn anew after a skip
    with pytest.raises(StreamRefused, match=r"skip\(4\) does not leave out the first 4 items"):
        feeders(Skipping(30, off_by=1)).digest(CPU)


def test_a_stream_that_fails_is_reported_by_the_digest_and_raised_by_training(
    feeders: Callable[..., StreamFeeder], caplog: pytest.LogCaptureFixture
) -> None:
    feeder = feeders(Counting(9, fails_at=2), num_workers=1)

    assert feeder.digest(CPU) == ""
    assert "could not be read" in caplog.text
    with pytest.raises(ValueError, match="item 2 is damaged"):
        list(feeder.batches(next(shares(0, 1)), nothing))


class Wrapped(Dataset[int]):
    """Iterable, though torch would look for indices."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


class Lengthless(Counting):
    def __len__(self) -> int:
        raise TypeError("this pipeline has no valid length")


def test_what_can_only_be_iterated_is_a_stream(feeders: Callable[..., StreamFeeder]) -> None:
    indexed = TensorDataset(torch.arange(3))

    assert all(map(is_stream, (Counting(3), Plain(3), Wrapped(), Lengthless(3))))
    assert not is_stream(indexed)
    assert isinstance(feeder_for(loader_of(indexed), SEED, None), LoaderFeeder)
    assert isinstance(feeder_for(loader_of(Wrapped()), SEED, None), StreamFeeder)
    assert feeders(Lengthless(3)).dataset_size is None


@pytest.mark.parametrize(
    ("loader", "remedy"),
    [
        (lambda: loader_of(Counting(9), num_workers=2), "Write num_workers=1"),
        (lambda: DataLoader(Counting(9), batch_size=None), "yield single samples"),
        (lambda: loader_of(Sized(0, 0)), "nothing to train on"),
        (lambda: loader_of(Sized(3, 3), drop_last=True), "drop_last=True leaves nothing"),
        (lambda: loader_of(Wrapped(), sampler=[2, 1]), "leave out sampler=list"),
    ],
)
def test_a_loader_that_the_line_cannot_follow_is_refused_with_the_remedy(
    loader: Callable[[], DataLoader[Any]], remedy: str
) -> None:
    with pytest.raises(ValueError, match=remedy):
        feeder_for(loader(), SEED, None)
