"""The worker's end of the value gate (F-DP-003): no NaN and no infinity is sent or averaged.

Theory of operation. Looking at every element is expensive, and almost always for nothing. So each
check sums a tile that is still in the processor's cache: a NaN or an infinity makes the sum not
finite. A sum of finite values may overflow too, so a bad sum is only an alarm. Then, and only then,
the tile is searched element by element.

`add_product` is one rank's part in a ring's mean. It computes what the reducer computes
(docs/protocol-data.md, section 5), in another order of ranks: c_r = float32(w_r / W), and each
product and each sum is rounded to float32. The first rank of a segment sends its
contribution as it is; the second rank multiplies both.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

import numpy as np

from andon.protocol.encoding import Encoding, EncodingOverflow, decode, encodable, encode, fused
from andon.protocol.halts import describe_value
from andon.protocol.records import Key
from andon_trainer.core.calls import Floats
from andon_trainer.core.events import ExchangeFailed

__all__ = [
    "BadValue",
    "NotFinite",
    "Source",
    "add_product",
    "bad_value_of",
    "encode_own",
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


class Source(enum.Enum):
    """Which number made a sum not finite."""

    CAME = "came"
    """What arrived."""
    OWN = "own"
    """This rank's own."""
    SUM = "sum"
    """Neither: the sum of both is beyond float32."""


@dataclass(frozen=True, slots=True)
class NotFinite:
    """The first element of a sum that is not finite."""

    element: int
    value: float
    source: Source

    def moved(self, offset: int) -> NotFinite:
        """The same, counted from `offset` elements before."""
        return replace(self, element=self.element + offset)


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


def encode_own(
    numbers: Floats, encoding: Encoding, *, keeps_loss: bool, kept: int | None = None
) -> memoryview:
    """This rank's numbers as bytes.

    Args:
        numbers: shape (n,); with `keeps_loss` each becomes what the encoding lost of it.
        encoding: how they travel.
        keeps_loss: whether the caller sends the loss with its next numbers (error feedback).
        kept: of TOPK, how many elements of a stretch are listed; None: all.

    Raises:
        EncodingOverflow: a finite value is not finite once encoded; `numbers` is as it was.
    """
    if not keeps_loss:
        return encode(numbers, encoding, kept=kept)
    lost = np.empty_like(numbers)
    payload = encode(numbers, encoding, lost, kept=kept)
    # Only now: after an overflow the search for the bad value needs the numbers as they were.
    np.copyto(numbers, lost)
    return payload


def rounded(flat: Floats, encoding: Encoding, *, keeps_loss: bool = False) -> Floats:
    """Returns the numbers as the other ranks decode them; `flat` itself for FLOAT32.

    `keeps_loss` is as for `encode_own`.

    Raises:
        EncodingOverflow: a finite value is not finite once encoded.
    """
    if encoding is Encoding.FLOAT32:
        return flat
    return decode(encode_own(flat, encoding, keeps_loss=keeps_loss), encoding, flat.size)


def add_product(
    came: Floats, came_share: float | None, own: Floats, share: float, out: Floats
) -> NotFinite | None:
    """Adds this rank's product to what came; returns the first element that is not finite.

    Args:
        came: a partial sum, or the first contribution if `came_share` is set.
        came_share: the share of that contribution, in float64.
        own: this rank's contribution.
        share: this rank's share, in float64.
        out: where the sum goes; neither `came` nor `own`.
    """
    # A sum of products is multiplied by 1, which changes no bit of it.
    factors = (
        float(np.float32(1.0 if came_share is None else came_share)),
        float(np.float32(share)),
    )
    for start in range(0, out.size, _TILE):
        tile = slice(start, min(start + _TILE, out.size))
        if not _sum_of_products(out[tile], (came[tile], own[tile]), factors):
            found = _search(came[tile], own[tile], out[tile])
            if found is not None:
                return found.moved(start)
    return None


def _sum_of_products(
    out: Floats, vectors: tuple[Floats, Floats], factors: tuple[float, float]
) -> bool:
    """Writes the sum of both products; False if it may not be finite."""
    if fused is not None:
        data = tuple(each.view(np.uint8).data for each in vectors)
        past_caches = False  # It is sent on soon.
        return bool(fused.weighted_mean(out.view(np.uint8).data, data, factors, past_caches))
    with np.errstate(all="ignore"):
        np.multiply(vectors[0], np.float32(factors[0]), out=out)
        np.add(out, vectors[1] * np.float32(factors[1]), out=out)
    return is_finite(out)


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


def _search(came: Floats, own: Floats, acc: Floats) -> NotFinite | None:
    """Finds the first bad element of a tile; None if the alarm was false."""
    # What came is looked at first: a NaN in it is in the sum too, and its sender must be named.
    for numbers, source in ((came, Source.CAME), (own, Source.OWN), (acc, Source.SUM)):
        wrong = np.flatnonzero(~np.isfinite(numbers))
        if wrong.size:
            return NotFinite(int(wrong[0]), float(numbers[wrong[0]]), source)
    return None
