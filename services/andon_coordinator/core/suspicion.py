"""Suspicion: how long to wait for what is late, learnt from how long it took before.

Theory of operation
===================

A silent worker may be stopped, cut off, or busy; from a silence nobody can tell which. A constant
that decides it is too short for one line and too long for another. So suspicion *accrues*, as in
the phi detector of Hayashibara et al. (2004): the level of a silence is the negative decimal
logarithm of the chance that an answer takes longer than that, if answers take as long as those
before. Level 2 is one in a hundred, level 8 one in a hundred million. Times are taken as normally
distributed, with a least deviation: answers that all took a millisecond do not prove much.

Two things make it patient with a worker that is sometimes held up, as by a call that keeps the
interpreter's lock. Nobody is suspected before half as long again as its longest answer of late. And
each suspicion that was a mistake doubles the patience: after a few the lease decides, as it would
without any of this.

A machine may become crowded from one second to the next, and then no answer of before says how long
one takes. The line's own ticks show that: if several come late, what runs here waits for a
processor. So nobody is suspected before several times the longest such wait of late.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

__all__ = ["Crowd", "Delays", "ProcessAnswers", "answers_of_processes", "durations_of_rounds"]

_ENOUGH = 10
"""From so few delays on they say something."""

_LATE = 2.0
"""Level at which a round is late: then workers are asked whether they are there."""
_SILENT = 8.0
"""Level at which a worker is suspected."""
_LONGER = 1.5
"""... and not before that many times its longest answer."""
_WAKES = 6.0
"""An answer takes several threads that wait for a processor one after the other: those that read
and write at both ends, and one that has the interpreter's lock. Each may wait as long."""
_CROWD_KEPT = 0.99
"""So much of a late tick counts a tick later: half of it after 70 ticks."""
_LATELY = 4
"""Answers that tell how it is now."""
_FORGIVEN_S = 600.0
"""After so long without a mistake, one is forgotten."""


def _deviations(level: float) -> float:
    """How many standard deviations above the mean a level is reached."""
    return -statistics.NormalDist().inv_cdf(10.0**-level)


_LATE_DEVIATIONS, _SILENT_DEVIATIONS = _deviations(_LATE), _deviations(_SILENT)
_NORMAL = 1.4826
"""The deviation of a normal distribution is so many median distances from its median."""


@dataclass(slots=True, eq=False)
class Delays:
    """How long something took the last times, in seconds."""

    least_deviation_s: float
    kept: deque[float]
    """The oldest first; its `maxlen` bounds them."""

    @property
    def enough(self) -> bool:
        """Whether there are enough of them to judge by."""
        return len(self.kept) >= _ENOUGH

    def until_late_s(self) -> float:
        """After so long it is late: one in a hundred takes longer, apart from outliers."""
        # By medians: a checkpoint takes long now and then, and must not make everything seem usual.
        middle = statistics.median(self.kept)
        apart = statistics.median(abs(each - middle) for each in self.kept)
        return middle + _LATE_DEVIATIONS * max(_NORMAL * apart, self.least_deviation_s)

    def until_silent_s(self) -> float:
        """After so long it does not come any more, as far as delays of late can tell."""
        # By the mean and the deviation, in which outliers count: here they are what matters.
        mean = self.usual_s()
        # Not `statistics.pstdev`: it is exact, and a hundred times slower.
        deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in self.kept) / len(self.kept))
        after_s = mean + _SILENT_DEVIATIONS * max(deviation, self.least_deviation_s)
        return max(after_s, _LONGER * max(self.kept))

    def usual_s(self) -> float:
        """The mean."""
        return statistics.fmean(self.kept)


def durations_of_rounds() -> Delays:
    """For how long rounds were open; empty at first."""
    return Delays(least_deviation_s=0.01, kept=deque(maxlen=32))


def answers_of_processes() -> Delays:
    """How long the answers of a process took; empty at first."""
    return Delays(least_deviation_s=0.025, kept=deque(maxlen=64))


