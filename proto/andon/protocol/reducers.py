"""Reducers: which reducer averages which elements of the model.

The model is partitioned between chunks, evenly by bytes. With several reducers it is divided into
stripes first, and each stripe is partitioned among all of them: backward makes one block after the
other, and so every reducer and every link has a part of each block to work on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from andon.protocol.layout import Chunk, Layout

__all__ = ["MAX_REDUCERS", "ReducerShare", "chunks_by_address", "partition"]

MAX_REDUCERS = 64
"""The most reducers that a line may be configured for."""

_STRIPES = 8
_CHUNKS_A_PIECE = 4
"""A stripe has at least so many chunks for each reducer; smaller ones are not worth it."""


@dataclass(frozen=True, slots=True)
class ReducerShare:
    """Elements `start` up to `stop` of the flat model, averaged by the reducer at `address`."""

    address: str
    """Its host:port; empty for the coordinator's own address."""
    start: int
    stop: int

    def __post_init__(self) -> None:
        """Refuses a range that ends before it begins."""
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"a reducer's share ends at {self.stop}, before its {self.start}")


def partition(
    layout: Layout, chunk_elements: int, addresses: Sequence[str]
) -> tuple[ReducerShare, ...]:
    """Partitions the model among the reducers at `addresses`, in the layout's order.

    A reducer has several shares, or none if there are more reducers than chunks.
    """
    count = len(addresses)
    if count < 2:
        return tuple(ReducerShare(address, 0, layout.elements) for address in addresses)
    edges = [start for start, _ in _starts(layout, chunk_elements)] + [layout.elements]
    stripes = max(1, min(_STRIPES, (len(edges) - 1) // (_CHUNKS_A_PIECE * count)))
    pieces = stripes * count
    cuts = [_nearest(edges, layout.elements * piece / pieces) for piece in range(pieces + 1)]
    shares = (
        ReducerShare(addresses[piece % count], start, stop)
        for piece, (start, stop) in enumerate(pairwise(cuts))
        if start < stop
    )
    return tuple(shares) or (ReducerShare(addresses[0], 0, 0),)


def chunks_by_address(
    layout: Layout, chunk_elements: int, shares: Sequence[ReducerShare]
) -> dict[str, list[list[Chunk]]]:
    """The chunks of each reducer by its address: one list for each block, in the layout's order.

    Raises:
        ValueError: the shares do not cover each element of the model once, or one ends inside a
            chunk.
    """
    lanes: dict[str, list[list[Chunk]]] = {
        share.address: [[] for _ in layout.blocks] for share in shares
    }
    # Empty shares come before the one that starts where they do, and so leave no gap.
    ordered = sorted(shares, key=lambda share: (share.start, share.stop))
    ends = [0, *(share.stop for share in ordered)]
    if ends[-1] != layout.elements or any(
        share.start != end for share, end in zip(ordered, ends, strict=False)
    ):
        raise ValueError("the reducers' shares have gaps or overlap")
    at = 0
    for start, chunk in _starts(layout, chunk_elements):
        # Ends: the shares reach to the end of the model, and a chunk begins before it.
        while ordered[at].stop <= start:
            at += 1
        if start + chunk.count > ordered[at].stop:
            raise ValueError(f"a reducer's share ends inside a chunk of block {chunk.block}")
        lanes[ordered[at].address][chunk.block].append(chunk)
    return lanes


def _starts(layout: Layout, chunk_elements: int) -> Iterator[tuple[int, Chunk]]:
    """Each chunk with its first element in the flat model."""
    start = 0
    for chunk in layout.chunks(chunk_elements):
        yield start, chunk
        start += chunk.count


def _nearest(edges: Sequence[int], place: float) -> int:
    """The edge nearest to a place; of two as near, the lower one."""
    above = bisect_left(edges, place)
    if above == 0:
        return edges[0]
    if above == len(edges):
        return edges[-1]
    low, high = edges[above - 1], edges[above]
    return low if place - low <= high - place else high
