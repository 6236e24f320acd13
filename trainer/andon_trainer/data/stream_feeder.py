"""The feeder of streams, which loads a worker's items with the script's own DataLoader.

Theory of operation. A position of a stream is the place of an item in the order in which the stream
yields them. Every worker reads the stream in that order and collates its own items; see
`stream_reader` for how. The reader stands behind a DataLoader as if it were a map-style dataset,
whose batches of indices are micro-batches of positions. So the script's own collate function,
pinned memory and loading process work as they do for any dataset, and the process reads ahead what
is foreseen.

If the stream does not say how long it is, its end is found by reading. The micro-batch before the
end then covers all positions of the share that are left, and a share beyond the end has none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from andon.protocol.order import mixed, splitmix64
from andon.protocol.records import PositionRange
from andon.protocol.shards import Ranges
from andon_trainer.data.feed import (
    Feeder,
    MicroBatch,
    Share,
    count_loop_bodies,
    refuse_length,
    usual_share,
)
from andon_trainer.data.feeder import LoaderFeeder
from andon_trainer.data.loader import processes_stay
from andon_trainer.data.share_loading import ShareLoading
from andon_trainer.data.stream_digest import StreamRefused
from andon_trainer.data.stream_loading import Probe, StreamSource, rebuild
from andon_trainer.data.stream_reader import Wanted, copy_of
from andon_trainer.data.streams import is_stream, length_of, refuse_stream_loader
from andon_trainer.state import rng

__all__ = ["StreamFeeder", "feeder_for"]

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")


class StreamFeeder:
    """Feeds one rank's shares of a stream. Used by one thread."""

    def __init__(
        self,
        loader: DataLoader[Any],
        seed: int,
        micro_batch_size: int | None = None,
        grain: int = 0,
    ) -> None:
        """Takes over a script's DataLoader: its dataset and its way of loading; see `feeder_for`.

        It starts no process yet.

        Raises:
            ValueError: the line can't follow how the loader loads, or nothing is left of it.
        """
        refuse_stream_loader(loader)
        assert loader.batch_size is not None
        self.dataset_size = size = length_of(loader.dataset)
        """Number of items in an epoch; None: unknown."""
        self.batch_size = loader.batch_size
        """Number of samples in one step, over all workers."""
        # Without a length nobody can say beforehand which batch is the last whole one.
        self.drop_last = loader.drop_last and size is not None
        """Whether an epoch ends with the last full batch that its length allows."""
        self.sparse = False
        """Whether a position may hold no sample."""
        left_out = size % self.batch_size if size is not None and self.drop_last else 0
        self.epoch_size = None if size is None else size - left_out
        """Number of positions in an epoch; None: unknown."""
        self._seed = seed
        self._grain = grain
        self._micro_batch_size = micro_batch_size
        only_whole = loader.drop_last and size is None
        self._whole = self.batch_size if only_whole else 1
        self._source = StreamSource(loader.dataset, seed=seed, size=size, whole=self._whole)
        self._collate = loader.collate_fn
        self._given = loader
        self._shares = ShareLoading(
            loader, lambda requests: rebuild(loader, self._source, requests, seed), self._wanted
        )
        self._epochs = self._shares.epochs
        self._keep_from: int | None = None
        """Where the present step's batch begins, if its items may be asked for again."""
        self._ended: tuple[int, int] | None = None
        """An epoch, and a bound that no item of it lies at or beyond."""
        self._spare: Any = None
        """A small batch to borrow."""

    def open(self) -> None:
        """Starts the loading process; a second call does nothing.

        Call it before any gRPC channel exists: a forked child must not inherit one.
        """
        self._shares.open()

    def digest(self, device: torch.device) -> str:
        """SHA-256 of the stream's first items; empty if they can't be read.

        They are read in iterations of their own, in the loading process if there is one. The random
        generators of the script keep their states.

        Raises:
            ValueError: the stream has no item, yields other items each time, or skips wrongly.
        """
        whole = f", whole batches of {self._whole}" if self._whole > 1 else ""
        header = f"andon stream 1, {self.dataset_size or 'unknown'} items{whole}"
        self._epochs.enter(0)  # The items of a curriculum differ between epochs.
        probe = Probe(header, self._epochs.calls(0))
        try:
            return str(self._shares.ask(probe))
        except StreamRefused:
            raise
        except Exception:  # The stream's own error: training raises it if it needs that item.
            log.warning(
                "the stream could not be read, so nobody knows if all workers have the same",
                exc_info=True,
            )
            return ""

    def batches(
        self, share: Share, upcoming: Callable[[], Iterator[Share]]
    ) -> Iterator[MicroBatch]:
        """The share's micro-batches in order; none if the epoch ended before it.

        Args:
            share: this rank's positions; an empty share yields nothing.
            upcoming: the shares that follow if nothing changes; the loading process reads them
                ahead. It may be endless.

        Raises:
            RuntimeError: there is a loading process, and `open` was not called. Or the stream is
                shorter than its `__len__` says.
            ValueError: the epoch has no item at all. Or the stream's data has changed, and is too
                much for its loading process.
        """
        if not self.samples_of(share.epoch, share.ranges):
            return
        self._enter(share.epoch)
        batch = share.batch
        # With a loading process also alone: a newcomer changes shares that were read ahead.
        again = batch is not None and (self._shares.parallel or len(share) < len(batch))
        self._keep_from = batch.start if batch is not None and again else None
        pieces = list(share.pieces(self._micro_batch_size))
        left = len(share)
        loaded = self._shares.batches(share, len(pieces), upcoming)
        for number, piece in enumerate(pieces, 1):
            batch, samples, end = next(loaded)
            self._note_end(share.epoch, end)
            if not samples:
                return
            # Whatever follows the last item is done with it.
            over = not self.samples_of(share.epoch, _after(pieces, number))
            positions = left if over else sum(map(len, piece))
            left -= positions
            yield MicroBatch(batch, positions, samples, piece[0].start)
            if over:
                return

    def samples_of(self, epoch: int, positions: Ranges) -> int:
        """How many samples there are at these positions, as far as is known."""
        end = self.end_of(epoch)
        if end is None:
            return sum(map(len, positions))
        return sum(max(0, min(part.stop, end) - part.start) for part in positions)

    def end_of(self, epoch: int) -> int | None:
        """A bound that no item of an epoch of unknown length lies at or beyond, once it is met."""
        return self._ended[1] if self._ended is not None and self._ended[0] == epoch else None

    def loop_bodies(self, epoch: int, rank: int, world_size: int) -> int:
        """How often the loop body runs in an epoch, with equal shares and no void round.

        Raises:
            TypeError: the stream does not say its length.
        """
        if self.epoch_size is None:
            raise TypeError(f"object of type '{type(self._given.dataset).__name__}' has no len()")

        def bodies(batch: PositionRange) -> int:
            share = usual_share(epoch, batch, rank, world_size, self._grain)
            return sum(1 for _ in share.pieces(self._micro_batch_size))

        return count_loop_bodies(self.epoch_size, self.batch_size, bodies)

    def borrow(self, epoch: int, position: int) -> Any:
        """A batch of two items of the stream, collated in this process."""
        if self._spare is None:
            states = rng.capture(_CPU)
            try:
                items = self._source.spare(self._epochs.calls(0))
                if not items:
                    raise _empty(self._source.stream, 0, self._whole)
                # BatchNorm refuses a batch of one.
                self._spare = self._collate(items if len(items) > 1 else items * 2)
            finally:
                rng.restore(states, _CPU)
        # A loop body may change what it gets.
        again = copy_of(self._spare)
        return self._spare if again is None else again

    def refuse_other_length(self) -> None:
        """Raises ValueError if the stream says another length than when the worker joined."""
        if self.dataset_size is not None:
            stream = self._given.dataset
            refuse_length(stream, length_of(stream), self.dataset_size)

    def close(self) -> None:
        """Ends the loading process; a second call does nothing."""
        self._shares.close()

    def _enter(self, epoch: int) -> None:
        """An epoch begins, or goes on."""
        if epoch == self._shares.epoch:
            return
        self.refuse_other_length()
        self._shares.enter(epoch, ends_with_data=self.dataset_size is None)

    def _note_end(self, epoch: int, end: int | None) -> None:
        if end is None or self.dataset_size is not None:
            return
        if end == 0:
            raise _empty(self._source.stream, epoch, self._whole)
        known = self.end_of(epoch)
        self._ended = epoch, end if known is None else min(end, known)

    def _wanted(self, share: Share) -> list[Wanted] | None:
        """The micro-batches of a share that is asked for, or read ahead; None: it can't be yet."""
        if share.epoch != self._shares.epoch and not processes_stay(self._given):
            return None
        seed = splitmix64(mixed(self._seed, share.epoch))
        calls = self._epochs.calls(share.epoch)
        pieces = list(share.pieces(self._micro_batch_size))
        return [
            Wanted(
                epoch=share.epoch,
                ranges=piece,
                following=self._following(share, pieces[number:]),
                # Of the step that is computed now, not of the one that is read ahead.
                keep_from=self._keep_from,
                seed=seed ^ piece[0].start,
                calls=calls,
                changes=self._epochs.changes,
            )
            for number, piece in enumerate(pieces, 1)
        ]

    def _following(self, share: Share, after: list[Ranges]) -> int | None:
        """The position that is looked for after a micro-batch, to find the end in time."""
        if self.dataset_size is not None:
            return None  # The end is known.
        if after:
            return after[0][0].start
        # The rank with the batch's last position looks whether it is the epoch's last, too.
        stop = share.batch.stop if share.batch is not None and self._whole == 1 else None
        return stop if share.ranges[-1].stop == stop else None


