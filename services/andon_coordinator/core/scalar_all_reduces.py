"""Scalar all-reduces: workers average a number outside any step, such as an evaluation's loss.

This is the bookkeeping; `syncing` has the rules.

A scalar all-reduce is named by a sequence number that counts from 0 after each move of the weights.
It is answered once every member in sync has given its number or moved on: to a later one, or to a
request for work. A worker that joins in the middle of an evaluation gives no numbers, and asks for
work, so nobody waits for it.

Workers count their answers, and every member gets answers and MARKs in the same order. So a MARK
leaves both the count and the given numbers as they are.

A worker waits in one scalar all-reduce at a time. That bounds what is kept: the last two numbers of
each worker, and the last two answers, for a worker whose answer was lost with its stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

__all__ = ["ScalarAllReduceMean", "ScalarAllReduces", "own_mean"]

_KEPT = 2
"""How many sequence numbers are kept: the current one and the one before."""

_MOST_KEPT_BYTES = 256 * 2**10
"""Of what workers gave between two moves of the weights, so much goes into the journal."""

_Parts = dict[int, tuple[float, float, bytes]]
"""Value, weight and data by worker."""


@dataclass(frozen=True, slots=True)
class ScalarAllReduceMean:
    """The weighted mean: the same number for all workers; NaN if the weights sum to 0."""

    sequence: int
    value: float
    weight: float
    contributors: int
    data: tuple[bytes, ...] = ()
    """Of each contributor; empty if none gave any."""


class ScalarAllReduces:
    """The scalar all-reduces since the weights last moved."""

    def __init__(self) -> None:
        """Starts with none."""
        self._open: dict[int, _Parts] = {}
        self._answered: dict[int, ScalarAllReduceMean] = {}
        self._latest: dict[int, int] = {}
        """The sequence number that each worker gave a number to last."""
        self._furthest: dict[int, int] = {}
        """The greatest sequence number that each worker gave a number to."""
        self._reached: dict[int, int] = {}
        """How many workers have each of these as their greatest."""
        self._kept_bytes = 0

    def give(
        self, worker: int, sequence: int, part: tuple[float, float, bytes]
    ) -> ScalarAllReduceMean | None:
        """Adds a worker's value, weight and data; returns the answer if there was one already."""
        # A worker whose stream broke gives the same number again, perhaps after the answer.
        if sequence in self._answered:
            return self._answered[sequence]
        self._latest[worker] = sequence
        # `_latest` says who moved on. This is for `may_settle`, which must not look at each worker.
        self._note_reached(worker, sequence)
        self._open.setdefault(sequence, {})[worker] = part
        # The distance counts in both directions, so that a worker that counts backwards can't keep
        # more than `_KEPT` open either.
        for other in [each for each in self._open if abs(each - sequence) >= _KEPT]:
            self._open[other].pop(worker, None)
            if not self._open[other]:
                del self._open[other]
        return None

    @property
    def any_open(self) -> bool:
        """Whether a worker waits for an answer."""
        return bool(self._open)

    def may_settle(self, awaited: int) -> bool:
        """Whether enough workers gave numbers that one may be answered; if not, none can be.

        Args:
            awaited: how many workers are; one is open.
        """
        first = min(self._open)
        return sum(n for reached, n in self._reached.items() if reached >= first) >= awaited

    def settle(self, awaited: set[int]) -> list[ScalarAllReduceMean]:
        """Answers each one that all awaited workers gave a number to, or moved on from."""
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

    def keep(self, mean: ScalarAllReduceMean) -> tuple[ScalarAllReduceMean, bool] | None:
        """An answer as the journal is to have it, and whether what workers gave is left out.

        None: nothing of it is kept, since it says nothing, or an earlier one was too much already.
        """
        size = sum(map(len, mean.data))
        if self._kept_bytes > _MOST_KEPT_BYTES or not (size or mean.weight):
            return None
        self._kept_bytes += size
        if self._kept_bytes > _MOST_KEPT_BYTES:
            return replace(mean, data=()), True
        return mean, False

    def close(self) -> list[tuple[ScalarAllReduceMean, frozenset[int]]]:
        """Forgets all, because the weights move.

        Returns:
            For each one that was still open, the mean of the numbers given so far, and the workers
            that gave them and still wait.
        """
        if not (self._latest or self._kept_bytes):
            return []  # As in most steps: nobody gave a number, and none was answered alone.
        left = [
            (_mean(sequence, parts), frozenset(parts))
            for sequence, parts in sorted(self._open.items())
        ]
        self._open.clear()
        self._answered.clear()
        self._latest.clear()
        self._furthest.clear()
        self._reached.clear()
        self._kept_bytes = 0
        return left

    def _note_reached(self, worker: int, sequence: int) -> None:
        before = self._furthest.get(worker)
        if before is not None and before >= sequence:
            return
        self._furthest[worker] = sequence
        self._reached[sequence] = self._reached.get(sequence, 0) + 1
        if before is not None:
            self._reached[before] -= 1
            if not self._reached[before]:
                del self._reached[before]


def own_mean(sequence: int, part: tuple[float, float, bytes]) -> ScalarAllReduceMean:
    """The answer for a worker that nobody else takes part with."""
    return _mean(sequence, {0: part})


def _mean(sequence: int, parts: _Parts) -> ScalarAllReduceMean:
    total = sum_of_products = 0.0
    # By worker id, not by arrival: the sum must not depend on who was first.
    for worker in sorted(parts):
        value, weight, _ = parts[worker]
        # A value without weight may be NaN: an empty shard has no mean.
        if weight > 0:
            total += weight
            sum_of_products += weight * value
    value = sum_of_products / total if total > 0 else math.nan
    data = tuple(parts[worker][2] for worker in sorted(parts))
    return ScalarAllReduceMean(sequence, value, total, len(parts), data if any(data) else ())
