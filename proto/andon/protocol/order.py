"""The order: which sample is at a position of an epoch, the same in every language.

Theory of operation: a keyed permutation of 0 .. size - 1 that needs no memory. A position is a
number of 2 w bits, the fewest that hold every position. It goes through an eight-round Feistel
network whose round function is splitmix64. A result beyond the size goes through it again (cycle
walking), which keeps the map one to one. The specification is "The order" in docs/protocol-data.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["Order", "mixed", "splitmix64"]

_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_U64 = 2**64 - 1
_ROUNDS = 8


def splitmix64(state: int) -> int:
    """The first output of the generator splitmix64 (Steele, Lea, Flood 2014) at `state`."""
    z = (state + _GAMMA) & _U64
    z = ((z ^ (z >> 30)) * _FIRST) & _U64
    z = ((z ^ (z >> 27)) * _SECOND) & _U64
    return z ^ (z >> 31)


def mixed(seed: int, *numbers: int) -> int:
    """64 bits drawn by a seed and numbers in order, such as that of an epoch."""
    state = splitmix64(seed)
    for each in numbers:
        state = splitmix64(state + each)
    return state


def _splitmix64_of_each(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    # Products and sums of unsigned arrays wrap modulo 2**64, as the definition wants.
    z = state + np.uint64(_GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    return z ^ (z >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Order:
    """A permutation of the samples 0 .. `size` - 1, drawn by `seed` and `epoch`."""

    seed: int
    epoch: int
    size: int
    _keys: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _half: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuses numbers that the wire can't hold, and derives the round keys."""
        if not (0 <= self.seed <= _U64 and 0 <= self.epoch <= _U64):
            raise ValueError(
                f"seed and epoch are unsigned 64-bit numbers, not {self.seed} and {self.epoch}"
            )
        if not 1 <= self.size <= 2**63:
            raise ValueError(f"an order has from 1 to 2**63 samples, not {self.size}")
        key = mixed(self.seed, self.epoch)
        keys = tuple(splitmix64((key + turn * _GAMMA) & _U64) for turn in range(_ROUNDS))
        object.__setattr__(self, "_keys", keys)
        object.__setattr__(self, "_half", max(1, ((self.size - 1).bit_length() + 1) // 2))

    def __len__(self) -> int:
        """How many samples there are."""
        return self.size

    def __iter__(self) -> Iterator[int]:
        """The samples, in order."""
        return (self[position] for position in range(self.size))

    def __getitem__(self, position: int) -> int:
        """The sample at `position`, from 0; IndexError beyond the last."""
        if not 0 <= position < self.size:
            raise IndexError(f"position {position} is not in an epoch of {self.size}")
        half, mask = self._half, (1 << self._half) - 1
        sample = position
        # Cycle walking ends: iterating a permutation comes back to the position, which is within
        # the size. It takes about four turns at most on average.
        while True:
            left, right = sample >> half, sample & mask
            for key in self._keys:
                left, right = right, left ^ (splitmix64(right ^ key) & mask)
            sample = left << half | right
            if sample < self.size:
                return sample

    def indices(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The samples at positions `start` up to, not including, `stop`; shape (stop - start,).

        Raises:
            IndexError: not a range of positions of the epoch.
        """
        if not 0 <= start <= stop <= self.size:
            raise IndexError(f"[{start}, {stop}) is not within an epoch of {self.size}")
        samples = self._permuted(np.arange(start, stop, dtype=np.uint64))
        beyond = np.flatnonzero(samples >= np.uint64(self.size))
        while beyond.size:
            samples[beyond] = self._permuted(samples[beyond])
            beyond = beyond[samples[beyond] >= np.uint64(self.size)]
        return samples.astype(np.int64)

    def _permuted(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        half, mask = np.uint64(self._half), np.uint64((1 << self._half) - 1)
        left, right = numbers >> half, numbers & mask
        for key in self._keys:
            left, right = right, left ^ (_splitmix64_of_each(right ^ np.uint64(key)) & mask)
        return left << half | right
