"""Draws: what a sampler of the script's own yields in an epoch, the same on every worker.

Theory of operation. A sampler is drawn from a copy, under generators that are seeded by the run's
seed and the epoch: Python's, NumPy's and torch's global ones, and every generator that the sampler
holds. So a draw leaves the script's generators and its sampler as they were, and it does not matter
which worker draws, or how often. That is what a run that is resumed in epoch 5 needs, and a worker
that joins there.

Some samplers depend on their own past: they count their epochs, or shuffle a list in place. Such a
sampler is told from others when it is first drawn: its second epoch differs with and without the
first one. For epoch 5 it is then drawn five times in vain, which gives what a plain script gets.
What a script changes of such a sampler later is not seen; of all other samplers, the next epoch is
drawn from what they are when it begins.
"""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from andon.protocol.order import mixed, splitmix64
from andon_trainer.data.digest import nested_datasets
from andon_trainer.data.randomness import seed_generators
from andon_trainer.state import rng

__all__ = ["EpochDraws", "draw_once"]

_SALT = 0x73616D706C657273
"""Draws use other numbers than augmentation does."""
_CPU = torch.device("cpu")
_TIMES, _LEAST, _MOST = 8, 2**20, 2**26
"""A sampler has no end if it yields more than `_TIMES` the dataset's samples, and more than
`_LEAST`; or, of a dataset without a length, more than `_MOST`. What the sampler says of its own
length is believed."""

_Copy = tuple[Any, list[Any]]
"""A sampler's copy, and the parts that it consists of."""


class EpochDraws:
    """A sampler's epochs, in any order and as often as asked for."""

    def __init__(self, sampler: Iterable[Any], dataset: Any, seed: int) -> None:
        """Draws the first two epochs, to find out whether the sampler depends on its past.

        Args:
            sampler: yields indices, or batches of indices.
            dataset: the loader's; it is not copied with the sampler.
            seed: the run's.

        Raises:
            ValueError: the sampler can't be drawn twice, or yields something else each time.
        """
        self._sampler = sampler
        self._copies = _Copies(sampler, dataset)
        self._seed = seed
        self._most = _most_of(sampler, dataset)
        self._origin: _Copy | None = None
        """The sampler as it was in the beginning, if it depends on its past."""
        self._advanced: tuple[int, _Copy] | None = None
        """The next epoch of a copy that was drawn from, if it does."""
        one = self._copies.of(sampler)
        first, second = self._draw(one, 0), self._draw(one, 1)
        if self._draw(self._copies.of(sampler), 1) == second:
            return
        again = self._copies.of(sampler)
        if [self._draw(again, 0), self._draw(again, 1)] != [first, second]:
            name = type(sampler).__name__
            raise ValueError(
                f"{name} yields other indices each time, though Python's, NumPy's and torch's "
                "generators and all that it holds were seeded alike: no two workers would agree "
                f"on its order. Let it draw from a generator that {name} holds as an attribute"
            )
        self._origin = self._copies.of(sampler)

    def draw(self, epoch: int) -> list[Any]:
        """What the sampler yields in an epoch: integers as int, anything else as it is.

        Raises:
            ValueError: it does not end.
        """
        if self._origin is None:
            return self._draw(self._copies.of(self._sampler), epoch)
        if self._advanced is None or self._advanced[0] > epoch:
            self._advanced = 0, self._copies.of(self._origin[0])
        done, sampler = self._advanced
        for earlier in range(done, epoch):
            self._draw(sampler, earlier)
        # Drawn from a further copy: an epoch may be asked for twice.
        self._advanced = epoch, sampler
        return self._draw(self._copies.of(sampler[0]), epoch)

    def _draw(self, copied: _Copy, epoch: int) -> list[Any]:
        return _drawn(copied, mixed(self._seed ^ _SALT, epoch), epoch, self._most)


