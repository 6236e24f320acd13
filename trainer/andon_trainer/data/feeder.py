"""The feeder that loads a worker's samples with the script's own DataLoader.

Without loading processes each share is loaded when it is asked for. With them, shares are loaded
ahead as far as they are foreseen; see `share_loading`. Nothing is loaded ahead beyond an epoch,
unless the script wants persistent processes: by then it may have changed the dataset.

Random augmentation must depend neither on the worker nor on how far was prefetched: `randomness`
sees to that, here and in the loading processes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from andon.protocol.order import mixed, splitmix64
from andon.protocol.records import PositionRange
from andon.protocol.shards import Ranges
from andon_trainer.data.digest import data_digest
from andon_trainer.data.feed import MicroBatch, Share, count_loop_bodies, usual_share
from andon_trainer.data.loader import rebuild_loader
from andon_trainer.data.loading_process import Indices
from andon_trainer.data.orders import BatchOrders, Orders, Piece, orders_of
from andon_trainer.data.randomness import SampleLoading
from andon_trainer.data.share_loading import ShareLoading
from andon_trainer.state import rng

__all__ = ["LoaderFeeder"]

log = logging.getLogger(__name__)

_PROBES, _PROBE_SIZE = 4, 4
"""The digest reads this many runs of this many positions, spread over the dataset."""


class LoaderFeeder:
    """Feeds one rank's shares from a DataLoader. Used by one thread."""

    def __init__(
        self,
        loader: DataLoader[Any],
        seed: int,
        micro_batch_size: int | None = None,
        grain: int = 0,
    ) -> None:
        """Takes over a script's DataLoader: its dataset, its order and its way of loading.

        It starts no process yet.

        Args:
            loader: over a map-style dataset. With `shuffle=True` samples come in the run's random
                order, with a sampler of its own as that yields them, else in the dataset's order.
            seed: the run's.
            micro_batch_size: the most samples in one batch; None: a whole range of the share.

        Raises:
            ValueError: the loader chooses samples in a way that the line can't follow, or a batch
                is larger than the dataset and `drop_last` leaves it out.
        """
        orders, drop_last = orders_of(loader, seed, spread=not grain)
        self._orders: Orders = orders
        self.dataset_size = orders.size
        """Number of positions in an epoch, with those that `drop_last` leaves out."""
        self.batch_size = orders.batch_size
        """Number of positions in one step, over all workers."""
        self.drop_last = drop_last
        """Whether an epoch ends with its last full batch."""
        self.sparse = isinstance(orders, BatchOrders)
        """Whether a position may hold no sample."""
        left_out = self.dataset_size % self.batch_size if self.drop_last else 0
        self.epoch_size = self.dataset_size - left_out
        """Number of positions in an epoch."""
        if left_out:
            log.info("drop_last leaves %d samples out of each epoch", left_out)
        self._seed = seed
        self._micro_batch_size = micro_batch_size
        self._grain = grain
        self._given = loader
        self._dataset = loader.dataset
        self._loading = SampleLoading(loader.dataset, loader.collate_fn)
        self._shares = ShareLoading(
            loader, lambda requests: rebuild_loader(loader, requests, seed), self._foreseen
        )
        self._epochs = self._shares.epochs
        self._salt = 0
        """Changes all seeds while the digest reads each sample a second time."""

    def open(self) -> None:
        """Starts the loading processes; a second call does nothing.

        Call it before any gRPC channel exists: a forked child must not inherit one.
        """
        self._shares.open()

    def digest(self, device: torch.device) -> str:
        """SHA-256 of the dataset's content; empty if its samples can't be read.

        It reads 16 samples twice, in the loading processes if there are any. The random generators
        of the script, including that of `device`, keep their states.
        """
        run = min(_PROBE_SIZE, max(1, self.dataset_size // _PROBES))
        starts = {self.dataset_size * each // _PROBES for each in range(_PROBES)}
        probes = [PositionRange(start, start + run) for start in sorted(starts)]
        states = rng.capture(device)
        self._epochs.enter(0)  # The samples of a curriculum differ between epochs.
        try:
            return data_digest(
                self._dataset,
                self._orders.digest(),
                self.dataset_size,
                lambda salt: self._probed(probes, salt),
            )
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
            share: this rank's positions; a share without samples yields nothing.
            upcoming: the shares that follow if nothing changes; the loading processes load them
                ahead. It may be endless.

        Raises:
            RuntimeError: there are loading processes, and `open` was not called.
            ValueError: the script's sampler yields what can't be an epoch.
        """
        self._enter(share.epoch)
        yield from self._batches(share, upcoming)

    def samples_of(self, epoch: int, positions: Ranges) -> int:
        """How many samples there are at these positions."""
        self._enter(epoch)
        return self._orders.samples_of(epoch, positions)

    def end_of(self, epoch: int) -> int | None:
        """None: the length is known."""
        return None

    def loop_bodies(self, epoch: int, rank: int, world_size: int) -> int:
        """How often the loop body runs in an epoch, with equal shares and no void round."""

        def bodies(batch: PositionRange) -> int:
            share = usual_share(epoch, batch, rank, world_size, self._grain)
            return sum(1 for _ in self._orders.pieces(share, self._micro_batch_size))

        if not isinstance(self._orders, BatchOrders):
            return count_loop_bodies(self.epoch_size, self.batch_size, bodies)
        starts = range(0, self.epoch_size, self.batch_size)
        return sum(max(1, bodies(PositionRange(at, at + self.batch_size))) for at in starts)

    def borrow(self, epoch: int, position: int) -> Any:
        """A batch of two samples near `position`, loaded in this process."""
        self._enter(epoch)
        return self._load(self._indices(epoch, self._orders.near(epoch, position)))

    def refuse_other_length(self) -> None:
        """Raises ValueError if an epoch would have another length by now."""
        self._orders.refuse_other_length()

    def close(self) -> None:
        """Ends the loading processes; a second call does nothing."""
        self._shares.close()

    def _enter(self, epoch: int) -> None:
        """An epoch begins, or goes on."""
        if not self._orders.enter(epoch):
            self._shares.drop_ahead()
        if epoch != self._shares.epoch:
            self._shares.enter(epoch)

    def _batches(
        self, share: Share, upcoming: Callable[[], Iterator[Share]]
    ) -> Iterator[MicroBatch]:
        pieces = list(self._pieces(share))
        if not pieces:
            return
        if self._shares.parallel:
            batches = self._shares.batches(share, len(pieces), upcoming)
        else:
            indices = (self._indices(share.epoch, piece) for piece in pieces)
            batches = (self._pinned(self._load(each)) for each in indices)
        for piece, batch in zip(pieces, batches, strict=True):
            yield MicroBatch(batch, piece.positions, len(piece.indices), piece.start)

    def _foreseen(self, share: Share) -> list[Indices] | None:
        """The batches of a share that is asked for, or loaded ahead; None: it can't be yet."""
        another = self._shares.epoch not in (None, share.epoch)
        if another and not (self._given.persistent_workers and self._orders.foresee(share.epoch)):
            return None
        return [self._indices(share.epoch, piece) for piece in self._pieces(share)]

    def _pieces(self, share: Share) -> Iterator[Piece]:
        return self._orders.pieces(share, self._micro_batch_size)

    def _probed(self, probes: list[PositionRange], salt: int) -> Iterator[Any]:
        """The batches of a few positions, with the same random numbers on all workers."""
        self._salt = salt
        # One share each, so that no batch has positions of two: how the samples lie in batches is a
        # part of the digest, and workers of other versions compare theirs with this one.
        shares = deque(Share(0, (probe,)) for probe in probes)
        while shares:
            # Not `batches`: no epoch begins.
            for micro_batch in self._batches(shares.popleft(), lambda: iter(tuple(shares))):
                yield micro_batch.batch

    def _load(self, indices: Indices) -> Any:
        """A batch, loaded in this process."""
        self._shares.require_open()
        return self._loading.load(indices)

    def _pinned(self, batch: Any) -> Any:
        """The batch in pinned memory, if the script's loader wants that and there is a GPU."""
        if not (self._given.pin_memory and torch.cuda.is_available()):
            return batch
        device = self._given.pin_memory_device or None
        return pin_memory(batch, device)  # type: ignore[no-untyped-call]  # torch's own

    def _indices(self, epoch: int, piece: Piece) -> Indices:
        seed = mixed(self._seed, epoch)
        if self._salt:
            seed = splitmix64(seed ^ self._salt)
        return Indices(
            piece.indices, piece.places, seed, self._epochs.calls(epoch), self._epochs.changes
        )
