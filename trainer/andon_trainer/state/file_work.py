"""Work on a run's files beside training: a thread for one thing at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["NICENESS", "FileWork"]

NICENESS = 15
"""By its weight, a thread gets a thirtieth of a core that training wants, and what is left idle."""


class FileWork:
    """Does one thing at a time, on a thread of its own. Used by one thread."""

    def __init__(self) -> None:
        """Does nothing yet; no thread is begun before there is anything to do."""
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._over.set()
        self._failure: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether it is at work."""
        return not self._over.is_set()

    def begin(self, work: Callable[[], None]) -> None:
        """Begins to work; the thing before must be over, and its failure taken."""
        assert not self.busy
        assert self._failure is None
        self._over.clear()

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._failure = error  # It ends this work, and is raised where it is taken.
            finally:
                self._over.set()

        # Not one that Python waits for at its end: who has to wait does so where it can still tell
        # the line.
        self._thread = threading.Thread(target=run, name="andon-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns once it is not at work."""
        self._over.wait()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take_failure(self) -> BaseException | None:
        """What the last thing failed with, once; None: it did not, or is not over."""
        failure, self._failure = self._failure, None
        return failure
