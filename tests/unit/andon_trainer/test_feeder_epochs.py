"""The feeder across epochs: `set_epoch`, samplers of one's own, and processes of one epoch."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
    get_worker_info,
)

from andon.protocol.records import Cursor
from andon.protocol.shards import next_batch, shard_of
from andon_trainer.data.feed import Share
from andon_trainer.data.feeder import LoaderFeeder
from unit.andon_trainer.feeding import BATCH, SEED, as_list, nothing, opened, shares

SIZE = 8


class Curriculum(Dataset[tuple[int, int, str, int]]):
    """Index, the epoch that it was told, a transform's name, and the process."""

    def __init__(self) -> None:
        self.epoch, self.transform = -1, "weak"

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, int, str, int]:
        return index, self.epoch, self.transform, os.getpid()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Phases(Curriculum):
    def set_epoch(self, epoch: int, phase: str) -> None:  # type: ignore[override]  # on purpose
        self.epoch = epoch * 100


@pytest.fixture
def feeders() -> Iterator[Callable[..., LoaderFeeder]]:
    with opened() as open_:

        def make(dataset: Dataset[Any], **options: Any) -> LoaderFeeder:
            loader: Any = DataLoader(dataset, batch_size=BATCH, collate_fn=as_list, **options)
            return open_(LoaderFeeder(loader, SEED))

        yield make


def epochs(
    feeder: LoaderFeeder, count: int, at_start: Callable[[int], None] = lambda epoch: None
) -> list[list[Any]]:
    """The samples of so many epochs; `at_start` is what the script does before each."""
    plan = list(islice(shares(size=feeder.epoch_size), count * -(-feeder.epoch_size // BATCH)))
    seen: list[list[Any]] = []
    for at, share in enumerate(plan):
        if share.epoch == len(seen):
            at_start(share.epoch)
            seen.append([])
        ahead = partial(iter, plan[at + 1 :])
        seen[-1] += [sample for each in feeder.batches(share, ahead) for sample in each.batch]
    return seen


WAYS: list[dict[str, Any]] = [
    {},
    {"num_workers": 1},
    {"num_workers": 2, "persistent_workers": True},
]


@pytest.mark.parametrize("options", WAYS)
def test_the_line_calls_set_epoch_of_the_dataset_and_of_datasets_in_it(
    feeders: Callable[..., LoaderFeeder], options: dict[str, Any]
) -> None:
    data = Curriculum()
    feeder = feeders(Subset(data, range(SIZE)), **options)

    seen = epochs(feeder, 3)

    assert [{epoch for _, epoch, _, _ in samples} for samples in seen] == [{0}, {1}, {2}]
    assert data.epoch == 2


@pytest.mark.parametrize("options", WAYS)
def test_the_scripts_own_set_epoch_does_not_hurt(
    feeders: Callable[..., LoaderFeeder], options: dict[str, Any]
) -> None:
    data = Curriculum()
    feeder = feeders(data, **options)

    def script(epoch: int) -> None:
        if epoch < 2:
            data.set_epoch(epoch=epoch)  # Then it stops doing so.

    seen = epochs(feeder, 4, script)

    assert [{epoch for _, epoch, _, _ in samples} for samples in seen] == [{0}, {1}, {2}, {3}]


@pytest.mark.parametrize("options", WAYS)
def test_another_value_that_the_script_sets_holds(
    feeders: Callable[..., LoaderFeeder], options: dict[str, Any]
) -> None:
    data = Curriculum()
    feeder = feeders(data, **options)

    seen = epochs(feeder, 3, lambda epoch: data.set_epoch(7) if epoch == 1 else None)

    assert [{epoch for _, epoch, _, _ in samples} for samples in seen] == [{0}, {7}, {7}]
    assert pickle.loads(pickle.dumps(data)).epoch == 7
    feeder.close()
    assert "set_epoch" not in vars(data), "the dataset is as it was"


def test_a_set_epoch_that_wants_more_is_left_to_the_script(
    feeders: Callable[..., LoaderFeeder],
) -> None:
    data = Phases()
    feeder = feeders(data, num_workers=1)

    seen = epochs(feeder, 2, lambda epoch: data.set_epoch(epoch + 1, phase="late"))

    assert [{epoch for _, epoch, _, _ in samples} for samples in seen] == [{100}, {200}]


class Told(Sampler[int]):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch, self.epoch + 1, self.epoch, self.epoch + 2, self.epoch])


@pytest.mark.parametrize("options", WAYS)
def test_a_samplers_indices_are_loaded_in_each_epoch_also_ahead(
    feeders: Callable[..., LoaderFeeder], options: dict[str, Any]
) -> None:
    feeder = feeders(Curriculum(), sampler=Told(), **options)

    seen = epochs(feeder, 4)

    assert [[index for index, *_ in samples] for samples in seen] == [
        [e, e + 1, e, e + 2, e] for e in range(4)
    ]


@pytest.mark.parametrize("options", WAYS)
def test_a_sampler_that_the_script_changes_between_epochs_is_followed(
    feeders: Callable[..., LoaderFeeder], options: dict[str, Any]
) -> None:
    sampler = SubsetRandomSampler([0, 1, 2, 3])
    feeder = feeders(Curriculum(), sampler=sampler, **options)

    def script(epoch: int) -> None:
        if epoch == 1:
            sampler.indices = [4, 5, 6, 7]

    seen = epochs(feeder, 3, script)

    assert [sorted(index for index, *_ in samples) for samples in seen] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [4, 5, 6, 7],
    ]


