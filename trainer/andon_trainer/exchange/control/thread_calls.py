"""The calls that each thread of this process is in, read while the threads run on.

Theory of operation. Python makes an object for a call only when somebody asks for it, and making
one may start a garbage collection. That may run the code of anything that it frees, and so let
another thread run, which leaves the very call of which an object is being made. Python before 3.12
then has something else in its hands than a call, or the process ends with SIGSEGV. So no collection
starts while calls are read.
"""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

from andon_trainer.core.stacks import RawFrame

__all__ = ["thread_calls"]

_DEEPEST = 200
"""Calls of a stack that are looked at."""

_reading = threading.Lock()
"""Whoever reads first would let collections start again while the other one still reads."""


def thread_calls() -> dict[int, tuple[RawFrame, ...]]:
    """The calls of each thread, by its identifier, the innermost first."""
    with _reading:
        collects = gc.isenabled()
        gc.disable()
        try:
            return {thread: _calls_of(frame) for thread, frame in sys._current_frames().items()}
        finally:
            if collects:
                gc.enable()


def _calls_of(frame: FrameType | None) -> tuple[RawFrame, ...]:
    found: list[RawFrame] = []
    while frame is not None and len(found) < _DEEPEST:
        code = frame.f_code
        found.append((code.co_filename, frame.f_lineno or 0, code.co_qualname))
        frame = frame.f_back
    return tuple(found)
