"""Termination: SIGTERM as the wish that this worker finish its step and leave the line.

Whoever stops a container or a host sends SIGTERM, waits, and kills. The first one lets the step be
finished: at the next point where the worker would wait for work, or already does, `Terminated` is
raised. The second one, or one where there is no step to finish, raises it where the script is.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Leaving", "Terminated", "Termination"]


class Terminated(SystemExit):
    """This worker was told to terminate, and leaves: an exit with code 143 (128 + SIGTERM)."""

    def __init__(self) -> None:
        """Has the exit code that shells give a process which SIGTERM ended."""
        super().__init__(128 + signal.SIGTERM)


class Leaving:
    """Whether a worker wants to leave, and whether it need not wait: there is no step to finish."""

    def __init__(self) -> None:
        """Stays; it has not joined yet."""
        self._wanted = False
        self._at_once = True

    def joined(self) -> None:
        """From now on there may be a step to finish."""
        self._at_once = False

    def want(self) -> bool:
        """Wants to leave; whether there may be a step to finish first."""
        self._wanted = True
        return not self._at_once

    def refuse_to_wait(self) -> None:
        """Raises Terminated if this worker wants to leave."""
        if self._wanted:
            raise Terminated

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Whoever is told to terminate meanwhile leaves where it is."""
        before, self._at_once = self._at_once, True
        self.refuse_to_wait()
        try:
            yield
        finally:
            self._at_once = before


class Termination:
    """What SIGTERM does to one process, from `install` to `remove`."""

    def __init__(self) -> None:
        """Changes nothing yet."""
        self.wanted = False
        """Whether a SIGTERM came."""
        self._wake: Callable[[], bool] | None = None
        self._previous: Callable[[int, FrameType | None], object] | int | None = None
        self._process = 0

    def install(self, wake: Callable[[], bool]) -> None:
        """Takes SIGTERM, if this is the main thread and the process does not ignore it.

        A handler of the script's own that is there already is called as well; one that the script
        sets later replaces this one.

        Args:
            wake: ends a wait for work; False if the worker is not where it can leave in words. It
                is called in the midst of anything, so it must only set flags and put events.
        """
        previous = signal.getsignal(signal.SIGTERM)
        taken = self._wake is not None or previous is None or previous == signal.SIG_IGN
        if taken or threading.current_thread() is not threading.main_thread():
            return
        self._wake, self._previous, self._process = wake, previous, os.getpid()
        signal.signal(signal.SIGTERM, self._take)

    def remove(self) -> None:
        """Gives SIGTERM back, unless somebody else has taken it meanwhile."""
        if self._wake is None or threading.current_thread() is not threading.main_thread():
            return
        if os.getpid() == self._process and signal.getsignal(signal.SIGTERM) == self._take:
            signal.signal(signal.SIGTERM, self._previous)
        self._wake = None

    def _take(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A process forked from this one, such as a loader's, is no worker of the line.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        again, self.wanted = self.wanted, True
        if callable(self._previous):
            self._previous(number, frame)
        if again or self._wake is None or not self._wake():
            raise Terminated
