"""What a test's worker computes of its share: one mean gradient, or local steps of its own.

It computes nothing twice, and takes time only for what is new: a void round leaves a worker what it
has computed, as long as that belongs to what it is assigned next. `pass_by` is called once in the
middle of the computation, if there is anything to compute: whoever stops there has not said that it
is done.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from andon.protocol.records import Key, PositionRange
from andon.protocol.run_settings import Policy
from andon.protocol.shards import merged
from andon_trainer.core.computed import Computed
from andon_trainer.core.events import Assigned
from andon_trainer.core.reports import Timings
from chaos.model import Floats, LineState, LocalWeights, Task
from chaos.schedules import Outer, parts_of

__all__ = ["Computing", "Gradients", "LocalSteps", "computing_for", "positions_of", "ranges_of"]

Positions = list[int]
PassBy = Callable[[], None]


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

    def take(self, part: Positions, compute: Callable[[], None]) -> None:
        """Computes a part, and notes how long it took."""
        began = time.perf_counter()
        compute()
        if self.seconds_per_sample:
            time.sleep(self.seconds_per_sample * len(part))
        self.busy_s += time.perf_counter() - began
        self.parts += 1
        self.samples += len(part)

    @property
    def timings(self) -> Timings:
        """For the report."""
        return Timings(busy_s=self.busy_s, micro_batches=self.parts, computed=self.samples)


@dataclass
class Computing(ABC):
    """What a worker computes, and what of it it keeps."""

    task: Task
    pace: Pace = field(default_factory=Pace)
    wanted: Callable[[], bool] = lambda: True
    """Asked between two parts whether the rest of them is still to be computed."""

    @abstractmethod
    def compute(
        self, assigned: Assigned, doubts: int, state: LineState, pass_by: PassBy
    ) -> Sequence[Positions]:
        """Computes what is missing of `assigned.positions`, in parts; returns these."""

    @abstractmethod
    def contribution(self, assigned: Assigned, state: LineState) -> Floats:
        """What is sent for `assigned.positions`; `state` is the line's."""

    def compute_ahead(self, assigned: Assigned, pass_by: PassBy) -> Sequence[Positions]:
        """Computes what is missing of `assigned.ahead`, while the contribution travels."""
        return []

    @abstractmethod
    def after(
        self, state: LineState, assigned: Assigned, total_weight: float, mean: Floats
    ) -> LineState:
        """The line's state once the round is committed."""

    def _in_parts(
        self, parts: Sequence[Positions], compute: Callable[[Positions], None], pass_by: PassBy
    ) -> Sequence[Positions]:
        """Computes the parts, and returns them, but for those that nobody wants any more."""
        for number, part in enumerate(parts):
            if number == len(parts) // 2:
                pass_by()
            if number and not self.wanted():
                return parts[:number]

            def now(part: Positions = part) -> None:
                compute(part)

            self.pace.take(part, now)
        return parts


