"""Calls from threads to the event loop: one wake-up is for all that wait.

Waking a loop writes to a pipe and hands the interpreter over, and chunks come and go by the
thousand.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["LoopCalls"]


class LoopCalls:
    """Has things done on one event loop, in the order in which they were asked for."""

    def __init__(self) -> None:
        """Belongs to no loop yet, because it may be made before there is one."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        self._woken = False
        self._lock = threading.Lock()
        """Guards `_waiting` and `_woken`."""

    def attach(self) -> None:
        """Takes the running loop; to be called there, before the first `call`."""
        self._loop = asyncio.get_running_loop()

    def call(self, what: Callable[..., None], *given: object) -> bool:
        """Has the loop call `what`; any thread may ask. False: the loop is closed."""
        assert self._loop is not None, "a loop is attached before its threads start"
        with self._lock:
            # Queued before the loop is woken: `_run` takes all that it finds.
            self._waiting.append((what, given))
            woken, self._woken = self._woken, True
        if not woken:
            try:
                self._loop.call_soon_threadsafe(self._run)
            except RuntimeError:
                self._woken = False  # So that the next one is told, too.
                return False
        return True

    def _run(self) -> None:
        with self._lock:
            # Both at once: what is asked for after this wakes the loop again.
            waiting, self._waiting = self._waiting, deque()
            self._woken = False
        for what, given in waiting:
            try:
                what(*given)
            except Exception as error:  # As the loop does: the calls behind it are of others.
                assert self._loop is not None
                context = {"message": f"{what} failed on the loop", "exception": error}
                self._loop.call_exception_handler(context)
