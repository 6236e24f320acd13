"""The reader of a stream: its items by their positions, though it can only be read in order.

Theory of operation. Position p of an epoch is the p-th item that the stream yields in it. A worker
reads in order, and is asked for rising positions, so usually it just goes on. Between two of its
own items it passes over the other workers'. Three things make it read behind where it stands: a
lost worker's positions, a roster that changed after items were loaded ahead, and a step that is
computed again. So it keeps the items from the current batch on, as far as memory allows, both
those that it passed over and copies of those that it handed out. Only if an item is not among them
does it iterate the stream anew, and skip to the position.

Nobody may know how long a stream is. The reader meets the end when it asks for an item that is not
there; from then on it knows a bound that no item of the epoch lies at or beyond. After a `skip`
beyond the end the bound is greater than the number of items. It is still right for every position
that was tried.

A stream may be shuffled in a buffer, with Python's, NumPy's or torch's own generators. These are
seeded by run and epoch where an iteration begins, and while the reader does not read, their states
are kept for it. So all workers see the same items, whatever else draws random numbers meanwhile.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections import UserDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from andon.protocol.order import mixed
from andon.protocol.shards import Ranges
from andon_trainer.data.dataset_epochs import METHOD, DatasetEpochs, EpochCalls
from andon_trainer.data.digest import nested_datasets
from andon_trainer.data.randomness import seed_generators
from andon_trainer.state import rng

__all__ = ["StreamPiece", "StreamReader", "Wanted", "copy_of"]

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_KEPT_BYTES = 256 * 2**20
"""The most that is kept of items which may never be asked for again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The positions of one micro-batch, to be read."""

    epoch: int
    ranges: Ranges
    following: int | None
    """The first position of the share's next micro-batch: read now, so that the end is known."""
    keep_from: int | None
    """Items from this position on may be asked for again; None: those before `ranges` are not."""
    seed: int
    """For what is drawn after reading, to collate."""
    calls: EpochCalls = field(default_factory=dict)
    """Calls of `set_epoch` that the script wants instead of the line's own."""
    changes: bytes = b""
    """What the script has set of the dataset, pickled; a loading process sets it, too."""


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """The items of a micro-batch; fewer than were wanted if the stream ended."""

    items: list[Any]
    end: int | None
    """No item of the epoch lies at or beyond it; None: the end was not met yet."""


class _Ended(Exception):
    """The stream has no item at the position."""


