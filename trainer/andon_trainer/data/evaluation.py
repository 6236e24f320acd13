"""Evaluation: a loader's samples divided among the workers, each sample once.

Theory of operation. Each worker takes a contiguous share of what the loader's own sampler yields,
or, of a stream, every n-th batch. Nobody waits for anybody while shares are computed; `line.mean`,
which follows, brings the results together. If it has fewer contributors than there were shares, a
worker was lost. The others then tell each other who is left, so that the same evaluation, made
again, is divided among them: no new roster is known before the next step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from andon.protocol.records import Key, PositionRange
from andon.protocol.shards import shard_of
from andon_trainer.data.draws import draw_once
from andon_trainer.data.loader import loading_options, move_to

__all__ = ["Coverage", "EvaluationShare", "Splitting", "WholeBatches"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EvaluationShare:
    """Which of how many shares is this worker's."""

    number: int
    workers: int
    part: int = 0
    """Which part of that share is this process's, if its host divides it among several."""
    parts: int = 1


class Coverage:
    """Whether the workers that `line.split` gave samples to are all in the mean that follows."""

    def __init__(self) -> None:
        """No loader was split yet."""
        self.complete = True
        """Whether all means since the last split covered every share of it."""
        self._ranks: tuple[int, ...] = ()
        """The ranks that have a share."""
        self._at: Key | None = None
        """The round after which they got it; None: before the first one."""
        self._units: int | None = None
        """Number of samples, or of batches, that were divided; None: of a stream."""
        self._round: Key | None = None
        """The round whose roster was last found to have lost somebody."""
        self._left: tuple[int, ...] = ()
        """The ranks of that roster which are left."""

    def place(self, rank: int | None, world_size: int, round_: Key | None) -> EvaluationShare:
        """This worker's place among those that are left of a round's roster.

        `rank` of None: it is not one of them, and sees what they do. Its place is the first one's.
        """
        self.complete, self._at = True, round_
        known = round_ is not None and round_ == self._round
        known = known and (rank is None or rank in self._left)
        self._ranks = self._left if known else tuple(range(world_size))
        number = 0 if rank is None else self._ranks.index(rank)
        return EvaluationShare(number, len(self._ranks))

    def has_share(self, rank: int, round_: Key) -> bool:
        """Whether a worker that was not on a round's roster is one of those that are left."""
        return round_ == self._round and rank in self._left

    def divided(self, units: int | None) -> None:
        """Notes what a loader's split divided."""
        self._units = units

    def lacks_any(self, ranks: Collection[int], round_: Key | None) -> bool:
        """Whether a rank with a share is not among these, which gave something; see `lacks`."""
        return self.lacks(len(set(self._ranks).intersection(ranks)), round_)

    def lacks(self, contributors: int, round_: Key | None) -> bool:
        """Whether a mean has fewer contributors than there are shares.

        A mean after a later round is of something else. A worker that came since has split nothing,
        and whoever asks who is left makes a call that all others make, too.
        """
        lacks = round_ == self._at and contributors < len(self._ranks)
        # It stays so until the next split: a gather of what is left does not make it whole.
        self.complete = self.complete and not lacks
        return lacks

    def lost(self, left: Sequence[int], round_: Key | None) -> None:
        """Says which samples are not in the mean; the next split is among the ranks `left`."""
        missing = [rank for rank in self._ranks if rank not in left]
        log.warning(
            "line.mean is of %d workers, and line.split divided a loader among %d: %s are not in "
            "the mean. line.covered is False: evaluate again, and the workers that are left divide "
            "all samples",
            len(left),
            len(self._ranks),
            " and ".join(self._share_of(rank) for rank in missing),
        )
        self.shrink(left, round_)

    def shrink(self, left: Sequence[int], round_: Key | None) -> None:
        """Of a round's roster, only the ranks `left` are there: the next split is among them."""
        self._round, self._left, self._ranks = round_, tuple(left), tuple(left)

    def _share_of(self, rank: int) -> str:
        number = self._ranks.index(rank)
        if self._units is None:
            return f"the samples of rank {rank}"
        share = shard_of(PositionRange(0, self._units), number, len(self._ranks))
        return f"{len(share)} of {self._units} (from {share.start} on, those of rank {rank})"


class WholeBatches:
    """The batches of a loader, each of which is computed by one worker; numbered from 0."""

    def __init__(
        self,
        units: Sequence[Any] | None,
        load: Callable[[Any], Iterator[Any]],
        device: torch.device,
    ) -> None:
        """Deals nothing yet.

        Args:
            units: what each batch is made of; None: of a stream.
            load: yields the batches of some units, or all of a stream.
            device: where they go.
        """
        self._units = units
        self._load = load
        self._device = device
        self.count = None if units is None else len(units)
        """How many there are; of a stream that is known once it was read."""

    def deal(
        self, place: EvaluationShare, missing: Sequence[int] | None = None
    ) -> Iterator[tuple[int, Any]]:
        """A worker's part of those that are `missing` (None: all), each with its number."""
        if missing is None and self.count is None:
            yield from self._read(lambda number: _is_of(place, number))
            return
        left = range(self.count or 0) if missing is None else missing
        share = shard_of(PositionRange(0, len(left)), place.number, place.workers)
        share = shard_of(share, place.part, place.parts)
        mine = left[share.start : share.stop]
        if self._units is None:
            yield from self._read(set(mine).__contains__)
        else:
            yield from zip(mine, self._load([self._units[each] for each in mine]), strict=True)

    def _read(self, wanted: Callable[[int], bool]) -> Iterator[tuple[int, Any]]:
        number = -1
        for number, batch in enumerate(self._load(None)):
            if wanted(number):
                yield number, move_to(self._device, batch)
        self.count = number + 1


