"""Eviction: who has been slow for so long that the line deals it less, and then does without it.

Theory of operation. Every committed step has a reading of each worker that computed in it
(`readings`): how long it took for a sample, without waiting for others. A worker is *slow* in a
step if it took more than `slower_than` times the median of the others, and *holds them up* if its
whole part also took it longer than theirs took them. Both count, so a worker that is slow and was
dealt little is left alone.

Once is no reason: a hiccup, a checkpoint, a page of swap. What counts is a *streak*: steps that
were so, of which at most every tenth was not. A streak is long enough by a number of steps and by a
time, because steps may be short.

    usual      a streak of `ease_steps` and `ease_s`: it is dealt less, in proportion to its speed.
               Shares by speed (`balance`, `cadence`) do so by themselves, so there the line waits
               for the longer streak
    eased      a streak of `follow_steps` and `follow_s` all the same: it should follow. What it
               was dealt less did not help
    eased      a streak of `ease_steps` and `ease_s` at less than half-way to `slower_than`: it is
               usual again

Two others are needed to tell who of them is slow, so a line of two never does this. Whether the
line can do without a worker is not decided here: `evicting`.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from andon_coordinator.core.balance import FLOOR
from andon_coordinator.core.readings import (
    PacedProcess,
    Reading,
    medians_of_others,
    seconds_per_sample,
)

__all__ = ["EvictionRules", "SlowStep", "SlowWorkers"]

_HOLDS = 1.25
"""A worker holds the others up if its part took so many times as long as theirs."""
_BUT_ONE_IN = 10
"""A streak ends when more than every so-many-th of its steps was not of it."""
_FEWEST_ROUNDS = 3
"""Long windows count as many steps; so many rounds are needed all the same."""
_LATELY = 20
"""How slow a worker is, is the median of so many rounds."""
_PARTS = 10_000
"""The part of a worker that is not slow."""


class SlowStep(enum.Enum):
    """What a line does about a slow worker."""

    EASED = "eased"
    """It is dealt less."""
    RECOVERED = "recovered"
    """It is dealt as the others again."""
    FOLLOWS = "follows"
    """It follows the line, and computes nothing."""
    BACK = "back"
    """It followed, and takes part again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionRules:
    """When a worker is slow, and for how long before something is done."""

    slower_than: float
    """So many times the median of the others."""
    ease_steps: int = 20
    ease_s: float = 20.0
    follow_steps: int = 60
    follow_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuses a factor by which everybody would be slow."""
        if not (math.isfinite(self.slower_than) and self.slower_than > 1):
            raise ValueError(f"slower_than must be above 1, not {self.slower_than}")
        if min(self.ease_steps, self.follow_steps) < 1 or min(self.ease_s, self.follow_s) < 0:
            raise ValueError("steps must be at least 1, and times at least 0 s")


@dataclass(slots=True)
class _Streak:
    """Steps in which something was so, with few exceptions."""

    steps: int = 0
    others: int = 0
    since: float = 0.0

    def take(self, now: float, *, so: bool) -> None:
        if so and not self.steps:
            self.since = now
        if so:
            self.steps += 1
        elif self.steps:
            self.others += 1
        if self.others * _BUT_ONE_IN > self.steps:
            self.end()

    def end(self) -> None:
        self.steps = self.others = 0

    def lasts(self, steps: int, seconds: float, now: float) -> bool:
        return self.steps >= steps and now - self.since >= seconds


@dataclass(slots=True)
class _Watched:
    """One process, as far as it is slow."""

    slow: _Streak = field(default_factory=_Streak)
    usual: _Streak = field(default_factory=_Streak)
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_LATELY))
    part: int | None = None
    """What it is dealt, of what the others are; None: it is not eased."""
    why: str = ""
    """Why it is eased."""
    should_follow: bool = False

    @property
    def ratio(self) -> float:
        """How many times as long as the others it took for a sample lately."""
        return statistics.median(self.ratios)


class SlowWorkers:
    """How slow the line's workers are, for how long, and what is to be done about it."""

    def __init__(self, rules: EvictionRules, *, batches: int = 1, by_speed: bool = False) -> None:
        """Starts without readings.

        Args:
            rules: when a worker is slow.
            batches: how many batches of the run a step takes.
            by_speed: whether shares follow the workers' speed anyway.
        """
        self._rules = rules
        self._by_speed = by_speed
        self._batches = batches
        self._watched: dict[PacedProcess, _Watched] = {}
        self._news: list[tuple[PacedProcess, SlowStep, str]] = []

    def observe(self, readings: Iterable[Reading], now: float) -> None:
        """Learns from a committed step, at `now` of the line's clock."""
        readings = tuple(readings)
        rates = seconds_per_sample(readings)
        self._forget_replaced(readings)
        if len(rates) < 3:
            return
        samples = {each.process: each.computed for each in readings}
        took = [rate * samples[process] for process, rate in rates.items()]
        others = medians_of_others(list(rates.values())), medians_of_others(took)
        for (process, rate), its, other_rate, other_took in zip(
            rates.items(), took, *others, strict=True
        ):
            ratio, longer = rate / other_rate, its > _HOLDS * other_took
            watched = self._watched.setdefault(process, _Watched())
            watched.slow.take(now, so=ratio > self._rules.slower_than and longer)
            if watched.slow.steps == 1 and not watched.slow.others:
                watched.ratios.clear()  # A streak begins: what was before says nothing of it.
            watched.ratios.append(ratio)
            watched.usual.take(now, so=ratio < (1 + self._rules.slower_than) / 2)
            self._judge(process, watched, now)

    def news(self) -> list[tuple[PacedProcess, SlowStep, str]]:
        """Who was eased, or recovered, since this was asked last, with the reason for people."""
        news, self._news = self._news, []
        return news

    @property
    def should_follow(self) -> dict[PacedProcess, str]:
        """Those that hold the others up though they are dealt less, with the reason for people."""
        return {
            process: self._reason(watched)
            for process, watched in self._watched.items()
            if watched.should_follow
        }

    def eased(self, process: PacedProcess) -> str:
        """Why a process is dealt less; empty if it is not."""
        watched = self._watched.get(process)
        return "" if watched is None or watched.part is None else watched.why

    def targets(self, roster: Sequence[PacedProcess]) -> Mapping[int, int]:
        """Each worker's part where shares are equal but for eased ones; empty if nobody is."""
        parts = {
            each.worker: watched.part
            for each in roster
            if (watched := self._watched.get(each)) is not None and watched.part is not None
        }
        if not parts:
            return {}
        return {each.worker: parts.get(each.worker, _PARTS) for each in roster}

    def forget(self, process: PacedProcess) -> None:
        """It follows, or starts anew: what was measured counts no more."""
        self._watched.pop(process, None)

    def _judge(self, process: PacedProcess, watched: _Watched, now: float) -> None:
        rules = self._rules
        if watched.part is None and not self._by_speed:
            if watched.slow.lasts(self._rounds(rules.ease_steps), rules.ease_s, now):
                watched.why = self._reason(watched)
                watched.part = max(int(_PARTS * FLOOR), round(_PARTS / watched.ratio))
                watched.slow.end()
                self._news.append((process, SlowStep.EASED, watched.why))
            return
        if watched.part is not None and watched.usual.lasts(
            self._rounds(rules.ease_steps), rules.ease_s, now
        ):
            watched.part = None
            watched.slow.end()
            self._news.append((process, SlowStep.RECOVERED, self._reason(watched)))
        watched.should_follow = watched.slow.lasts(
            self._rounds(rules.follow_steps), rules.follow_s, now
        )

    def _rounds(self, steps: int) -> int:
        return max(min(_FEWEST_ROUNDS, steps), -(-steps // self._batches))

    def _reason(self, watched: _Watched) -> str:
        streak = watched.slow if watched.slow.steps else watched.usual
        steps = streak.steps * self._batches
        how = f"{watched.ratio:.1f} times as slow as the others"
        return f"{how} for {steps} step{'' if steps == 1 else 's'}"

    def _forget_replaced(self, readings: Iterable[Reading]) -> None:
        # Bounded by the slots that there are: the process that has one now replaces the one before.
        here = {each.process.worker: each.process for each in readings}
        gone = [each for each in self._watched if here.get(each.worker, each) != each]
        for each in gone:
            del self._watched[each]
