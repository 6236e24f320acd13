"""Termination: on SIGTERM this worker finishes its step and leaves the line.

What stops a container or a host sends SIGTERM, waits, and kills. The first SIGTERM lets the step be
finished: `Terminated` is raised at the next point where the worker waits for work, or waits
already. A second one, or one that comes when there is no step to finish, raises it at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Leaving", "Terminated", "Termination"]


class Terminated(SystemExit):
    """This worker was asked to terminate, and leaves: exit code 143 (128 + SIGTERM)."""

    def __init__(self) -> None:
        """Sets the exit code that shells report for a process that SIGTERM ended."""
        super().__init__(128 + signal.SIGTERM)


class Leaving:
    """Whether a worker wants to leave, and whether there may be a step to finish first.

    A signal handler writes to it at any moment, so it only has flags.
    """

    def __init__(self) -> None:
        """Does not want to leave, and has no step: it has not joined yet."""
        self._wanted = False
        self._at_once = True
        self._released_by: float | None = None
        """Until when it waits for the line to let it go; None: it gave no notice."""

    def joined(self) -> None:
        """Notes that from now on there may be a step to finish."""
        self._at_once = False

    def want(self) -> bool:
        """Wants to leave; returns whether there may be a step to finish first."""
        self._wanted = True
        return not self._at_once

    @property
    def wanted(self) -> bool:
        """Whether it wants to leave."""
        return self._wanted

    def give_notice(self, grace_s: float) -> None:
        """Notes that the line was told, and lets it go within that time."""
        self._released_by = time.monotonic() + grace_s

    @property
    def release_in_s(self) -> float | None:
        """How long it waits to be let go, at most; 0: no longer; None: it gave no notice."""
        if self._released_by is None:
            return None
        return max(0.0, self._released_by - time.monotonic())

    def refuse_to_wait(self) -> None:
        """Raises Terminated if this worker wants to leave."""
        if self._wanted:
            raise Terminated

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within it there is no step to finish: a SIGTERM raises at once."""
        before, self._at_once = self._at_once, True
        # After the flag is set: a SIGTERM from before it is seen here, and one after it raises.
        self.refuse_to_wait()
        try:
            yield
        finally:
            self._at_once = before


class Termination:
    """Handles SIGTERM in one process, from `install` to `remove`."""

    def __init__(self) -> None:
        """Changes nothing yet."""
        self.wanted = False
        """Whether this worker was asked to leave, by SIGTERM or by `ask`."""
        self.why = "SIGTERM"
        """What asked this worker to leave, for people."""
        self._signalled = False
        """Whether a SIGTERM came; `ask` does not count."""
        self._wake: Callable[[str], bool] | None = None
        self._handles = False
        """Whether the process's handler is ours."""
        self._previous: Callable[[int, FrameType | None], object] | int | None = None
        self._process = 0

    def install(self, wake: Callable[[str], bool]) -> None:
        """Handles SIGTERM, if this is the main thread and the process does not ignore it.

        A handler that the script has set already is called as well. One that it sets later replaces
        this one. In another thread only `ask` ends a wait: signals come to the main thread.

        Args:
            wake: ends a wait for work, and is told why; returns False if there is no step to
                finish. It is called at any moment, so it must only set flags and put events.
        """
        if self._wake is not None:
            return
        self._wake = wake
        previous = signal.getsignal(signal.SIGTERM)
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or previous is None or previous == signal.SIG_IGN:
            return  # `ask` is heard all the same.
        self._previous, self._process, self._handles = previous, os.getpid(), True
        signal.signal(signal.SIGTERM, self._take)

    def ask(self, why: str) -> None:
        """Does what a first SIGTERM does, from any thread, and raises nothing here.

        Args:
            why: what the line is told.
        """
        self.why, self.wanted = why, True
        if self._wake is not None:
            self._wake(why)

    def remove(self) -> None:
        """Restores the handler from before, unless another one was set meanwhile."""
        if self._handles and threading.current_thread() is not threading.main_thread():
            return
        self._wake = None
        if not self._handles:
            return
        self._handles = False
        if os.getpid() == self._process and signal.getsignal(signal.SIGTERM) == self._take:
            signal.signal(signal.SIGTERM, self._previous)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A process that was forked from this one, such as a loader's, is no worker. It only
            # inherited the handler, and dies as it would have without it.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        # After an `ask` the first signal is no second one: the step may still be finished.
        again, self._signalled, self.wanted = self._signalled, True, True
        if callable(self._previous):
            self._previous(number, frame)
        if again or self._wake is None or not self._wake(self.why):
            raise Terminated
