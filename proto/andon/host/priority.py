"""Threads that leave the processors to training."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

__all__ = ["give_way"]


def give_way(niceness: int) -> None:
    """Makes this thread yield to others that want its core, for as long as it lives.

    Args:
        niceness: by which the kernel weighs it. It should not be of the idle class: it takes
            Python's lock now and then, and must not hold that for long.
    """
    if sys.platform == "linux":  # Elsewhere the number would be the whole process's.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