def count_starts(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Subset)
    assert isinstance(info.dataset.dataset, Curriculum)
    info.dataset.dataset.transform += "+init"


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_without_persistent_workers_what_the_script_sets_reaches_the_processes_of_an_epoch(
    feeders: Callable[..., LoaderFeeder], context: str
) -> None:
    data = Curriculum()
    feeder = feeders(
        Subset(data, range(SIZE)),
        num_workers=1,
        worker_init_fn=count_starts,
        multiprocessing_context=context,
    )

    def script(epoch: int) -> None:
        if epoch == 1:
            data.transform = "strong"

    seen = epochs(feeder, 2, script)

    first, second = ({process for *_, process in samples} for samples in seen)
    # Nothing may be forked while a worker is on the line.
    stays = context == "fork"
    assert (first == second) == stays
    assert [{name for _, _, name, _ in samples} for samples in seen] == [
        {"weak+init"},
        {"strong" if stays else "strong+init"},
    ]


def test_a_change_that_can_not_be_sent_to_the_processes_is_said(
    feeders: Callable[..., LoaderFeeder], caplog: pytest.LogCaptureFixture
) -> None:
    data: Any = Curriculum()
    feeder = feeders(data, num_workers=1)

    def script(epoch: int) -> None:
        if epoch == 1:
            data.augment = lambda sample: sample
            data.transform = "strong"

    seen = epochs(feeder, 3, script)

    assert {name for _, _, name, _ in seen[1]} == {"strong"}
    assert caplog.text.count("augment of the Curriculum has changed since line.prepare") == 1


def test_without_processes_a_change_of_the_dataset_is_seen_at_once(
    feeders: Callable[..., LoaderFeeder],
) -> None:
    data = Curriculum()
    feeder = feeders(data)
    first, second = islice(shares(size=SIZE), 2)

    list(feeder.batches(first, nothing))
    data.transform = "strong"
    (micro_batch,) = feeder.batches(second, nothing)

    assert {name for _, _, name, _ in micro_batch.batch} == {"strong"}


@pytest.mark.parametrize("micro", [None, 3])
@pytest.mark.parametrize("workers", [1, 3, 5])
@pytest.mark.parametrize("batches", [None, [[0, 1, 2, 3, 4, 5], [6], [7, 0]]])
def test_loop_bodies_are_counted_as_they_run(
    workers: int, micro: int | None, batches: list[list[int]] | None
) -> None:
    options: dict[str, Any] = {"batch_size": 5} if batches is None else {"batch_sampler": batches}
    feeder = LoaderFeeder(DataLoader(Curriculum(), **options), SEED, micro)

    for rank in range(workers):
        bodies, start = 0, 0
        while start < feeder.epoch_size:
            batch = next_batch(Cursor(0, start), feeder.batch_size, feeder.epoch_size)
            share = Share(0, (shard_of(batch, rank, workers),))
            # Without samples the loop body runs once, on borrowed ones.
            bodies += max(1, len(list(feeder.batches(share, nothing))))
            start = batch.stop
        assert feeder.loop_bodies(0, rank, workers) == bodies


def test_the_order_of_a_sampler_is_in_the_digest_of_the_data(
    feeders: Callable[..., LoaderFeeder],
) -> None:
    def digest(indices: list[int]) -> str:
        return feeders(Curriculum(), sampler=indices).digest(torch.device("cpu"))

    assert digest([0, 1, 2, 3, 4, 5, 6, 7]) == digest([0, 1, 2, 3, 4, 5, 6, 7])
    assert digest([0, 1, 2, 3, 4, 5, 6, 7]) != digest([1, 0, 2, 3, 4, 5, 6, 7])
