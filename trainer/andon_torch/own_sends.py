"""Sends of a rank to itself: PyTorch allows them if they don't block."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable

__all__ = ["OwnSends"]


class _OwnCall:
    """One end of a send to oneself."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._waiting: list[Callable[[BaseException | None], None]] = []

    def end(self, error: BaseException | None) -> None:
        with self._lock:
            self._error = error
            self._ended.set()
            waiting, self._waiting = self._waiting, []
        for ended in waiting:
            ended(error)

    def wait(self, timeout_s: float | None) -> None:
        """Waits for the other end.

        Raises:
            RuntimeError: it did not come in time, or is of another size.
        """
        if not self._ended.wait(timeout_s):
            raise RuntimeError(
                f"a send of this rank to itself waited {timeout_s:g} s for its other end"
            )
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Whether the other end came."""
        return self._ended.is_set()

    def then(self, ended: Callable[[BaseException | None], None]) -> None:
        """Has `ended` called once."""
        with self._lock:
            if not self._ended.is_set():
                self._waiting.append(ended)
                return
        ended(self._error)


class OwnSends:
    """Brings the two ends of each send together, by tag and in order."""

    def __init__(self) -> None:
        """Nothing is sent yet."""
        self._lock = threading.Lock()
        self._sent: dict[int, deque[_OwnCall]] = defaultdict(deque)
        self._wanted: dict[int, deque[_OwnCall]] = defaultdict(deque)

    def send(self, tag: int, view: memoryview) -> _OwnCall:
        """Begins a send."""
        return self._meet(_OwnCall(view), self._sent[tag], self._wanted[tag], sends=True)

    def receive(self, tag: int, view: memoryview) -> _OwnCall:
        """Begins a receive."""
        return self._meet(_OwnCall(view), self._wanted[tag], self._sent[tag], sends=False)

    def _meet(
        self, own: _OwnCall, mine: deque[_OwnCall], theirs: deque[_OwnCall], *, sends: bool
    ) -> _OwnCall:
        with self._lock:
            if not theirs:
                mine.append(own)
                return own
            other = theirs.popleft()
        source, target = (own, other) if sends else (other, own)
        error = None
        if len(source.view) == len(target.view):
            target.view[:] = source.view
        else:
            error = RuntimeError(
                f"a send of this rank to itself gives {len(source.view)} bytes, and "
                f"{len(target.view)} are wanted"
            )
        for each in (source, target):
            each.end(error)
        return own
