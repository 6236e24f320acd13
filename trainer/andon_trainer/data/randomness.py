"""Random augmentation: the generators have a state for each position while its sample is loaded.

Theory of operation. One worker and several, with any micro-batch size and any number of loading
processes, are to see the same samples. So the generators (Python's, NumPy's and torch's for the
CPU) are seeded before each sample, by the run's seed, the epoch and the sample's place in it, and
once more before the batch is collated. Seeding all three takes 6 us.

In a loading process that is all. In the script's process the generators belong to the script, and
get their states back after each batch. Most data sets use no random numbers, and time there is
dear; so what the first batch did not use is left alone from then on, and only looked at after each
batch. If it has moved after all, it is seeded from then on, and the batch is loaded again.

A dataset may load a whole batch at once (`__getitems__`), and augment it at once. Then the numbers
depend on what else is in the batch. It shows: the generators move before the first index is taken,
or after the last one. Such a dataset is asked for one sample at a time from then on.
"""

from __future__ import annotations

import ctypes
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from andon.protocol.order import splitmix64

__all__ = ["SampleLoading", "SeededBatch", "seed_generators"]

_COLLATE = 0x636F6C6C617465
"""Collating has seeds of its own."""


class SeededBatch(list[Any]):
    """The indices of a batch. Iterating it seeds the generators before each index."""

    def __init__(self, indices: list[Any], places: list[int], epoch_seed: int) -> None:
        """`places` has a number for each index, unlike those of all others in its epoch."""
        super().__init__(indices)
        self.places = places
        self.epoch_seed = epoch_seed
        self.loading: SampleLoading | None = None
        """What loads it in this process; None: nothing is seeded yet."""

    def __iter__(self) -> Iterator[Any]:
        """The indices."""
        if self.loading is None or self.loading.seeds_none:
            return super().__iter__()
        return self._seeded(self.loading)

    def _seeded(self, loading: SampleLoading) -> Iterator[Any]:
        loading.asking_begins()
        for index, place in zip(super().__iter__(), self.places, strict=True):
            loading.next_sample(splitmix64(self.epoch_seed ^ place))
            yield index
        loading.all_asked_for()

    @property
    def collate_seed(self) -> int:
        """The seed for collating: that of the first sample, and not the same."""
        return splitmix64(self.epoch_seed ^ self.places[0] ^ _COLLATE)


@dataclass(frozen=True, slots=True)
class _Generator:
    """One of the process's generators."""

    seed: Callable[[int], Any]
    look: Callable[[], Any]
    """Its state, in a form that is quickly made and compared."""
    save: Callable[[], Any]
    restore: Callable[[Any], Any]
    """Takes what `save` or `look` gave."""


class _NumPy:
    """NumPy's generator.

    Of a normal distribution it makes two numbers at a time, and keeps the second. Asking NumPy for
    it takes 20 us, and the words of MT19937 are there at once. So it is only asked for where there
    can be one.
    """

    WORDS = 624 * 4 + 4
    """Bytes of the state of MT19937: 624 words, and the place among them."""

    def __init__(self) -> None:
        self._single = b""
        """Words beside which no second number is kept."""

    def seed(self, seed: int) -> None:
        np.random.seed(seed & 0xFFFFFFFF)

    def look(self) -> bytes | tuple[bytes, float | None]:
        """The words, and the second number if there is one; another generator's state, pickled."""
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]  # not in its stubs
        if not isinstance(bits, np.random.MT19937):
            return pickle.dumps(self.save())
        words = ctypes.string_at(bits.ctypes.state_address, self.WORDS)
        if words != self._single:
            state: Any = np.random.get_state()
            if state[3]:
                return words, state[4]
            self._single = words
        return words, None

    def save(self) -> Any:
        return np.random.get_state(legacy=False)

    def restore(self, state: Any) -> None:
        # The words may be those of before, now with a second number.
        self._single = b""
        if isinstance(state, bytes):
            state = pickle.loads(state)
        elif isinstance(state, tuple):
            words, second = np.frombuffer(state[0], np.uint32), state[1]
            state = ("MT19937", words[:-1], int(words[-1]), second is not None, second or 0.0)
        np.random.set_state(state)


def _look_at_torch() -> bytes:
    return torch.default_generator.get_state().numpy().tobytes()


def _restore_torch(state: bytes) -> None:
    torch.default_generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


_NUMPY = _NumPy()

_GENERATORS = {
    "python": _Generator(random.seed, random.getstate, random.getstate, random.setstate),
    "numpy": _Generator(_NUMPY.seed, _NUMPY.look, _NUMPY.save, _NUMPY.restore),
    "torch": _Generator(
        # Not torch.manual_seed, which also prepares the accelerators: a forked child must not touch
        # them.
        torch.default_generator.manual_seed,
        _look_at_torch,
        _look_at_torch,
        _restore_torch,
    ),
}


