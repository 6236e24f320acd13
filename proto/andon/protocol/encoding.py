"""Encodings: numbers to little-endian bytes and back, rounded to nearest even."""

from __future__ import annotations

import enum
import math
import sys
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from andon.protocol import sparse
from andon.protocol.strips import (
    GREATEST_SCALED,
    INT2,
    INT4,
    INT8,
    StripFormat,
    dequantise,
    quantise,
)

__all__ = [
    "Encoding",
    "EncodingOverflow",
    "answers_defect",
    "decode",
    "decode_into",
    "decode_part",
    "encodable",
    "encode",
    "fused",
]

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

    __hash__ = object.__hash__  # Enum's own is a call of Python for each look into a table.

    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    FLOAT64 = 4
    INT32 = 5
    INT64 = 6
    UINT8 = 7
    INT8_BLOCK = 8
    INT4_BLOCK = 9
    INT2_BLOCK = 10
    TOPK = 11

    @classmethod
    def of(cls, label: str) -> Encoding:
        """The encoding of a label.

        Raises:
            ValueError: there is none.
        """
        for encoding in cls:
            if encoding.label == label:
                return encoding
        raise ValueError(f"there is no encoding {label!r}")

    @property
    def label(self) -> str:
        """Its name on command lines and in messages for people, such as `float32` or `int8`."""
        return _LABELS.get(self) or self.name.lower()

    @property
    def strips(self) -> StripFormat | None:
        """The format, if elements share scales; None: each element stands by itself."""
        return _STRIPS.get(self)

    @property
    def loses_much(self) -> bool:
        """Whether a worker sends what it lost of one contribution with the next one."""
        return self.strips is not None or self is Encoding.TOPK

    @property
    def wire_dtype(self) -> np.dtype[Any]:
        """The numpy type of the bytes; bfloat16, which numpy lacks, is unsigned 16 bits.

        Raises:
            ValueError: the payload has parts of several types.
        """
        if self.loses_much:
            raise ValueError(f"a payload of {self.label} is no array of one type")
        return _DTYPES[self]

    def payload_bytes(self, count: int) -> int:
        """The length of the payload of `count` elements.

        That of TOPK depends on how many of them it lists: this is more than any worker sends.
        """
        itemsize = _ITEM_BYTES.get(self)
        if itemsize is not None:
            return count * itemsize
        strips = self.strips
        assert strips is not None, f"no payload of {self.label}"
        return strips.payload_bytes(count)

    def fits(self, size: int, count: int) -> bool:
        """Whether `count` elements may have a payload of `size` bytes."""
        return self is Encoding.TOPK or size == self.payload_bytes(count)


_DTYPES: dict[Encoding, np.dtype[Any]] = {
    Encoding.FLOAT32: np.dtype("<f4"),
    Encoding.FLOAT16: np.dtype("<f2"),
    Encoding.BFLOAT16: np.dtype("<u2"),
    Encoding.FLOAT64: np.dtype("<f8"),
    Encoding.INT32: np.dtype("<i4"),
    Encoding.INT64: np.dtype("<i8"),
    Encoding.UINT8: np.dtype("u1"),
}

_ITEM_BYTES = {
    **{encoding: dtype.itemsize for encoding, dtype in _DTYPES.items()},
    Encoding.TOPK: _DTYPES[Encoding.FLOAT32].itemsize,
}
"""Bytes of an element, where elements do not share scales; of TOPK at most."""

_STRIPS = {Encoding.INT8_BLOCK: INT8, Encoding.INT4_BLOCK: INT4, Encoding.INT2_BLOCK: INT2}
_LABELS = {
    Encoding.INT8_BLOCK: "int8",
    Encoding.INT4_BLOCK: "int4",
    Encoding.INT2_BLOCK: "int2",
}


class EncodingOverflow(ValueError):
    """A finite value does not fit the encoding: `element` is its index, `value` the value."""

    def __init__(self, encoding: Encoding, element: int, value: float) -> None:
        """Names the element, and the remedy."""
        super().__init__(
            f"element {element} is {value:g}, beyond what {encoding.label} holds: "
            "use bfloat16 or float32, or scale the loss down"
        )
        self.encoding = encoding
        self.element = element
        self.value = value


def answers_defect(encoding: Encoding, answer: Encoding | None) -> str:
    """Why means of contributions in `encoding` can't be answered in `answer`; empty: they can.

    `answer` of None is that of the contributions.
    """
    answer = answer or encoding
    if answer is Encoding.INT2_BLOCK:
        return "an average has more levels than int2: answers need another encoding"
    if answer is Encoding.TOPK and encoding is not Encoding.TOPK:
        return f"an average of {encoding.label} has no few elements that topk could list"
    return ""


def decode(payload: bytes | memoryview, encoding: Encoding, count: int | None = None) -> Floats:
    """The numbers of a payload as float32, shape (n,); a read-only view where that is possible.

    `count` is n. Encodings whose elements share anything need it: two counts may have payloads of
    one length.

    Raises:
        ValueError: the payload is not as long as `count` elements, or no whole number of them; or
            the encoding is not one of numbers that float32 holds.
    """
    if not encoding.loses_much:
        numbers = _numbers(payload, encoding)
        found = numbers.size
        if encoding is Encoding.FLOAT32 and count in (None, found):
            return numbers
    elif count is None:
        raise ValueError(f"a payload of {encoding.label} does not say how many numbers it holds")
    out = np.empty(found if count is None else count, np.float32)
    decode_into(payload, encoding, out)
    return out


