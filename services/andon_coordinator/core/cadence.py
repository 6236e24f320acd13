"""Cadence: how much each worker computes before the line exchanges (El Che).

Theory of operation
===================

In a window each worker computes its count of units, and then all exchange once and take one
optimizer step. Fast workers have greater counts, so that all finish at about the same time. The
longer the window, the less the exchange weighs; but the optimizer takes fewer steps, of larger
batches. The algorithm is that of flodl 0.7, called El Che: the line marches at the pace of the
slowest, and the others carry more. How many samples a unit is, `pacing` says: the algorithm needs
only their ratio.

Counts. The anchor is the count of the slowest worker, the *anchor process*. Every other one gets
the anchor times the ratio of their times for a sample, at most 64 times the anchor. Times are means
of the last five readings, so that a reading which is an outlier has a fifth of the weight, and is
forgotten. Two in a row that are off in the same direction are no outliers: the process has changed
its speed, and what was before is dropped at once. The anchor process changes only if another one is
clearly slower (`_elect`): among equals the line would otherwise follow the noise. A count changes
only if the exact value is farther from it than rounding explains and 5 % of the count, for the same
reason.

Overhead. What does the exchange cost a window? Each worker reports how long it stood still after
its own last backward. For all but one of them, most of that is waiting for slower ones, which the
counts are there to reduce. The last to finish waits for nobody: it waits only for the exchange
itself, as far as backward did not hide it. So the least wait of all workers is the exchange, and
what the coordinator needed to make the record durable comes on top. Neither needs a clock that two
machines share. A worker could report less than the truth, which only keeps windows short; more than
the truth has no effect as long as one worker is honest. One slow exchange is no trend: decisions
take the median of the last five.

Growth. If the overhead is above the target, a greater anchor is proposed: twice as great at most.
A proposal is staged. It is applied only by a Stable verdict on the same window, never applied and
then taken back. Growth ends at `max_anchor`, and at the limit that comes with the verdict.

Verdict. In the system that this comes from, the replicas drift apart between two averages, and
their distance is the sign of too long a window. Here all replicas are equal at all times, and a
window is a larger batch. What too large a batch harms is the loss. So the verdict is about the
loss, smoothed, because single losses rise and fall by chance (their own study counts 55 false
alarms a run without smoothing, and one with it); see `LossTrend`. A loss that has risen for a few
windows stops growth. If it goes on rising, the anchor is halved. Five Stable verdicts in a row
allow growth again, and an anchor that was lowered climbs back one by one. But a loss that still
falls, only more slowly, is no trend that anybody could see. So no verdict makes an anchor grow
beyond the limit that comes with it; see `growth`.

Not taken over: the surcharge for the first micro-batch of a window, which workers do not report,
and the pause before a callback of one rank, because evaluation and checkpoints take place between
two windows here.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from andon_coordinator.core.loss_trend import NudgeDown, Stable, SuppressGrowth, Verdict
from andon_coordinator.core.readings import (
    PacedProcess,
    Reading,
    estimated_speeds,
    round_half_away,
    seconds_per_sample,
    without_replaced,
)

__all__ = ["Cadence", "CadenceRules", "Phase", "SavedPace"]

READINGS = 5
"""How many readings of a process count; after as many reports without one, all are forgotten."""
JUMP = 1.5
"""Two readings in a row beyond this ratio of the earlier ones replace them."""
MOST_RATIO = 64.0
"""No count is more than so many times the anchor."""
DEAD_ZONE = 0.05
"""A count is kept while the exact value is within rounding and this part of the count."""
COHORT = 0.85
"""Processes whose time is at least this part of the longest are equally slow."""
CHALLENGE = 1.10
"""An anchor process in the cohort is replaced only by one that takes so many times longer."""
STABLE_AFTER, MATURE_AFTER = 5, 20
"""Reports after which the line is in these phases."""
CALM_RUN = 5
"""Stable verdicts in a row that allow growth again."""


class Phase(enum.IntEnum):
    """How much is known: it decides how easily the anchor process changes and the anchor grows."""

    PROBE = 0
    """No report yet."""
    WARMUP = 1
    """The anchor process is not changed; only an overhead of twice the target makes it grow."""
    STABLE = 2
    """From the report after the fifth."""
    MATURE = 3
    """From the report after the twentieth: an anchor that was lowered may climb back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CadenceRules:
    """What an operator may choose about the cadence."""

    overhead_target: float = 0.05
    """The part of a window that exchanging may take."""
    max_anchor: int = 16
    """The most units of the slowest worker in a window."""
    max_batch_diff: int | None = None
    """The most by which one count changes at a time; None: any number."""
    initial_anchor: int = 1
    """The anchor at first, and the least that growth starts from."""
    least_anchor: int = 1
    """No verdict lowers the anchor below this."""

    def __post_init__(self) -> None:
        """Refuses numbers out of range."""
        if not 0 < self.overhead_target < 1:
            raise ValueError(f"overhead_target must be between 0 and 1, not {self.overhead_target}")
        if not 1 <= self.least_anchor <= self.initial_anchor <= self.max_anchor:
            raise ValueError(
                f"needs 1 <= least_anchor <= initial_anchor <= max_anchor, not "
                f"{self.least_anchor}, {self.initial_anchor} and {self.max_anchor}"
            )
        if self.max_batch_diff is not None and self.max_batch_diff < 1:
            raise ValueError(f"max_batch_diff must be at least 1, not {self.max_batch_diff}")


