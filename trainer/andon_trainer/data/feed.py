"""Feeders: what a step's loop takes its samples from, and the feeder of bare indices.

A step's positions are assigned by the line. A feeder turns this worker's share of them into
micro-batches: `LoaderFeeder` (in `feeder.py`) loads them with the script's DataLoader, and
`ShardFeeder` here yields their indices, for scripts that load samples themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from andon.protocol.grains import Grains
from andon.protocol.order import Order
from andon.protocol.records import Cursor, PositionRange
from andon.protocol.shards import Ranges, Split, cursor_after, divide, next_batch, shard_of

__all__ = [
    "Feeder",
    "MicroBatch",
    "Shard",
    "ShardFeeder",
    "Share",
    "around",
    "count_loop_bodies",
    "indices_of",
    "refuse_length",
    "usual_share",
    "whole_epoch",
]


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's positions of one step."""

    epoch: int
    ranges: tuple[PositionRange, ...]
    limit: int | None = None
    """The most samples in a micro-batch, whatever the script asked for; None: what it asked for."""
    parts: int = 1
    """Equal parts that it is divided into first; no micro-batch belongs to two of them."""
    batch: PositionRange | None = field(default=None, compare=False)
    """The step's batch, if it is known: what other ranks have of it may become this one's."""
    grain: int = 0
    """Positions of a grain, of which a micro-batch is one exactly; 0: the line has no grains."""

    def __len__(self) -> int:
        """Number of positions."""
        return sum(map(len, self.ranges))

    def pieces(self, micro_batch_size: int | None) -> Iterator[Ranges]:
        """The share's micro-batches, in order, each of at most `micro_batch_size` positions.

        They are as few as possible, and as even as possible. A micro-batch may consist of several
        ranges: a share has many if it was interleaved, or assigned after a worker was lost.
        """
        if self.grain:
            yield from self._grains()
            return
        for part in divide(self.ranges, self.parts):
            total = sum(map(len, part))
            if not total:
                continue  # A rank without samples, or more parts than samples.
            size = min(micro_batch_size or total, self.limit or total)
            # Even, not full pieces and a rest: BatchNorm refuses a rest of one sample.
            yield from divide(part, -(-total // size))

    def _grains(self) -> Iterator[Ranges]:
        assert self.batch is not None, "grains are counted from a batch's first position"
        grains = Grains(self.batch, self.grain)
        for part in grains.of(self.ranges):
            for grain in range(part.start, part.stop):
                yield (grains.positions(grain),)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one loop body gets.

    Positions and samples differ where positions hold no sample, as those of a batch sampler whose
    batches are not all of one size.
    """

    batch: Any
    positions: int
    """Number of positions of the share that are done with it."""
    samples: int
    """Number of samples in it, from 1: the weight of its loss if the script gives none."""
    start: int = 0
    """Its first position."""


class Feeder(Protocol):
    """Where a worker's samples come from. Used by one thread."""

    @property
    def dataset_size(self) -> int | None:
        """Number of samples in the training set; None: unknown."""

    @property
    def epoch_size(self) -> int | None:
        """Number of positions in an epoch; None: unknown, so that an epoch ends where it ends."""

    @property
    def batch_size(self) -> int:
        """Number of samples in one step, over all workers."""

    @property
    def drop_last(self) -> bool:
        """Whether an epoch ends with its last full batch."""

    @property
    def sparse(self) -> bool:
        """Whether a position may hold no sample."""

    def open(self) -> None:
        """Starts the loading processes; call it before any gRPC channel exists."""

    def digest(self, device: torch.device) -> str:
        """SHA-256 of the dataset's content, hexadecimal; empty if it can't be computed."""

    def batches(
        self, share: Share, upcoming: Callable[[], Iterator[Share]]
    ) -> Iterator[MicroBatch]:
        """The share's micro-batches in order; the positions of all are those of the share.

        If nobody knows the length of the data, there may be none: the epoch ended before the share.

        Args:
            share: this rank's positions; a share without samples yields nothing.
            upcoming: the shares that follow if nothing changes, for loading ahead. It may be
                endless.
        """

    def samples_of(self, epoch: int, positions: Ranges) -> int:
        """How many samples there are at these positions, as far as is known."""

    def end_of(self, epoch: int) -> int | None:
        """Where an epoch of unknown length ends: no sample lies there or beyond it.

        None: that was not found yet, or the length is known.
        """

    def loop_bodies(self, epoch: int, rank: int, world_size: int) -> int:
        """How often the loop body runs in an epoch, with equal shares and no void round.

        Raises:
            TypeError: the length of the data is unknown.
        """

    def borrow(self, epoch: int, position: int) -> Any:
        """A small batch near `position`, for a rank that has no samples in this step."""

    def refuse_other_length(self) -> None:
        """Raises ValueError if the data has another length than when the worker joined."""

    def close(self) -> None:
        """Ends the loading processes; a second call does nothing."""


def indices_of(order: Order, piece: Ranges) -> npt.NDArray[np.int64]:
    """The samples at a micro-batch's positions: int64, shape (positions,)."""
    return np.concatenate([order.indices(part.start, part.stop) for part in piece])


def refuse_length(data: Any, now: int | None, before: int) -> None:
    """Raises ValueError if data that had `before` samples when the worker joined has others now."""
    if now == before:
        return
    name = type(data).__name__
    raise ValueError(
        f"len({name}) is {now}, and it was {before} when line.prepare was called: workers agree on "
        "the length of an epoch when they join, so it must stay as it is. For data that grows or "
        "shrinks let an IterableDataset without __len__ yield it, whose epoch ends where it ends, "
        "or let a sampler yield as many indices in each epoch, such as "
        f"RandomSampler(dataset, replacement=True, num_samples={before})"
    )


def count_loop_bodies(
    epoch_size: int, batch_size: int, bodies: Callable[[PositionRange], int]
) -> int:
    """How often a loop body runs in an epoch whose batches of one size are all alike.

    `bodies` says it of one batch, of which a rank may have no sample: then it runs once.
    """
    whole, rest = divmod(epoch_size, batch_size)
    count = whole * max(1, bodies(PositionRange(0, batch_size))) if whole else 0
    if rest:
        count += max(1, bodies(PositionRange(epoch_size - rest, epoch_size)))
    return count


def usual_share(epoch: int, batch: PositionRange, rank: int, world_size: int, grain: int) -> Share:
    """A rank's part of a batch, with equal shares; `grain` as in `Share`."""
    if not grain:
        return Share(epoch, (shard_of(batch, rank, world_size),))
    grains = Grains(batch, grain)
    mine = grains.deal([()] * world_size, Split())[rank]
    return Share(epoch, grains.ranges(mine), batch=batch, grain=grain)


def around(position: int, size: int) -> PositionRange:
    """Two positions near `position` in an epoch of `size`: BatchNorm refuses a batch of one."""
    start = max(0, min(position, size - 2))
    return PositionRange(start, min(start + 2, size))


def whole_epoch(feeder: Feeder, epoch: int) -> Iterator[Any]:
    """An epoch's batches as a worker that is alone gets them, outside of any step."""

    def shares_from(cursor: Cursor) -> Iterator[tuple[Share, Cursor]]:
        while cursor.epoch == epoch:
            batch = next_batch(cursor, feeder.batch_size, feeder.epoch_size)
            cursor = cursor_after(cursor, batch, feeder.epoch_size)
            yield Share(epoch, (batch,), batch=batch), cursor

    def upcoming(cursor: Cursor) -> Iterator[Share]:
        return (share for share, _ in shares_from(cursor))

    for share, after in shares_from(Cursor(epoch, 0)):
        for micro_batch in feeder.batches(share, partial(upcoming, after)):
            yield micro_batch.batch
        end = feeder.end_of(epoch)
        if end is not None and end <= share.ranges[0].stop:
            return  # A stream of which nobody knew the length.


@dataclass(frozen=True, slots=True)
class Shard:
    """This worker's samples of one micro-batch, from `line.shards`."""

    indices: torch.Tensor
    """Indices of the samples: int64, shape (samples,), on the CPU."""
    step: int
    """The step that they are for, from 1."""
    epoch: int
    """The epoch that they belong to, from 0."""


class ShardFeeder:
    """Feeds sample indices, for scripts that have no DataLoader."""

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        seed: int,
        micro_batch_size: int | None,
        step: Callable[[], int],
        grain: int = 0,
    ) -> None:
        """Feeds the indices of `size` samples; `step` tells which step they are for.

        `grain`: positions of a grain, if the line has grains.

        Raises:
            ValueError: a size is below 1.
        """
        if min(size, batch_size, 1 if micro_batch_size is None else micro_batch_size) < 1:
            raise ValueError("samples, batch_size and micro_batch_size must be at least 1")
        self._seed = seed
        self._grain = grain
        self._micro_batch_size = micro_batch_size
        self.dataset_size = self.epoch_size = size
        self.batch_size = batch_size
        self.drop_last = self.sparse = False
        self._step = step

    def open(self) -> None:
        """Does nothing: the script loads."""

    def digest(self, device: torch.device) -> str:
        """Empty: only the script knows what an index stands for."""
        return ""

    def batches(
        self, share: Share, upcoming: Callable[[], Iterator[Share]]
    ) -> Iterator[MicroBatch]:
        """The share's indices, one `Shard` for each micro-batch."""
        for piece in share.pieces(self._micro_batch_size):
            samples = sum(map(len, piece))
            yield MicroBatch(self._shard(share.epoch, piece), samples, samples, piece[0].start)

    def samples_of(self, epoch: int, positions: Ranges) -> int:
        """One at each position."""
        return sum(map(len, positions))

    def end_of(self, epoch: int) -> int | None:
        """None: the length is known."""
        return None

    def loop_bodies(self, epoch: int, rank: int, world_size: int) -> int:
        """See `Feeder`."""

        def bodies(batch: PositionRange) -> int:
            share = usual_share(epoch, batch, rank, world_size, self._grain)
            return sum(1 for _ in share.pieces(self._micro_batch_size))

        return count_loop_bodies(self.epoch_size, self.batch_size, bodies)

    def borrow(self, epoch: int, position: int) -> Shard:
        """The indices of two samples."""
        return self._shard(epoch, (around(position, self.dataset_size),))

    def refuse_other_length(self) -> None:
        """Does nothing: `line.shards` is told the length each time, and looks."""

    def close(self) -> None:
        """Does nothing: no process was started."""

    def _shard(self, epoch: int, piece: Ranges) -> Shard:
        indices = torch.from_numpy(indices_of(Order(self._seed, epoch, self.dataset_size), piece))
        return Shard(indices, self._step(), epoch)
