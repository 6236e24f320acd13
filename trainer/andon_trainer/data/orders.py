"""Orders: which sample is at which position of an epoch.

Theory of operation. The line assigns positions and knows nothing of samples. What a position stands
for is an order's to say, and it must say the same on every worker. There are four: the line's own
shuffle (`shuffle=True`), the dataset's own order, what a sampler of the script's yields, and what a
batch sampler yields. The first two are computed. The others are drawn (see `draws`), when their
epoch begins; an epoch that is loaded ahead is drawn early, and again when it begins, since the
script may have changed its sampler by then.

A batch sampler's batches may differ in size, and the optimizer is to see exactly them. So each
takes as many positions as the largest one of the first epoch has samples, and its samples are
spread over them: sample j of n is at floor(j * positions / n). Every run of positions, and so every
worker's share, then holds its part of the samples, in one piece. Some positions hold none. In a
later epoch a batch may be larger than any of the first one; then some positions hold several.
"""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from andon.protocol.order import Order
from andon.protocol.records import PositionRange
from andon.protocol.shards import Ranges, divide
from andon_trainer.data.draws import EpochDraws
from andon_trainer.data.feed import Share, around, refuse_length

__all__ = ["BatchOrders", "DatasetOrders", "DrawnOrders", "Orders", "Piece", "orders_of"]

log = logging.getLogger(__name__)

_AHEAD = 512
"""Positions whose samples are looked up together."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The samples of one micro-batch."""

    indices: list[Any]
    """Of the dataset."""
    places: list[int]
    """A number for each sample, unlike those of all others in its epoch, for its random seed."""
    positions: int
    """Number of positions of the share that are done with it."""
    start: int = 0
    """The first position that is."""


class Orders(Protocol):
    """The order of each epoch. Used by one thread."""

    @property
    def size(self) -> int:
        """Number of positions in an epoch, with those that `drop_last` leaves out."""

    @property
    def batch_size(self) -> int:
        """Number of positions in one step, over all workers."""

    def enter(self, epoch: int) -> bool:
        """An epoch begins, or goes on; False if it is not as it was foreseen.

        Raises:
            ValueError: the sampler yields what can't be an epoch.
        """

    def foresee(self, epoch: int) -> bool:
        """Whether what is known of this epoch is enough to load ahead."""

    def pieces(self, share: Share, micro_batch_size: int | None) -> Iterator[Piece]:
        """A share's micro-batches, in order; none if there is no sample in it."""

    def samples_of(self, epoch: int, positions: Ranges) -> int:
        """How many samples there are at these positions."""

    def near(self, epoch: int, position: int) -> Piece:
        """Two samples near a position: BatchNorm refuses a batch of one."""

    def digest(self) -> bytes:
        """A digest of the first epoch's order; empty if it follows from the run's plan."""

    def refuse_other_length(self) -> None:
        """Raises ValueError if an epoch would have another length by now."""


def orders_of(loader: DataLoader[Any], seed: int, *, spread: bool = True) -> tuple[Orders, bool]:
    """The orders of a loader's epochs, and whether an epoch leaves out a short last batch.

    `spread`: whether the samples of a batch sampler's batch are spread over its positions.

    Raises:
        ValueError: the loader's sampler can't be followed, or nothing is left of its dataset.
    """
    sampler: Any = loader.sampler
    batch_size, drop_last = loader.batch_size, loader.drop_last
    if batch_size is None:
        batches: Any = loader.batch_sampler
        if batches is None:
            raise ValueError(
                "batch_size=None leaves batches to the dataset, so the line can't divide them "
                "among workers: let the dataset return single samples, and write "
                "DataLoader(dataset, batch_size=...) or DataLoader(dataset, batch_sampler=...)"
            )
        if type(batches) is not BatchSampler:
            return BatchOrders(batches, loader.dataset, seed, spread=spread), False
        # What the DataLoader itself would have made of these arguments.
        sampler, batch_size, drop_last = batches.sampler, batches.batch_size, batches.drop_last
    orders = _sample_orders(sampler, loader.dataset, batch_size, seed)
    if drop_last and orders.size < batch_size:
        raise ValueError(
            f"drop_last=True leaves nothing of an epoch of {orders.size} samples in batches of "
            f"{batch_size}: leave it out, or make batch_size smaller"
        )
    return orders, drop_last