class _Units:
    """A batch sampler whose batches are set before each evaluation."""

    def __init__(self) -> None:
        self.batches: Any = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Splitting:
    """Divides loaders, and keeps the loading processes of those that want to keep theirs."""

    def __init__(self, device: torch.device) -> None:
        """Moves batches to `device`; no process is started yet."""
        self._device = device
        self._kept: WeakKeyDictionary[DataLoader[Any], tuple[_Units, DataLoader[Any]]] = (
            WeakKeyDictionary()
        )

    def split(
        self, loader: DataLoader[Any], place: EvaluationShare, *, seed: int
    ) -> tuple[int | None, Iterator[Any]]:
        """A share of what a loader loads, loaded in the same way.

        Samples come in the dataset's order, or in that of the loader's own sampler, which is drawn
        under `seed` so that it is the same on every worker. `shuffle=True` is ignored. The batches
        of a batch sampler, and those of a stream, are not divided: each goes to one worker.

        Returns:
            How many samples, or batches of a batch sampler, are divided (None: of a stream), and
            the batches of this share.
        """
        if isinstance(loader.dataset, IterableDataset):
            return None, self._every_nth(loader, place)
        units, by_batch = _units_of(loader, seed)
        share = shard_of(PositionRange(0, len(units)), place.number, place.workers)
        share = shard_of(share, place.part, place.parts)
        mine: Any = units[share.start : share.stop]
        if not by_batch and loader.batch_size is not None:
            mine = BatchSampler(mine, loader.batch_size, drop_last=False)
        return len(units), self._load(loader, mine)

    def whole_batches(self, loader: DataLoader[Any], *, seed: int) -> WholeBatches:
        """A loader's batches as it makes them, which are dealt whole; see `split` for the order."""
        if isinstance(loader.dataset, IterableDataset):
            return WholeBatches(None, lambda _: iter(loader), self._device)
        units, by_batch = _units_of(loader, seed)
        if not by_batch and loader.batch_size is not None:
            units = list(BatchSampler(units, loader.batch_size, drop_last=False))
        return WholeBatches(units, lambda mine: self._load(loader, mine), self._device)

    def close(self) -> None:
        """Ends the loading processes that were kept."""
        for _, local in self._kept.values():
            shutdown = getattr(local._iterator, "_shutdown_workers", None)
            if shutdown is not None:
                shutdown()
        self._kept.clear()

    def _load(self, loader: DataLoader[Any], mine: Any) -> Iterator[Any]:
        one_by_one = loader.batch_size is None and loader.batch_sampler is None
        options = loading_options(loader)
        if one_by_one:
            local = DataLoader(loader.dataset, batch_size=None, sampler=mine, **options)
        elif loader.num_workers and loader.persistent_workers:
            local = self._kept_loader(loader, mine, options)
        else:
            local = DataLoader(loader.dataset, batch_sampler=mine, **options)
        for batch in local:
            yield move_to(self._device, batch)

    def _kept_loader(
        self, loader: DataLoader[Any], mine: Any, options: dict[str, Any]
    ) -> DataLoader[Any]:
        """A loader whose processes stay from one evaluation to the next."""
        if loader not in self._kept:
            units = _Units()
            # A DataLoader takes any iterable of batches.
            sampler: Any = units
            options["persistent_workers"] = True
            local = DataLoader(loader.dataset, batch_sampler=sampler, **options)
            self._kept[loader] = units, local
        units, local = self._kept[loader]
        units.batches = mine
        return local

    def _every_nth(self, loader: DataLoader[Any], place: EvaluationShare) -> Iterator[Any]:
        """Reads a whole stream and keeps every n-th batch: a stream has no indices to divide."""
        for number, batch in enumerate(loader):
            if _is_of(place, number):
                yield move_to(self._device, batch)


def _is_of(place: EvaluationShare, number: int) -> bool:
    """Whether batch `number` of a stream belongs to this process."""
    turn, worker = divmod(number, place.workers)
    return worker == place.number and turn % place.parts == place.part


def _units_of(loader: DataLoader[Any], seed: int) -> tuple[Any, bool]:
    """Indices of samples, or batches of them; and whether they are batches."""
    if loader.batch_size is None and loader.batch_sampler is not None:
        return draw_once(loader.batch_sampler, loader.dataset, seed), True
    return _samples_of(loader, seed), False


def _samples_of(loader: DataLoader[Any], seed: int) -> Sequence[int]:
    """The indices that the loader's sampler yields, the same on every worker."""
    sampler = loader.sampler
    indices: Sequence[int]
    size = len(loader.dataset)  # type: ignore[arg-type]  # a map-style dataset has a length
    # By exact type: a subclass may yield other indices.
    if type(sampler) is SequentialSampler or _shuffles(sampler, size):
        indices = range(size)
    elif isinstance(sampler, DistributedSampler):
        log.warning("line.split assigns the samples itself: leave DistributedSampler out")
        indices = range(size)
    elif type(sampler) is SubsetRandomSampler:
        indices = list(sampler.indices)
    else:
        indices = draw_once(sampler, loader.dataset, seed)
    if loader.drop_last and loader.batch_size is not None:
        indices = indices[: len(indices) - len(indices) % loader.batch_size]
    return indices


def _shuffles(sampler: Any, size: int) -> bool:
    """Whether a sampler is what `shuffle=True` makes."""
    return (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == size
    )
