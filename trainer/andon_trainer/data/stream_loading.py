"""Between a stream's reader and the script's DataLoader: what it is asked for, and what comes back.

A DataLoader takes the reader for a map-style dataset. Its batch sampler yields micro-batches of
positions, and its collate function gets what the reader read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler, get_worker_info

from andon_trainer.data.dataset_epochs import EpochCalls, set_changes
from andon_trainer.data.loader import loading_options
from andon_trainer.data.stream_digest import stream_digest
from andon_trainer.data.stream_reader import StreamPiece, StreamReader, Wanted, copy_of

__all__ = ["Probe", "StreamSource", "rebuild"]


@dataclass(frozen=True, slots=True)
class Probe:
    """Asks the reader's process for the digest of the stream."""

    header: str
    calls: EpochCalls


class StreamSource(StreamReader):
    """The reader behind the DataLoader: it also looks at the stream before training."""

    def __init__(self, stream: Any, *, seed: int, size: int | None, whole: int = 1) -> None:
        """As for `StreamReader`."""
        super().__init__(stream, seed=seed, size=size, whole=whole)
        self._seed_of_run = seed
        self._spare: list[Any] = []
        self._set = b""
        """The changes that were made in this process."""

    def __getitems__(self, wanted: Wanted | Probe) -> Any:
        """What was asked for: a `StreamPiece`, or the digest."""
        if isinstance(wanted, Probe):
            read = partial(self.first_anew, calls=wanted.calls)
            return stream_digest(self.stream, wanted.header, read)
        if wanted.changes != self._set and get_worker_info() is not None:
            set_changes(self.stream, wanted.changes)
            self._set = wanted.changes
        piece = super().__getitems__(wanted)
        if not self._spare and get_worker_info() is None:
            copies = [copy_of(item) for item in piece.items[:2]]
            self._spare = [each for each in copies if each is not None]
        return piece

    def spare(self, calls: EpochCalls) -> list[Any]:
        """One or two items of the stream, to borrow; none if it is empty."""
        # Read anew only if nothing was read in this process: that may cost as much as an epoch.
        return self._spare or self.first_anew(2, calls=calls)

    def first_anew(
        self, count: int, *, calls: EpochCalls, skip: int = 0, salt: int = 0
    ) -> list[Any]:
        """The first items of epoch 0 after `skip`, from an iteration of its own."""
        scratch = StreamReader(self.stream, seed=self._seed_of_run ^ salt, size=None)
        items = scratch.first(count, skip=skip, calls=calls)
        self.rewind()  # The stream may be its own iterator, which then stands elsewhere now.
        return items


class _Collate:
    """The script's collate function, for what a reader returns."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, read: StreamPiece | str) -> tuple[Any, int, int | None] | str:
        if isinstance(read, str):
            return read
        # No script's function expects an empty list.
        batch = self._collate(read.items) if read.items else None
        return batch, len(read.items), read.end


class _InitProcess:
    """Shows the script's dataset to its `worker_init_fn`, and to the dataset itself."""

    def __init__(self, init: Callable[[int], None]) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        # By `object`: the class refuses assignments.
        object.__setattr__(info, "dataset", info.dataset.stream)  # type: ignore[attr-defined]  # it is a reader
        self._init(worker)


def rebuild(
    loader: DataLoader[Any], source: StreamSource, requests: Sampler[Any], seed: int
) -> DataLoader[Any]:
    """The script's loader over a reader, with a loading process that stays."""
    options = loading_options(loader)
    options["collate_fn"] = _Collate(loader.collate_fn)
    if loader.num_workers > 0:
        options["persistent_workers"] = True
        options["worker_init_fn"] = _InitProcess(options["worker_init_fn"])
    # A DataLoader draws a seed each time that it is iterated: not from the script's generator.
    generator = torch.Generator()
    generator.manual_seed(seed)
    return DataLoader(source, batch_sampler=requests, generator=generator, **options)
