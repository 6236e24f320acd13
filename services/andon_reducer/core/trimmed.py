"""The trimmed mean of one chunk: of each element the lowest and highest contributions are left out.

Theory of operation. A contribution's *place* in an element is how many others come before it, by
value and then by rank: pairs of vectors are compared, and of each pair one gains a place. Of n
contributions with `cut` to leave out at each end, those with a place from `cut` up to n - cut are
kept. They are added in rank order in float64, and so are their shares of all weights; the quotient
is rounded to float32 once. With shares that are all equal it has one divisor for all elements.

It takes n * (n - 1) / 2 comparisons an element. Sorting would take fewer from some dozens of
contributions on, and is slower below: here each comparison is of whole vectors in the cache.

A contribution that is left out must be finite all the same, so all are looked at here.

Where the C module `andon.protocol._fused` was built, it does all this to a tile in one go, to the
same bits: `_trimmed.h` and this file must be changed together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from andon.protocol.encoding import fused
from andon.protocol.run_settings import cut_at_each_end
from andon.protocol.sums import sum_in_order

__all__ = ["LEAST_SHARE", "adds_trimmed"]

Floats = npt.NDArray[np.float32]

LEAST_SHARE = 2.0**-512
"""The least share of all weights with which products and sums of float64 keep all digits."""

_NOTHING = np.float32(-0.0)
"""Added to a number it changes nothing, the sign of a zero included."""

_TILE_ELEMENTS = 2**14
"""So many elements of a few contributions fit a core's cache, with what is computed of them."""


def adds_trimmed(
    shares: Sequence[float], read: Callable[[int, int, Floats], None]
) -> Callable[[int, Floats], None]:
    """A function that makes elements of the trimmed mean: from a first one on, into a vector.

    Where a contribution is not finite, all elements of the same tile become NaN.

    Args:
        shares: each contribution's part of all weights, in rank order: five or more, none below
            LEAST_SHARE.
        read: copies a contribution's elements from a first one on, as many as a vector has, there.
    """
    tiles = _Tiles(shares)

    def add_up(start: int, acc: Floats) -> None:
        for at in range(0, acc.size, _TILE_ELEMENTS):
            part = acc[at : at + _TILE_ELEMENTS]
            values = tiles.values[:, : part.size]
            for number in range(len(shares)):
                read(number, start + at, values[number])
            if not tiles.mean_into(part):
                part.fill(np.nan)

    return add_up


class _Tiles:
    """Memory for the elements of one tile, and what is computed of them. Used by one thread."""

    def __init__(self, shares: Sequence[float]) -> None:
        count = len(shares)
        self._shares = tuple(shares)
        self._cut = cut_at_each_end(count)
        self._kept = count - 2 * self._cut
        self.values = np.empty((count, _TILE_ELEMENTS), np.float32)
        """The contributions' elements, in rank order."""
        self._places = np.empty((count, _TILE_ELEMENTS), np.min_scalar_type(count))
        self._flags = np.empty((count, _TILE_ELEMENTS), np.bool_)
        self._floats = np.empty((3, _TILE_ELEMENTS), np.float64)

    def mean_into(self, out: Floats) -> bool:
        """Makes as many elements of the mean as `out` has; False: not all numbers are finite."""
        if fused is not None:
            return bool(fused.trimmed_mean(out, self.values, self._shares, self._cut))
        size = out.size
        values = self.values[:, :size]
        # A sum of finite numbers may overflow, so only the second look is certain.
        if not math.isfinite(np.einsum("ij->", values)) and not np.isfinite(values).all():
            return False
        is_kept = self._look(size)
        total, term, weight = self._floats[:, :size]
        total.fill(_NOTHING)
        for values, kept, share in zip(self.values[:, :size], is_kept, self._shares, strict=True):
            np.multiply(np.where(kept, values, _NOTHING), share, out=term, dtype=np.float64)
            np.add(total, term, out=total)
        if len({*self._shares}) == 1:
            np.divide(total, sum_in_order([self._shares[0]] * self._kept), out=total)
        else:
            weight.fill(0.0)
            for kept, share in zip(is_kept, self._shares, strict=True):
                np.multiply(kept, share, out=term, dtype=np.float64)
                np.add(weight, term, out=weight)
            np.divide(total, weight, out=total)
        out[:] = total
        return True

    def _look(self, size: int) -> npt.NDArray[np.bool_]:
        """Which contributions to which elements are kept."""
        values, places = self.values[:, :size], self._places[:, :size]
        places.fill(0)
        last = len(values) - 1
        for lower in range(last):
            # Equal numbers, as also zeros of both signs are, have the order of their ranks.
            flags = self._flags[: last - lower, :size]
            np.less_equal(values[lower], values[lower + 1 :], out=flags)
            np.add(places[lower + 1 :], flags.view(np.uint8), out=places[lower + 1 :])
            places[lower] += last - lower
            places[lower] -= np.add.reduce(flags.view(np.uint8), axis=0, dtype=places.dtype)
        # Places below the cut wrap around to great ones.
        np.subtract(places, self._cut, out=places)
        return np.less(places, self._kept, out=self._flags[:, :size])