@dataclass(slots=True)
class ProcessPace:
    """What is known of one process."""

    count: int
    """Its units in a window."""
    readings: deque[float] = field(default_factory=lambda: deque(maxlen=READINGS))
    """Its last times for a sample, in seconds, oldest first."""
    silent: int = 0
    """Consecutive reports that had no valid reading of it."""


@dataclass(frozen=True, slots=True)
class SavedPace:
    """A process's pace as it is kept."""

    process: PacedProcess
    count: int
    readings: tuple[float, ...]


class Cadence:
    """The counts of a line, and the anchor that they follow from."""

    def __init__(self, rules: CadenceRules) -> None:
        """Starts at the initial anchor, without readings."""
        self._rules = rules
        self.anchor = rules.initial_anchor
        """The count of the slowest worker."""
        self.anchor_process: PacedProcess | None = None
        """The worker that counts as the slowest."""
        self.phase = Phase.PROBE
        self.reports = 0
        """Windows that were reported."""
        self._paces: dict[PacedProcess, ProcessPace] = {}
        self._roster: tuple[PacedProcess, ...] = ()
        self._exchanges: deque[float] = deque(maxlen=READINGS)
        self._proposal: int | None = None
        self._calm_run = 0
        self._may_grow = True
        self._nudged_from = 0

    @property
    def roster_size(self) -> int:
        """How many of the last paces of `saved` are the roster's."""
        return len(self._roster)

    @property
    def proposal(self) -> int | None:
        """The anchor that waits for a Stable verdict."""
        return self._proposal

    def times(self) -> dict[PacedProcess, float]:
        """The smoothed seconds per sample of each process that has readings."""
        return {
            each: statistics.fmean(pace.readings)
            for each, pace in self._paces.items()
            if pace.readings
        }

    def counts(self, roster: Sequence[PacedProcess]) -> tuple[int, ...]:
        """How many units each rank computes in the next window; at least 1.

        Args:
            roster: the processes in rank order. If it changed, all counts are computed anew from
                what is known.
        """
        if tuple(roster) != self._roster:
            self._take_roster(tuple(roster))
        return tuple(self._paces[each].count for each in roster)

    def report(self, readings: Iterable[Reading], *, exchange_s: float, unit: float) -> None:
        """Learns from a committed window of the present roster.

        The proposal that follows from it waits for `judge`.

        Args:
            readings: what each process computed.
            exchange_s: what exchanging cost the window; see the theory of operation.
            unit: samples in a unit.
        """
        if self.phase is Phase.WARMUP and self.reports >= STABLE_AFTER:
            self.phase = Phase.STABLE
        elif self.phase is Phase.STABLE and self.reports >= MATURE_AFTER:
            self.phase = Phase.MATURE
        measured = seconds_per_sample(readings)
        for process in self._roster:
            self._take(self._paces[process], measured.get(process))
        if math.isfinite(exchange_s) and exchange_s >= 0:
            self._exchanges.append(exchange_s)
        times, self._proposal = self._times_of_roster(), None
        if not times:
            return
        self.reports += 1
        first, self.phase = self.phase is Phase.PROBE, max(self.phase, Phase.WARMUP)
        self._elect(times)
        # After the election: growth is measured by the time of the anchor process.
        self._proposal = self._grown(times, unit)
        # The first counts were a guess, and are replaced whatever the difference is.
        self._recount(free=first, exact=first)

    def judge(self, verdict: Verdict | None, most: int | None = None) -> None:
        """Applies the proposal of the last report, or drops it.

        Args:
            verdict: None: nothing is known, drop it.
            most: no anchor grows beyond this; None: no limit but `max_anchor`.
        """
        proposal, self._proposal = self._proposal, None
        most = self._rules.max_anchor if most is None else most
        match verdict:
            case Stable():
                self._calm_run += 1
                self._may_grow = self._may_grow or self._calm_run >= CALM_RUN
                if proposal is None and self._may_climb():
                    proposal = self.anchor + 1
                if proposal is not None and min(proposal, most) > self.anchor:
                    self._set_anchor(min(proposal, most))
            case SuppressGrowth() | NudgeDown():
                self._calm_run, self._may_grow = 0, False
                # The proposal is gone by now. Otherwise it would be applied on top of the nudge.
                if isinstance(verdict, NudgeDown) and math.isfinite(verdict.factor):
                    self._nudge(min(max(verdict.factor, 0.1), 1.0))
            case None:
                pass

    def saved(self) -> list[SavedPace]:
        """The paces that are worth keeping; those of the present roster last, in rank order."""
        present = set(self._roster)
        gone = [each for each in self._paces if each not in present]
        return [
            SavedPace(each, self._paces[each].count, tuple(self._paces[each].readings))
            for each in (*gone, *self._roster)
        ]

    def restore(
        self,
        saved: Sequence[SavedPace],
        *,
        roster: int,
        anchor: int,
        anchor_process: PacedProcess | None,
        reports: int,
    ) -> None:
        """Goes on from what another coordinator saved; the last `roster` paces are the roster's."""
        self._paces = {
            each.process: ProcessPace(each.count, deque(each.readings, READINGS)) for each in saved
        }
        self._roster = tuple(self._paces)[len(saved) - roster :]
        self.anchor = max(min(anchor, self._rules.max_anchor), self._rules.least_anchor)
        self.anchor_process = anchor_process if anchor_process in self._paces else None
        self.reports = reports
        self.phase = _phase_after(reports)
        if self.anchor != anchor:
            self._recount(free=True, exact=True)

    # ------------------------------------------------------------------------------ counts

    def _take_roster(self, roster: tuple[PacedProcess, ...]) -> None:
        for process in roster:
            self._paces.setdefault(process, ProcessPace(self.anchor))
        self._roster = roster
        if self.anchor_process not in roster:
            self.anchor_process = None
            # Also in the first phases: nobody else's time can stand for the slowest one's.
            if times := self._times_of_roster():
                self._elect(times)
        self._recount(free=True, exact=True)
        # Last: the counts above may go by a process that a newcomer on its machine replaces.
        self._forget_replaced()

    def _forget_replaced(self) -> None:
        kept = set(without_replaced(self.times(), self._roster)).union(self._roster)
        self._paces = {each: pace for each, pace in self._paces.items() if each in kept}

    @staticmethod
    def _take(pace: ProcessPace, seconds: float | None) -> None:
        if seconds is not None:
            _append(pace.readings, seconds)
            pace.silent = 0
            return
        pace.silent += 1
        if pace.silent >= READINGS:
            pace.readings.clear()

    def _times_of_roster(self) -> dict[PacedProcess, float]:
        times = self.times()
        return {each: times[each] for each in self._roster if each in times}

    def _elect(self, times: Mapping[PacedProcess, float]) -> None:
        """Chooses the anchor process; `times` has at least one, in rank order."""
        present = self.anchor_process
        # A silent one keeps its place until its readings are forgotten.
        if present in times and self.phase < Phase.STABLE:
            return
        longest = max(times.values())
        cohort = [each for each, seconds in times.items() if seconds >= COHORT * longest]
        # The lowest rank of equally slow ones: their times are noise, and must not decide.
        elected = cohort[0] if present is None or present not in cohort else present
        if longest > CHALLENGE * times[elected]:
            elected = max(cohort, key=lambda each: times[each])
        self.anchor_process = elected

    def _recount(self, *, free: bool, exact: bool) -> None:
        """Sets the counts of the roster.

        Args:
            free: whether counts may change by more than `max_batch_diff`.
            exact: whether counts are set without the dead zone.
        """
        speeds = estimated_speeds(
            self._roster, {each: 1.0 / seconds for each, seconds in self.times().items()}
        )
        anchor_speed = speeds.get(self.anchor_process) if self.anchor_process else None
        if anchor_speed is None:
            anchor_speed = min(speeds.values(), default=1.0)
        for process in self._roster:
            # Nothing is known of a process without speed: it gets the least, as if it were slow.
            ratio = speeds.get(process, anchor_speed) / anchor_speed
            self._set_count(
                self._paces[process], self.anchor * min(ratio, MOST_RATIO), free=free, exact=exact
            )

    def _set_count(self, pace: ProcessPace, value: float, *, free: bool, exact: bool) -> None:
        count, most = pace.count, self._rules.max_batch_diff
        if not exact and abs(value - count) <= 0.5 + DEAD_ZONE * count:
            return
        wanted = max(1, round_half_away(value))
        if not free and most is not None:
            wanted = min(max(wanted, count - most, 1), count + most)
        pace.count = wanted

    # ------------------------------------------------------------------------------ anchor

    def _grown(self, times: Mapping[PacedProcess, float], unit: float) -> int | None:
        """The greater anchor that the overhead asks for; None if it may not or need not grow."""
        target, most = self._rules.overhead_target, self._rules.max_anchor
        if not self._may_grow or not self._exchanges or self.reports < 2:
            return None
        slowest = times.get(self.anchor_process) if self.anchor_process else None
        if slowest is None:
            return None
        fixed = statistics.median_low(self._exchanges)
        compute = self.anchor * unit * slowest
        overhead = fixed / (compute + fixed)
        if overhead <= (target if self.phase >= Phase.STABLE else 2 * target):
            return None
        wanted = min(math.ceil(self.anchor * min(overhead / target, 2.0)), most)
        return wanted if wanted > self.anchor else None

    def _set_anchor(self, anchor: int) -> None:
        self.anchor = anchor
        self._recount(free=False, exact=True)

    def _nudge(self, factor: float) -> None:
        # Below the initial anchor too: that one is only where growth starts.
        lower = max(self._rules.least_anchor, math.ceil(self.anchor * factor))
        if lower < self.anchor:
            self._nudged_from = max(self._nudged_from, self.anchor)
            self._set_anchor(lower)

    def _may_climb(self) -> bool:
        """Whether an anchor that was lowered may climb back by one."""
        if self.anchor >= self._nudged_from or not self._may_grow or self.phase < Phase.MATURE:
            return False
        times, most = self._times_of_roster(), self._rules.max_batch_diff
        if most is None or not times:
            return True
        ratio = max(times.values()) / min(times.values())
        higher = self.anchor + 1
        return round_half_away(higher * ratio) - higher <= most


def _append(readings: deque[float], seconds: float) -> None:
    """Adds a reading, which may show that the earlier ones are out of date."""
    *earlier, last = readings or (seconds,)
    if earlier:
        usual = statistics.fmean(earlier)
        slower = min(last, seconds) > JUMP * usual
        faster = max(last, seconds) < usual / JUMP
        if slower or faster:
            readings.clear()
            readings.append(last)
    readings.append(seconds)


def _phase_after(reports: int) -> Phase:
    # `report` enters a phase with the report after the one that completes the number.
    if reports > MATURE_AFTER:
        return Phase.MATURE
    if reports > STABLE_AFTER:
        return Phase.STABLE
    return Phase.WARMUP if reports else Phase.PROBE
