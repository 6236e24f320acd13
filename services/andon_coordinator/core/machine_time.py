"""Machine time: how long the machines of a run's workers were on the line, and what that costs.

A worker's machine counts from its join to its end, as the run's events tell both. So the journal
has all of it, and a coordinator that starts again knows what the one before it knew.

Nothing tells who was there while no service ran. A stay goes on over that time if the same process
comes back. If another one comes, or none, the stay ended with the last thing that the journal has
of the service before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from andon.protocol.records import Key
from andon.protocol.scalars import Scalar
from andon_coordinator.core import effects, events
from andon_coordinator.core.run_events import RunEvent, RunEventKind

__all__ = ["TOKENS", "CostMeter", "Counted", "MachineTime", "Price", "RunCost"]

TOKENS = "tokens"
"""A script that logs by this name how many tokens it computed gets tokens for its money."""
_GONE = (RunEventKind.LEFT, RunEventKind.LOST, RunEventKind.DROPPED)
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Price:
    """What an hour of one worker's machine costs."""

    per_hour: float
    currency: str = ""
    """For people; empty: nobody said."""

    def of(self, machine_s: float) -> float:
        """What so many seconds cost."""
        return self.per_hour * machine_s / _HOUR_S

    def per_unit(self, count: float, machine_s: float) -> float | None:
        """How many samples, or tokens, one unit of the currency buys; None if nothing was spent."""
        cost = self.of(machine_s)
        return count / cost if cost > 0 else None


@dataclass(frozen=True, slots=True)
class RunCost:
    """What a run has taken so far."""

    machine_seconds: float = 0.0
    """The time of all workers' machines together."""
    price_per_hour: float | None = None
    """Of one worker's machine; None: nobody said, and then the rest is None and empty too."""
    currency: str = ""
    cost: float | None = None
    samples_per_unit: float | None = None
    """Committed samples for one unit of the currency, without those that were rolled back; None as
    long as nothing was spent."""
    tokens_per_unit: float | None = None
    """Likewise tokens; None if the script logs none."""


class MachineTime:
    """The time that each worker's machine was on the line; pure."""

    def __init__(self) -> None:
        """Nobody was there yet."""
        self._sign = 0.0
        """When something was last known to happen."""
        self._since: dict[int, float] = {}
        self._awaited: dict[int, tuple[float, float]] = {}
        """Who was there when the service before went, since when, and its last sign."""
        self._ended: dict[int, float] = {}
        """The seconds of the stays that ended."""

    def saw(self, at_unix_s: float) -> None:
        """Something else was written at that time, so the service ran then."""
        self._sign = max(self._sign, at_unix_s)

    def happened(self, event: RunEvent) -> None:
        """Takes the next thing that happened to the run."""
        worker, at = event.worker, event.at_unix_s
        if event.kind is RunEventKind.STARTED:
            self._awaited |= {each: (since, self._sign) for each, since in self._since.items()}
            self._since.clear()
        elif event.kind is RunEventKind.SESSION_OVER:
            for each in list(self._since):
                self._end(each, at)
        elif worker is not None and event.kind is RunEventKind.JOINED:
            self._joined(worker, at, again=event.again)
        elif worker is not None and event.kind in _GONE:
            self._end(worker, at)
        self.saw(at)

    def seconds(self, at_unix_s: float) -> dict[int, float]:
        """By worker, in their order; who is there at that time is counted until then."""
        found = dict(self._ended)
        for worker, (since, sign) in self._awaited.items():
            found[worker] = found.get(worker, 0.0) + max(0.0, sign - since)
        for worker, since in self._since.items():
            found[worker] = found.get(worker, 0.0) + max(0.0, at_unix_s - since)
        return dict(sorted(found.items()))

    def _joined(self, worker: int, at: float, *, again: bool) -> None:
        if again and worker in self._awaited:
            self._since[worker], _ = self._awaited.pop(worker)
            return
        if worker not in self._since:
            self._end(worker, at)
            self._since[worker] = at

    def _end(self, worker: int, at: float) -> None:
        """Ends a worker's stay, if there is one."""
        since, at = self._awaited.pop(worker, (self._since.pop(worker, at), at))
        self._ended[worker] = self._ended.get(worker, 0.0) + max(0.0, at - since)


@dataclass(frozen=True, slots=True)
class Counted:
    """What a run has done that counts: what was rolled back does not."""

    samples: int = 0
    """Of committed steps."""
    tokens: float = 0.0
    """That scripts logged, all workers together."""
    logged: Mapping[int, tuple[int, float]] = field(default_factory=dict)
    """By worker, the last step at which its script logged tokens, and how many."""


class CostMeter:
    """What the run has taken, as it goes on; pure."""

    def __init__(self, time: MachineTime, counted: Counted, price: Price | None) -> None:
        """Goes on from what the journal has.

        Args:
            time: of the events in it.
            counted: what was done for that.
            price: None: nobody said.
        """
        self._time, self._samples, self._tokens = time, counted.samples, counted.tokens
        self._logged = dict(counted.logged)
        self.price = price
        self._pending: dict[Key, int] = {}
        """The samples of steps that are not durable yet."""

    def receive(self, event: events.Event, done: Sequence[effects.Effect]) -> None:
        """Takes an event of the line, and what followed; run events are among it."""
        match event:
            case events.RecordSaved(key):
                self._samples += self._pending.pop(key, 0)
                if event.undone is not None:
                    self._undo(event.undone)
            case events.JournalFailed():
                self._pending.clear()
            case _:
                pass
        for effect in done:
            match effect:
                case effects.SaveRunEvent(happened):
                    self._time.happened(happened)
                case effects.SaveRecord(record, result) if result is not None:
                    self._pending[record.key] = result.samples
                case effects.SaveScalars(worker, scalars):
                    for each in scalars:
                        if each.name == TOKENS:
                            self._log(worker, each)

    def at(self, at_unix_s: float) -> RunCost:
        """What it is at that time."""
        machine_s = sum(self._time.seconds(at_unix_s).values())
        if self.price is None:
            return RunCost(machine_s)
        return RunCost(
            machine_s,
            self.price.per_hour,
            self.price.currency,
            self.price.of(machine_s),
            self.price.per_unit(self._samples, machine_s),
            self.price.per_unit(self._tokens, machine_s) if self._tokens else None,
        )

    def _log(self, worker: int, scalar: Scalar) -> None:
        """Counts what a worker logged: once, though a worker may send it again."""
        value = scalar.value if 0 < scalar.value < math.inf else 0.0
        step, before = self._logged.get(worker, (-1, 0.0))
        if scalar.step < step:
            return
        self._tokens += value - before if scalar.step == step else value
        self._logged[worker] = scalar.step, value

    def _undo(self, undone: events.Undone) -> None:
        self._samples -= undone.samples
        self._tokens -= undone.tokens
        for worker, (step, _) in self._logged.items():
            if step > undone.step:
                self._logged[worker] = undone.step + 1, 0.0
