"""What a test's worker computes of its share: one mean gradient, or local steps of its own.

It computes nothing twice, and takes time only for what is new: a void round leaves a worker what it
has computed, as long as that belongs to what it is assigned next. `pass_by` is called once in the
middle of the computation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from andon.protocol.records import Key, PositionRange
from andon.protocol.run_settings import Policy
from andon_trainer.core.events import Assigned
from andon_trainer.core.reports import Timings
from chaos.model import Floats, LineState, Task
from chaos.schedules import Outer, parts_of

__all__ = ["Computed", "Computing", "Gradients", "LocalSteps", "computing_for", "positions_of"]

Positions = list[int]


@dataclass
class Pace:
    """How fast a worker computes, and what it took."""

    seconds_per_sample: float = 0.0
    busy_s: float = 0.0
    parts: int = 0
    samples: int = 0

    def begin(self) -> None:
        """A new attempt: nothing was computed in it yet."""
        self.busy_s, self.parts, self.samples = 0.0, 0, 0

    def take(self, positions: Positions, compute: Callable[[], None]) -> None:
        """Computes a part, and notes how long it took."""
        began = time.perf_counter()
        compute()
        if self.seconds_per_sample:
            time.sleep(self.seconds_per_sample * len(positions))
        self.busy_s += time.perf_counter() - began
        self.parts += 1
        self.samples += len(positions)

    @property
    def timings(self) -> Timings:
        """For the report."""
        return Timings(busy_s=self.busy_s, micro_batches=self.parts, computed=self.samples)


@dataclass(frozen=True)
class Computed:
    """A worker's contribution to a round."""

    vector: Floats
    new: int
    """Positions that were computed in this attempt."""
    steps: Sequence[Positions] = ()
    """Every local step behind it, in the order in which they were made."""


@dataclass
class Computing:
    """What has been computed from one head."""

    task: Task
    pace: Pace = field(default_factory=Pace)
    head: Key | None = None
    doubts: int = 0
    have: set[int] = field(default_factory=set)

    def compute(
        self, assigned: Assigned, doubts: int, state: LineState, pass_by: Callable[[], None]
    ) -> Computed:
        """The contribution to an assignment; `state` is the line's."""
        wanted = positions_of(assigned.positions)
        if (assigned.parent, doubts) != (self.head, self.doubts) or not self.have <= set(wanted):
            self.head, self.doubts, self.have = assigned.parent, doubts, set()
            self._begin(state)
        missing = [at for at in wanted if at not in self.have]
        parts = self._parts(assigned, missing)
        self.pace.begin()
        for number, part in enumerate(parts):
            if number == len(parts) // 2:
                pass_by()
            self._part(assigned, part)
            self.have.update(part)
        if not parts:
            pass_by()
        return self._computed(assigned, state, len(missing))

    def _begin(self, state: LineState) -> None:
        raise NotImplementedError

    def _parts(self, assigned: Assigned, missing: Positions) -> list[Positions]:
        raise NotImplementedError

    def _part(self, assigned: Assigned, part: Positions) -> None:
        raise NotImplementedError

    def _computed(self, assigned: Assigned, state: LineState, new: int) -> Computed:
        raise NotImplementedError

    def after(
        self, state: LineState, assigned: Assigned, total_weight: float, mean: Floats
    ) -> LineState:
        """The line's state once the round is committed."""
        raise NotImplementedError


class Gradients(Computing):
    """One mean gradient, in as many micro-batches as the line says."""

    def _begin(self, state: LineState) -> None:
        pass

    def _parts(self, assigned: Assigned, missing: Positions) -> list[Positions]:
        # At least two, so that there is something between two micro-batches.
        count = max(2, assigned.micro_batches)
        return parts_of(missing, math.ceil(len(missing) / count)) if missing else []

    def _part(self, assigned: Assigned, part: Positions) -> None:
        self.pace.take(part, lambda: None)

    def _computed(self, assigned: Assigned, state: LineState, new: int) -> Computed:
        # Summed in the order of the positions, whatever was computed first.
        gradient = self.task.gradient(state.weights, assigned.epoch, assigned.positions)
        return Computed(gradient, new)

    def after(
        self, state: LineState, assigned: Assigned, total_weight: float, mean: Floats
    ) -> LineState:
        """An optimizer's step by the mean gradient."""
        if total_weight <= 0:
            return state
        scale = assigned.learning_rate_scale
        return LineState(weights=self.task.moved(state.weights, mean, scale))


@dataclass
class LocalSteps(Computing):
    """Optimizer steps of the worker's own, and the change of the weights that they made.

    The line's state stays as it was until the record comes: it may have to be sent to a newcomer.
    """

    outer: Outer = field(default_factory=Outer)
    now: Floats | None = None
    """The worker's own weights in the window."""
    steps: list[Positions] = field(default_factory=list)

    def _begin(self, state: LineState) -> None:
        self.now, self.steps = state.weights, []

    def _parts(self, assigned: Assigned, missing: Positions) -> list[Positions]:
        return parts_of(missing, math.ceil(self.task.batch / assigned.world_size))

    def _part(self, assigned: Assigned, part: Positions) -> None:
        def step() -> None:
            assert self.now is not None
            gradient = self.task.gradient(self.now, assigned.epoch, ranges_of(part))
            self.now = self.task.moved(self.now, gradient, assigned.learning_rate_scale)

        self.pace.take(part, step)
        self.steps.append(part)

    def _computed(self, assigned: Assigned, state: LineState, new: int) -> Computed:
        assert self.now is not None
        return Computed(state.weights - self.now, new, list(self.steps))

    def after(
        self, state: LineState, assigned: Assigned, total_weight: float, mean: Floats
    ) -> LineState:
        """The outer optimizer's step by the mean change."""
        return self.task.outer_step(state, mean, self.outer) if total_weight > 0 else state


def computing_for(task: Task, policy: Policy) -> Computing:
    """What the line's policy asks for."""
    if not policy.local_steps:
        return Gradients(task)
    outer = Outer(rate=policy.outer.learning_rate, momentum=policy.outer.momentum)
    return LocalSteps(task, outer=outer)


def positions_of(ranges: Iterable[PositionRange]) -> Positions:
    """Every position of some ranges, in order."""
    return [at for part in ranges for at in range(part.start, part.stop)]


def ranges_of(positions: Positions) -> list[PositionRange]:
    """Each position as a range of its own."""
    return [PositionRange(at, at + 1) for at in positions]