class StreamReader(Dataset[Any]):
    """Reads a stream by position. Used by one thread, in the script's process or in another.

    A DataLoader takes it for a map-style dataset, whose batches of indices are `Wanted`.
    """

    def __init__(self, stream: Any, *, seed: int, size: int | None, whole: int = 1) -> None:
        """Reads nothing yet.

        Args:
            stream: the script's dataset.
            seed: the run's.
            size: items in an epoch; None: unknown.
            whole: an epoch of unknown length ends with its last whole batch of so many items.
        """
        self.stream = stream
        self._seed = seed
        self._size = size
        self._whole = whole
        self._epoch = -1
        self._calls: EpochCalls = {}
        self._iterator: Iterator[Any] | None = None
        self._next = 0
        """The position of the item that the iterator yields next."""
        self._known = 0
        """So many items of the epoch are known to exist."""
        self._end: int | None = None
        """No item lies at or beyond it; None: the end was not met."""
        self._kept: dict[int, tuple[Any, int]] = {}
        """Items that were read, each with its size in bytes, by position."""
        self._kept_bytes = 0
        self._keep_from: int | None = None
        """Items from here on may be asked for again, or for the first time."""
        self._states: dict[str, Any] | None = None
        """The random generators as the stream left them; None: it was not begun."""
        self._warned = False

    def __getitems__(self, wanted: Wanted) -> StreamPiece:
        """The items at some positions, as far as there are any.

        Leaves the random generators of this process seeded with `wanted.seed`.

        Raises:
            RuntimeError: the stream has fewer items than its `__len__` says.
        """
        if (wanted.epoch, wanted.calls) != (self._epoch, self._calls):
            self.rewind()
            self._epoch, self._calls = wanted.epoch, wanted.calls
            self._known, self._end = 0, None
            self._drop_below(None)
        first = wanted.ranges[0].start
        self._keep_from = wanted.keep_from
        self._drop_below(first if wanted.keep_from is None else min(first, wanted.keep_from))
        items = []
        with self._own_generators():
            for position in _positions(wanted.ranges):
                if not self._exists(position):
                    break
                items.append(self._take(position))
            else:
                if wanted.following is not None:
                    self._exists(wanted.following)
        seed_generators(wanted.seed)
        return StreamPiece(items, self._bound)

    def first(self, count: int, *, skip: int = 0, calls: EpochCalls) -> list[Any]:
        """The first items of epoch 0 after `skip` of them, for a look at the stream."""
        self._epoch, self._calls, items = 0, calls, []
        with self._own_generators():
            for position in range(skip, skip + count):
                if not self._exists(position):
                    break
                items.append(self._take(position))
        return items

    def rewind(self) -> None:
        """Forgets where the iteration stands: another one was begun, or the epoch is over."""
        self._iterator = None
        self._next = 0

    # ------------------------------------------------------------------ positions

    @property
    def _bound(self) -> int | None:
        """Where the epoch ends for the line."""
        return None if self._end is None else self._end // self._whole * self._whole

    def _exists(self, position: int) -> bool:
        """Whether the epoch has a position; reads as far as it must to tell."""
        # The last item of its batch, if only whole batches count.
        last = position // self._whole * self._whole + self._whole - 1
        if last < self._known:
            return True
        try:
            if self._end is None or last < self._end:
                self._read(last, since=position)
                return True
        except _Ended:
            pass
        if self._size is not None:
            raise RuntimeError(
                f"len({type(self.stream).__name__}) says {self._size} items, and epoch "
                f"{self._epoch} ended before item {position}: correct __len__, or take it away; "
                "the line then finds the end by itself"
            )
        return False

    def _take(self, position: int) -> Any:
        """The item at a position that exists. A copy is kept as long as it may be wanted again."""
        if position not in self._kept:
            self._read(position, since=position)
        item, size = self._kept.pop(position)
        self._kept_bytes -= size
        if self._keep_from is not None:
            # The collate function, or the script, may change what it gets.
            again = copy_of(item)
            if again is not None:
                self._keep(position, again, size=size)
        if self._size is not None and position == self._size - 1:
            self._look_beyond()
        return item

    def _look_beyond(self) -> None:
        """Warns, once, of a stream that is longer than it says: the rest is not used."""
        if self._warned or self._iterator is None or self._next != self._size:
            return
        self._warned = True
        try:
            self._step(keep=False)
        except _Ended:
            return
        log.warning(
            "len(%s) says %d items, and the stream has more: the line leaves the rest out. "
            "Correct __len__, or take it away",
            type(self.stream).__name__,
            self._size,
        )

    def _read(self, last: int, *, since: int) -> None:
        """Reads on until item `last` is kept, and with it those from `since` on.

        Raises:
            _Ended: there is no such item.
        """
        missing = next(each for each in range(since, last + 1) if each not in self._kept)
        if self._iterator is None or missing < self._next:
            self._begin(missing)
        if self._next < missing:
            self._pass_over(missing - self._next)
        while self._next <= last:
            self._step(keep=True)

    # ------------------------------------------------------------------ the iteration

    def _begin(self, position: int) -> None:
        """Begins to iterate the epoch anew, at `position` if the stream can skip."""
        stream, self._next = self.stream, 0
        self._iterator = None
        seed_generators(mixed(self._seed, self._epoch))
        self._tell_epoch(stream)
        # A stream that is its own iterator is skipped in place, once it was begun.
        if position and not hasattr(stream, "__next__"):
            rest = _skipped(stream, position)
            if rest is not None:
                stream, self._next = rest, position
                self._tell_epoch(stream)  # It may be a new object, in epoch 0.
        self._iterator = iter(stream)

    def _tell_epoch(self, stream: Any) -> None:
        """Calls `set_epoch` of a stream, and of those that it wraps."""
        calls = DatasetEpochs(stream).calls(self._epoch)
        for place, part in enumerate(nested_datasets(stream)):
            if place in calls:
                arguments, named = self._calls.get(place, calls[place])
                # By the class: on the object the script's own calls are observed.
                getattr(type(part), METHOD)(part, *arguments, **named)

    def _pass_over(self, count: int) -> None:
        """Leaves out the next items, which are other workers' or were committed."""
        skip = getattr(self._iterator, "skip", None)
        if callable(skip):
            rest = skip(count)
            if rest is not None and rest is not self._iterator and hasattr(rest, "__iter__"):
                self._iterator = iter(rest)
            self._next += count
            return
        for _ in range(count):
            self._step(keep=False)

    def _step(self, *, keep: bool) -> None:
        """Reads the next item, and keeps it if it must be kept, or may be wanted."""
        assert self._iterator is not None
        try:
            item = next(self._iterator)
        except StopIteration:
            self._end = self._next if self._end is None else min(self._end, self._next)
            self._iterator = None
            raise _Ended from None
        except BaseException:
            # A generator that raised is over. Its StopIteration must not look like the end.
            self._iterator = None
            raise
        position, self._next = self._next, self._next + 1
        self._known = max(self._known, self._next)
        asked_again = self._keep_from is not None and position >= self._keep_from
        if position not in self._kept and (keep or asked_again):
            self._keep(position, item, must=keep)

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        """Puts the generators where the stream left them, and notes where it leaves them."""
        if self._states is not None:
            rng.restore(self._states, _CPU)
        try:
            yield
        finally:
            self._states = rng.capture(_CPU)

    # ------------------------------------------------------------------ what is kept

    def _keep(
        self, position: int, item: Any, *, must: bool = False, size: int | None = None
    ) -> None:
        size = _size_of(item) if size is None else size
        if must or self._kept_bytes + size <= _KEPT_BYTES:
            self._kept[position] = item, size
            self._kept_bytes += size

    def _drop_below(self, position: int | None) -> None:
        """Forgets items before a position; None: all."""
        for old in [each for each in self._kept if position is None or each < position]:
            self._kept_bytes -= self._kept.pop(old)[1]


