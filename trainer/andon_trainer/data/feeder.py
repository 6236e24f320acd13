"""The feeder that loads a worker's samples with the script's own DataLoader.

Theory of operation. The loader is rebuilt with a batch sampler that yields whatever this rank's
share is. Without loading processes each share is loaded when it is asked for. With them, the
processes start once, in `open`, before any gRPC channel exists (a forked child must never inherit
one), on a sampler that is empty at first; they stay until `close`. From then on the sampler is a
pipeline: the share that is asked for, followed by the shares that are foreseen, as far as torch
prefetches. If the next share that is asked for is the foreseen one, its batches are on their way
already. If not (the roster changed, or a step is tried again), iterating the persistent loader
again drains and drops what is on its way, and the same processes go on.

Random augmentation must not depend on how far was prefetched. So a batch's indices carry a seed
made from the run's seed, the epoch and the batch's first position, and the loading process seeds
its generators with it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler

from andon.protocol.order import Order, splitmix64
from andon.protocol.records import PositionRange
from andon.protocol.shards import Ranges
from andon_trainer.data.digest import data_digest
from andon_trainer.data.feed import MicroBatch, Share, around, indices_of
from andon_trainer.data.loader import rebuild_loader, refuse_loader
from andon_trainer.data.loading_process import (
    EpochCall,
    EpochCalls,
    Indices,
    observe_set_epoch,
    seed_generators,
)
from andon_trainer.state import rng

__all__ = ["LoaderFeeder"]

log = logging.getLogger(__name__)

_U64 = 2**64 - 1
_PROBES, _PROBE_SIZE = 4, 4
"""The digest reads this many runs of this many positions, spread over the dataset."""


class _ShareSampler(Sampler[list[int]]):
    """A batch sampler that yields the micro-batches of shares; they change between iterations."""

    def __init__(
        self,
        indices: Callable[[int, Ranges], list[int]],
        micro_batch_size: int | None,
    ) -> None:
        self._indices = indices
        self._micro_batch_size = micro_batch_size
        self._shares: Iterator[Share] = iter(())
        self.taken: deque[Share] = deque()
        """Shares that torch has taken indices of; the first is the one that it yields next."""

    def restart(self, shares: Iterator[Share]) -> None:
        """Makes the next iteration go over these shares."""
        self._shares = shares
        self.taken.clear()

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches(self._shares)

    def _batches(self, shares: Iterator[Share]) -> Iterator[list[int]]:
        for share in shares:
            if not len(share):
                continue  # This rank has no samples in that step.
            self.taken.append(share)
            for piece in share.pieces(self._micro_batch_size):
                yield self._indices(share.epoch, piece)


class LoaderFeeder:
    """Feeds one rank's shares from a DataLoader. Used by one thread."""

    @classmethod
    def from_loader(
        cls, loader: DataLoader[Any], seed: int, micro_batch_size: int | None = None
    ) -> LoaderFeeder:
        """Takes over a script's DataLoader: its dataset and its way of loading.

        Args:
            loader: over a map-style dataset, with `batch_size`. With `shuffle=True` samples come
                in the run's random order, else in the dataset's own.
            seed: the run's.
            micro_batch_size: the most samples in one batch; None: a whole range of the share.

        Raises:
            TypeError: the dataset has no length and no indices.
            ValueError: the loader chooses samples in a way that the line can't follow, or a batch
                is larger than the dataset and `drop_last` leaves it out.
        """
        refuse_loader(loader)
        if micro_batch_size is not None and micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be at least 1, not {micro_batch_size}")
        return cls(loader, seed, micro_batch_size)

    def __init__(self, loader: DataLoader[Any], seed: int, micro_batch_size: int | None) -> None:
        """Starts no process yet; see `from_loader`, which checks the arguments."""
        assert loader.batch_size is not None
        self.dataset_size = len(loader.dataset)  # type: ignore[arg-type]  # it has a length
        """Number of samples in the dataset."""
        self.batch_size = loader.batch_size
        """Number of samples in one step, over all workers."""
        self.drop_last = loader.drop_last
        """Whether an epoch ends with its last full batch."""
        left_out = self.dataset_size % self.batch_size if self.drop_last else 0
        self.epoch_size = self.dataset_size - left_out
        """Number of positions in an epoch."""
        if left_out:
            log.info("drop_last leaves %d samples out of each epoch", left_out)
        self._seed = seed
        self._micro_batch_size = micro_batch_size
        self._shuffled = isinstance(loader.sampler, RandomSampler)
        self._sampler = _ShareSampler(self._indices, micro_batch_size)
        self._loader: DataLoader[Any] | None = rebuild_loader(loader, self._sampler, seed)
        self._dataset = loader.dataset
        self._collate = loader.collate_fn
        self._parallel = loader.num_workers > 0
        self._stream: Iterator[Any] | None = None
        """The loading processes' batches; None before `open`, and without such processes."""
        self._midway = False
        """Whether the batch that the stream yields next is not the first of its share."""
        self._order: Order | None = None
        self._salt = 0
        """Changes all seeds while the digest reads each sample a second time."""
        self._epoch_calls: EpochCalls = {}
        self._stale = False
        """Whether what is loaded ahead is of the dataset as it was before `set_epoch`."""
        self._stop_observing: Callable[[], None] = lambda: None

    def open(self) -> None:
        """Starts the loading processes; a second call does nothing.

        Call it before any gRPC channel exists: a forked child must not inherit one.
        """
        if self._parallel and self._stream is None:
            self._stream = iter(self._open_loader())
            # Observed after the fork: the children must have the dataset's own `set_epoch`.
            self._stop_observing = observe_set_epoch(self._dataset, self._epoch_was_set)

    def digest(self, device: torch.device) -> str:
        """SHA-256 of the dataset's content; empty if its samples can't be read.

        It reads 16 samples twice, in the loading processes if there are any. The random generators
        of the script, including that of `device`, keep their states.
        """
        run = min(_PROBE_SIZE, max(1, self.dataset_size // _PROBES))
        starts = {self.dataset_size * each // _PROBES for each in range(_PROBES)}
        probes = [PositionRange(start, start + run) for start in sorted(starts)]
        states = rng.capture(device)
        try:
            return data_digest(self._dataset, lambda salt: self._probed(probes, salt))
        except Exception:  # The dataset's own error: training raises it if it needs that sample.
            log.warning(
                "samples could not be read, so nobody knows if all workers have the same",
                exc_info=True,
            )
            return ""
        finally:
            rng.restore(states, device)
            self._salt = 0

    def batches(
        self, share: Share, upcoming: Callable[[], Iterator[Share]]
    ) -> Iterator[MicroBatch]:
        """The share's micro-batches in order.

        Args:
            share: this rank's positions; an empty share yields nothing.
            upcoming: the shares that follow if nothing changes; the loading processes load them
                ahead. It may be endless.

        Raises:
            RuntimeError: there are loading processes, and `open` was not called.
        """
        if not len(share):
            return
        if self._parallel:
            stream = self._stream_at(share, upcoming)
        else:
            self._sampler.restart(iter((share,)))
            stream = iter(self._open_loader())
        # A loop may leave this generator at any `yield`. Until the last batch is out, the stream
        # does not stand at the beginning of a share, and the next call must restart it.
        self._midway = True
        pieces = list(share.pieces(self._micro_batch_size))
        for number, piece in enumerate(pieces, 1):
            batch = next(stream)
            if number == len(pieces):
                self._sampler.taken.popleft()
                self._midway = False
            samples = sum(map(len, piece))
            yield MicroBatch(batch, samples, samples)

    def samples_of(self, epoch: int, positions: Ranges) -> int:
        """One at each position."""
        return sum(map(len, positions))

    def borrow(self, epoch: int, position: int) -> Any:
        """A batch of two samples near `position`, loaded in this process."""
        return self._load(self._indices(epoch, (around(position, self.dataset_size),)))

    def close(self) -> None:
        """Ends the loading processes; a second call does nothing."""
        stream, self._stream, self._loader = self._stream, None, None
        self._stop_observing()
        self._sampler.restart(iter(()))
        # Called here, and not left to the garbage collector: a suspended `batches` may hold the
        # stream too, and the processes would live as long as it does.
        shutdown = getattr(stream, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()

    def _stream_at(self, share: Share, upcoming: Callable[[], Iterator[Share]]) -> Iterator[Any]:
        """The loading processes' batches, with `share`'s first batch next."""
        loader = self._open_loader()
        if self._stream is None:
            raise RuntimeError("call open() before the first batch: it starts the processes")
        # The stream goes on only if it stands at the first batch of this very share, and the
        # dataset's epoch was not set since that was loaded.
        taken = self._sampler.taken
        if self._stale or self._midway or not taken or taken[0] != share:
            self._stale = False
            self._sampler.restart(_chain(share, upcoming))
            self._stream = iter(loader)
        return self._stream

    def _epoch_was_set(self, place: int, call: EpochCall) -> None:
        """The script called `set_epoch` of a dataset: what was loaded ahead is out of date."""
        # A new dict: indices that are queued already keep the old one.
        self._epoch_calls = {**self._epoch_calls, place: call}
        self._stale = True

    def _probed(self, probes: list[PositionRange], salt: int) -> Iterator[Any]:
        """The batches of a few positions, with the same random numbers on all workers."""
        self._salt = salt
        share = Share(0, tuple(probes))
        if self._parallel:
            for micro_batch in self.batches(share, lambda: iter(())):
                yield micro_batch.batch
        else:
            for piece in share.pieces(self._micro_batch_size):
                indices = self._indices(share.epoch, piece)
                seed_generators(indices.seed)
                yield self._load(indices)

    def _load(self, indices: list[int]) -> Any:
        """A batch, loaded in this process."""
        fetch_all = getattr(self._dataset, "__getitems__", None)
        samples = fetch_all(indices) if fetch_all else [self._dataset[index] for index in indices]
        return self._collate(samples)

    def _open_loader(self) -> DataLoader[Any]:
        if self._loader is None:
            raise RuntimeError("the feeder is closed")
        return self._loader

    def _indices(self, epoch: int, piece: Ranges) -> Indices:
        seed = splitmix64(splitmix64((splitmix64(self._seed) + epoch) & _U64) ^ piece[0].start)
        seed ^= self._salt
        if not self._shuffled:
            plain = [place for part in piece for place in range(part.start, part.stop)]
            return Indices(plain, seed, self._epoch_calls)
        if self._order is None or self._order.epoch != epoch:
            self._order = Order(self._seed, epoch, self.dataset_size)
        return Indices(indices_of(self._order, piece).tolist(), seed, self._epoch_calls)


def _chain(share: Share, upcoming: Callable[[], Iterator[Share]]) -> Iterator[Share]:
    yield share
    yield from upcoming()
