"""Scalar all-reduces: numbers that workers average outside any step, such as an evaluation's loss.

A scalar all-reduce is named by a sequence number, counted since the weights last moved. It is
answered once every member in sync has given its number, or has gone past it: to a later one, or to
ask for work. A worker that joined meanwhile evaluates nothing, and must not be waited for.

Sequence numbers count answers on a stream, and every member gets answers and MARKs in one order.
So a MARK changes neither the count nor what was given.

A worker waits in one scalar all-reduce at a time. What is kept is bounded by that: a worker's last
two numbers, and the last two answers, for a worker whose answer was lost with its stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["ScalarAllReduceMean", "ScalarAllReduces", "own_mean"]

_KEPT = 2

_Parts = dict[int, tuple[float, float]]
"""Value and weight by worker."""


@dataclass(frozen=True, slots=True)
class ScalarAllReduceMean:
    """The average of one of them: the same number for all; NaN if the weights sum to 0."""

    sequence: int
    value: float
    weight: float
    contributors: int


class ScalarAllReduces:
    """The scalar all-reduces since the weights last moved."""

    def __init__(self) -> None:
        """Starts with none."""
        self._open: dict[int, _Parts] = {}
        self._answered: dict[int, ScalarAllReduceMean] = {}
        self._latest: dict[int, int] = {}
        """The last scalar all-reduce that each worker gave a number to."""

    def give(
        self, worker: int, sequence: int, value: float, weight: float
    ) -> ScalarAllReduceMean | None:
        """Adds a worker's number; the answer, if there was one already."""
        if sequence in self._answered:
            return self._answered[sequence]
        self._latest[worker] = sequence
        self._open.setdefault(sequence, {})[worker] = (value, weight)
        # Later ones, too: whoever counts backwards has no more of them open.
        for other in [each for each in self._open if abs(each - sequence) >= _KEPT]:
            self._open[other].pop(worker, None)
            if not self._open[other]:
                del self._open[other]
        return None

    def settle(self, awaited: set[int]) -> list[ScalarAllReduceMean]:
        """Answers the scalar all-reduces that everybody awaited gave a number to, or went past."""
        answered = []
        for sequence, parts in sorted(self._open.items()):
            missing = awaited - parts.keys()
            if all(self._latest.get(worker, -1) > sequence for worker in missing):
                answered.append(_mean(sequence, parts))
        for mean in answered:
            del self._open[mean.sequence]
            self._answered[mean.sequence] = mean
        for older in sorted(self._answered)[:-_KEPT]:
            del self._answered[older]
        return answered

    def close(self) -> list[tuple[ScalarAllReduceMean, frozenset[int]]]:
        """Forgets all, since the weights moved; what those came to that were still open.

        Returns:
            Each mean of what was given, with the workers that gave it and still wait.
        """
        left = [
            (_mean(sequence, parts), frozenset(parts))
            for sequence, parts in sorted(self._open.items())
        ]
        self._open.clear()
        self._answered.clear()
        self._latest.clear()
        return left


def own_mean(sequence: int, value: float, weight: float) -> ScalarAllReduceMean:
    """What a scalar all-reduce comes to that nobody else takes part in."""
    return _mean(sequence, {0: (value, weight)})


def _mean(sequence: int, parts: _Parts) -> ScalarAllReduceMean:
    total = sum_of_products = 0.0
    for worker in sorted(parts):
        value, weight = parts[worker]
        if weight > 0:
            total += weight
            sum_of_products += weight * value
    value = sum_of_products / total if total > 0 else math.nan
    return ScalarAllReduceMean(sequence, value, total, len(parts))
