"""The weighted mean of one chunk, checked: this is where gradients are averaged.

Theory of operation. The mean is defined to the bit, so that every language and every arrival order
gives the same bytes: contributions are added in rank order, c_r = float32(w_r / W) with W and the
quotient in float64, acc = c_0 * g_0, then acc = acc + c_r * g_r, each product and each sum rounded
to float32. Where ranks contribute nodes of the tree over the batch's grains, these are added along
that tree instead (`core.tree`). A trimmed mean leaves some of them out (`core.trimmed`).

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from andon.protocol.encoding import Encoding, EncodingOverflow, decode_part, encode, fused
from andon.protocol.halts import describe_value
from andon.protocol.messages import BlockFaultKind, BlockGradient
from andon.protocol.run_settings import cut_at_each_end
from andon.protocol.sums import sum_in_order
from andon_reducer.core.tree import TreeSum
from andon_reducer.core.trimmed import LEAST_SHARE, adds_trimmed

__all__ = [
    "MEAN_ENCODINGS",
    "TILE_ELEMENTS",
    "TRIMMED_ENCODINGS",
    "Mean",
    "MeanDefect",
    "Memory",
    "fresh",
    "trimmed_mean",
    "weighted_mean",
]

Floats = npt.NDArray[np.float32]

Memory = Callable[[int], memoryview]
"""Lends memory of so many bytes, with any content."""

MEAN_ENCODINGS = frozenset(
    {
        Encoding.FLOAT32,
        Encoding.FLOAT16,
        Encoding.BFLOAT16,
        Encoding.INT8_BLOCK,
        Encoding.INT4_BLOCK,
        Encoding.INT2_BLOCK,
        Encoding.TOPK,
    }
)
"""Encodings whose numbers can be averaged. Which of them a mean may have, `answers_defect` says."""

TRIMMED_ENCODINGS = frozenset(each for each in MEAN_ENCODINGS if not each.loses_much)
"""Of those, the encodings of trimmed means."""

TILE_ELEMENTS = 2**16
"""Elements of a tile: three float32 vectors of this length fit a core's L2 cache. It is a multiple
of a strip of the encodings that have strips."""


def fresh(size: int) -> memoryview:
    """New memory of `size` bytes."""
    return np.empty(size, np.uint8).data


_BEYOND_FLOAT64 = "the sum of the weights is beyond float64: use smaller weights"


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
    memory: Memory = fresh,
) -> Mean | MeanDefect:
    """The mean of contributions in rank order, or of nodes in that of their grains.

    It is encoded as `answer`; if there is none, the first defect is returned.

    All payloads are of equal length and encoded as `encoding`; weights are finite and above 0. The
    defect is the one at the lowest element, and there of the lowest rank. Both encodings are among
    MEAN_ENCODINGS. A single contribution comes back bit for bit.

    If `into` is given, the mean's bytes are written there. It must have their length, and answer
    and contributions must be FLOAT32. It holds nothing of use if there is a defect. Else
    `memory` lends what the mean is made in.
    """
    assert into is None or answer is encoding is Encoding.FLOAT32
    # Values that are not finite are found below, so NumPy need not warn of them.
    with np.errstate(all="ignore"):
        tree = None if contributions[0].node is None else TreeSum(contributions)
        # In rank order, too: a sum of float64 depends on the order of its terms.
        weights = (part.weight for part in contributions)
        total = sum_in_order(weights) if tree is None else tree.weight
        if not math.isfinite(total):
            return _bad_weights(total, _BEYOND_FLOAT64)
        if tree is not None and not tree.is_divided_well:
            return _bad_weights(total, "the weights of a position are beyond float32: use others")
        # The only share is exactly 1, so there is nothing to compute: the values are only checked.
        as_it_is = len(contributions) == 1 if tree is None else tree.is_gradient
        if as_it_is and answer is encoding:
            return _checked(contributions[0], encoding, into)
        if answer is Encoding.TOPK:
            return _listed(weighted_mean(contributions, encoding, Encoding.FLOAT32))
        in_place = into is not None
        mean = memory(answer.payload_bytes(contributions[0].count)) if into is None else into
        terms = total, encoding, answer
        if tree is not None:
            if answer is encoding and tree.mean_in_one_pass(mean, past_caches=in_place):
                return Mean(mean, total)
            return _in_tiles(contributions, terms, mean, tree.mean_into)
        return _mean(contributions, terms, mean, in_place=in_place)


def trimmed_mean(
    contributions: Sequence[BlockGradient],
    encoding: Encoding,
    answer: Encoding,
    into: memoryview | None = None,
    memory: Memory = fresh,
) -> Mean | MeanDefect:
    """The trimmed mean of contributions in rank order; of too few of them their weighted mean.

    Arguments and result are those of `weighted_mean`, and both encodings are among
    TRIMMED_ENCODINGS. The contributions are no nodes.
    """
    if not cut_at_each_end(len(contributions)):
        return weighted_mean(contributions, encoding, answer, into, memory)
    total = sum_in_order(part.weight for part in contributions)
    if not math.isfinite(total):
        return _bad_weights(total, _BEYOND_FLOAT64)
    shares = [part.weight / total for part in contributions]
    if min(shares) < LEAST_SHARE:
        return _bad_weights(total, "weights 2**512 times apart have no trimmed mean: use others")

    def read(number: int, start: int, out: Floats) -> None:
        # A copy, also of what lies in shared memory: its worker may still write there, and each
        # number is compared several times before it is added.
        found = _floats(contributions[number], encoding, start, out)
        if found is not out:
            np.copyto(out, found)

    mean = memory(answer.payload_bytes(contributions[0].count)) if into is None else into
    with np.errstate(all="ignore"):
        add_up = adds_trimmed(shares, read)
        return _in_tiles(contributions, (total, encoding, answer), mean, add_up)


def _bad_weights(total: float, message: str) -> MeanDefect:
    return MeanDefect(BlockFaultKind.INCONSISTENT, 0, describe_value(total), message)


def _checked(part: BlockGradient, encoding: Encoding, into: memoryview | None) -> Mean | MeanDefect:
    scratch = np.empty(min(TILE_ELEMENTS, part.count), dtype=np.float32)
    out = None if into is None else np.frombuffer(into, dtype=encoding.wire_dtype)
    for start in range(0, part.count, TILE_ELEMENTS):
        tile = _floats(part, encoding, start, scratch[: part.count - start])
        if out is not None:
            # Copied first, and the copy is checked: the worker may still write to its own memory,
            # so this way the others read the very bytes that were found to be finite.
            copy = out[start : start + TILE_ELEMENTS]
            np.copyto(copy, tile)
            tile = copy
        if not _surely_finite(tile):
            defect = _find_defect([part], encoding, start, tile)
            if defect is not None:
                return defect
    return Mean(part.payload if into is None else into, part.weight)


def _listed(mean: Mean | MeanDefect) -> Mean | MeanDefect:
    """A mean in float32 as TOPK, with all elements that are not zero."""
    if isinstance(mean, MeanDefect):
        return mean
    try:
        payload = encode(np.frombuffer(mean.payload, np.float32), Encoding.TOPK)
    except EncodingOverflow as overflow:
        return _overflow(overflow, 0)
    return Mean(payload, mean.total_weight)


def _mean(
    contributions: Sequence[BlockGradient],
    terms: tuple[float, Encoding, Encoding],
    mean: memoryview,
    *,
    in_place: bool,
) -> Mean | MeanDefect:
    """Makes the mean in `mean`; `terms` are the weights' sum and both encodings."""
    total, encoding, answer = terms
    # Shares are at most 1, so weights of any size can't make finite values overflow.
    shares = [np.float32(part.weight / total) for part in contributions]
    if _in_one_pass(contributions, shares, encoding, answer, mean, in_place=in_place):
        return Mean(mean, total)
    # If the pass in C found a value that is not finite, this one finds out which.
    product = np.empty(min(TILE_ELEMENTS, contributions[0].count), dtype=np.float32)

    def add_up(start: int, acc: Floats) -> None:
        np.multiply(_floats(contributions[0], encoding, start, acc), shares[0], out=acc)
        term = product[: acc.size]
        for part, share in zip(contributions[1:], shares[1:], strict=True):
            np.multiply(_floats(part, encoding, start, term), share, out=term)
            np.add(acc, term, out=acc)

    return _in_tiles(contributions, terms, mean, add_up)


