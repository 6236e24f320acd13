"""Encodings: numbers to little-endian bytes and back, rounded to nearest even."""

from __future__ import annotations

import enum
import math
import sys
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Encoding", "EncodingOverflow", "decode", "decode_into", "encodable", "encode", "fused"]

Floats = npt.NDArray[np.float32]

fused: ModuleType | None
"""The compiled passes of `_fused.c`; None if Andon was installed without a C compiler."""

try:
    from andon.protocol import _fused
except ImportError:
    fused = None
else:
    # It reads numbers in this processor's byte order, and those of the wire are little-endian.
    fused = _fused if sys.byteorder == "little" else None


class Encoding(enum.Enum):
    """How numbers travel; values are those of `andon.v1.Encoding`."""

    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    FLOAT64 = 4
    INT32 = 5
    INT64 = 6
    UINT8 = 7

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return _DTYPES[self].itemsize

    @property
    def wire_dtype(self) -> np.dtype[Any]:
        """The numpy type of the bytes; bfloat16, which numpy lacks, is unsigned 16 bits."""
        return _DTYPES[self]


_DTYPES: dict[Encoding, np.dtype[Any]] = {
    Encoding.FLOAT32: np.dtype("<f4"),
    Encoding.FLOAT16: np.dtype("<f2"),
    Encoding.BFLOAT16: np.dtype("<u2"),
    Encoding.FLOAT64: np.dtype("<f8"),
    Encoding.INT32: np.dtype("<i4"),
    Encoding.INT64: np.dtype("<i8"),
    Encoding.UINT8: np.dtype("u1"),
}


class EncodingOverflow(ValueError):
    """A finite value does not fit the encoding: `element` is its index, `value` the value."""

    def __init__(self, encoding: Encoding, element: int, value: float) -> None:
        """Names the element, and the remedy."""
        super().__init__(
            f"element {element} is {value:g}, beyond what {encoding.name.lower()} holds: "
            "use bfloat16 or float32, or scale the loss down"
        )
        self.encoding = encoding
        self.element = element
        self.value = value


def decode(payload: bytes | memoryview, encoding: Encoding) -> Floats:
    """The numbers of a payload as float32, shape (n,); a read-only view where that is possible.

    Raises:
        ValueError: the payload's length is not a whole number of elements, or the encoding is
            not one of floating-point numbers that float32 holds.
    """
    numbers = _numbers(payload, encoding)
    if encoding is Encoding.FLOAT32:
        return numbers
    return _widened(numbers, encoding, np.empty(numbers.size, np.float32))


def decode_into(payload: bytes | memoryview, encoding: Encoding, out: Floats) -> None:
    """Writes the numbers of a payload to `out`: contiguous float32, shape (n,).

    Raises:
        ValueError: as for `decode`, or `out` has another size.
    """
    numbers = _numbers(payload, encoding)
    if numbers.size != out.size:
        raise ValueError(f"{numbers.size} numbers do not fill {out.size} places")
    _widened(numbers, encoding, out)


def encode(values: Floats, encoding: Encoding) -> memoryview:
    """Finite float32 numbers, shape (n,), as bytes; a view of `values` for FLOAT32.

    NaN and infinities stay as they are. A caller checks for them before.

    Raises:
        EncodingOverflow: a finite value is not finite once encoded.
        ValueError: the encoding is not one of floating-point numbers that float32 fills.
    """
    if encoding is Encoding.FLOAT32:
        return _bytes_of(np.ascontiguousarray(values, dtype="<f4"))
    if encoding not in _GREATEST:
        raise ValueError(f"float32 numbers are not encoded as {encoding.name.lower()}")
    values = np.ascontiguousarray(values, dtype=np.float32)
    narrow = np.empty(values.size, dtype=encoding.wire_dtype)
    if (
        fused is not None
        and encoding is Encoding.BFLOAT16
        and fused.to_bfloat16(_bytes_of(narrow), _bytes_of(values))
    ):
        return _bytes_of(narrow)
    # The compiled pass only says that some value is illegal. These passes find which one.
    scratch = np.empty(min(_TILE_ELEMENTS, values.size), dtype=np.uint32)
    for start in range(0, values.size, _TILE_ELEMENTS):
        tile = values[start : start + _TILE_ELEMENTS]
        out = narrow[start : start + tile.size]
        if encoding is Encoding.FLOAT16:
            with np.errstate(over="ignore", under="ignore"):
                np.copyto(out, tile, casting="same_kind")
        else:
            _round_to_bfloat16(tile, out, scratch[: tile.size])
        if not _within(tile, _GREATEST[encoding]):
            _settle(tile, out, encoding, start)
    return _bytes_of(narrow)


