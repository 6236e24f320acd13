"""The watch over workers' processes on this host: it sees at once that one is stopped.

A stopped process keeps its connections. Its lease would show it after seconds, in which the others
wait. The process table shows it now, and without a doubt: this is no guess from silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from andon.host.process import Process, is_stopped

__all__ = ["STOPPED_S", "ProcessWatch"]

STOPPED_S = 0.1
"""A process counts as stopped if every look for so long found it so."""

_MOST = 64
"""Processes that are looked up at each tick. A host that has more is looked at in turns."""


class ProcessWatch:
    """Looks at the processes of streams, a few times a second."""

    def __init__(self, stopped: Callable[[Process], bool] = is_stopped) -> None:
        """`stopped` tells whether a process is stopped now."""
        self._stopped = stopped
        self._since: dict[int, float] = {}
        """Since when each stream's process is stopped."""
        self._turn = 0

    def look(
        self, processes: Iterable[tuple[int, Process | None]], now: float
    ) -> list[tuple[int, float]]:
        """The streams whose processes are stopped, and for how many seconds at least."""
        known = [(stream, process) for stream, process in processes if process is not None]
        here = {stream for stream, _ in known}
        self._since = {stream: at for stream, at in self._since.items() if stream in here}
        if len(known) > _MOST:
            start = self._turn % len(known)
            known = [*known[start:], *known[:start]][:_MOST]
            self._turn += _MOST
        for stream, process in known:
            if self._stopped(process):
                self._since.setdefault(stream, now)
            else:
                self._since.pop(stream, None)
        return [
            (stream, now - at)
            for stream, at in sorted(self._since.items())
            if now - at >= STOPPED_S
        ]
