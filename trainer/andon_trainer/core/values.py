"""The worker's end of the value gate (F-DP-003): no NaN and no infinity is sent or averaged.

Theory of operation. Looking at every element is expensive, and almost always for nothing. So each
check sums a tile that is still in the processor's cache: a NaN or an infinity makes the sum not
finite. A sum of finite values may overflow too, so a bad sum is only an alarm. Then, and only then,
the tile is searched element by element.

`add_product` is one rank's part in a ring's mean. It computes what the reducer computes
(docs/protocol.md, section 5), in another order of ranks: c_r = float32(w_r / W), and each product
and each sum is rounded to float32. The first rank of a segment sends its contribution as it is; the
second rank multiplies both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from andon.protocol.encoding import Encoding, EncodingOverflow, decode, encodable, encode
from andon.protocol.halts import describe_value
from andon.protocol.records import Key
from andon_trainer.core.calls import Floats
from andon_trainer.core.events import ExchangeFailed

__all__ = [
    "BadValue",
    "NotFinite",
    "add_product",
    "bad_value_of",
    "first_not_finite",
    "is_finite",
    "rounded",
]

_TILE = 2**16


@dataclass(frozen=True, slots=True)
class BadValue:
    """The first element of a vector that must not be sent; `kind` is a name of FaultKind."""

    kind: str
    element: int
    value: str

    def failure(self, key: Key, rank: int, block: int) -> ExchangeFailed:
        """What a rank reports in the place of the block that holds the value."""
        return ExchangeFailed(
            key=key,
            kind=self.kind,
            message="",
            rank=rank,
            block=block,
            element=self.element,
            value=self.value,
        )


@dataclass(frozen=True, slots=True)
class NotFinite:
    """The first element of a sum that is not finite; `came`: it already was when it arrived."""

    element: int
    value: float
    came: bool


def bad_value_of(flat: Floats, encoding: Encoding) -> BadValue | None:
    """Finds the first value of `flat`, shape (n,), that must not be sent; None if there is none."""
    if encodable(flat, encoding):
        return None
    # A NaN anywhere is reported before an overflow: it is the root of the trouble more often.
    wrong = np.flatnonzero(~np.isfinite(flat))
    if wrong.size:
        element = int(wrong[0])
        return BadValue("NON_FINITE_GRADIENT", element, describe_value(float(flat[element])))
    try:
        encode(flat, encoding)
    except EncodingOverflow as overflow:
        return BadValue("ENCODING_OVERFLOW", overflow.element, describe_value(overflow.value))
    return None  # a false alarm: the values are finite and only their sum was not


def rounded(flat: Floats, encoding: Encoding) -> Floats:
    """Returns the numbers as the other ranks decode them; `flat` itself for FLOAT32.

    Raises:
        EncodingOverflow: a finite value is not finite once encoded.
    """
    return flat if encoding is Encoding.FLOAT32 else decode(encode(flat, encoding), encoding)


def add_product(
    came: Floats, came_share: float | None, own: Floats, share: float, out: Floats
) -> NotFinite | None:
    """Adds this rank's product to what came; returns the first element that is not finite.

    Args:
        came: a partial sum, or the first contribution if `came_share` is set.
        came_share: the share of that contribution, in float64.
        own: this rank's contribution, finite.
        share: this rank's share, in float64.
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
                found = _search(came[start:stop], acc, start)
                if found is not None:
                    return found
    return None


def is_finite(tile: Floats) -> bool:
    """Whether all elements are certainly finite; False may be a false alarm."""
    with np.errstate(all="ignore"):
        return math.isfinite(np.einsum("i->", tile))


def first_not_finite(flat: Floats) -> tuple[int, float] | None:
    """Returns the index and value of the first element that is not finite; None: all are."""
    if is_finite(flat):
        return None
    wrong = np.flatnonzero(~np.isfinite(flat))
    return (int(wrong[0]), float(flat[wrong[0]])) if wrong.size else None


def _search(came: Floats, acc: Floats, start: int) -> NotFinite | None:
    """Finds the first bad element of a tile; None if the alarm was false."""
    # What came is looked at first: a NaN in it is in the sum too, and its sender must be named.
    for numbers, was in ((came, True), (acc, False)):
        wrong = np.flatnonzero(~np.isfinite(numbers))
        if wrong.size:
            return NotFinite(start + int(wrong[0]), float(numbers[wrong[0]]), was)
    return None