def _in_tiles(
    contributions: Sequence[BlockGradient],
    terms: tuple[float, Encoding, Encoding],
    mean: memoryview,
    add_up: Callable[[int, Floats], None],
) -> Mean | MeanDefect:
    """Makes the mean in `mean`: `add_up` makes the elements of a tile, from a first one on."""
    total, encoding, answer = terms
    size = contributions[0].count
    out = np.frombuffer(mean, np.uint8)
    whole = out.view(np.float32) if answer is Encoding.FLOAT32 else None
    scratch = np.empty(0 if whole is not None else min(TILE_ELEMENTS, size), dtype=np.float32)
    for start in range(0, size, TILE_ELEMENTS):
        stop = min(start + TILE_ELEMENTS, size)
        acc = scratch[: stop - start] if whole is None else whole[start:stop]
        add_up(start, acc)
        if not _surely_finite(acc):
            defect = _find_defect(contributions, encoding, start, acc)
            if defect is not None:
                return defect
        if whole is None:
            try:
                _put(encode(acc, answer), answer, start, acc.size, out, size)
            except EncodingOverflow as overflow:
                return _overflow(overflow, start)
    return Mean(mean, total)


def _put(
    part: memoryview,
    answer: Encoding,
    start: int,
    count: int,
    out: npt.NDArray[np.uint8],
    size: int,
) -> None:
    """Writes the payload of `count` elements from `start` on into that of `size` elements."""
    data, strips = np.frombuffer(part, np.uint8), answer.strips
    if strips is None:
        at = answer.payload_bytes(start)
        out[at : at + data.size] = data
        return
    # All scales come before all codes, in the part and in the whole.
    scales, before = strips.scale_bytes(count), strips.scale_bytes(start)
    out[before : before + scales] = data[:scales]
    at = strips.scale_bytes(size) + strips.payload_bytes(start) - before
    out[at : at + data.size - scales] = data[scales:]