def _empty(stream: Any, epoch: int, whole: int) -> ValueError:
    name = type(stream).__name__
    if whole > 1:
        return ValueError(
            f"epoch {epoch} of the {name} has fewer than {whole} items, and drop_last=True leaves "
            "nothing of it: leave it out, or make batch_size smaller"
        )
    again = "" if epoch == 0 else ": its __iter__ must begin anew each time that it is called"
    return ValueError(f"epoch {epoch} of the {name} has no item{again}")


def _after(pieces: list[Ranges], number: int) -> Ranges:
    """The positions of the pieces from a number on."""
    return tuple(part for piece in pieces[number:] for part in piece)


def feeder_for(
    loader: DataLoader[Any], seed: int, micro_batch_size: int | None, grain: int = 0
) -> Feeder:
    """The feeder of a script's DataLoader, by the kind of its dataset.

    Args:
        loader: the script's.
        seed: the run's.
        micro_batch_size: the most samples in one batch; None: all of a share.
        grain: positions of a grain, if the line has grains.

    Raises:
        TypeError: the dataset has neither a length and indices, nor an `__iter__`.
        ValueError: the line can't follow how the loader loads, or a size is below 1.
    """
    if micro_batch_size is not None and micro_batch_size < 1:
        raise ValueError(f"micro_batch_size must be at least 1, not {micro_batch_size}")
    if is_stream(loader.dataset):
        return StreamFeeder(loader, seed, micro_batch_size, grain)
    return LoaderFeeder(loader, seed, micro_batch_size, grain)
