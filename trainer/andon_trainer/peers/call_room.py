"""Memory in which a group's calls have what came of others and is not reduced yet.

To let such memory go and to get it again takes the kernel as long as some percent of the call: all
its pages are given back, and filled with zeros. So the last call's memory is kept for the next one,
up to a size that nobody minds.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

__all__ = ["KEPT_BYTES", "CallRoom"]

_LARGE_BYTES = 2**20
KEPT_BYTES = 64 * 2**20
"""Longer memory is not kept: a process may make one call of many gigabytes, and never again."""


class CallRoom:
    """The memory of one group's calls. Any thread may use it."""

    def __init__(self) -> None:
        """Has none yet."""
        self._lock = threading.Lock()
        self._kept: memoryview | None = None

    def take(self, size: int) -> memoryview:
        """Memory of `size` bytes or more, with any content; nobody else has it."""
        with self._lock:
            kept = self._kept
            if kept is not None and kept.nbytes >= size:
                self._kept = None
                return kept
        return _memory(size)

    def give_back(self, room: memoryview) -> None:
        """Nobody uses what `take` returned any more."""
        with self._lock:
            kept = self._kept
            if room.nbytes <= KEPT_BYTES and (kept is None or kept.nbytes < room.nbytes):
                self._kept = room


def _memory(size: int) -> memoryview:
    """In large pages where the kernel has them."""
    if size < _LARGE_BYTES:
        return memoryview(bytearray(size))
    room = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            room.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(room)