def decode_into(payload: bytes | memoryview, encoding: Encoding, out: Floats) -> None:
    """Writes the numbers of a payload to `out`: contiguous float32, shape (n,).

    Raises:
        ValueError: as for `decode`, or `out` has another size.
    """
    if encoding is Encoding.TOPK and (defect := sparse.defect_of(payload, out.size)):
        raise ValueError(defect)
    if encoding.loses_much:
        decode_part(payload, encoding, out.size, 0, out)
        return
    numbers = _numbers(payload, encoding)
    if numbers.size != out.size:
        raise ValueError(f"{numbers.size} numbers do not fill {out.size} places")
    _widened(numbers, encoding, out)


def decode_part(
    payload: bytes | memoryview, encoding: Encoding, count: int, start: int, out: Floats
) -> None:
    """Writes elements of a payload of `count` elements, from element `start` on, to `out`.

    `out` is contiguous float32 and says how many elements; `start` is a multiple of 128. A payload
    of TOPK must be sound (`sparse.defect_of`).

    Raises:
        ValueError: as for `decode`, or there are no such elements.
    """
    strips = encoding.strips
    if start < 0 or start + out.size > count:
        raise ValueError(f"elements {start} to {start + out.size} are not among {count}")
    if encoding is Encoding.TOPK:
        sparse.unpack(np.frombuffer(payload, np.uint8), count, start, out)
        return
    if strips is None:
        numbers = _numbers(payload, encoding)
        if numbers.size != count:
            raise ValueError(f"{numbers.size} numbers do not fill {count} places")
        _widened(numbers[start : start + out.size], encoding, out)
        return
    found = memoryview(payload).nbytes
    if found != strips.payload_bytes(count):
        raise ValueError(f"{found} bytes are not {count} elements of {encoding.label}")
    if fused is not None and out.flags.c_contiguous:
        widen = getattr(fused, f"from_int{strips.bits}")
        widen(_bytes_of(out), payload, count, start)
    else:
        dequantise(np.frombuffer(payload, np.uint8), strips, count, start, out)


def encode(
    values: Floats,
    encoding: Encoding,
    residual: Floats | None = None,
    *,
    kept: int | None = None,
) -> memoryview:
    """Finite float32 numbers, shape (n,), as bytes; a view of `values` for FLOAT32.

    If `residual` is given, it gets what the encoding lost: float32(values - decoded). It is
    contiguous float32, of the shape of `values`, and shares no memory with them. TOPK lists `kept`
    elements of each stretch (`sparse`), or, if that is None, all that are not zero.

    NaN and infinities stay what they are, or become NaN where the encoding has no infinity. A
    caller checks for them before.

    Raises:
        EncodingOverflow: a finite value is not finite once encoded. `residual` is of no use then.
        ValueError: the encoding is not one of floating-point numbers that float32 fills.
    """
    values = np.ascontiguousarray(values, dtype=np.float32)
    if encoding.strips is not None:
        return _quantised(values, encoding, encoding.strips, residual)
    if encoding is Encoding.FLOAT32:
        if residual is not None:
            residual.fill(0)
        return _bytes_of(values.astype("<f4", copy=False))
    if encoding is Encoding.TOPK:
        halves = np.frombuffer(_narrowed(values, Encoding.BFLOAT16, encoding), "<u2")
        payload = sparse.pack(values, halves, kept)
    else:
        payload = _narrowed(values, encoding, encoding)
    if residual is not None:
        with np.errstate(invalid="ignore"):
            np.subtract(values, decode(payload, encoding, values.size), out=residual)
    return payload


def _quantised(
    values: Floats, encoding: Encoding, strips: StripFormat, residual: Floats | None
) -> memoryview:
    out = np.empty(strips.payload_bytes(values.size), np.uint8)
    if fused is not None:
        narrow = getattr(fused, f"to_int{strips.bits}")
        if narrow(out.data, _bytes_of(values), None if residual is None else _bytes_of(residual)):
            return out.data
    # The compiled pass only says that some value is illegal. These passes find which one.
    for start in range(0, values.size, _TILE_ELEMENTS):
        tile = values[start : start + _TILE_ELEMENTS]
        if not _within(tile, GREATEST_SCALED):
            lost = np.flatnonzero((np.abs(tile) > GREATEST_SCALED) & np.isfinite(tile))
            if lost.size:
                raise EncodingOverflow(encoding, start + int(lost[0]), float(tile[lost[0]]))
    quantise(values, strips, out, residual)
    return out.data


def _narrowed(values: Floats, encoding: Encoding, named: Encoding) -> memoryview:
    """Float32 numbers as one of the 16-bit encodings; `named` is who could not hold them."""
    if encoding not in _GREATEST:
        raise ValueError(f"float32 numbers are not encoded as {encoding.label}")
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
            _settle(tile, out, encoding, named, start)
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
        raise ValueError(f"float32 numbers are not encoded as {encoding.label}")
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
    Encoding.INT8_BLOCK: GREATEST_SCALED,
    Encoding.INT4_BLOCK: GREATEST_SCALED,
    Encoding.INT2_BLOCK: GREATEST_SCALED,
}
_GREATEST[Encoding.TOPK] = _GREATEST[Encoding.BFLOAT16]
"""The greatest float32 that may be encoded: for 16 bits, what is finite once it is rounded."""


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


def _settle(
    tile: Floats, out: npt.NDArray[Any], encoding: Encoding, named: Encoding, start: int
) -> None:
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
        raise EncodingOverflow(named, start + int(lost[0]), float(tile[lost[0]]))


def _numbers(payload: bytes | memoryview, encoding: Encoding) -> npt.NDArray[Any]:
    if encoding is not Encoding.FLOAT32 and encoding not in _GREATEST:
        raise ValueError(f"{encoding.label} is not decoded to float32")
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
