"""Top-k: the elements of greatest magnitude with their places, and nothing of the others.

Theory of operation. Elements are taken in stretches of 256, so that a place is one byte. A sender
lists so many of a stretch as the line's policy says, those of greatest magnitude, and keeps what it
did not send (error feedback). A mean is listed whole: everything in it that is not zero, which are
at most the elements that some rank sent. So a reader need not know how many are listed: the payload
says it of each stretch. It is these parts, one after the other:

    counts     2 bytes for each stretch: how many of its elements are listed
    places     a byte for each listed element, which counts from the beginning of its stretch
    values     bfloat16, in the same order
    runs       first element and length, 4 bytes each, of each stretch of -0.0, if there are any

An element that is not listed is +0.0, but for those in a run. -0.0 says that a parameter has no
gradient, so it must survive, and parameters lie in one piece.

Section 6 of docs/protocol-data.md defines the results to the bit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["KEPT", "MOST_KEPT", "STRETCH", "defect_of", "pack", "unpack"]

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]

STRETCH = 256
"""Elements whose places are counted together."""
KEPT = 4
"""Elements of a stretch that a sender lists, unless the line says otherwise: 1.6 %."""
MOST_KEPT = 64
"""The most that a line may ask for. With more, four bits an element take no more bytes."""

_COUNT_BYTES = 2
_ENTRY_BYTES = 3
_RUN_BYTES = 8
_MAGNITUDE = np.uint16(0x7FFF)
_MINUS_ZERO = np.uint32(0x80000000)


def pack(values: Floats, halves: Halves, kept: int | None) -> memoryview:
    """The payload of float32 `values`, shape (n,), which are `halves` as bfloat16.

    Of each stretch it has the `kept` elements of greatest magnitude as bfloat16, of equals those
    that come first; None: all. It has none whose magnitude is zero then.
    """
    places = _listed(halves & _MAGNITUDE, kept)
    counts = np.bincount(places // STRETCH, minlength=-(-values.size // STRETCH)).astype("<u2")
    parts = (counts, (places % STRETCH).astype(np.uint8), halves[places].astype("<u2"))
    return np.concatenate([part.view(np.uint8) for part in (*parts, _runs_in(values))]).data


def unpack(payload: Bytes, count: int, start: int, out: Floats) -> None:
    """Decodes elements of a payload of `count` elements, from `start` on, to `out`.

    `start` is a multiple of 128, `out` contiguous float32 that says how many there are. The payload
    is sound (`defect_of`).
    """
    counts, places, halves, runs = _parts_of(payload, count)
    # The stretches that `out` is in, the first of which it may have the second half of.
    first, stop = start // STRETCH, -(-(start + out.size) // STRETCH)
    listed = counts[first:stop].astype(np.intp)
    before = int(counts[:first].sum(dtype=np.int64))
    some = slice(before, before + int(listed.sum()))
    at = np.repeat(np.arange(first, stop) * STRETCH - start, listed) + places[some]
    there = (at >= 0) & (at < out.size)
    out.fill(0)
    out.view(np.uint32)[at[there]] = halves[some][there].astype(np.uint32) << np.uint32(16)
    for begin, length in runs.tolist():
        out[max(begin - start, 0) : max(begin + length - start, 0)] = -0.0


def defect_of(payload: memoryview | bytes, count: int) -> str:
    """What is wrong with a payload of `count` elements that somebody sent; empty: nothing."""
    data = np.frombuffer(payload, np.uint8)
    stretches = -(-count // STRETCH)
    if data.size < _COUNT_BYTES * stretches:
        return f"{data.size} bytes have no counts for {stretches} stretches"
    counts = data[: _COUNT_BYTES * stretches].view("<u2")
    listed = int(counts.sum(dtype=np.int64))
    left = data.size - _COUNT_BYTES * stretches - _ENTRY_BYTES * listed
    if left < 0 or left % _RUN_BYTES:
        return f"{data.size} bytes are not {listed} listed elements, and runs"
    _, places, _, runs = _parts_of(data, count)
    at = np.repeat(np.arange(stretches) * STRETCH, counts) + places
    if at.size and (int(at[-1]) >= count or (np.diff(at) <= 0).any()):
        return f"the listed places do not rise, or are not among {count} elements"
    ends = runs.astype(np.int64).sum(axis=1)
    if runs.size and ((ends[:-1] > runs[1:, 0]).any() or ends[-1] > count or not runs[:, 1].all()):
        return f"the runs of -0.0 do not rise, or are not among {count} elements"
    return ""


def _listed(sizes: Halves, kept: int | None) -> npt.NDArray[np.intp]:
    """The places of the elements to list, rising; `sizes` are magnitudes."""
    if kept is None or not sizes.size:
        return np.flatnonzero(sizes)
    stretches = -(-sizes.size // STRETCH)
    # A number for each element that orders a stretch: by magnitude, and then the first ones first.
    order = np.zeros((stretches, STRETCH), np.uint32)
    order.reshape(-1)[: sizes.size] = sizes
    order <<= np.uint32(8)
    order |= np.arange(STRETCH - 1, -1, -1, dtype=np.uint32)
    least = np.partition(order, STRETCH - kept, axis=1)[:, STRETCH - kept, None]
    # Zeros are below all others, and never listed.
    return np.flatnonzero(order >= np.maximum(least, np.uint32(STRETCH)))


def _runs_in(values: Floats) -> npt.NDArray[np.uint32]:
    """First element and length of each stretch of -0.0, one after the other."""
    minus = values.view(np.uint32) == _MINUS_ZERO
    if not minus.any():
        return np.empty(0, "<u4")
    edges = np.flatnonzero(np.diff(minus, prepend=False, append=False))
    edges[1::2] -= edges[0::2]
    return edges.astype("<u4")


def _parts_of(payload: Bytes, count: int) -> tuple[Halves, Bytes, Halves, npt.NDArray[np.uint32]]:
    """Counts, places, values, and runs as rows of two, of a payload whose length fits."""
    places_at = _COUNT_BYTES * -(-count // STRETCH)
    counts = payload[:places_at].view("<u2")
    values_at = places_at + int(counts.sum(dtype=np.int64))
    runs_at = 3 * values_at - 2 * places_at
    return (
        counts,
        payload[places_at:values_at],
        payload[values_at:runs_at].view("<u2"),
        payload[runs_at:].view("<u4").reshape(-1, 2),
    )