@dataclass(slots=True)
class Crowd:
    """How long what is to run waits for a processor here, as late ticks show it."""

    waits_s: float = 0.0
    """The longest wait of late but one: a single one may be the line's own work."""
    _longest_s: float = 0.0

    @property
    def answer_s(self) -> float:
        """How long an answer may take, since its threads wait for processors."""
        return _WAKES * self.waits_s

    def ticked(self, late_s: float) -> None:
        """A tick came so late."""
        longest_s = self._longest_s * _CROWD_KEPT
        self.waits_s = max(self.waits_s * _CROWD_KEPT, min(late_s, longest_s))
        self._longest_s = max(longest_s, late_s)


@dataclass(slots=True, eq=False)
class ProcessAnswers:
    """What one process was asked, and how fast it answers. Times are the line's clock."""

    delays: Delays = field(default_factory=answers_of_processes)
    number: int = 0
    """Of the last probe."""
    asked_at: float | None = None
    """When the probe was sent that is not answered; None: none is open."""
    last_at: float = -math.inf
    """When the last probe was sent."""
    _lag_s: float = 0.0
    """For how long the line had not listened, in total, when that probe was sent."""
    _mistakes: int = 0
    _mistaken_at: float = 0.0
    _suspected_since: float | None = None
    """Since when it was silent, if that cut it off and it has not come back."""

    def ask(self, now: float, lag_s: float) -> int:
        """Notes a probe that leaves now. Returns its number."""
        assert self.asked_at is None
        self.number += 1
        self.asked_at = self.last_at = now
        self._lag_s = lag_s
        return self.number

    def answered(self, number: int, now: float, lag_s: float) -> None:
        """Notes an answer; one to another probe than the open one says nothing."""
        if self.asked_at is not None and number == self.number:
            self.delays.kept.append(self._waited_s(now, lag_s))
            self.asked_at = None

    def forget_probe(self) -> None:
        """No answer comes any more: its stream is over."""
        self.asked_at = None

    def silent_s(self, now: float, lag_s: float, heard_at: float) -> float:
        """For how long it has been silent since it was asked, while the line listened; 0: it isn't.

        Args:
            now: the time.
            lag_s: for how long the line has not listened so far, in total.
            heard_at: when it was heard of last; any message shows that it is there.
        """
        return 0.0 if self.asked_at is None else min(self._waited_s(now, lag_s), now - heard_at)

    def patience_s(self, now: float, lease_s: float, crowd_s: float = 0.0) -> float:
        """After how long a silence it is suspected; a lease is the most.

        Args:
            now: the time.
            lease_s: the lease.
            crowd_s: how long an answer may take on a crowded machine.
        """
        if not self.delays.enough:
            return lease_s
        # Bounded before it is used: a float overflows at 2**1024.
        doublings = min(self._mistakes_left(now), 30)
        after_s = max(self.delays.until_silent_s(), crowd_s)
        return min(after_s * 2.0**doublings, lease_s)

    def suspected(self) -> None:
        """It is cut off for its present silence."""
        self._suspected_since = self.asked_at

    @property
    def lately_s(self) -> float:
        """The longest of its last answers; 0: it has given none."""
        return max(list(self.delays.kept)[-_LATELY:], default=0.0)

    def came_back(self, now: float, lease_s: float) -> float | None:
        """It is here again.

        Returns:
            For how long it had been silent, if it was suspected by mistake: it came back within a
            lease, so that it would not have been lost without the suspicion. Else None.
        """
        since, self._suspected_since = self._suspected_since, None
        if since is None or now - since >= lease_s:
            return None
        self._mistakes = self._mistakes_left(now) + 1
        self._mistaken_at = now
        return now - since

    def _mistakes_left(self, now: float) -> int:
        """How many suspicions of it were mistakes, and are not forgiven yet."""
        return max(0, self._mistakes - int((now - self._mistaken_at) / _FORGIVEN_S))

    def _waited_s(self, now: float, lag_s: float) -> float:
        assert self.asked_at is not None
        return max(0.0, now - self.asked_at - (lag_s - self._lag_s))
