"""Balance: shares of a batch in proportion to what each worker computes in a second.

Theory of operation
===================

The seed is flodl's auto-balancer. Each committed step gives each worker a throughput: samples that
it computed, divided by the seconds that it was busy with them. Throughputs are smoothed (EMA, 0.3
for the newest). After `CALIBRATION` steps, and then every `INTERVAL` steps, the shares are set to
the smoothed throughputs. In between they stand, so that workers can fetch ahead what they will be
dealt. No share is below the floor: a worker without samples could never show that it has become
faster.

Four things differ from the seed.

- Shares are keyed by process. When the roster changes, they are computed at once from what is known
  (a newcomer counts as the median until it was measured) and calibration starts again.
- Shares that are clearly wrong do not wait for the next interval: a machine that becomes three
  times slower half-way would cost fifty bad steps. They are clearly wrong if each of the last
  `PATIENCE` steps, and their mean, would be `WRONG` times shorter with the shares that these steps
  ask for. Compared is the time that the slowest one would take under either. So a worker at the
  floor, which no new shares could relieve, does not cause one rebalance after another. What was
  measured before is out of date then, and is dropped.
- All of these numbers are of steps of one batch. A window of many local steps tells as much as so
  many steps, so it counts as that many: one reading may be enough.
- The floor is 5 %, but at most a quarter of an equal share. With 20 workers a floor of 5 % would
  make all shares equal.

The result is a whole number for each rank, in parts of at least 10,000. Whole numbers can't differ
between coordinator and worker.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from andon_coordinator.core.readings import (
    PacedProcess,
    Reading,
    estimated_speeds,
    round_half_away,
    seconds_per_sample,
    without_replaced,
)

__all__ = ["Balance", "SavedShare", "shares_of", "targets_of"]

CALIBRATION = 10
"""Steps after which the shares are first set by measured throughputs."""
INTERVAL = 50
"""After that, they are set again every so many steps."""
NEWEST = 0.3
"""The weight of the newest throughput in the smoothed one."""
FLOOR = 0.05
"""The least share, if there are at most five workers."""
WRONG = 1.25
"""Shares are wrong if the slowest worker would take so many times longer than with new ones."""
PATIENCE = 3
"""For so many steps in a row shares must be wrong, before they are set early; so few readings are
enough to set them by."""
_PARTS = 10_000


@dataclass(frozen=True, slots=True)
class SavedShare:
    """A process's throughput and target as they are kept; None: it has none."""

    process: PacedProcess
    throughput: float | None
    target: int | None


