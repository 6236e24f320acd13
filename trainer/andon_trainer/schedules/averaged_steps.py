"""Averaged steps: a step's life on this worker, from its assignment to its commit.

Theory of operation. The gradients of each step are averaged (see `loop_steps` for what is common to
all schedules). If the step is void, what was computed of it is kept (see `core.keeping`), and under
the next assignment the loop computes only the positions that are new to this worker. If none are,
the loop body runs all the same, on borrowed samples, and what was kept is sent again.

What is kept, and how it grows, is what the two kinds of steps differ in: `Stepper` has a gradient,
and `GrainStepper` the sums of grains.
"""

from __future__ import annotations

import itertools
import time
from abc import abstractmethod
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import Optimizer

from andon_trainer.averaging.averager import StepAverager
from andon_trainer.averaging.averaging import Averaged
from andon_trainer.core.events import Assigned
from andon_trainer.core.keeping import Kept
from andon_trainer.data.feed import MicroBatch, Share
from andon_trainer.schedules.accumulation import Accumulation
from andon_trainer.schedules.loop_checks import HookedParameters, check_device
from andon_trainer.schedules.loop_steps import LoopParts, LoopSteps
from andon_trainer.schedules.processes import Processes
from andon_trainer.schedules.step_state import StepPhase, StepState

__all__ = ["AveragedSteps"]