def draw_once(sampler: Iterable[Any], dataset: Any, seed: int) -> list[Any]:
    """What a sampler yields under a seed; the sampler and all generators keep their states.

    Raises:
        ValueError: the sampler can't be drawn twice, or does not end.
    """
    copied = _Copies(sampler, dataset).of(sampler)
    return _drawn(copied, splitmix64(seed), None, _most_of(sampler, dataset))


def _drawn(copied: _Copy, key: int, epoch: int | None, most: int) -> list[Any]:
    sampler, parts = copied
    states = rng.capture(_CPU)
    try:
        seed_generators(key)
        for number, part in enumerate(parts, 1):
            _seed(part, splitmix64(key + number))
            if epoch is not None:
                _set_epoch(part, epoch)
        return _listed(sampler, most)
    finally:
        rng.restore(states, _CPU)


class _Copies:
    """Makes copies of a sampler and of everything in it but datasets."""

    def __init__(self, sampler: Any, dataset: Any) -> None:
        self._kept = {id(part): part for part in _not_to_copy(sampler, dataset)}

    def of(self, sampler: Any) -> _Copy:
        """A copy, and the parts that it consists of.

        Raises:
            ValueError: it can't be copied, like a generator that runs.
        """
        memo: dict[int, Any] = dict(self._kept)
        try:
            copied = copy.deepcopy(sampler, memo)
        except Exception:  # A part of it can't be copied, as an open file or a lock.
            return self._shallow(sampler)
        # The memo has everything that was copied, and what was not to be.
        return copied, [part for part in memo.values() if id(part) not in self._kept]

    def _shallow(self, sampler: Any) -> _Copy:
        try:
            copied = copy.copy(sampler)
        except Exception as error:
            raise ValueError(
                f"the sampler is a {type(sampler).__name__}, which can be drawn only once: give "
                "the DataLoader a list, or a Sampler with __iter__"
            ) from error
        parts = [copied]
        for name, value in list(getattr(copied, "__dict__", {}).items()):
            if isinstance(value, _GENERATORS):
                vars(copied)[name] = value = copy.deepcopy(value)
                parts.append(value)
        return copied, parts


_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def _seed(part: Any, seed: int) -> None:
    """Seeds a generator; does nothing to anything else."""
    if isinstance(part, torch.Generator):
        part.manual_seed(seed)
    elif isinstance(part, np.random.Generator):
        part.bit_generator.state = type(part.bit_generator)(seed).state
    elif isinstance(part, np.random.RandomState):
        part.seed([seed & 0xFFFFFFFF, seed >> 32])
    elif isinstance(part, random.Random):
        part.seed(seed)


def _set_epoch(part: Any, epoch: int) -> None:
    # Of the class: some objects answer to any name.
    if callable(getattr(type(part), "set_epoch", None)):
        part.set_epoch(epoch)


def _not_to_copy(sampler: Any, dataset: Any) -> Iterator[Any]:
    """The datasets that a sampler may hold."""
    yield from nested_datasets(dataset)
    waiting = [sampler]
    while waiting:
        for value in getattr(waiting.pop(), "__dict__", {}).values():
            if isinstance(value, Dataset):
                yield value
            elif isinstance(value, Sampler):
                waiting.append(value)


def _most_of(sampler: Any, dataset: Any) -> int:
    said = len(sampler) if hasattr(sampler, "__len__") else 0
    if not hasattr(dataset, "__len__"):
        return max(_MOST, said)
    return max(_LEAST, _TIMES * len(dataset), said)


def _listed(sampler: Iterable[Any], most: int) -> list[Any]:
    values = [_plain(value) for value in islice(sampler, most + 1)]
    if len(values) > most:
        raise ValueError(
            f"{type(sampler).__name__} has yielded {most} indices and does not end: an epoch has "
            "an end, so let its __iter__ end too"
        )
    return values


def _plain(value: Any) -> Any:
    """An index as int, a batch as list; what is neither stays as it is."""
    if isinstance(value, int):
        return value
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim:
        return value.tolist()
    try:
        return operator.index(value)
    except TypeError:
        return value
