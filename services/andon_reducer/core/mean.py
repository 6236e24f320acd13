"""The weighted mean of one chunk, checked.

Theory of operation. The mean is defined to the bit, so that every language and every arrival order
gives the same bytes: contributions are added in rank order, c_r = float32(w_r / W) with W and the
quotient in float64, acc = c_0 * g_0, then acc = acc + c_r * g_r, each product and each sum rounded
to float32.

The vectors are processed in tiles that stay in the processor's cache. A NaN or an infinity in any
contribution makes that element of the mean NaN or infinite (also where c_r is 0), and adding up a
tile carries either into the sum. So one sum for each tile, taken while it is in the cache, shows
that all of it is finite. Only if the sum is not finite, the tile is checked element by element. The
sum of finite numbers may overflow too: then that check finds nothing.

Where the C module `andon.protocol._fused` was built, it does all this in one pass over memory, to
the same bits. `_fused.c` and this file must be changed together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from andon.protocol.encoding import Encoding, EncodingOverflow, encode, fused
from andon.protocol.halts import describe_value
from andon.protocol.messages import BlockFaultKind, BlockGradient

__all__ = ["MEAN_ENCODINGS", "TILE_ELEMENTS", "Mean", "MeanDefect", "weighted_mean"]

Floats = npt.NDArray[np.float32]

MEAN_ENCODINGS = frozenset({Encoding.FLOAT32, Encoding.FLOAT16, Encoding.BFLOAT16})
"""Encodings whose numbers can be averaged."""

TILE_ELEMENTS = 2**16
"""Elements of a tile: three float32 vectors of this length fit a core's L2 cache."""


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean's bytes and the sum of the weights that went into it."""

    payload: memoryview
    total_weight: float


@dataclass(frozen=True, slots=True)
class MeanDefect:
    """Why there is no mean. `element` counts from the chunk's first one."""

    kind: BlockFaultKind
    element: int
    value: str
    message: str
    rank: int | None = None
    """The rank at fault; None: no single one."""


def weighted_mean(
    contributions: Sequence[BlockGradient],
    encoding: Encoding,
    answer: Encoding,
    into: memoryview | None = None,
) -> Mean | MeanDefect:
    """The mean of contributions in rank order, encoded as `answer`; or the first defect in it.

    All payloads are of equal length and encoded as `encoding`; weights are finite and above 0. The
    defect is the one at the lowest element, and there of the lowest rank. Both encodings are among
    MEAN_ENCODINGS. A single contribution comes back bit for bit.

    If `into` is given, the mean's bytes are written there. It must have their length, and answer
    and contributions must be FLOAT32. It holds nothing of use if there is a defect.
    """
    assert into is None or answer is encoding is Encoding.FLOAT32
    # In rank order, too: a sum of float64 depends on the order of its terms.
    total = sum(part.weight for part in contributions)
    if not math.isfinite(total):
        message = "the sum of the weights is beyond float64: use smaller weights"
        return MeanDefect(BlockFaultKind.INCONSISTENT, 0, describe_value(total), message)
    # Values that are not finite are found below, so NumPy need not warn of them.
    with np.errstate(all="ignore"):
        # The only share is exactly 1, so there is nothing to compute: the values are only checked.
        if len(contributions) == 1 and answer is encoding:
            return _checked(contributions[0], encoding, into)
        return _mean(contributions, total, encoding, answer, into)


def _checked(part: BlockGradient, encoding: Encoding, into: memoryview | None) -> Mean | MeanDefect:
    numbers = np.frombuffer(part.payload, dtype=encoding.wire_dtype)
    scratch = np.empty(min(TILE_ELEMENTS, numbers.size), dtype=np.float32)
    out = None if into is None else np.frombuffer(into, dtype=encoding.wire_dtype)
    for start in range(0, numbers.size, TILE_ELEMENTS):
        tile = _floats(numbers[start : start + TILE_ELEMENTS], encoding, scratch)
        if out is not None:
            # Copied first, and the copy is checked: the worker may still write to its own memory,
            # so this way the others read the very bytes that were found to be finite.
            copy = out[start : start + TILE_ELEMENTS]
            np.copyto(copy, tile)
            tile = copy
        if not _surely_finite(tile):
            defect = _find_defect([part], [numbers], encoding, start, tile)
            if defect is not None:
                return defect
    return Mean(part.payload if into is None else into, part.weight)


