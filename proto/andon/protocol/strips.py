"""Small integers with a scale for each strip of elements: 8, 4 and 2 bits, with NumPy.

Theory of operation. A *strip* is a stretch of elements that share one float32 scale. (Others call
it a block, but here a block is a part of a model.) The last strip of a payload may be shorter. A
payload is all scales, then all codes. In 8 and 4 bits the greatest magnitude of a strip gets the
greatest code, so each element is wrong by half a scale at most. A scale has so few digits that a
product with a code is exact: what was decoded is encoded to the same bytes again.

In 2 bits the codes are -1, 0 and 1, and the scale is three quarters of the greatest magnitude: the
elements that get a 1 lie between a half of the scale and four thirds of it. With the greatest
magnitude itself as the scale, nearly all of them would be sent too large. What was decoded has
another scale, so 2 bits are for contributions, which are encoded once.

The lowest code, -128, -8 or -2, is no multiple of the scale. It stands for -0.0, which says that a
parameter has no gradient, so it must survive. In a strip with values that are not finite the scale
is NaN, the lowest code marks these values, and 1 marks all others. So a reader knows which.

Section 6 of docs/protocol-data.md defines the results to the bit, and `_strips.h` computes them in
one pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["GREATEST_SCALED", "INT2", "INT4", "INT8", "StripFormat", "dequantise", "quantise"]

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int8]
Bytes = npt.NDArray[np.uint8]

GREATEST_SCALED = np.float32(2.0**120)
"""The greatest magnitude that is encoded: far enough below float32's end that no code overflows."""