@dataclass
class Gradients(Computing):
    """One mean gradient, in as many micro-batches as the line says."""

    head: Key | None = None
    doubts: int = 0
    have: set[int] = field(default_factory=set)
    """The positions that are computed from this head."""

    def compute(
        self, assigned: Assigned, doubts: int, state: LineState, pass_by: PassBy
    ) -> Sequence[Positions]:
        """Takes the time for what is missing; the gradient is added up when it is sent."""
        wanted = positions_of(assigned.positions)
        if (assigned.parent, doubts) != (self.head, self.doubts) or not self.have <= set(wanted):
            self.head, self.doubts, self.have = assigned.parent, doubts, set()
        missing = [at for at in wanted if at not in self.have]
        # At least two, so that there is something between two micro-batches.
        count = max(2, assigned.micro_batches)
        parts = parts_of(missing, max(1, math.ceil(len(missing) / count)))
        self.pace.begin()
        self._in_parts(parts, self.have.update, pass_by)
        return parts

    def contribution(self, assigned: Assigned, state: LineState) -> Floats:
        """The mean, summed in the order of the positions, whatever was computed first."""
        return self.task.gradient(state.weights, assigned.epoch, assigned.positions)

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

    The line's state is kept apart, and stays as it was until the record comes. Which positions
    count as computed is decided by the trainer's core (`piles`), as for any worker.
    """

    piles: Computed = field(default_factory=Computed)
    outer: Outer = field(default_factory=Outer)
    fragments: int = 1
    mix: float = 0.0
    overlap_steps: int = 0
    own: LocalWeights = field(default_factory=LocalWeights)

    def compute(
        self, assigned: Assigned, doubts: int, state: LineState, pass_by: PassBy
    ) -> Sequence[Positions]:
        """Makes local steps over what is missing, from where the worker's own weights are."""
        if not (self.piles or self.piles.left_over):
            self.own.begin(state.weights)
        self.pace.begin()
        parts = self._parts(assigned, positions_of(self.piles.missing(assigned)))
        ahead = bool(self._parts_ahead(assigned))

        def step(part: Positions) -> None:
            self.due_step(assigned.epoch, part)
            self.piles.add(merged(ranges_of(part)))

        own = self.own
        # With overlapped windows the middle is in what is computed ahead.
        made = self._in_parts(parts, step, (lambda: None) if ahead else pass_by)
        return made if own is self.own else []  # Else it was dropped meanwhile.

    def contribution(self, assigned: Assigned, state: LineState) -> Floats:
        """The change of the weights by the due pile."""
        return self.own.change(state.weights)

    def compute_ahead(self, assigned: Assigned, pass_by: PassBy) -> Sequence[Positions]:
        """Makes further local steps, which the next round's record will cover."""
        parts = self._parts_ahead(assigned)

        def step(part: Positions) -> None:
            self.own.step_ahead(self.task, assigned.epoch, ranges_of(part))
            self.piles.add_ahead(merged(ranges_of(part)))

        self._in_parts(parts, step, pass_by)
        return parts

    def after(
        self, state: LineState, assigned: Assigned, total_weight: float, mean: Floats
    ) -> LineState:
        """The outer optimizer's step by the mean change; what is ahead goes on top of it."""
        moved, new = None, state
        if assigned.fragment is not None:
            moved = self.task.exchanged(assigned.fragment, self.fragments)
        if total_weight > 0:
            scale = assigned.change_scale
            new = self.task.outer_step(state, mean, self.outer, scale, moved)
        if assigned.attends and self.piles:
            # What a late worker owes is no part of the others' round.
            self.own.attend(state.weights, new.weights)
        else:
            self.own.rebase(state.weights, new.weights, moved, self.mix)
        self.piles.left_over = self.own.left_over
        return new

    def due_step(self, epoch: int, part: Positions) -> None:
        """One local step."""
        self.own.step(self.task, epoch, ranges_of(part))

    def drop(self) -> None:
        """The piles do not count any more; the core has emptied them."""
        self.own = LocalWeights()

    def _parts_ahead(self, assigned: Assigned) -> list[Positions]:
        missing = positions_of(self.piles.missing_ahead(assigned))
        if not self.overlap_steps or not missing:
            return self._parts(assigned, missing)
        # The first ones of its share, of which an attempt before may have made some.
        steps = self._parts(assigned, positions_of(assigned.ahead))[: self.overlap_steps]
        return [step for step in steps if set(step) <= set(missing)]

    def _parts(self, assigned: Assigned, missing: Positions) -> list[Positions]:
        return parts_of(missing, math.ceil(self.task.batch / assigned.world_size))


def computing_for(task: Task, policy: Policy, piles: Computed) -> Computing:
    """What the line's policy asks for."""
    if not policy.local_steps:
        return Gradients(task)
    outer = Outer(rate=policy.outer.learning_rate, momentum=policy.outer.momentum)
    return LocalSteps(
        task,
        piles=piles,
        outer=outer,
        fragments=policy.fragments,
        mix=policy.mix,
        overlap_steps=policy.overlap_steps,
    )


def positions_of(ranges: Iterable[PositionRange]) -> Positions:
    """Every position of some ranges, in order."""
    return [at for part in ranges for at in range(part.start, part.stop)]


def ranges_of(positions: Iterable[int]) -> list[PositionRange]:
    """Each position as a range of its own."""
    return [PositionRange(at, at + 1) for at in positions]
