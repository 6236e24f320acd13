"""The reference: the mean and the encodings of docs/protocol-data.md, one number at a time.

Written from the text alone, in Python's own floats, so that it shares no code with what it judges.
Computing in float64 and then rounding gives the same float32 as computing in float32: a product of
two float32 is exact in float64, and a sum is not harmed by being rounded twice, because float64's
53 bits are at least 2 * 24 + 2.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from itertools import pairwise

from andon.protocol.encoding import Encoding

__all__ = [
    "EncodingTooSmall",
    "MeanOf",
    "bits",
    "decode",
    "encode",
    "f32",
    "mean",
    "repeated",
    "strip_elements",
    "trimmed_mean",
]

MeanOf = Callable[[Sequence[tuple[float, Sequence[float]]]], tuple[float, list[float]]]
"""Makes total weight and mean of (weight, float32 numbers), which are in rank order."""


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


def trimmed_mean(parts: Sequence[tuple[float, Sequence[float]]]) -> tuple[float, list[float]]:
    """Total weight and trimmed mean of (weight, float32 numbers), which are in rank order."""
    cut = len(parts) // 5
    if not cut:
        return mean(parts)
    total = 0.0
    for weight, _ in parts:
        total += weight
    shares = [weight / total for weight, _ in parts]
    result = []
    for element in range(len(parts[0][1])):
        values = [numbers[element] for _, numbers in parts]
        # Sorting keeps the order of equal values, which is that of the ranks.
        order = sorted(range(len(values)), key=values.__getitem__)
        acc, kept = -0.0, 0.0
        for rank in sorted(order[cut:-cut]):
            acc += shares[rank] * values[rank]
            kept += shares[rank]
        result.append(f32(acc / kept))
    return total, result


def encode(numbers: Sequence[float], encoding: Encoding, kept: int | None = None) -> bytes:
    """Encodes float32 numbers; `kept` is how many TOPK lists of each 256, None: all.

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
    if encoding is Encoding.BFLOAT16:
        return struct.pack(f"<{len(numbers)}H", *map(_bfloat16, numbers))
    if encoding is Encoding.TOPK:
        return _listed(numbers, kept or _STRETCH)
    return _quantised(numbers, *_STRIPS[encoding])


def decode(data: bytes, encoding: Encoding, count: int) -> list[float]:
    """Decodes `count` float32 numbers."""
    if encoding is Encoding.FLOAT32:
        return list(struct.unpack(f"<{len(data) // 4}f", data))
    if encoding is Encoding.FLOAT16:
        return list(struct.unpack(f"<{len(data) // 2}e", data))
    if encoding in _STRIPS:
        return _dequantised(data, count, *_STRIPS[encoding])
    if encoding is Encoding.TOPK:
        return _unlisted(data, count)
    halves = struct.unpack(f"<{len(data) // 2}H", data)
    words = struct.pack(f"<{len(halves)}I", *(half << 16 for half in halves))
    return list(struct.unpack(f"<{len(halves)}f", words))


_STRIPS = {
    Encoding.INT8_BLOCK: (8, 128),
    Encoding.INT4_BLOCK: (4, 32),
    Encoding.INT2_BLOCK: (2, 64),
}
"""Bits of a code, and elements that share a scale."""


def _quantised(numbers: Sequence[float], bits: int, strip: int) -> bytes:
    scales, codes = [], []
    for start in range(0, len(numbers), strip):
        part = numbers[start : start + strip]
        scale, marks = _strip_of(part, 2 ** (bits - 1) - 1)
        scales.append(scale)
        codes += marks
    each, mask = 8 // bits, 2**bits - 1
    packed = bytes(
        sum((code & mask) << bits * at for at, code in enumerate(codes[first : first + each]))
        for first in range(0, len(codes), each)
    )
    return struct.pack(f"<{len(scales)}f", *scales) + packed


def _strip_of(part: Sequence[float], greatest: int) -> tuple[float, list[int]]:
    """The scale of a strip and its codes."""
    if not all(map(math.isfinite, part)):
        return math.nan, [1 if math.isfinite(number) else -greatest - 1 for number in part]
    most = max(map(abs, part))
    if most > 2.0**120:
        raise EncodingTooSmall
    scale = f32(most * 0.75) if greatest == 1 else f32(most / greatest)
    if scale < 2.0**-126:
        scale = 0.0
    fraction, exponent = math.frexp(scale)
    scale = math.ldexp(round(fraction * 2**16), exponent - 16)
    codes, factor = [], f32(1 / scale) if scale else 0.0
    for number in part:
        if number == 0 and math.copysign(1, number) < 0:
            codes.append(-greatest - 1)
        else:
            # Python rounds to the nearest integer, ties to even.
            codes.append(round(f32(number * factor)))
    return scale, codes


