"""Buffers that are used again: where payloads are received, and where means are made.

Fresh memory of a chunk's size comes from the kernel page by page, which costs more than receiving
into it. So what was used is kept. Nobody gives a buffer back: it returns once the last view of it
is gone, whoever held that: a round, a thread that averages, or one that sends.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque

import numpy as np
import numpy.typing as npt

__all__ = ["Buffers"]

Bytes = npt.NDArray[np.uint8]

_GRAIN_BYTES = 2**16
"""Lengths are rounded up to it, so that chunks of almost one length share buffers. What is shorter
is not kept: fresh memory of that length costs little."""


class Buffers:
    """Lends memory. Any thread may ask, and let go."""

    def __init__(self, max_kept_bytes: int) -> None:
        """Keeps at most so many bytes that nobody uses."""
        self._max_kept_bytes = max_kept_bytes
        self._kept: defaultdict[int, deque[Bytes]] = defaultdict(deque)
        """By length, what nobody uses."""
        self._kept_bytes = 0
        # Returns run wherever the last view is dropped: it may be a thread that is just in here.
        self._lock = threading.RLock()

    @property
    def kept_bytes(self) -> int:
        """Bytes that nobody uses at the moment."""
        return self._kept_bytes

    def lend(self, size: int) -> memoryview:
        """Memory of `size` bytes, with any content. The object behind the view has all of it."""
        if size < _GRAIN_BYTES:
            return np.empty(size, np.uint8).data
        whole = -(-size // _GRAIN_BYTES) * _GRAIN_BYTES
        with self._lock:
            kept = self._kept[whole]
            memory = kept.pop() if kept else None
            if memory is not None:
                self._kept_bytes -= whole
        if memory is None:
            memory = np.empty(whole, np.uint8)
        # A new array over the same memory: views refer to it, and not to the memory itself. So it
        # dies with the last of them.
        lent = np.frombuffer(memory.data, np.uint8)
        weakref.finalize(lent, self._keep, memory).atexit = False
        return lent.data[:size]

    def _keep(self, memory: Bytes) -> None:
        """Nobody uses this memory any more."""
        with self._lock:
            for size, others in self._kept.items():
                # Most likely chunks have another length now: the others make room.
                while size != memory.nbytes and others and self._is_full(memory):
                    others.pop()
                    self._kept_bytes -= size
            if not self._is_full(memory):
                self._kept[memory.nbytes].append(memory)
                self._kept_bytes += memory.nbytes

    def _is_full(self, memory: Bytes) -> bool:
        return self._kept_bytes + memory.nbytes > self._max_kept_bytes