def _sample_orders(sampler: Any, dataset: Any, batch_size: int, seed: int) -> _SampleOrders:
    size = len(dataset) if hasattr(dataset, "__len__") else 0
    # By exact type: a subclass may yield other indices.
    kind = type(sampler)
    if kind is DistributedSampler:
        log.warning(
            "DistributedSampler is taken off: the line itself gives each worker its part. "
            "batch_size=%d is now the batch of all workers together",
            batch_size,
        )
    elif isinstance(sampler, DistributedSampler):
        raise ValueError(
            f"{kind.__name__} yields the samples of one rank, and the line itself gives each "
            "worker its part: give the DataLoader a sampler that yields all samples of an epoch"
        )
    shuffles = kind is RandomSampler and not sampler.replacement and sampler.num_samples == size
    if shuffles or (kind is DistributedSampler and sampler.shuffle):
        return _ShuffledOrders(dataset, batch_size, seed)
    if kind is DistributedSampler or (
        kind is SequentialSampler and len(sampler.data_source) == size
    ):
        return DatasetOrders(dataset, batch_size)
    return DrawnOrders(sampler, dataset, batch_size, seed)


class _SampleOrders(ABC):
    """Orders with a sample at each position."""

    def __init__(self, size: int, batch_size: int) -> None:
        self.size = size
        self.batch_size = batch_size

    def enter(self, epoch: int) -> bool:
        """Nothing is foreseen that could change."""
        return True

    def foresee(self, epoch: int) -> bool:
        """Every epoch is known."""
        return True

    def pieces(self, share: Share, micro_batch_size: int | None) -> Iterator[Piece]:
        """As `Share.pieces` divides it."""
        for part in share.pieces(micro_batch_size):
            yield self._piece(share.epoch, part)

    def samples_of(self, epoch: int, positions: Ranges) -> int:
        """One at each position."""
        return sum(map(len, positions))

    def near(self, epoch: int, position: int) -> Piece:
        """The samples at two positions."""
        return self._piece(epoch, (around(position, self.size),))

    def digest(self) -> bytes:
        """Empty: seed and size say it all."""
        return b""

    def _piece(self, epoch: int, positions: Ranges) -> Piece:
        places = [place for part in positions for place in range(part.start, part.stop)]
        return Piece(self._indices(epoch, positions), places, len(places), positions[0].start)

    @abstractmethod
    def refuse_other_length(self) -> None:
        """See `Orders.refuse_other_length`."""

    @abstractmethod
    def _indices(self, epoch: int, positions: Ranges) -> list[Any]:
        """The samples at these positions."""


class DatasetOrders(_SampleOrders):
    """The dataset's own order, in each epoch."""

    def __init__(self, dataset: Any, batch_size: int) -> None:
        """Of all samples that the dataset has now.

        Raises:
            ValueError: it has none.
        """
        self._dataset = dataset
        self._entered: int | None = None
        super().__init__(len(dataset) if hasattr(dataset, "__len__") else 0, batch_size)
        if self.size < 1:
            raise ValueError("the dataset is empty: there is nothing to train on")

    def enter(self, epoch: int) -> bool:
        """See `Orders.enter`.

        Raises:
            ValueError: the dataset has another length by now.
        """
        if epoch != self._entered:
            self.refuse_other_length()
            self._entered = epoch
        return True

    def refuse_other_length(self) -> None:
        """See `Orders.refuse_other_length`."""
        refuse_length(self._dataset, len(self._dataset), self.size)

    def _indices(self, epoch: int, positions: Ranges) -> list[Any]:
        return [place for part in positions for place in range(part.start, part.stop)]


class _ShuffledOrders(DatasetOrders):
    """The line's own order, another one in each epoch."""

    def __init__(self, dataset: Any, batch_size: int, seed: int) -> None:
        super().__init__(dataset, batch_size)
        self._order = Order(seed, 0, self.size)
        self._from = 0
        self._known: list[int] = []
        """The samples at the positions from `_from` on: one by one they would cost more."""

    def _indices(self, epoch: int, positions: Ranges) -> list[Any]:
        if self._order.epoch != epoch:
            self._order = Order(self._order.seed, epoch, self.size)
            self._known = []
        return [index for part in positions for index in self._range(part)]

    def _range(self, part: PositionRange) -> list[int]:
        if part.start < self._from or part.stop > self._from + len(self._known):
            self._from = part.start
            stop = min(max(part.stop, part.start + _AHEAD), self.size)
            self._known = self._order.indices(part.start, stop).tolist()
        return self._known[part.start - self._from : part.stop - self._from]