class AveragedSteps(LoopSteps):
    """Steps that are averaged, one round a step."""

    _averager: StepAverager

    def __init__(self, parts: LoopParts, averager: StepAverager, processes: Processes) -> None:
        """Stands between steps; `processes` are those of its host."""
        super().__init__(parts, averager, processes)
        self._accumulation = Accumulation(parts.accumulated, parts.replica)
        self._hooked = HookedParameters(parts.accumulated.named(), "line.backward(loss)")
        self._kept: Kept | None = None
        """What this worker has of a void step."""

    # ------------------------------------------------------------------ what the kinds differ in

    @abstractmethod
    def _begin_attempt(self, state: StepState) -> None:
        """An attempt begins, before its first forward."""

    @abstractmethod
    def _share_left(self, state: StepState) -> Share:
        """The positions that are left to compute."""

    def _verify(self, state: StepState) -> Generator[Any, None, bool]:
        """Loop bodies that come before those of this worker's share; False ends the attempt."""
        yield from ()
        return True

    def _take_up_kept(self, state: StepState) -> None:
        """What is kept is to be added to."""

    def _before_body(self, assigned: Assigned, micro_batch: MicroBatch) -> None:
        """A loop body follows."""

    # ------------------------------------------------------------------ the loop's batches

    def _forget(self) -> None:
        self.pause()
        self._accumulation.drop()
        self._kept = None

    def pause(self) -> None:
        """Puts running statistics away; weights move on a commit only."""
        self._averager.put_away()

    def _before_work(self) -> None:
        self.pause()

    def _micro_batches(self, assigned: Assigned) -> Iterator[Any]:
        """The loop's batches of one assignment; the loop body runs at each `yield`."""
        check_device(self._on_one_device, self._device)
        if self._state is not None and self._state.phase is not StepPhase.COMMITTED:
            self._accumulated.drop()  # A void attempt left gradients.
        self._averager.late.clear()
        self._averager.clock.begin()
        self._state = state = self._begin(assigned)
        # Before the first forward, which may move buffers.
        self._begin_attempt(state)
        if not (yield from self._verify(state)):
            return
        share, began, seen = self._share_to_compute(state), time.perf_counter(), 0
        positions = sum(len(each) for part in self._shares.filled(share) for each in part)
        batches = self._feeder.batches(share, lambda: self._shares.upcoming(assigned))
        # Whether there is anything to compute is not known before: a stream may end here.
        first = next(batches, None) if positions else None
        if first is None:
            if self._ends_epoch(assigned):
                return
            state.borrowed = True
            borrowed = self._feeder.borrow(assigned.epoch, assigned.batch.start)
            first = MicroBatch(borrowed, positions, 1)
        if state.kept is not None and not state.borrowed:
            self._take_up_kept(state)
        self._look_at_weights(state)
        for micro_batch in itertools.chain((first,), batches):
            self._loaded(state, began)
            if state.borrowed:
                self.rows.take_none(assigned.step)
            else:
                self.rows.take(assigned.step, share, seen, micro_batch)
            seen += micro_batch.positions
            state.last = seen >= positions
            if not (yield from self._body(state, micro_batch)):
                return
            began = time.perf_counter()

    def _look_at_weights(self, state: StepState) -> None:
        """Digests the weights, if the line compares them in this step.

        Before a loop body runs: they are still those of the head.
        """
        here, assigned = self._member.position, state.assigned
        # Nobody compares those of a worker that only attends.
        if (assigned.wants_digest or here.digest_due) and not assigned.attends:
            state.digest = self._replica.weights(here.coordinator_can)

    def _body(self, state: StepState, micro_batch: MicroBatch) -> Generator[Any, None, bool]:
        """One loop body; returns whether another one of this attempt may follow."""
        state.waiting = micro_batch.samples
        self._before_body(state.assigned, micro_batch)
        return (yield from self._run_body(state, micro_batch.batch))

    def _begin(self, assigned: Assigned) -> StepState:
        """The step that an assignment begins, with what is kept of an earlier attempt."""
        doubts = self._member.position.doubts
        # Dropped for good: a later assignment at this head would find other values in the buffers.
        if self._kept is not None and not self._kept.serves(assigned, doubts):
            self._kept = None
        state = StepState.begin(assigned, doubts, self._kept, self._shares.samples_of(assigned))
        self._processes.begin(state)
        return state

    def _share_to_compute(self, state: StepState) -> Share:
        """This process's part of the positions that are left to compute."""
        return self._processes.part_of(self._share_left(state), state.assigned.epoch)

    # ------------------------------------------------------------------ the commit

    def _report(self, state: StepState, averaged: Averaged) -> None:
        """Tells the line of a step whose averages are in `p.grad`."""
        state.collect()
        state.averaged = averaged
        ends = self._feeder.epoch_size == state.assigned.batch.stop
        self._accumulation.take(averaged.total_weight, ends_epoch=ends)
        state.phase = StepPhase.AVERAGED
        self._note_end(state)
        # All averages are here, so the last backward is over: reading the clock waits for nothing.
        busy = self._averager.clock.read()
        self._member.report(state.report(averaged, busy, self.stop_wanted))

    def stepped(self, optimizer: Optimizer) -> None:
        """Does nothing: the step is over for the line already."""

    @property
    def committed(self) -> bool:
        """Whether the last `optimizer.step()` committed the step, or an accumulation's last."""
        over = self._state is not None and self._state.phase is StepPhase.COMMITTED
        return over and not self._accumulation.is_open

    @property
    def left_over(self) -> int:
        """Number of committed batches whose gradients wait for more of their accumulation."""
        return self._accumulation.batches

    def accumulate(self, every: int) -> AbstractContextManager[None]:
        """Around loop bodies: every `every`-th batch moves the weights."""
        return self._accumulation.of(every)

    @property
    def overflowed(self) -> bool:
        """Whether scaled gradients overflowed, in the step or in the accumulation that it ended."""
        state = self._state
        return self._accumulation.overflowed or (state is not None and state.overflow)

    def has_gradients(self) -> bool:
        """Whether `p.grad` is the mean of a committed step; waits for the commit."""
        self.try_commit()
        return self.committed and self._has_mean

    @property
    def _has_mean(self) -> bool:
        """Whether anybody had a weight, in the step or in the accumulation that it ended."""
        state = self._state
        return self._accumulation.has_mean or (state is not None and state.moves_weights)

    def try_commit(self) -> bool:
        """Waits for the current step's commit; returns whether the weights are to move.

        They do not move if the step is incomplete or void, if its total weight is 0, or if the
        scaled gradients of some worker overflowed. With several optimizers the first call waits,
        and the others get the same answer.
        """
        state = self._state
        self._refuse_early_step()
        if state is not None and state.phase is StepPhase.AVERAGED:
            state.phase = StepPhase.VOID  # In case the wait raises.
            commit = self._member.await_commit()
            if commit is None:
                self._drop()
                self._accumulation.drop()
                return False
            state.phase = StepPhase.COMMITTED
            state.overflow = commit.overflow
            self._limit(commit.gradient_scale)
            self._commits += 1
            # Before the two lines below, which ask whether this batch ended its accumulation.
            self._accumulation.committed(overflow=commit.overflow)
            # Of an accumulation by its last one only, and not by an overflow: a script that spares
            # its scheduler one (`if not line.overflowed`) must not find the scheduler moved in the
            # next step's first loop body.
            self._moves += not (self._accumulation.is_open or self.overflowed)
            self._kept = None
            self._averager.committed(overflow=commit.overflow)
            self.last_commit = commit
            if self._scaling is not None and not self._accumulation.is_open:
                self._scaling.loss_scale.committed(overflow=self.overflowed)
        return self.committed and self._has_mean and not self.overflowed

    def _limit(self, scale: float) -> None:
        """Scales the averaged gradients, where the line limits a spike instead of halting for it.

        On all workers by the same float32 number, so they stay the same bits everywhere.
        """
        if scale == 1.0:
            return
        with torch.no_grad():
            groups = [group for each in self._replica.optimizers for group in each.param_groups]
            for parameter in {id(p): p for group in groups for p in group["params"]}.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
