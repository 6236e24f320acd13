"""The ring's geometry: how a block is divided, and which way each part of it goes around.

A block is divided into *buckets* of as many elements as N messages hold, and a bucket of D elements
into N *segments*, the i-th from element `i·(D div N) + min(i, D mod N)` on. Segment i starts at
rank i as that rank's own contribution, and each rank after it adds its own: i, i+1, … around to
rank i-1, which then holds the sum and sends the mean around. So segment 0 is summed in the same
order as a reducer sums. With two ranks, so is segment 1: a sum of two does not depend on the order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from andon.protocol.limits import MAX_PAYLOAD_BYTES
from andon.protocol.sums import sum_in_order

__all__ = [
    "RING_CAPABILITY",
    "NormalizedWeights",
    "Segment",
    "is_address",
    "normalize_weights",
    "segment_elements",
    "segments_of",
]

RING_CAPABILITY = "ring.v1"
"""The capability that every worker needs on a line whose topology is a ring."""

_FLOAT32_BYTES = 4
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` elements of a block from `offset` on, which go around the ring from rank `start`."""

    block: int
    offset: int
    count: int
    start: int

    def hops_to(self, rank: int, world_size: int) -> int:
        """How many ranks the segment passes before `rank`. The last rank makes the mean."""
        return (rank - self.start) % world_size

    def owner(self, world_size: int) -> int:
        """The last rank that the segment reaches; it makes the mean."""
        return (self.start - 1) % world_size


def segment_elements(chunk_elements: int) -> int:
    """The most elements of a segment: those of a chunk, but no more than a message of float32.

    A chunk may be of 16-bit numbers, and partial sums always are float32.
    """
    return min(chunk_elements, MAX_PAYLOAD_BYTES // _FLOAT32_BYTES)


def segments_of(block: int, elements: int, world_size: int, most: int) -> Iterator[Segment]:
    """The segments of a block of `elements` elements, in rising order; none of them is empty.

    Args:
        block: its index in the layout.
        elements: how many elements the block has.
        world_size: how many ranks the ring has.
        most: the most elements of a segment.
    """
    bucket = most * world_size
    for base in range(0, elements, bucket):
        small, large = divmod(min(bucket, elements - base), world_size)
        at = base
        for start in range(world_size):
            count = small + (start < large)
            if count:
                yield Segment(block, at, count, start)
            at += count


@dataclass(frozen=True, slots=True)
class NormalizedWeights:
    """Each rank's factor in a mean: w_r / W in float64, not yet rounded; None if it abstains."""

    total_weight: float
    factors: tuple[float | None, ...]

    @property
    def contributors(self) -> int:
        """How many ranks contribute."""
        return sum(share is not None for share in self.factors)

    def first_contributor(self, segment: Segment) -> int:
        """The first contributing rank on a segment's way. The caller knows that there is one."""
        return next(rank for rank in self._way(segment) if self.factors[rank] is not None)

    def last_contributor_before(self, segment: Segment, rank: int) -> int:
        """The last contributing rank before `rank` on a segment's way. There must be one."""
        way = list(self._way(segment))
        before = way[: way.index(rank)]
        return next(each for each in reversed(before) if self.factors[each] is not None)

    def _way(self, segment: Segment) -> Iterator[int]:
        size = len(self.factors)
        return ((segment.start + step) % size for step in range(size))


def normalize_weights(weights: tuple[float, ...]) -> NormalizedWeights:
    """The factors of ranks with these weights; a rank of weight 0 abstains.

    Raises:
        ValueError: a weight is negative or not finite, or their sum is beyond float64.
    """
    for rank, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(
                f"rank {rank} has weight {weight}, which must be finite and at least 0"
            )
    total = sum_in_order(weight for weight in weights if weight)
    if not math.isfinite(total):
        raise ValueError("the sum of the weights is beyond float64: use smaller weights")
    return NormalizedWeights(total, tuple(weight / total if weight else None for weight in weights))


def is_address(text: str) -> bool:
    """Whether a text is host:port or [host]:port.

    gRPC would also take names of other resolvers, such as `unix:`, which no peer may choose.
    """
    found = _ADDRESS.fullmatch(text)
    return found is not None and len(text) <= 255 and 0 < int(found.group(1)) < 2**16
