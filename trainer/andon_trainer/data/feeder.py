"""The feeder: how samples reach the training loop, from the user's own DataLoader.

Theory of operation. The loader is rebuilt with a batch sampler that yields whatever this rank's
share is. Without loading processes each share is loaded when it is asked for. With them, the
processes are started once, by `open`, before any gRPC channel exists (a forked child must never
inherit one), on a sampler that is empty at first; they stay until `close`. From then on the sampler
is a pipeline: the share that is asked for, and behind it the shares that are foreseen, as far as
torch prefetches. If the next share asked for is the foreseen one, its batches are on their way
already. If not (the roster changed, or a step is tried again), iterating the persistent loader
anew drains and drops what is on its way, and the same processes go on.

Random augmentation must not depend on how far was prefetched: a batch's indices carry a seed made
from the run's seed, the epoch and the batch's first position, and on arrival in a loading process
they seed its generators.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from andon.protocol.order import Order, splitmix64
from andon.protocol.records import PositionRange
from andon.protocol.shards import shard_of
from andon_trainer.data.digest import data_digest
from andon_trainer.data.loading_process import Call, Indices, Told, listen, seed_generators
from andon_trainer.state import rng

__all__ = ["Feeder", "Share", "move_to", "ways_of_loading"]

log = logging.getLogger(__name__)

_U64 = 2**64 - 1
_PROBES, _PROBE_SIZE = 4, 4
"""So many runs of so many positions, spread over the dataset, are looked at for its digest."""
_BORROWED = 2
"""Samples of a borrowed batch: BatchNorm refuses a batch of one."""


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's positions of one step."""

    epoch: int
    ranges: tuple[PositionRange, ...]
    most: int | None = None
    """No micro-batch is larger, whatever the loader is set to; None: as it is set to."""

    def __len__(self) -> int:
        """How many positions it holds."""
        return sum(map(len, self.ranges))

    def pieces(self, micro_batch_size: int | None) -> Iterator[PositionRange]:
        """The share's micro-batches: contiguous, of at most `micro_batch_size` positions.

        Each range is cut into as few as can be, as even as can be: a rest of one sample would be a
        batch that BatchNorm refuses.
        """
        for part in self.ranges:
            size = min(micro_batch_size or len(part), self.most or len(part)) or 1
            count = -(-len(part) // size)
            for number in range(count):
                yield shard_of(part, number, count)


class _Pipeline(Sampler[list[int]]):
    """A batch sampler whose batches are those of shares, to be changed between iterations."""

    def __init__(
        self,
        indices: Callable[[int, PositionRange], list[int]],
        micro_batch_size: int | None,
    ) -> None:
        self._indices = indices
        self._micro = micro_batch_size
        self._shares: Iterator[Share] = iter(())
        self.taken: deque[Share] = deque()
        """Shares that torch has taken batches of, from the one that is yielded next."""

    def restart(self, shares: Iterator[Share]) -> None:
        """The next iteration is over these."""
        self._shares = shares
        self.taken.clear()

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches(self._shares)

    def _batches(self, shares: Iterator[Share]) -> Iterator[list[int]]:
        for share in shares:
            if not len(share):
                continue  # this rank has no sample in that step
            self.taken.append(share)
            for piece in share.pieces(self._micro):
                yield self._indices(share.epoch, piece)


class Feeder:
    """Feeds one rank's shares from a DataLoader. Used by one thread."""

    @classmethod
    def from_loader(
        cls, loader: DataLoader[Any], seed: int, micro_batch_size: int | None = None
    ) -> Feeder:
        """Takes over a user's DataLoader: its dataset and its way of loading.

        Args:
            loader: over a map-style dataset, with `batch_size`; `shuffle=True` draws the run's
                order, the default is the dataset's own.
            seed: the run's.
            micro_batch_size: the most samples in one batch; None: a whole range of the share.

        Raises:
            TypeError: the dataset has no length and no indices.
            ValueError: the loader deals samples out in a way that the line can't follow, or a batch
                is larger than the dataset and `drop_last` leaves it out.
        """
        _refuse(loader)
        if micro_batch_size is not None and micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be at least 1, not {micro_batch_size}")
        return cls(loader, seed, micro_batch_size)

    def __init__(self, loader: DataLoader[Any], seed: int, micro_batch_size: int | None) -> None:
        """See `from_loader`."""
        assert loader.batch_size is not None
        self.dataset_size = len(loader.dataset)  # type: ignore[arg-type]  # it has a length
        """Samples in the dataset."""
        self.batch_size = loader.batch_size
        """Samples in one step of the whole line."""
        self.drop_last = loader.drop_last
        """Whether an epoch ends with its last whole batch."""
        left_out = self.dataset_size % self.batch_size if self.drop_last else 0
        self.epoch_size = self.dataset_size - left_out
        """Positions that an epoch deals out."""
        if left_out:
            log.info("drop_last leaves %d samples out of each epoch", left_out)
        self._seed = seed
        self._micro = micro_batch_size
        self._shuffled = isinstance(loader.sampler, RandomSampler)
        self._pipeline = _Pipeline(self._indices, micro_batch_size)
        self._loader: DataLoader[Any] | None = _rebuild(loader, self._pipeline, seed)
        self._dataset = loader.dataset
        self._collate = loader.collate_fn
        self._parallel = loader.num_workers > 0
        self._stream: Iterator[Any] | None = None
        self._midway = False
        """Whether the batch that the stream yields next is not the first of its share."""
        self._order: Order | None = None
        self._salt = 0
        """Tells what is random in loading from what it is in training."""
        self._told: Told = {}
        self._stale = False
        """Whether what is loaded ahead is as the dataset was before `set_epoch`."""
        self._forget: Callable[[], None] = lambda: None

    def open(self) -> None:
        """Starts the loading processes; call it before any channel exists. Once is enough."""
        if self._parallel and self._stream is None:
            self._stream = iter(self._living())
            self._forget = listen(self._dataset, self._tell)

    def digest(self, device: torch.device) -> str:
        """SHA-256 of what the dataset is; empty if its samples can't be read.

        It reads 16 samples twice, where training reads them: in the loading processes, if there are
        any. The script's generators, also that of `device`, are left as they are.
        """
        run = min(_PROBE_SIZE, max(1, self.dataset_size // _PROBES))
        starts = {self.dataset_size * each // _PROBES for each in range(_PROBES)}
        probes = [PositionRange(start, start + run) for start in sorted(starts)]
        states = rng.capture(device)
        try:
            return data_digest(self._dataset, lambda salt: self._probed(probes, salt))
        except Exception:  # the dataset's own; if training needs the sample it says so itself
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
    ) -> Iterator[tuple[Any, int]]:
        """The share's micro-batches in order, each with its number of samples.

        Args:
            share: this rank's positions; none yields nothing.
            upcoming: the shares that will follow if nothing changes, to be loaded ahead by the
                loading processes. It may be endless.

        Raises:
            RuntimeError: there are loading processes, and `open` was not called.
        """
        if not len(share):
            return
        if self._parallel:
            stream = self._aimed(share, upcoming)
        else:
            self._pipeline.restart(iter((share,)))
            stream = iter(self._living())
        # Until the last batch is out the pipeline is not at the beginning of a share.
        self._midway = True
        pieces = list(share.pieces(self._micro))
        for number, piece in enumerate(pieces, 1):
            batch = next(stream)
            if number == len(pieces):
                self._pipeline.taken.popleft()
                self._midway = False
            yield batch, len(piece)

    def borrow(self, epoch: int, position: int) -> Any:
        """A batch of two samples about `position`, for a rank without samples; loaded here."""
        start = max(0, min(position, self.dataset_size - _BORROWED))
        stop = min(start + _BORROWED, self.dataset_size)
        return self._load(self._indices(epoch, PositionRange(start, stop)))

    def close(self) -> None:
        """Ends the loading processes; a second call does nothing."""
        stream, self._stream, self._loader = self._stream, None, None
        self._forget()
        self._pipeline.restart(iter(()))
        # A suspended `batches` may hold the stream too: its end is not left to the collector.
        shutdown = getattr(stream, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()

    def _aimed(self, share: Share, upcoming: Callable[[], Iterator[Share]]) -> Iterator[Any]:
        """The loading processes' stream, with `share`'s first batch next."""
        loader = self._living()
        if self._stream is None:
            raise RuntimeError("call open() before the first batch: it starts the processes")
        taken = self._pipeline.taken
        if self._stale or self._midway or not taken or taken[0] != share:
            self._stale = False
            self._pipeline.restart(_followed(share, upcoming))
            self._stream = iter(loader)
        return self._stream

    def _tell(self, place: int, call: Call) -> None:
        """The script told its dataset the epoch: what was loaded ahead is of another."""
        self._told = {**self._told, place: call}
        self._stale = True

    def _probed(self, probes: list[PositionRange], salt: int) -> Iterator[Any]:
        """The batches of a few positions, with what is random in them drawn alike everywhere."""
        self._salt = salt
        share = Share(0, tuple(probes))
        if self._parallel:
            for batch, _ in self.batches(share, lambda: iter(())):
                yield batch
        else:
            for piece in share.pieces(self._micro):
                indices = self._indices(share.epoch, piece)
                seed_generators(indices.seed)
                yield self._load(indices)

    def _load(self, indices: list[int]) -> Any:
        """A batch, loaded in this process."""
        whole = getattr(self._dataset, "__getitems__", None)
        samples = whole(indices) if whole else [self._dataset[index] for index in indices]
        return self._collate(samples)

    def _living(self) -> DataLoader[Any]:
        if self._loader is None:
            raise RuntimeError("the feeder is closed")
        return self._loader

    def _indices(self, epoch: int, piece: PositionRange) -> Indices:
        seed = splitmix64(splitmix64((splitmix64(self._seed) + epoch) & _U64) ^ piece.start)
        seed ^= self._salt
        if not self._shuffled:
            return Indices(list(range(piece.start, piece.stop)), seed, self._told)
        if self._order is None or self._order.epoch != epoch:
            self._order = Order(self._seed, epoch, self.dataset_size)
        return Indices(self._order.indices(piece.start, piece.stop).tolist(), seed, self._told)


def _followed(share: Share, upcoming: Callable[[], Iterator[Share]]) -> Iterator[Share]:
    yield share
    yield from upcoming()


def _refuse(loader: DataLoader[Any]) -> None:
    """Raises if the line can't deal out what this loader loads."""
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise TypeError(
            f"{type(loader.dataset).__name__} has no length and no indices, so its samples can't "
            "be dealt out: give the DataLoader a map-style dataset, or use line.shards(n, "
            "batch_size=...)"
        )
    if isinstance(loader.sampler, DistributedSampler):
        raise ValueError(
            "the line itself deals the samples out: leave out sampler=DistributedSampler(...) and "
            "write DataLoader(dataset, batch_size=..., shuffle=True)"
        )
    if loader.batch_size is None:
        what = "batch_size=None" if loader.batch_sampler is None else "batch_sampler="
        raise ValueError(
            f"the line itself makes the batches: leave out {what} and write DataLoader(dataset, "
            "batch_size=..., shuffle=True)"
        )
    size = len(loader.dataset)
    if size < 1:
        raise ValueError("the dataset is empty: there is nothing to train on")
    if loader.drop_last and size < loader.batch_size:
        raise ValueError(
            f"drop_last=True leaves nothing of a dataset of {size} samples in batches of "
            f"{loader.batch_size}: leave it out, or make batch_size smaller"
        )
    sampler = loader.sampler
    if isinstance(sampler, RandomSampler):
        if sampler.replacement or sampler.num_samples != size:
            raise ValueError(
                "every sample is in one step of its epoch: leave out the RandomSampler and write "
                "shuffle=True"
            )
    elif not isinstance(sampler, SequentialSampler):
        raise ValueError(
            f"the line draws the order itself: leave out sampler={type(sampler).__name__}(...) and "
            "write shuffle=True, or leave shuffle out for the dataset's order"
        )


def _rebuild(loader: DataLoader[Any], pipeline: _Pipeline, seed: int) -> DataLoader[Any]:
    """The user's loader over `pipeline`, with loading processes that stay."""
    how = ways_of_loading(loader)
    if loader.num_workers > 0:
        how["persistent_workers"] = True
    # Torch draws a seed at each iteration: not from the generator that the script's model uses.
    generator = torch.Generator()
    generator.manual_seed(seed)
    return DataLoader(loader.dataset, batch_sampler=pipeline, generator=generator, **how)


def ways_of_loading(loader: DataLoader[Any]) -> dict[str, Any]:
    """How a loader loads, whatever it loads: what `DataLoader` takes for it, by name."""
    how: dict[str, Any] = {
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        # Torch warns at each iteration if there is no device to pin for.
        "pin_memory": loader.pin_memory and torch.cuda.is_available(),
    }
    if loader.num_workers > 0:
        how |= {
            "prefetch_factor": loader.prefetch_factor,
            "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    return how


def move_to(device: torch.device, batch: Any) -> Any:
    """The batch with its tensors on `device`: in tuples, lists, dicts and what has a `to`.

    Pinned tensors are copied without waiting. Anything else stays as it is.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=device.type == "cuda" and batch.is_pinned())
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, MutableMapping):
        moved = copy.copy(batch)  # keeps its class, and what else that knows
        moved.update((key, move_to(device, part)) for key, part in batch.items())
        return moved
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_to(device, part) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)([move_to(device, part) for part in batch])
    return batch
