"""Spent: where a run's time went, and what its workers' time cost.

All of it comes from the journal, so it is the time between events as the coordinator saw them.
Three parts are known: training (the attempts that were committed), halts, and the time without a
service. The rest went into joining, attempts that came to nothing, and waiting for workers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from andon_coordinator.core.run_events import RunEvent, RunEventKind

__all__ = ["Presence", "Spent", "presences"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """How long a worker was on the line, all its stays together."""

    worker: int
    seconds: float
    joins: int
    losses: int
    notices: int
    """How often its machine was about to go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """The parts of a run's time, in seconds; they sum up to `total_s`."""

    total_s: float
    training_s: float
    """In the attempts that were committed, those rolled back later included."""
    halted_s: float
    away_s: float
    """The service did not run."""

    @classmethod
    def of(
        cls,
        events: Sequence[RunEvent],
        steps_s: float,
        committed: Sequence[float],
        began: float,
        ended: float,
    ) -> Spent:
        """Divides the time from `began` to `ended`.

        Args:
            events: everything that happened, in order.
            steps_s: the seconds of all committed steps together.
            committed: when each of them was committed, in order, in seconds since the Unix epoch.
            began: when the run began.
            ended: when its last record or event was written.
        """
        total = max(0.0, ended - began)
        halted = _between(events, RunEventKind.HALTED, RunEventKind.ANSWERED, ended)
        away = 0.0
        for earlier, later in pairwise(events):
            if later.kind is RunEventKind.STARTED:
                at = bisect_left(committed, later.at_unix_s)
                seen = max([earlier.at_unix_s, *committed[max(0, at - 1) : at]])
                away += max(0.0, later.at_unix_s - seen)
        # A clock that was set back would count a moment twice.
        training = min(steps_s, total)
        halted = min(halted, total - training)
        return cls(
            total_s=total,
            training_s=training,
            halted_s=halted,
            away_s=min(away, total - training - halted),
        )

    @property
    def rest_s(self) -> float:
        """Joining, attempts that came to nothing, and waiting for workers."""
        return self.total_s - self.training_s - self.halted_s - self.away_s


def presences(events: Iterable[RunEvent], seconds: Mapping[int, float]) -> list[Presence]:
    """How long each worker was on the line, by worker.

    Args:
        events: everything that happened, in order.
        seconds: each worker's machine time; see `MachineTime`.
    """
    happened = Counter((event.worker, event.kind) for event in events)
    return [
        Presence(
            worker=worker,
            seconds=stayed,
            joins=happened[worker, RunEventKind.JOINED],
            losses=happened[worker, RunEventKind.LOST],
            notices=happened[worker, RunEventKind.NOTICE],
        )
        for worker, stayed in seconds.items()
    ]


def _between(
    events: Iterable[RunEvent], first: RunEventKind, last: RunEventKind, ended: float
) -> float:
    """The seconds from each `first` to the `last` after it, or to the end."""
    spent, since = 0.0, None
    for event in events:
        if event.kind is first and since is None:
            since = event.at_unix_s
        elif event.kind is last and since is not None:
            spent, since = spent + max(0.0, event.at_unix_s - since), None
    return spent if since is None else spent + max(0.0, ended - since)