def seed_generators(seed: int) -> None:
    """Seeds the CPU generators of Python, NumPy and torch."""
    for generator in _GENERATORS.values():
        generator.seed(seed)


class SampleLoading:
    """Loads batches of one dataset in this process, each sample under its position's state."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any] | None = None) -> None:
        """In a loading process `collate` is called elsewhere, after `finished`."""
        self._dataset = dataset
        self._collate = collate
        self._used = set(_GENERATORS)
        """Generators that are seeded."""
        self._unused: dict[str, Any] = {}
        """Of the first batch: the generators that nothing has used yet, as they were seeded."""
        self._learned = False
        """Whether `_used` has only those that are used."""
        self._fetch: Callable[[Any], Any] | None = getattr(dataset, "__getitems__", None)
        """Loads a whole batch; None: the dataset can't."""
        self._one_by_one = False
        """Whether it may be asked for batches of one only."""
        self._asked: dict[str, Any] = {}
        """The states while no index was asked for, of a batch that is loaded at once."""
        self._mixed = False
        """Whether numbers of that batch were used between two samples, for both of them."""

    @property
    def seeds_none(self) -> bool:
        """Whether nothing is known to use random numbers, so that no sample needs a state."""
        return self._learned and not self._used

    # ------------------------------------------------------------------ in the script's process

    def load(self, batch: SeededBatch) -> Any:
        """A batch, collated; the script's generators keep their states."""
        seeded = {name: _GENERATORS[name].save() for name in self._used}
        others = {name: each.look() for name, each in _GENERATORS.items() if name not in seeded}
        untouched = False
        try:
            loaded = self._loaded(batch)
            surprises = _moved(others)
            untouched = not surprises
            if surprises:
                self._used |= surprises
                loaded = self._loaded(batch)
        finally:
            for name, state in seeded.items():
                _GENERATORS[name].restore(state)
            for name in () if untouched else _moved(others):
                _GENERATORS[name].restore(others[name])
        return loaded

    def _loaded(self, batch: SeededBatch) -> Any:
        assert self._collate is not None
        self.begin(batch)
        if self._fetch is None:
            samples: Any = [self._dataset[index] for index in batch]
        else:
            samples = self._singly(batch) if self._one_by_one else self._fetch(batch)
        loaded = self._collate(self.finished(batch, samples))
        if not self._learned:
            self._look_for_use()
            self._used -= self._unused.keys()
            self._unused = {}
            self._learned = True
        return loaded

    # ------------------------------------------------------------------ anywhere

    def begin(self, batch: SeededBatch) -> None:
        """A batch is about to be loaded."""
        batch.loading = self
        if not self._learned and self._collate is not None:
            self._unused = {name: each.look() for name, each in _GENERATORS.items()}
        if self._fetch is not None:
            self._mixed = False
            self._seed(batch.collate_seed)
            self.all_asked_for()

    def asking_begins(self) -> None:
        """The first index of a batch is about to be taken, maybe again."""
        self._mixed |= bool(_moved(self._asked))

    def next_sample(self, seed: int) -> None:
        """The next sample is about to be loaded."""
        self._look_for_use()
        self._seed(seed)

    def all_asked_for(self) -> None:
        """The last index of a batch was taken."""
        self._look_for_use()
        if self._fetch is not None:
            self._asked = {name: _GENERATORS[name].look() for name in self._used}

    def finished(self, batch: SeededBatch, samples: Any) -> Any:
        """The samples of a batch that were loaded under the states of their positions.

        The generators have the state for collating them.
        """
        if self._mixed or _moved(self._asked):
            self._one_by_one = True
            if self._collate is None and hasattr(self._dataset, "__dict__"):
                # This loading process has a dataset of its own, and torch asks it for batches.
                vars(self._dataset)["__getitems__"] = self._singly
            samples = self._singly(batch)
        self._look_for_use()
        self._seed(batch.collate_seed)
        return samples

    def _singly(self, batch: Any) -> list[Any]:
        assert self._fetch is not None
        return [sample for index in batch for sample in self._fetch([index])]

    def _seed(self, seed: int) -> None:
        for name in self._used:
            _GENERATORS[name].seed(seed)
        for name in self._unused:
            self._unused[name] = _GENERATORS[name].look()

    def _look_for_use(self) -> None:
        """Of the first batch: forgets what has moved since it was seeded."""
        for name in _moved(self._unused):
            del self._unused[name]


def _moved(states: dict[str, Any]) -> set[str]:
    """The generators whose states are not these."""
    return {name for name, state in states.items() if _GENERATORS[name].look() != state}
