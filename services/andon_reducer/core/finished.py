"""Finished: the elements whose averages were made, as ranges of each block.

A worker sends its chunks in order, so what is finished of a block is one range, or a few while
streams overtake each other. So to remember it takes as much as there are blocks, and not chunks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

__all__ = ["RANGE_BYTES", "Finished"]

RANGE_BYTES = 256
"""What it costs to remember one range: two numbers, and its part of a list and of a dict."""


class Finished:
    """The finished elements of one exchange."""

    def __init__(self) -> None:
        """Nothing is."""
        self.ranges = 0
        """How many ranges are remembered."""
        self._bounds: dict[int, list[int]] = {}
        """By block, rising: a range's first element, one past its last, the next range's first."""

    def overlaps(self, block: int, start: int, stop: int) -> bool:
        """Whether any of these elements is finished."""
        bounds = self._bounds.get(block, ())
        inside = bisect_right(bounds, start)
        # An odd place is within a range; any bound before `stop` begins one.
        return bool(inside % 2) or inside != bisect_left(bounds, stop)

    def add(self, block: int, start: int, stop: int) -> None:
        """These elements are finished; a range that touches others is one with them."""
        bounds = self._bounds.setdefault(block, [])
        before = len(bounds)
        first, last = bisect_left(bounds, start), bisect_right(bounds, stop)
        bounds[first:last] = [start] * (first % 2 == 0) + [stop] * (last % 2 == 0)
        self.ranges += (len(bounds) - before) // 2
