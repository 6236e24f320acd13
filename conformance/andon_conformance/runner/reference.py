"""The reference: the mean and the encodings of docs/protocol.md, one number at a time.

Written from the text alone, in Python's own floats, so that it shares no code with what it judges.
Computing in float64 and then rounding gives the same float32 as computing in float32: a product of
two float32 is exact in float64, and a sum is not harmed by being rounded twice, because float64's
53 bits are at least 2 * 24 + 2.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from andon.protocol.encoding import Encoding

__all__ = ["EncodingTooSmall", "bits", "decode", "encode", "f32", "mean", "tiled"]


class EncodingTooSmall(Exception):
    """A finite number does not fit its encoding."""


def f32(number: float) -> float:
    """The nearest float32, ties to even; beyond the largest, an infinity."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)
    return rounded


def mean(parts: Sequence[tuple[float, Sequence[float]]]) -> tuple[float, list[float]]:
    """Total weight and weighted mean of (weight, float32 numbers), which are in rank order."""
    total = 0.0
    for weight, _ in parts:
        total += weight
    shares = [f32(weight / total) for weight, _ in parts]
    result = []
    for element in range(len(parts[0][1])):
        acc = f32(shares[0] * parts[0][1][element])
        for share, (_, numbers) in zip(shares[1:], parts[1:], strict=True):
            acc = f32(acc + f32(share * numbers[element]))
        result.append(acc)
    return total, result


def encode(numbers: Sequence[float], encoding: Encoding) -> bytes:
    """Encodes float32 numbers.

    Raises:
        EncodingTooSmall: a finite one rounds to an infinity.
    """
    if encoding is Encoding.FLOAT32:
        return struct.pack(f"<{len(numbers)}f", *numbers)
    if encoding is Encoding.FLOAT16:
        try:
            return struct.pack(f"<{len(numbers)}e", *numbers)
        except OverflowError:
            raise EncodingTooSmall from None
    return struct.pack(f"<{len(numbers)}H", *map(_bfloat16, numbers))


def decode(data: bytes, encoding: Encoding) -> list[float]:
    """Decodes to float32 numbers."""
    if encoding is Encoding.FLOAT32:
        return list(struct.unpack(f"<{len(data) // 4}f", data))
    if encoding is Encoding.FLOAT16:
        return list(struct.unpack(f"<{len(data) // 2}e", data))
    halves = struct.unpack(f"<{len(data) // 2}H", data)
    words = struct.pack(f"<{len(halves)}I", *(half << 16 for half in halves))
    return list(struct.unpack(f"<{len(halves)}f", words))


def tiled(data: bytes, width: int, start: int, count: int) -> bytes:
    """`count` elements of `width` bytes from element `start`, of `data` repeated forever."""
    first = start * width % len(data)
    size = count * width
    return (data * ((first + size) // len(data) + 1))[first : first + size]


def bits(data: bytes) -> str:
    """A number's bits, for reports."""
    return f"0x{data[::-1].hex()}"


def _bfloat16(number: float) -> int:
    pattern: int = struct.unpack("<I", struct.pack("<f", number))[0]
    half = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
    if half & 0x7FFF == 0x7F80:
        raise EncodingTooSmall
    return half
