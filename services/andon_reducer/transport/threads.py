"""Threads: they do what the event loop hands over, and wake it once for all that is done."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

__all__ = ["Threads", "Work"]


class Work(Protocol):
    """Something to be done. Both methods run on a thread, and say whether to tell the loop."""

    def work(self) -> bool:
        """Does it."""

    def fail(self, error: Exception) -> bool:
        """Takes note that doing it raised an error."""


_Work = TypeVar("_Work", bound=Work)


class Threads(Generic[_Work]):
    """Threads that belong to one event loop. All but `_run` is called there."""

    def __init__(self, count: int, done: Callable[[_Work], None], name: str) -> None:
        """Starts `count` threads; the loop calls `done` with the work that it is to be told of."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._done = done
        self._tasks: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._results: deque[_Work] = deque()
        self._woken = False
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}_{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def do(self, work: _Work) -> None:
        """Has it done by whichever thread is free."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self._tasks.put(work)

    def close(self) -> None:
        """Ends the threads, each after what it is doing; what waits is not done."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._tasks.get_nowait()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (work := self._tasks.get()) is not None:
            try:
                told = work.work()
            except Exception as error:  # whose work it is says what becomes of that
                told = work.fail(error)
            if told:
                self._tell(work)

    def _tell(self, work: _Work) -> None:
        assert self._loop is not None
        with self._lock:
            self._results.append(work)
            woken, self._woken = self._woken, True
        if not woken:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for this
                self._loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        with self._lock:
            results, self._results = self._results, deque()
            self._woken = False
        for work in results:
            self._done(work)