def _dequantised(data: bytes, count: int, bits: int, strip: int) -> list[float]:
    strips = -(-count // strip)
    scales, packed = struct.unpack(f"<{strips}f", data[: 4 * strips]), data[4 * strips :]
    lowest, numbers = -(2 ** (bits - 1)), []
    raw = [byte >> shift & 2**bits - 1 for byte in packed for shift in range(0, 8, bits)][:count]
    codes = [code + 2 * lowest if code >= -lowest else code for code in raw]
    for element, code in enumerate(codes):
        scale = scales[element // strip]
        if not (math.isfinite(scale) and math.copysign(1, scale) > 0):
            numbers.append(0.0 if code == 1 else math.nan)
        else:
            numbers.append(-0.0 if code == lowest else f32(code * scale))
    return numbers


_STRETCH = 256
"""Elements whose places TOPK counts together."""


def _listed(numbers: Sequence[float], kept: int) -> bytes:
    counts, places, values = [], [], []
    runs: list[tuple[int, int]] = []
    for start in range(0, len(numbers), _STRETCH):
        halves = list(map(_bfloat16, numbers[start : start + _STRETCH]))
        # By magnitude, and of equals the first ones first.
        order = sorted((-(half & 0x7FFF), at) for at, half in enumerate(halves))
        chosen = sorted(at for size, at in order[:kept] if size)
        counts.append(len(chosen))
        places += chosen
        values += [halves[at] for at in chosen]
    for at, number in enumerate(numbers):
        if number == 0 and math.copysign(1, number) < 0:
            if runs and sum(runs[-1]) == at:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((at, 1))
    return (
        struct.pack(f"<{len(counts)}H", *counts)
        + bytes(places)
        + struct.pack(f"<{len(values)}H", *values)
        + b"".join(struct.pack("<2I", *run) for run in runs)
    )


def _unlisted(data: bytes, count: int) -> list[float]:
    stretches = -(-count // _STRETCH)
    counts = struct.unpack_from(f"<{stretches}H", data)
    places_at, listed = 2 * stretches, sum(counts)
    halves = struct.unpack_from(f"<{listed}H", data, places_at + listed)
    stretch_of = [stretch for stretch, some in enumerate(counts) for _ in range(some)]
    numbers = [0.0] * count
    for entry, half in enumerate(halves):
        word = struct.pack("<I", half << 16)
        at = _STRETCH * stretch_of[entry] + data[places_at + entry]
        numbers[at] = struct.unpack("<f", word)[0]
    for first, length in struct.iter_unpack("<2I", data[places_at + 3 * listed :]):
        numbers[first : first + length] = [-0.0] * length
    return numbers


def strip_elements(encoding: Encoding) -> int:
    """How many elements share a scale or a list; 1 if each stands by itself."""
    if encoding is Encoding.TOPK:
        return _STRETCH
    return _STRIPS[encoding][1] if encoding in _STRIPS else 1


def repeated(
    made: Callable[[int, int], bytes], encoding: Encoding, period: int, count: int, strip: int = 1
) -> bytes:
    """The payload of `count` elements that repeat after `period` of them.

    `made(start, n)` makes the payload of `n` elements from `start` on. It is called for a period of
    whole strips, and for what is left of the last strip. `strip` is what to take for one if it is
    longer than the encoding's.
    """
    own = strip_elements(encoding)
    strip = max(strip, own)
    if encoding is Encoding.TOPK:
        return _repeated_list(made, math.lcm(period, strip), count)
    whole = count - count % strip
    once = min(whole, math.lcm(period, strip))
    head, tail = (
        made(0, once) if once else b"",
        made(whole, count - whole) if whole < count else b"",
    )
    first, last = 4 * (once // own), 4 * -(-(count - whole) // own)
    if encoding not in _STRIPS:
        first = last = 0
    size = (len(head) - first) * whole // once if once else 0
    scales = _tiled(head[:first], 4 * (whole // own)) + tail[:last]
    return scales + _tiled(head[first:], size) + tail[last:]


def _repeated_list(made: Callable[[int, int], bytes], once: int, count: int) -> bytes:
    """A payload of TOPK whose elements repeat after `once` of them, which are whole stretches."""
    rest = count % once
    sizes = [once] * (count // once) + ([rest] if rest else [])
    head = made(0, once) if count >= once else b""
    tail = made(count - rest, rest) if rest else b""
    parts, runs, first = [b"", b"", b""], list[tuple[int, int]](), 0
    for size in sizes:
        piece = head if size == once else tail
        places_at = 2 * -(-size // _STRETCH)
        listed = sum(struct.unpack_from(f"<{places_at // 2}H", piece))
        cuts = (0, places_at, places_at + listed, places_at + 3 * listed)
        for at, (start, stop) in enumerate(pairwise(cuts)):
            parts[at] += piece[start:stop]
        for begin, length in struct.iter_unpack("<2I", piece[cuts[-1] :]):
            if runs and sum(runs[-1]) == first + begin:
                begin, length = runs[-1][0] - first, length + runs.pop()[1]
            runs.append((first + begin, length))
        first += size
    return b"".join(parts) + b"".join(struct.pack("<2I", *run) for run in runs)


def _tiled(data: bytes, size: int) -> bytes:
    return (data * (size // len(data) + 1))[:size] if data else b""


def bits(data: bytes) -> str:
    """A number's bits, for reports."""
    return f"0x{data[::-1].hex()}"


def _bfloat16(number: float) -> int:
    if math.isnan(number):
        return 0x7FC0
    if math.isinf(number):
        return 0x7F80 if number > 0 else 0xFF80
    pattern: int = struct.unpack("<I", struct.pack("<f", number))[0]
    half = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
    if half & 0x7FFF == 0x7F80:
        raise EncodingTooSmall
    return half
