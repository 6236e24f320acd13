"""Reducers: which reducer averages which elements of the model.

The model is partitioned between chunks, evenly by bytes. With several reducers it is cut into
pieces, of one chunk each if the model is not very large, and each piece goes to the reducer that
has least so far. Backward makes one block after the other. So of every block each reducer has a
part, no link has to carry a block alone, and the last block is exchanged over all links at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from andon.protocol.layout import Chunk, Layout

__all__ = ["MAX_REDUCERS", "ReducerShare", "chunks_by_address", "partition"]

MAX_REDUCERS = 64
"""The most reducers that a line may be configured for."""

_PIECES = 256
"""A large model is cut into a few hundred pieces: each assignment of each worker has the map."""
_PIECES_OF_A_REDUCER = 4
"""A small model is cut so finely that each reducer has about so many, if it has the chunks."""


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

    No reducer has more than another by more than a piece, of the model and of any beginning of it.
    A reducer has several shares, or none if there are more reducers than chunks.
    """
    count = len(addresses)
    if count < 2:
        return tuple(ReducerShare(address, 0, layout.elements) for address in addresses)
    averages = [0] * count
    shares = []
    for start, stop in pairwise(_cuts(layout, chunk_elements, count)):
        # Of several that have as little, the first one: so they take turns.
        least = averages.index(min(averages))
        averages[least] += stop - start
        shares.append(ReducerShare(addresses[least], start, stop))
    return tuple(shares) or (ReducerShare(addresses[0], 0, 0),)


def _cuts(layout: Layout, chunk_elements: int, reducers: int) -> list[int]:
    """The edges of the pieces, both ends of the model included. A piece is one or more chunks."""
    whole = layout.elements
    small = min(chunk_elements, whole // (_PIECES_OF_A_REDUCER * reducers))
    cuts = [0]
    for start, chunk in _starts(layout, chunk_elements):
        # Towards the end pieces shrink, to a chunk at last: so the reducers end up even, and all
        # links have a part of the last block, which no backward hides.
        most = max(small, min(whole // _PIECES, (whole - cuts[-1]) // (2 * reducers)))
        if start > cuts[-1] and start + chunk.count - cuts[-1] > most:
            cuts.append(start)
    if whole:
        cuts.append(whole)
    return cuts


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