def _mean(
    contributions: Sequence[BlockGradient],
    total: float,
    encoding: Encoding,
    answer: Encoding,
    into: memoryview | None,
) -> Mean | MeanDefect:
    vectors = [np.frombuffer(part.payload, dtype=encoding.wire_dtype) for part in contributions]
    # Shares are at most 1, so weights of any size can't make finite values overflow.
    shares = [np.float32(part.weight / total) for part in contributions]
    size = vectors[0].size
    if into is None:
        out = np.empty(size, dtype=answer.wire_dtype)
    else:
        out = np.frombuffer(into, dtype=answer.wire_dtype)
    mean = out.view(np.uint8).data
    if answer is encoding and _in_one_pass(contributions, shares, encoding, mean, into):
        return Mean(mean, total)
    # If the pass in C found a value that is not finite, this one finds out which.
    product = np.empty(min(TILE_ELEMENTS, size), dtype=np.float32)
    scratch = product if answer is Encoding.FLOAT32 else np.empty_like(product)
    for start in range(0, size, TILE_ELEMENTS):
        stop = min(start + TILE_ELEMENTS, size)
        acc = out[start:stop] if answer is Encoding.FLOAT32 else scratch[: stop - start]
        np.multiply(_floats(vectors[0][start:stop], encoding, acc), shares[0], out=acc)
        term = product[: stop - start]
        for vector, share in zip(vectors[1:], shares[1:], strict=True):
            np.multiply(_floats(vector[start:stop], encoding, term), share, out=term)
            np.add(acc, term, out=acc)
        if not _surely_finite(acc):
            defect = _find_defect(contributions, vectors, encoding, start, acc)
            if defect is not None:
                return defect
        if answer is not Encoding.FLOAT32:
            try:
                out[start:stop] = np.frombuffer(encode(acc, answer), dtype=answer.wire_dtype)
            except EncodingOverflow as overflow:
                return _overflow(overflow, start)
    return Mean(mean, total)


def _in_one_pass(
    contributions: Sequence[BlockGradient],
    shares: Sequence[np.float32],
    encoding: Encoding,
    mean: memoryview,
    into: memoryview | None,
) -> bool:
    """Makes the mean in C. Returns whether that was possible, and all of it is finite."""
    if fused is None:
        return False
    payloads, factors = tuple(part.payload for part in contributions), tuple(map(float, shares))
    if encoding is Encoding.BFLOAT16:
        return bool(fused.bfloat16_mean(mean, payloads, factors))
    if encoding is Encoding.FLOAT32:
        # Shared memory is written past the caches: this thread does not read it again, and a line
        # that is written whole past the caches need not be read first.
        return bool(fused.weighted_mean(mean, payloads, factors, into is not None))
    return False


def _floats(tile: npt.NDArray[Any], encoding: Encoding, out: Floats) -> Floats:
    """A tile as float32: itself, or decoded into the first elements of `out`."""
    if encoding is Encoding.FLOAT32:
        return tile
    out = out[: tile.size]
    if encoding is Encoding.FLOAT16:
        np.copyto(out, tile)
    else:
        # bfloat16 is the upper half of a float32.
        np.left_shift(tile, np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
    return out


def _surely_finite(tile: Floats) -> bool:
    """Whether all elements are surely finite; False may be a false alarm."""
    return math.isfinite(np.einsum("i->", tile))


def _find_defect(
    contributions: Sequence[BlockGradient],
    vectors: Sequence[npt.NDArray[Any]],
    encoding: Encoding,
    start: int,
    acc: Floats,
) -> MeanDefect | None:
    """The first defect of the tile that starts at `start`; None if the alarm was false."""
    first: tuple[int, int, float] | None = None
    # Contributions come before the mean: only if all of them are finite, a mean that is not finite
    # is no rank's fault.
    for part, vector in zip(contributions, vectors, strict=True):
        tile = _floats(vector[start : start + acc.size], encoding, np.empty_like(acc))
        found = np.flatnonzero(~np.isfinite(tile))
        if found.size and (first is None or found[0] < first[0]):
            first = int(found[0]), part.rank, float(tile[found[0]])
    if first is not None:
        element, rank, number = first
        value = describe_value(number)
        message = f"rank {rank} contributed {value}"
        return MeanDefect(BlockFaultKind.NON_FINITE, start + element, value, message, rank)
    found = np.flatnonzero(~np.isfinite(acc))
    if not found.size:
        return None
    element = int(found[0])
    value = describe_value(float(acc[element]))
    message = f"all contributions are finite and their mean is {value}: scale the loss down"
    return MeanDefect(BlockFaultKind.NON_FINITE_AVERAGE, start + element, value, message)


def _overflow(overflow: EncodingOverflow, start: int) -> MeanDefect:
    message = (
        f"the mean is {overflow.value:g}, beyond what {overflow.encoding.name.lower()} holds: "
        "ask for float32 or bfloat16 answers, or scale the loss down"
    )
    value = describe_value(overflow.value)
    return MeanDefect(BlockFaultKind.ENCODING_OVERFLOW, start + overflow.element, value, message)
