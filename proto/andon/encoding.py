"""Encodings: numbers to little-endian bytes and back, rounded to nearest even."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Encoding", "EncodingOverflow", "decode", "encode"]

Floats = npt.NDArray[np.float32]


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
    """A finite value does not fit the encoding. `element` is the first, `value` what it was."""

    def __init__(self, encoding: Encoding, element: int, value: float) -> None:
        """Says which element of the vector, and what to do."""
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
    if encoding is Encoding.FLOAT32:
        return np.frombuffer(payload, dtype="<f4")
    if encoding is Encoding.FLOAT16:
        return np.frombuffer(payload, dtype="<f2").astype(np.float32)
    if encoding is Encoding.BFLOAT16:
        upper = np.frombuffer(payload, dtype="<u2").astype(np.uint32)
        return (upper << np.uint32(16)).view(np.float32)
    raise ValueError(f"{encoding.name.lower()} is not decoded to float32")


def encode(values: Floats, encoding: Encoding) -> memoryview:
    """Finite float32 numbers, shape (n,), as bytes; a view of `values` for FLOAT32.

    NaN and infinities, which a caller should have found before, stay what they are.

    Raises:
        EncodingOverflow: a finite value is not finite once encoded.
        ValueError: the encoding is not one of floating-point numbers that float32 fills.
    """
    if encoding is Encoding.FLOAT32:
        return _bytes_of(np.ascontiguousarray(values, dtype="<f4"))
    if encoding is Encoding.FLOAT16:
        with np.errstate(over="ignore", under="ignore"):
            half = np.ascontiguousarray(values).astype("<f2")
        _refuse_overflow(values, np.isinf(half), encoding)
        return _bytes_of(half)
    if encoding is Encoding.BFLOAT16:
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        upper = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype("<u2")
        nan = np.isnan(values)
        if nan.any():
            # Rounding could carry a NaN into infinity, or cut its payload off; a quiet bit stays.
            upper[nan] = (bits[nan] >> np.uint32(16)).astype("<u2") | np.uint16(0x0040)
        _refuse_overflow(values, (upper & np.uint16(0x7FFF)) == np.uint16(0x7F80), encoding)
        return _bytes_of(upper)
    raise ValueError(f"float32 numbers are not encoded as {encoding.name.lower()}")


def _bytes_of(numbers: npt.NDArray[Any]) -> memoryview:
    # Not memoryview.cast, which refuses an empty view.
    return numbers.view(np.uint8).data


def _refuse_overflow(values: Floats, infinite: npt.NDArray[np.bool_], encoding: Encoding) -> None:
    if infinite.any():
        lost = np.flatnonzero(infinite & np.isfinite(values))
        if lost.size:
            raise EncodingOverflow(encoding, int(lost[0]), float(values[lost[0]]))
