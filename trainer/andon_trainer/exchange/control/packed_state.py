"""A packed state: bytes that lie in several places, so that nobody needs a second copy of them."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate

__all__ = ["PackedState"]


class PackedState:
    """What one worker sends of its state to another: the parts, one after the other.

    The parts are views. Whoever made them sees to it that nobody writes to them meanwhile.
    """

    def __init__(self, parts: Iterable[bytes | memoryview], base_bytes: int = 0) -> None:
        """Holds the parts.

        Args:
            parts: bytes, any number of them in each.
            base_bytes: how many bytes at the end are weights that no worker trains, which the
                other end may have of its own.
        """
        self._parts = [view for part in parts if (view := memoryview(part))]
        self._ends = list(accumulate(map(len, self._parts)))
        self.base_bytes = base_bytes

    def __len__(self) -> int:
        """In bytes."""
        return self._ends[-1] if self._ends else 0

    def __bytes__(self) -> bytes:
        """A copy, in one piece."""
        return b"".join(self._parts)

    def views(self, begin: int, end: int) -> Iterator[memoryview]:
        """The bytes from `begin` to `end`; that is not beyond the last one."""
        number = bisect_right(self._ends, begin)
        while begin < end:
            part, stop = self._parts[number], self._ends[number]
            start = stop - len(part)
            yield part[begin - start : end - start]
            begin, number = stop, number + 1

    def sha256(self) -> bytes:
        """SHA-256 of all bytes."""
        return self._hashed_from(0)

    def base_sha256(self) -> bytes:
        """SHA-256 of the base; empty if there is none."""
        return self._hashed_from(len(self) - self.base_bytes) if self.base_bytes else b""

    def _hashed_from(self, begin: int) -> bytes:
        found = hashlib.sha256()
        for view in self.views(begin, len(self)):
            found.update(view)
        return found.digest()
