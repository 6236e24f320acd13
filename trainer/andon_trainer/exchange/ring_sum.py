"""Sums of the ring: one rank's product added to what came, checked while it is in cache.

Theory of operation. The mean is the reducer's (docs/protocol.md, section 5), in another order of
ranks: c_r = float32(w_r / W), each product and each sum rounded to float32. The first contribution
on a segment's way travels as it is, so that its product is made by the second rank. One sum a tile
tells whether all its elements are finite; only if it is not, the tile is looked at one by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from andon.protocol.encoding import Encoding, decode, encode
from andon_trainer.exchange.path import Floats

__all__ = ["NotFinite", "add_product", "first_not_finite", "is_finite", "rounded"]

_TILE = 2**16


@dataclass(frozen=True, slots=True)
class NotFinite:
    """The first element of a sum that is not finite; `came` if it was so when it came."""

    element: int
    value: float
    came: bool


def rounded(flat: Floats, encoding: Encoding) -> Floats:
    """What others see of numbers that travel in an encoding; `flat` itself for FLOAT32.

    Raises:
        EncodingOverflow: a finite value is not finite once encoded.
    """
    return flat if encoding is Encoding.FLOAT32 else decode(encode(flat, encoding), encoding)


def add_product(
    came: Floats, came_share: float | None, own: Floats, share: float, out: Floats
) -> NotFinite | None:
    """Writes the sum of what came and this rank's product; the first element that is not finite.

    Args:
        came: a partial sum; a contribution if it has a share.
        came_share: of the contribution, in float64.
        own: this rank's contribution, finite.
        share: of this rank, in float64.
        out: where the sum goes; neither `came` nor `own`.
    """
    factor, own_factor = np.float32(came_share or 0.0), np.float32(share)
    product = np.empty(min(_TILE, out.size), dtype=np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, out.size, _TILE):
            stop = min(start + _TILE, out.size)
            acc, term = out[start:stop], product[: stop - start]
            np.multiply(own[start:stop], own_factor, out=term)
            if came_share is None:
                np.add(came[start:stop], term, out=acc)
            else:
                np.multiply(came[start:stop], factor, out=acc)
                np.add(acc, term, out=acc)
            if not is_finite(acc):
                found = _look(came[start:stop], acc, start)
                if found is not None:
                    return found
    return None


def is_finite(tile: Floats) -> bool:
    """Whether all elements are surely finite; False may be a false alarm."""
    with np.errstate(all="ignore"):
        return math.isfinite(np.einsum("i->", tile))


def first_not_finite(flat: Floats) -> tuple[int, float] | None:
    """The first element that is not finite, and its value; looks at all only if it must."""
    if is_finite(flat):
        return None
    wrong = np.flatnonzero(~np.isfinite(flat))
    return (int(wrong[0]), float(flat[wrong[0]])) if wrong.size else None


def _look(came: Floats, acc: Floats, start: int) -> NotFinite | None:
    """The first defect of a tile; None if the alarm was false."""
    for numbers, was in ((came, True), (acc, False)):
        wrong = np.flatnonzero(~np.isfinite(numbers))
        if wrong.size:
            return NotFinite(start + int(wrong[0]), float(numbers[wrong[0]]), was)
    return None