class Balance:
    """The throughputs of the line's workers, and the shares that follow from them."""

    def __init__(self, batches: int = 1) -> None:
        """Starts without readings: all shares are equal.

        Args:
            batches: how many batches of the run a step takes.
        """
        self._newest = 1 - (1 - NEWEST) ** batches
        self._calibration, self._interval, self._patience = (
            -(-steps // batches) for steps in (CALIBRATION, INTERVAL, PATIENCE)
        )
        self._throughputs: dict[PacedProcess, float] = {}
        self._latest: deque[dict[PacedProcess, float]] = deque(maxlen=self._patience)
        """The throughputs of the last steps, not smoothed."""
        self._targets: dict[PacedProcess, int] = {}
        self._roster: tuple[PacedProcess, ...] = ()
        self._steps = 0

    @property
    def throughputs(self) -> Mapping[PacedProcess, float]:
        """The smoothed throughput of each process that was measured, in samples per second."""
        return self._throughputs

    def targets(self, roster: Sequence[PacedProcess]) -> tuple[int, ...]:
        """The share of each rank as a whole number of at least 1; ranks share by these parts.

        They change only with the roster and by `observe`.
        """
        if tuple(roster) != self._roster:
            self._roster = tuple(roster)
            self._throughputs = without_replaced(self._throughputs, roster)
            self._calibrate()
        return tuple(self._targets[each] for each in roster)

    def observe(self, readings: Iterable[Reading]) -> None:
        """Learns from a committed step of the present roster."""
        measured = seconds_per_sample(each for each in readings if each.process in self._targets)
        if not measured:
            return
        for process, seconds in measured.items():
            throughput = 1.0 / seconds
            older = self._throughputs.get(process)
            self._throughputs[process] = (
                throughput if older is None else older + self._newest * (throughput - older)
            )
        self._steps += 1
        # Noted first: this step is one of those that are judged.
        self._latest.append({each: 1.0 / seconds for each, seconds in measured.items()})
        if self._clearly_wrong():
            self._throughputs |= self._recent()
            self._calibrate()
        elif self._is_due():
            self._targets = self._proposed(self._throughputs)

    def saved(self) -> list[SavedShare]:
        """What is worth keeping; the processes of the present roster come last, in rank order."""
        gone = [each for each in self._throughputs if each not in self._targets]
        return [
            SavedShare(each, self._throughputs.get(each), self._targets.get(each))
            for each in (*gone, *self._targets)
        ]

    def restore(self, saved: Sequence[SavedShare]) -> None:
        """Goes on from what another coordinator saved.

        The steps since the last rebalance are not kept: calibration starts again.
        """
        self._throughputs = {
            each.process: each.throughput for each in saved if each.throughput is not None
        }
        self._targets = {each.process: each.target for each in saved if each.target is not None}
        self._roster = tuple(self._targets)
        self._steps = 0
        self._latest.clear()

    # ------------------------------------------------------------------------------ inside

    def _calibrate(self) -> None:
        self._steps = 0
        self._latest.clear()
        self._targets = self._proposed(self._throughputs)

    def _proposed(self, throughputs: Mapping[PacedProcess, float]) -> dict[PacedProcess, int]:
        """The targets that throughputs ask for."""
        speeds = self._speeds(throughputs)
        targets = targets_of(shares_of([speeds[each] for each in self._roster]))
        return dict(zip(self._roster, targets, strict=True))

    def _speeds(self, throughputs: Mapping[PacedProcess, float]) -> dict[PacedProcess, float]:
        speeds = estimated_speeds(self._roster, throughputs)
        usual = statistics.median(speeds.values()) if speeds else 1.0
        return {each: speeds.get(each, usual) for each in self._roster}

    def _is_due(self) -> bool:
        since = self._steps - self._calibration
        return since >= 0 and since % self._interval == 0

    def _recent(self) -> dict[PacedProcess, float]:
        """The mean throughputs of the last steps."""
        seen: defaultdict[PacedProcess, list[float]] = defaultdict(list)
        for step in self._latest:
            for process, throughput in step.items():
                seen[process].append(throughput)
        return {process: statistics.fmean(values) for process, values in seen.items()}

    def _clearly_wrong(self) -> bool:
        # Each step is judged, so that one very slow step does not count for three; and so is their
        # mean, because what was slow in turns is no reason for other shares.
        return len(self._latest) == self._patience and all(
            self._is_wrong(self._throughputs | step) for step in (*self._latest, self._recent())
        )

    def _is_wrong(self, throughputs: Mapping[PacedProcess, float]) -> bool:
        speeds, best = self._speeds(throughputs), self._proposed(throughputs)
        return _longest(self._targets, speeds) > WRONG * _longest(best, speeds)


def _longest(targets: Mapping[PacedProcess, int], speeds: Mapping[PacedProcess, float]) -> float:
    """How long a step's slowest worker takes for its share, in no particular unit."""
    whole = sum(targets.values())
    return max(target / (whole * speeds[process]) for process, target in targets.items())


def shares_of(speeds: Sequence[float]) -> list[float]:
    """Shares in proportion to speeds, none below the floor; their sum is 1.

    Args:
        speeds: above 0, at least one; in any unit.
    """
    whole = sum(speeds)
    shares = [speed / whole for speed in speeds]
    floor = min(FLOOR, 0.25 / len(shares))
    low = [share < floor for share in shares]
    missing = sum(floor - share for share, is_low in zip(shares, low, strict=True) if is_low)
    free = sum(share for share, is_low in zip(shares, low, strict=True) if not is_low)
    shares = [
        floor if is_low else max(floor, share - missing * share / free)
        for share, is_low in zip(shares, low, strict=True)
    ]
    whole = sum(shares)
    return [share / whole for share in shares]


def targets_of(shares: Sequence[float]) -> tuple[int, ...]:
    """Shares as whole parts, each at least 1. Large lines have more parts, at least 100 a rank."""
    parts = max(_PARTS, 100 * len(shares))
    return tuple(max(1, round_half_away(share * parts)) for share in shares)