def encodable(values: Floats, encoding: Encoding) -> bool:
    """Whether all float32 `values`, shape (n,), are finite, also once they are encoded.

    For FLOAT32, False may be a false alarm: a sum of finite numbers may overflow. For other
    encodings it is exact.

    Raises:
        ValueError: the encoding is not one of floating-point numbers that float32 fills.
    """
    greatest = _GREATEST.get(encoding)
    if greatest is None and encoding is not Encoding.FLOAT32:
        raise ValueError(f"float32 numbers are not encoded as {encoding.name.lower()}")
    with np.errstate(all="ignore"):
        for start in range(0, values.size, _TILE_ELEMENTS):
            tile = values[start : start + _TILE_ELEMENTS]
            if greatest is not None:
                if not _within(tile, greatest):
                    return False
            # A NaN or an infinity makes any sum that it is part of not finite, and a sum is the
            # cheapest pass that there is.
            elif not math.isfinite(np.einsum("i->", tile)):
                return False
    return True


_TILE_ELEMENTS = 2**16
"""Elements of a tile. Several passes over a tile find it in the core's cache."""

_GREATEST = {
    Encoding.FLOAT16: np.nextafter(np.float32(65520), np.float32(0)),
    Encoding.BFLOAT16: np.uint32(0x7F7F7FFF).view(np.float32),
}
"""The greatest float32 that is finite once it is rounded."""


def _within(tile: Floats, greatest: np.float32) -> bool:
    """Whether no element is a NaN or beyond `greatest` in magnitude."""
    # The extremes of numbers with a NaN among them are NaN, which compares as false.
    return bool(tile.max() <= greatest and tile.min() >= -greatest)


def _round_to_bfloat16(tile: Floats, out: npt.NDArray[Any], scratch: npt.NDArray[Any]) -> None:
    # Adding 0x7FFF and the lowest bit that is kept rounds to nearest, ties to even.
    bits = tile.view(np.uint32)
    np.right_shift(bits, np.uint32(16), out=scratch)
    np.bitwise_and(scratch, np.uint32(1), out=scratch)
    np.add(scratch, bits, out=scratch)
    np.add(scratch, np.uint32(0x7FFF), out=scratch)
    np.right_shift(scratch, np.uint32(16), out=scratch)
    np.copyto(out, scratch, casting="same_kind")


def _settle(tile: Floats, out: npt.NDArray[Any], encoding: Encoding, start: int) -> None:
    """Corrects the NaN of a tile, and refuses overflow.

    Raises:
        EncodingOverflow: a finite value became infinite.
    """
    if encoding is Encoding.FLOAT16:
        infinite = np.isinf(out)
    else:
        nan = np.isnan(tile)
        # Rounding may carry a NaN over into infinity, or truncate its payload to zero, which is an
        # infinity, too. The quiet bit keeps it a NaN.
        upper = (tile.view(np.uint32)[nan] >> np.uint32(16)).astype("<u2")
        out[nan] = upper | np.uint16(0x0040)
        infinite = (out & np.uint16(0x7FFF)) == np.uint16(0x7F80)
    lost = np.flatnonzero(infinite & np.isfinite(tile))
    if lost.size:
        raise EncodingOverflow(encoding, start + int(lost[0]), float(tile[lost[0]]))


def _numbers(payload: bytes | memoryview, encoding: Encoding) -> npt.NDArray[Any]:
    if encoding is not Encoding.FLOAT32 and encoding not in _GREATEST:
        raise ValueError(f"{encoding.name.lower()} is not decoded to float32")
    return np.frombuffer(payload, dtype=encoding.wire_dtype)


def _widened(numbers: npt.NDArray[Any], encoding: Encoding, out: Floats) -> Floats:
    if encoding is Encoding.BFLOAT16:
        np.left_shift(numbers, np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
    else:
        np.copyto(out, numbers)
    return out


def _bytes_of(numbers: npt.NDArray[Any]) -> memoryview:
    # memoryview.cast would refuse an empty view.
    return numbers.view(np.uint8).data
