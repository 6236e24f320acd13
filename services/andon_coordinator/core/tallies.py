"""Tallies: numbers that workers average outside any step, such as an evaluation's loss.

Tallies at one head are told apart by a sequence number. One is answered once every member in sync
has given its number or has gone on to ask for work: a worker that joined meanwhile evaluates
nothing, and must not be waited for. Who asks again, after a broken stream, gets the same answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["Tallies", "TallyMean"]


@dataclass(frozen=True, slots=True)
class TallyMean:
    """The average of one tally: the same number for all; NaN if the weights sum to 0."""

    sequence: int
    value: float
    weight: float
    contributors: int


@dataclass(slots=True)
class _Tally:
    parts: dict[int, tuple[float, float]] = field(default_factory=dict)
    mean: TallyMean | None = None


class Tallies:
    """The tallies at the line's head."""

    def __init__(self) -> None:
        """Starts with none."""
        self._tallies: dict[int, _Tally] = {}

    def clear(self) -> None:
        """Forgets all: the head moved."""
        self._tallies.clear()

    def give(self, worker: int, sequence: int, value: float, weight: float) -> TallyMean | None:
        """Adds a worker's number; the answer, if there was one already.

        Raises:
            ValueError: a weight that is negative or not finite.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"a tally's weight must be finite and at least 0, not {weight}")
        tally = self._tallies.setdefault(sequence, _Tally())
        if tally.mean is None:
            tally.parts[worker] = (value, weight)
        return tally.mean

    def settle(self, awaited: set[int]) -> list[TallyMean]:
        """Answers the tallies that hold a number of everybody awaited."""
        answered = []
        for sequence, tally in sorted(self._tallies.items()):
            if tally.mean is None and awaited <= tally.parts.keys():
                tally.mean = _mean(sequence, tally.parts)
                answered.append(tally.mean)
        return answered


def _mean(sequence: int, parts: dict[int, tuple[float, float]]) -> TallyMean:
    total = sum_of_products = 0.0
    for worker in sorted(parts):
        value, weight = parts[worker]
        if weight > 0:
            total += weight
            sum_of_products += weight * value
    value = sum_of_products / total if total > 0 else math.nan
    return TallyMean(sequence, value, total, len(parts))
