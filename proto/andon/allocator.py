"""The allocator: freed memory is kept for the next message instead of given back to the system.

glibc gives a freed buffer of a megabyte back at once, and the kernel clears every page of the next
one: for each message twice or more, on both ends. Kept memory costs nothing; a process stays as
large as it was at its largest, which bounded queues bound. Other C libraries are left alone.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["KEPT_BYTES", "keep_freed_memory"]

KEPT_BYTES = 256 * 2**20
"""Free memory at the end of a heap beyond which it is given back after all."""

_LARGEST_BYTES = 32 * 2**20
"""Allocations from here on are the system's, as before; the most that glibc takes."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Names of glibc's malloc.h."""


def keep_freed_memory() -> bool:
    """Makes this process keep what it frees, up to KEPT_BYTES a heap; False if it can't.

    It can where the C library is glibc. Once is enough, and again does no harm.
    """
    try:
        glibc = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if glibc else None
    if mallopt is None:
        return False
    kept = mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES) and kept)
