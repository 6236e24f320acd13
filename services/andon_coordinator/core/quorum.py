"""Quorum: whether a window of local steps goes on without those that have not computed yet.

Theory of operation. A window may go on once a quorum of its workers has computed. To go on at once
is not always best: whoever is left out has its change in a later record, and one that comes in a
moment is worth a moment. So there is a *grace*, after the quorum, for which those that are done may
wait.

What a late change costs is not known before a run. What is known: it enters one record later, at
weights that moved meanwhile, and asynchronous local steps lose a few percent by that. Let it be a
tenth of what the change is worth in time, and a worker's change be worth the time that it took, `T`
for each worker's part. Of a missing part `n` of the window that is `0.1 T n N` seconds of one
worker, with `N` workers. Waiting costs the `done` workers that wait one second each. They are even
at

    grace = 0.1 T n N / done

A worker that is not expected within that time is not waited for at all: the wait would be lost. So
one that is always three times as slow delays nobody, and one that is a hundredth slower is in every
record. What is expected follows from its own speed of late, and from when it began.

With a grace of 0, and a quorum of one worker, this is the asynchronous policy.

At an epoch's end everybody is waited for. So that nobody waits long, no worker takes more then than
it computes until all are done (`done_in_s`), if all have work until then.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from andon.protocol.shards import Ranges, subtract

__all__ = ["OpenWindow", "Pace", "Working", "done_in_s", "late_workers", "needed"]

_PRICE = 0.1
"""What a change loses by one record, as a part of the time that it took."""

_LATELY = 4
"""So many shares say how fast a worker is."""


@dataclass(slots=True, eq=False)
class Pace:
    """How fast one worker computes its shares. Times are the line's clock."""

    done: Ranges = ()
    """What it has computed, and no record covers."""
    took_s: float | None = None
    """How long it took for the last share; None: it has computed none."""
    _begun_at: float | None = None
    """Since when it computes what it was assigned; None: it does not."""
    _positions: int = 0
    """How many positions it has to compute since then."""
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=_LATELY))
    """Seconds for each position, the oldest first."""

    def assigned(self, share: Ranges, now: float) -> None:
        """It was assigned this share; what it has computed of that it keeps."""
        if subtract(self.done, share):
            # Workers that lack a position of what they computed drop all of it.
            self.done, self._begun_at = (), None
        missing = sum(map(len, subtract(share, self.done)))
        if not missing:
            self._begun_at = None
        elif self._begun_at is None:
            self._begun_at = now
        self._positions = missing

    def computed(self, share: Ranges, now: float) -> None:
        """It has computed all of this share, which it was assigned."""
        self.done = share
        if self._begun_at is not None:
            self.took_s = now - self._begun_at
            self._rates.append(self.took_s / self._positions)
            self._begun_at = None

    def recorded(self) -> None:
        """A record covers what it has computed."""
        self.done, self._begun_at = (), None

    @property
    def position_s(self) -> float | None:
        """How long it takes for a position; None: it has computed none."""
        return statistics.median(self._rates) if self._rates else None

    @property
    def expected_at(self) -> float | None:
        """When it will have computed its share; None: nobody knows, or it computes none."""
        position_s = self.position_s
        if self._begun_at is None or position_s is None:
            return None
        return self._begun_at + position_s * self._positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Working:
    """A worker of an open window that has not computed its share."""

    worker: int
    positions: int
    """How many it was assigned."""
    expected_at: float | None
    """When it will have computed them; None: nobody knows."""
    may_be_late: bool
    """Whether a record may be made without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenWindow:
    """An open window of which a quorum has computed."""

    workers: int
    """All that it may wait for: its roster, and those that are late meanwhile."""
    done: int
    """Those of them that have computed."""
    positions: int
    """All that its roster was assigned."""
    usual_s: float
    """How long workers take for a share."""
    reached_at: float
    """Since when a quorum has computed."""


def done_in_s(left: int, paces: Iterable[Pace], now: float) -> float | None:
    """In how long all workers are done, if each has work until then; None: a pace is not known.

    Args:
        left: positions that nobody was assigned.
        paces: all workers'.
        now: the line's clock.
    """
    rate, positions = 0.0, float(left)
    for pace in paces:
        if not pace.position_s:
            return None
        rate += 1.0 / pace.position_s
        if pace.expected_at is not None:
            positions += max(0.0, pace.expected_at - now) / pace.position_s
    return positions / rate if rate else None


def needed(part: float, workers: int) -> int:
    """How many of so many workers a window waits for: the part of them, rounded up, at least 1."""
    # A part such as 0.1 of 10 must not become 2 by a rounding error.
    return max(1, math.ceil(part * workers - 1e-9))


def late_workers(
    window: OpenWindow, working: Sequence[Working], grace_s: float | None, now: float
) -> tuple[int, ...]:
    """The workers without which the window goes on now; empty: it waits.

    Args:
        window: which of its workers have computed.
        working: the others of its roster.
        grace_s: how long it waits for them; None: as long as that is worth.
        now: the line's clock.
    """
    if not all(each.may_be_late for each in working):
        return ()
    if grace_s is None:
        missing = sum(each.positions for each in working) / max(1, window.positions)
        grace_s = _PRICE * window.usual_s * missing * window.workers / window.done
    until = window.reached_at + grace_s
    awaited = any(each.expected_at is None or each.expected_at <= until for each in working)
    if awaited and now < until:
        return ()
    return tuple(each.worker for each in working)