def _positions(ranges: Ranges) -> Iterator[int]:
    for part in ranges:
        yield from range(part.start, part.stop)


def _skipped(stream: Any, count: int) -> Any:
    """The stream without its first items; None: it can't skip.

    A `skip` that returns nothing makes the next iteration begin there.
    """
    skip = getattr(stream, "skip", None)
    if not callable(skip):
        return None
    rest = skip(count)
    return stream if rest is None else rest


def copy_of(value: Any) -> Any:
    """A copy that shares nothing that could be changed; None if the type is not known.

    Not `copy.deepcopy`, which copies all of the storage that a tensor is a view of.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, str | bytes | int | float | complex | bool | np.generic):
        return value
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.copy()
    if isinstance(value, dict | UserDict):  # Of another mapping a shallow copy may be the same.
        return _filled(value, {key: copy_of(part) for key, part in value.items()})
    if isinstance(value, list | tuple):
        parts = [copy_of(part) for part in value]
        if any(new is None and old is not None for new, old in zip(parts, value, strict=True)):
            return None
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if callable(getattr(value, "tobytes", None)) and callable(getattr(value, "copy", None)):
        return value.copy()  # A PIL image.
    return None


def _filled(value: Any, parts: dict[Any, Any]) -> Any:
    """A mapping of the same class with other values; None if one of them could not be copied."""
    if any(new is None and value[key] is not None for key, new in parts.items()):
        return None
    again = copy.copy(value)  # Keeps the class and its other attributes (BatchEncoding).
    again.update(parts)
    return again


def _size_of(value: Any) -> int:
    """About how many bytes an item takes."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return int(value.nbytes)
    if isinstance(value, Mapping):
        return sum(map(_size_of, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_size_of, value))
    if callable(getattr(value, "getbands", None)):
        return int(value.width * value.height * len(value.getbands()))  # A PIL image.
    return sys.getsizeof(value)