_SCALE_BYTES = 4
_LEAST_SCALE = np.float32(2.0**-126)
"""A smaller scale is subnormal and would lose digits: the strip is zeros then."""
_NOT_A_SCALE = np.uint32(0x7F800000)
"""As bits, everything from here on is infinite, NaN or negative: none of them is a scale."""
_MINUS_ZERO = np.uint32(0x80000000)
_WAS_FINITE = 1
"""The code of a finite value beside one that is not finite."""
_PART_OF_THE_GREATEST = np.float32(0.75)
"""Of 2 bits: the scale, as a part of a strip's greatest magnitude."""
_TILE_ELEMENTS = 2**16
"""Elements that are done at a time, so that several passes find them in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StripFormat:
    """How many bits a code has, and how many elements share a scale."""

    bits: int
    """8, 4 or 2."""
    elements: int
    """Elements of a strip; a multiple of four that divides a tile."""

    @property
    def greatest(self) -> int:
        """The greatest code; the least code of a multiple of the scale is its opposite."""
        return (1 << (self.bits - 1)) - 1

    @property
    def lowest(self) -> int:
        """The code that is no multiple of the scale."""
        return -self.greatest - 1

    def scale_bytes(self, count: int) -> int:
        """The length of the scales of `count` elements, with which their payload begins."""
        return _SCALE_BYTES * -(-count // self.elements)

    def payload_bytes(self, count: int) -> int:
        """The length of the payload of `count` elements."""
        return self.scale_bytes(count) + -(-count * self.bits // 8)


INT8 = StripFormat(bits=8, elements=128)
INT4 = StripFormat(bits=4, elements=32)
INT2 = StripFormat(bits=2, elements=64)


def quantise(values: Floats, form: StripFormat, out: Bytes, residual: Floats | None) -> None:
    """Encodes contiguous float32 `values`, shape (n,), to the bytes `out`.

    No finite value is beyond GREATEST_SCALED. `residual`, contiguous and of the same shape, gets
    what the encoding lost: float32(values - decoded). It shares no memory with `values`.
    """
    scales, codes = _scales_of(out, form, values.size), np.empty(values.size, np.int8)
    with np.errstate(all="ignore"):
        for tile in _tiles(values.size, form):
            rows = values[tile.start : tile.stop].reshape(tile.shape)
            marks = codes[tile.start : tile.stop].reshape(tile.shape)
            scale = scales[tile.strip : tile.strip + tile.shape[0]]
            _encode_rows(rows, form, scale, marks)
            if residual is not None:
                lost = residual[tile.start : tile.stop].reshape(tile.shape)
                _decode_rows(marks, scale, form, lost)
                np.subtract(rows, lost, out=lost)
    _pack(codes, form, out[scales.nbytes :])


def dequantise(payload: Bytes, form: StripFormat, count: int, start: int, out: Floats) -> None:
    """Decodes elements of a payload of `count` elements to `out`, contiguous float32.

    `start` is the first of them, and begins a strip; `out` says how many there are.
    """
    scales = _scales_of(payload, form, count)[start // form.elements :]
    first, last = start * form.bits // 8, -(-(start + out.size) * form.bits // 8)
    packed = payload[form.scale_bytes(count) :][first:last]
    with np.errstate(all="ignore"):
        for tile in _tiles(out.size, form):
            bytes_ = slice(tile.start * form.bits // 8, -(-tile.stop * form.bits // 8))
            codes = _unpacked(packed[bytes_], form, tile.stop - tile.start).reshape(tile.shape)
            scale = scales[tile.strip : tile.strip + tile.shape[0]]
            _decode_rows(codes, scale, form, out[tile.start : tile.stop].reshape(tile.shape))


@dataclass(frozen=True, slots=True)
class _Tile:
    """Elements `start` to `stop`, which are `shape[0]` strips of `shape[1]` elements."""

    start: int
    stop: int
    strip: int
    shape: tuple[int, int]


def _tiles(count: int, form: StripFormat) -> Iterator[_Tile]:
    """Tiles of whole strips, and the last strip by itself if it is shorter."""
    whole = count - count % form.elements
    for start in range(0, whole, _TILE_ELEMENTS):
        stop = min(start + _TILE_ELEMENTS, whole)
        rows = (stop - start) // form.elements
        yield _Tile(start, stop, start // form.elements, (rows, form.elements))
    if whole < count:
        yield _Tile(whole, count, whole // form.elements, (1, count - whole))


def _scales_of(payload: Bytes, form: StripFormat, count: int) -> Floats:
    """The scales of a payload, as a view."""
    return payload[: form.scale_bytes(count)].view("<f4")


def _encode_rows(rows: Floats, form: StripFormat, scale: Floats, codes: Codes) -> None:
    finite = np.isfinite(rows)
    known = rows if finite.all() else np.where(finite, rows, np.float32(0))
    most = np.abs(known).max(axis=1)
    if form.bits == 2:
        np.multiply(most, _PART_OF_THE_GREATEST, out=scale)
    else:
        np.divide(most, np.float32(form.greatest), out=scale)
    scale[scale < _LEAST_SCALE] = 0
    # To 16 significant bits, ties to even: so a product with a code is exact.
    bits = scale.view(np.uint32)
    bits += np.uint32(0x7F) + ((bits >> np.uint32(8)) & np.uint32(1))
    bits &= np.uint32(0xFFFFFF00)
    factor = np.zeros_like(scale)
    np.divide(np.float32(1), scale, out=factor, where=scale > 0)
    # rint rounds to nearest, ties to even. No product is beyond the greatest code by a half.
    np.copyto(codes, np.rint(known * factor[:, None]), casting="unsafe")
    codes[rows.view(np.uint32) == _MINUS_ZERO] = form.lowest
    if known is not rows:
        spoiled = ~finite.all(axis=1)
        scale[spoiled] = np.nan
        codes[spoiled] = np.where(finite[spoiled], _WAS_FINITE, form.lowest)


def _decode_rows(codes: Codes, scale: Floats, form: StripFormat, out: Floats) -> None:
    np.multiply(codes, scale[:, None], out=out, dtype=np.float32)
    out.view(np.uint32)[codes == form.lowest] = _MINUS_ZERO
    spoiled = scale.view(np.uint32) >= _NOT_A_SCALE
    if spoiled.any():
        numbers = np.where(codes[spoiled] == _WAS_FINITE, np.float32(0), np.float32(np.nan))
        out[spoiled] = numbers


def _pack(codes: Codes, form: StripFormat, out: Bytes) -> None:
    if form.bits == 8:
        out[:] = codes.view(np.uint8)
        return
    # Several elements a byte, the first one in its lowest bits; what is left over at the end is 0.
    each, mask = 8 // form.bits, np.uint8((1 << form.bits) - 1)
    np.bitwise_and(codes[0::each].view(np.uint8), mask, out=out)
    for at in range(1, each):
        higher = (codes[at::each].view(np.uint8) & mask) << np.uint8(at * form.bits)
        out[: higher.size] |= higher


def _unpacked(packed: Bytes, form: StripFormat, count: int) -> npt.NDArray[Any]:
    if form.bits == 8:
        return packed.view(np.int8)
    each = 8 // form.bits
    codes = np.empty(each * packed.size, np.int8)
    for at in range(each):
        # To the top of a byte, and back: shifting to the right keeps the sign.
        top = packed << np.uint8(8 - (at + 1) * form.bits)
        np.right_shift(top.view(np.int8), np.int8(8 - form.bits), out=codes[at::each])
    return codes[:count]
