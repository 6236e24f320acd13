"""The watch over workers' processes on this host: it sees at once that one is stopped, or ends.

Such a process keeps its connections. Its lease would show a stopped one after seconds, in which the
others wait, and a killed one that held gigabytes is heard of once they are freed. The process table
shows both now, and without a doubt: this is no guess from silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from andon.host.process import Process, ProcessState, state_of

__all__ = ["SURE_S", "ProcessWatch", "Seen"]

SURE_S = 0.1
"""A state counts if every look for so long found it so.

What a process said last is read meanwhile: one that leaves in order has not just ended.
"""

_MOST = 64
"""Processes that are looked up at each tick. A host that has more is looked at in turns."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A stream whose process is stopped, or ends, and for how many seconds at least."""

    stream: int
    state: ProcessState
    seconds: float


class ProcessWatch:
    """Looks at the processes of streams, a few times a second."""

    def __init__(self, state_of: Callable[[Process], ProcessState] = state_of) -> None:
        """`state_of` tells the state of a process now."""
        self._state_of = state_of
        self._since: dict[int, tuple[ProcessState, float]] = {}
        """In which state each stream's process is, unless it runs, and since when."""
        self._turn = 0

    def look(self, processes: Iterable[tuple[int, Process | None]], now: float) -> list[Seen]:
        """The streams whose processes do not run, in order."""
        known = [(stream, process) for stream, process in processes if process is not None]
        here = {stream for stream, _ in known}
        self._since = {stream: since for stream, since in self._since.items() if stream in here}
        if len(known) > _MOST:
            start = self._turn % len(known)
            known = [*known[start:], *known[:start]][:_MOST]
            self._turn += _MOST
        for stream, process in known:
            state = self._state_of(process)
            if state is ProcessState.RUNS:
                self._since.pop(stream, None)
            elif stream not in self._since or self._since[stream][0] is not state:
                self._since[stream] = state, now
        return [
            Seen(stream, state, now - at)
            for stream, (state, at) in sorted(self._since.items())
            if now - at >= SURE_S
        ]