class _Drawn:
    """What a sampler yields in each epoch, checked and kept while it is needed."""

    def __init__(self, sampler: Any, dataset: Any, seed: int, *, batches: bool) -> None:
        self._name = type(sampler).__name__
        self._in_batches = batches
        self._draws = EpochDraws(sampler, dataset, seed)
        self._dataset = dataset
        self._epochs: dict[int, Sequence[Any] | npt.NDArray[np.int64]] = {}
        self._entered: int | None = None
        self.count = 0
        """How much the sampler yields in an epoch; the first draw says it."""
        self.count = len(self[0])
        if not self.count:
            raise ValueError(f"{self._name} yields nothing: there is nothing to train on")

    def __getitem__(self, epoch: int) -> Any:
        """The epoch's indices, or batches of indices."""
        if epoch not in self._epochs:
            self._epochs[epoch] = self._checked(epoch)
        return self._epochs[epoch]

    def enter(self, epoch: int) -> bool:
        """See `Orders.enter`."""
        if epoch == self._entered:
            return True
        foreseen = self._epochs.get(epoch)
        # Drawn again: the script may have changed its sampler since then.
        drawn = self._checked(epoch)
        self._epochs = {each: known for each, known in self._epochs.items() if each > epoch}
        self._epochs[epoch] = drawn
        self._entered = epoch
        return foreseen is None or _equal(foreseen, drawn)

    def foresee(self, epoch: int) -> bool:
        """See `Orders.foresee`."""
        try:
            self[epoch]
        except Exception:  # The script's own error, which it gets when that epoch begins.
            return False
        return True

    def digest(self) -> bytes:
        """SHA-256 of the first epoch."""
        first = self[0]
        text = first.tobytes() if isinstance(first, np.ndarray) else repr(first).encode()
        return hashlib.sha256(text).digest()

    def _checked(self, epoch: int) -> Sequence[Any] | npt.NDArray[np.int64]:
        drawn = self._draws.draw(epoch)
        if self.count and len(drawn) != self.count:
            raise ValueError(
                f"{self._name} yields {len(drawn)} in epoch {epoch}, and {self.count} in the first "
                "one: workers agree on the length of an epoch when they join, so it must always "
                "yield as many. See docs/guide/data.md, A data set that grows"
            )
        if self._in_batches:
            batches = [self._batch(value, number, epoch) for number, value in enumerate(drawn)]
            for batch in batches:
                self._check(batch, epoch)
            return batches
        self._check(drawn, epoch)
        if all(isinstance(index, int) for index in drawn):
            return np.array(drawn, dtype=np.int64)
        return drawn

    def _batch(self, value: Any, number: int, epoch: int) -> list[Any]:
        batch = list(value) if isinstance(value, list | tuple) else None
        if not batch:
            raise ValueError(
                f"batch_sampler={self._name} yields {value!r} as batch {number} of epoch {epoch}: "
                "let it yield lists of indices, none of them empty"
            )
        return batch

    def _check(self, indices: list[Any], epoch: int) -> None:
        if not hasattr(self._dataset, "__len__"):
            return
        size = len(self._dataset)  # Of now: it may have grown since the last epoch.
        for index in indices:
            # Keys that are no numbers are the dataset's to judge.
            if isinstance(index, int) and not -size <= index < size:
                raise ValueError(
                    f"{self._name} yields the index {index} in epoch {epoch}, and the dataset has "
                    f"{size} samples: let it yield indices from 0 to {size - 1}"
                )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))
    return bool(one == other)


class DrawnOrders(_SampleOrders):
    """What a sampler of the script's own yields."""

    def __init__(self, sampler: Any, dataset: Any, batch_size: int, seed: int) -> None:
        """Draws the first epoch.

        Raises:
            ValueError: the sampler yields what can't be an epoch.
        """
        self._drawn = _Drawn(sampler, dataset, seed, batches=False)
        super().__init__(self._drawn.count, batch_size)

    def enter(self, epoch: int) -> bool:
        """Draws the epoch; see `Orders.enter`."""
        return self._drawn.enter(epoch)

    def foresee(self, epoch: int) -> bool:
        """Draws the epoch, if that works."""
        return self._drawn.foresee(epoch)

    def digest(self) -> bytes:
        """SHA-256 of the first epoch's indices."""
        return self._drawn.digest()

    def refuse_other_length(self) -> None:
        """Does nothing: whoever draws an epoch sees its length."""

    def _indices(self, epoch: int, positions: Ranges) -> list[Any]:
        drawn = self._drawn[epoch]
        found: list[Any] = []
        for part in positions:
            found += _listed(drawn[part.start : part.stop])
        return found


