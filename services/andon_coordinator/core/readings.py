"""Readings: how fast each process computes, measured in committed steps. `balance` and `cadence`
both decide by them.

Theory of operation. A reading is samples computed and the time that they took, never the time of
the whole step: that one includes waiting for the others, and by it a fast worker would look as slow
as the slowest. A step in which a worker computed nothing (its share was empty, or it sent gradients
that it had kept from a void attempt) says nothing about its speed.

A worker that waits for its data delivers less than it could compute. So the time includes the wait
for data, but only if every worker with samples reported one. Otherwise the waits of all are left
out: a ratio of two speeds means something only if both are on one scale.

Readings belong to a process, not to a slot: the process that takes a slot next may run on another
machine. If it runs on the same machine, the last one's speed is the best guess until the first
reading. Next best is the hint that its operator gave.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

__all__ = [
    "PacedProcess",
    "Reading",
    "estimated_speeds",
    "medians_of_others",
    "round_half_away",
    "seconds_per_sample",
    "without_replaced",
]

_Value = TypeVar("_Value")

_LEAST_S, _MOST_S = 1e-9, 1e6
"""A reading beyond these seconds per sample is a mistake or a lie, and is rejected."""


@dataclass(frozen=True, slots=True)
class PacedProcess:
    """The process in a worker's slot, as far as its speed is concerned."""

    worker: int
    incarnation: int
    machine: str = ""
    """Where it runs and on which devices; empty if it does not say."""
    speed_hint: float = field(default=0.0, compare=False)
    """Its speed relative to the other workers, as its operator expects it; 0: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one process reported of one committed step, unchecked."""

    process: PacedProcess
    computed: int
    """Samples whose gradients it computed in the attempt that was committed."""
    busy_s: float
    """How long forward and backward of these samples took."""
    data_s: float = 0.0
    """How long it stood still for data."""


def seconds_per_sample(readings: Iterable[Reading]) -> dict[PacedProcess, float]:
    """Seconds per sample of each process that has a valid reading, all on one scale."""
    computing = [each for each in readings if each.computed > 0]
    delivered = all(math.isfinite(each.data_s) and each.data_s > 0 for each in computing)
    # A NaN fails both comparisons, and an infinity the second.
    return {
        each.process: seconds
        for each in computing
        if _LEAST_S
        <= (seconds := (each.busy_s + (each.data_s if delivered else 0.0)) / each.computed)
        <= _MOST_S
        and each.busy_s > 0
    }


def medians_of_others(values: Sequence[float]) -> list[float]:
    """For each of at least two numbers, the median of the others; sorts them once."""
    ranked = sorted(values)
    low, odd = divmod(len(ranked) - 1, 2)
    found = []
    for value in values:
        gone = bisect_left(ranked, value)
        # Those from the number's own place on move down by one.
        above = ranked[low + (low >= gone)]
        below = above if odd else ranked[low - 1 + (low - 1 >= gone)]
        found.append(above if odd else (below + above) / 2)
    return found


def estimated_speeds(
    roster: Sequence[PacedProcess], measured: Mapping[PacedProcess, float]
) -> dict[PacedProcess, float]:
    """The speed of each process of `roster` of which anything is known.

    Hints are relative. They are brought to the scale of measured speeds by the processes that have
    both; there, a process without a hint counts as 1. So it does if nothing is measured yet.

    Args:
        roster: the processes in rank order.
        measured: speeds by process, in any unit; also of processes that are gone.
    """
    earlier = {(each.worker, each.machine): speed for each, speed in measured.items()}
    speeds: dict[PacedProcess, float] = {}
    for process in roster:
        if process in measured:
            speeds[process] = measured[process]
        elif process.machine and (process.worker, process.machine) in earlier:
            speeds[process] = earlier[process.worker, process.machine]
    hinted = [each for each in roster if each not in speeds and _is_hint(each.speed_hint)]
    if hinted and not speeds:
        return {each: each.speed_hint if each in hinted else 1.0 for each in roster}
    if hinted:
        scale = statistics.median(
            speed / (each.speed_hint if _is_hint(each.speed_hint) else 1.0)
            for each, speed in speeds.items()
        )
        speeds |= {each: each.speed_hint * scale for each in hinted}
    return speeds


def without_replaced(
    measured: Mapping[PacedProcess, _Value], roster: Iterable[PacedProcess]
) -> dict[PacedProcess, _Value]:
    """`measured` without processes whose slot was taken by a later one that was measured too.

    A process that is away keeps its readings: it may come back. Memory is bounded: besides the
    roster, one process is kept for each slot. The order is that of the first reading.
    """
    latest = {each.worker: each for each in measured}
    present = set(roster)
    return {
        each: value
        for each, value in measured.items()
        if each in present or latest[each.worker] == each
    }


def round_half_away(value: float) -> int:
    """The nearest whole number; a half is rounded away from zero.

    Python's `round` goes to the even neighbour, which would give 2 for 2.5.
    """
    whole = math.floor(abs(value))
    whole += abs(value) - whole >= 0.5
    return -whole if value < 0 else whole


def _is_hint(hint: float) -> bool:
    return math.isfinite(hint) and hint > 0