def _in_one_pass(
    contributions: Sequence[BlockGradient],
    shares: Sequence[np.float32],
    encoding: Encoding,
    answer: Encoding,
    mean: memoryview,
    *,
    in_place: bool,
) -> bool:
    """Makes the mean in C. Returns whether that was possible, and all of it is finite."""
    strips = encoding.strips
    if fused is None or answer not in (encoding, strips and Encoding.FLOAT32):
        return False
    payloads, factors = tuple(part.payload for part in contributions), tuple(map(float, shares))
    if strips is not None:
        strips_mean = getattr(fused, f"int{strips.bits}_mean")
        wide = answer is not encoding
        return bool(strips_mean(mean, payloads, factors, contributions[0].count, wide))
    if encoding is Encoding.BFLOAT16:
        return bool(fused.bfloat16_mean(mean, payloads, factors))
    if encoding is Encoding.FLOAT32:
        # Shared memory is written past the caches: this thread does not read it again, and a line
        # that is written whole past the caches need not be read first.
        return bool(fused.weighted_mean(mean, payloads, factors, in_place))
    return False


def _floats(part: BlockGradient, encoding: Encoding, start: int, out: Floats) -> Floats:
    """A contribution's elements from `start` on as float32: a view, or decoded into `out`.

    There are as many as `out` has, which must all exist.
    """
    if encoding is Encoding.FLOAT32:
        return np.frombuffer(part.payload, "<f4")[start : start + out.size]
    decode_part(part.payload, encoding, part.count, start, out)
    return out


def _surely_finite(tile: Floats) -> bool:
    """Whether all elements are surely finite; False may be a false alarm."""
    return math.isfinite(np.einsum("i->", tile))


def _find_defect(
    contributions: Sequence[BlockGradient],
    encoding: Encoding,
    start: int,
    acc: Floats,
) -> MeanDefect | None:
    """The first defect of the tile that starts at `start`; None if the alarm was false."""
    first: tuple[int, int, float] | None = None
    # Contributions come before the mean: only if all of them are finite, a mean that is not finite
    # is no rank's fault. Of several ranks the lowest is named; nodes are not in rank order.
    for part in sorted(contributions, key=lambda each: each.rank):
        tile = _floats(part, encoding, start, np.empty_like(acc))
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
        f"the mean is {overflow.value:g}, beyond what {overflow.encoding.label} holds: "
        "ask for float32 or bfloat16 answers, or scale the loss down"
    )
    value = describe_value(overflow.value)
    return MeanDefect(BlockFaultKind.ENCODING_OVERFLOW, start + overflow.element, value, message)