def _listed(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


class BatchOrders:
    """The batches of a batch sampler, each on as many positions as the largest one needs."""

    def __init__(self, sampler: Any, dataset: Any, seed: int, *, spread: bool = True) -> None:
        """Draws the first epoch.

        Args:
            sampler: yields lists of indices.
            dataset: what they are of.
            seed: the run's.
            spread: whether a batch's samples are spread over its positions. If not, sample j is at
                position j, so that a grain is full or at the batch's end; and no batch may be
                larger than those of the first epoch.

        Raises:
            ValueError: the sampler yields what can't be an epoch.
        """
        self._spread = spread
        self._drawn = _Drawn(sampler, dataset, seed, batches=True)
        self.batch_size: int = max(map(len, self._drawn[0]))
        self.size = self._drawn.count * self.batch_size

    def enter(self, epoch: int) -> bool:
        """Draws the epoch; see `Orders.enter`."""
        same = self._drawn.enter(epoch)
        largest = max(map(len, self._drawn[epoch]))
        if not self._spread and largest > self.batch_size:
            raise ValueError(
                f"the batch sampler yields a batch of {largest} samples in epoch {epoch}, and the "
                f"largest one of the first epoch had {self.batch_size}: with same_bits a batch "
                "can't grow, since its grains would be others. Leave same_bits out, or let the "
                "sampler yield its largest batch in the first epoch"
            )
        return same

    def foresee(self, epoch: int) -> bool:
        """Draws the epoch, if that works."""
        return self._drawn.foresee(epoch)

    def digest(self) -> bytes:
        """SHA-256 of the first epoch's batches."""
        return self._drawn.digest()

    def refuse_other_length(self) -> None:
        """Does nothing: whoever draws an epoch sees its length."""

    def pieces(self, share: Share, micro_batch_size: int | None) -> Iterator[Piece]:
        """As few as possible and as even as possible; none belongs to two batches."""
        if share.grain:
            yield from self._grains(share)
            return
        for part in divide(share.ranges, share.parts):
            pieces: list[Piece] = []
            empty = 0
            for number, samples, positions in self._by_batch(share.epoch, part):
                if not samples:
                    empty += positions
                    continue
                most = min(micro_batch_size or len(samples), share.limit or len(samples))
                for some in _evenly(samples, -(-len(samples) // most)):
                    pieces.append(self._piece(share.epoch, number, some, 0))
                pieces[-1] = _with_positions(pieces[-1], positions + empty)
                empty = 0
            if pieces:
                # Whoever counts positions learns from the last piece that the part is done.
                pieces[-1] = _with_positions(pieces[-1], pieces[-1].positions + empty)
            yield from pieces

    def _grains(self, share: Share) -> Iterator[Piece]:
        """A piece for each grain that holds a sample; the last one is done with all others."""
        pieces: list[Piece] = []
        left = len(share)
        for part in share.pieces(None):
            for number, samples, positions in self._by_batch(share.epoch, part):
                if samples:
                    piece = self._piece(share.epoch, number, samples, positions)
                    pieces.append(replace(piece, start=part[0].start))
                    left -= positions
        if pieces:
            pieces[-1] = _with_positions(pieces[-1], pieces[-1].positions + left)
        yield from pieces

    def samples_of(self, epoch: int, positions: Ranges) -> int:
        """Fewer than positions, as a rule."""
        return sum(len(samples) for _, samples, _ in self._by_batch(epoch, positions))

    def near(self, epoch: int, position: int) -> Piece:
        """The first two samples of the position's batch."""
        number = position // self.batch_size
        count = len(self._drawn[epoch][number])
        return self._piece(epoch, number, list(range(min(2, count))), 0)

    def _piece(self, epoch: int, number: int, samples: Sequence[int], positions: int) -> Piece:
        batch = self._drawn[epoch][number]
        places = [(number << 32) + sample for sample in samples]
        return Piece([batch[sample] for sample in samples], places, positions)

    def _by_batch(self, epoch: int, positions: Ranges) -> Iterator[tuple[int, list[int], int]]:
        """For each batch: its number, which of its samples are here, at how many positions."""
        found: dict[int, tuple[list[int], int]] = {}
        size, batches = self.batch_size, self._drawn[epoch]
        for part in positions:
            for number in range(part.start // size, -(-part.stop // size)):
                first, end = number * size, (number + 1) * size
                start, stop = max(part.start, first) - first, min(part.stop, end) - first
                count = len(batches[number])
                if self._spread:
                    # floor(j * size / count) >= start exactly if j >= start * count / size.
                    here = range(-(-start * count // size), -(-stop * count // size))
                else:
                    here = range(min(start, count), min(stop, count))
                samples, covered = found.get(number, ([], 0))
                found[number] = [*samples, *here], covered + stop - start
        for number, (samples, covered) in found.items():
            yield number, samples, covered


def _with_positions(piece: Piece, positions: int) -> Piece:
    return replace(piece, positions=positions)


def _evenly(samples: list[int], parts: int) -> Iterator[list[int]]:
    base, rest = divmod(len(samples), parts)
    start = 0
    for part in range(parts):
        stop = start + base + (part < rest)
        yield samples[start:stop]
        start = stop
