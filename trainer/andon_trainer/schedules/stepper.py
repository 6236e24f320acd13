"""The stepper: a step's life on this worker, from its assignment to its commit.

Theory of operation. The gradients of each step are averaged (see `loop_steps` for what is common to
all schedules). If the step is void, the gradient that was sent is kept (see `core.keeping`), and
under the next assignment the loop computes only the positions that are new to this worker. If none
are, the loop body runs all the same, on borrowed samples, and what was kept is sent again.

A script that gathers in its loop body computes a loss of all workers' samples. Then nothing is kept
of a void step, and each attempt is one loop body with the whole share.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import Optimizer

from andon.protocol.shards import subtract
from andon.protocol.sums import sum_in_order
from andon_trainer.averaging.averaging import Averaged
from andon_trainer.averaging.line_averaging import Averager
from andon_trainer.averaging.step_gather import Given, Rows
from andon_trainer.core.events import Assigned
from andon_trainer.core.keeping import Kept
from andon_trainer.data.feed import MicroBatch, Share
from andon_trainer.schedules.accumulation import Accumulation
from andon_trainer.schedules.loop_checks import HookedParameters, check_device, check_loop_body
from andon_trainer.schedules.loop_steps import LoopParts, LoopSteps
from andon_trainer.schedules.processes import Processes
from andon_trainer.schedules.step_state import StepPhase, StepState
from andon_trainer.script.gates import StepIdentity

__all__ = ["Stepper", "StepperGate"]


class Stepper(LoopSteps):
    """Steps whose gradients are averaged, one exchange a step."""

    _averager: Averager

    def __init__(
        self, parts: LoopParts, averager: Averager, processes: Processes | None = None
    ) -> None:
        """Stands between steps; `processes` are those of its host, if there are several."""
        super().__init__(parts, averager, processes)
        self._accumulation = Accumulation(parts.accumulated, parts.replica)
        self._hooked = HookedParameters(parts.accumulated.named(), "line.backward(loss)")
        self._moves = 0
        self._kept: Kept | None = None
        """This worker's gradient of a void step."""
        self._usual = 0
        """The most samples that a micro-batch of a first attempt had to hold."""
        self._gathers = False
        """Whether the script has gathered in a loop body, which then must have the whole share."""

    def _forget(self) -> None:
        self.pause()
        self._accumulation.drop()
        self._kept = None

    def pause(self) -> None:
        """Puts running statistics away; weights move on a commit only."""
        self._averager.put_away()

    def _before_work(self) -> None:
        self.pause()

    def stepped(self, optimizer: Optimizer) -> None:
        """Does nothing: the step is over for the line already."""

    @property
    def committed(self) -> bool:
        """Whether the last `optimizer.step()` committed the step, or an accumulation's last."""
        over = self._state is not None and self._state.phase is StepPhase.COMMITTED
        return over and not self._accumulation.is_open

    @property
    def moves(self) -> int:
        """Counts commits, of an accumulation its last one only."""
        return self._moves

    @property
    def left_over(self) -> int:
        """Number of committed batches whose gradients wait for more of their accumulation."""
        return self._accumulation.batches

    def accumulate(self, every: int) -> AbstractContextManager[None]:
        """Around loop bodies: every `every`-th batch moves the weights."""
        return self._accumulation.of(every)

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

    def _verify(self, state: StepState) -> Generator[Any, None, bool]:
        """Loop bodies that come before those of this worker's share; False ends the attempt."""
        yield from ()
        return True

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
        was = self._written_by_line
        self._moved.begin()
        self._before_body(state.assigned, micro_batch)
        with self._lone.allowed(state.waiting):
            yield self._hand_over(state, micro_batch.batch)
        if state is not self._state:
            return False  # The script left the epoch, and resumed this generator afterwards.
        settled = self.committed or was != self._written_by_line
        self._moved.check(state.phase, committed=settled)
        if state.phase is StepPhase.VOID:
            return False  # The next assignment has the positions that are left.
        check_loop_body(state, self._scaling)
        return True

    def _begin_attempt(self, state: StepState) -> None:
        """An attempt begins, before its first forward."""
        self._averager.begin(kept=state.kept is not None)

    def _take_up_kept(self, state: StepState) -> None:
        """The kept gradient, times its weight, is what the missing positions are added to."""
        assert state.kept is not None
        self._averager.recall(state.kept.weight / state.unit)
        self._accumulated.hold()

    def _before_body(self, assigned: Assigned, micro_batch: MicroBatch) -> None:
        """A loop body follows."""

    @property
    def _written_by_line(self) -> tuple[int, int]:
        """Changes when a state may have come that replaced the weights."""
        here = self._member.position
        return id(here.installed_from), here.doubts

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

    def _share_left(self, state: StepState) -> Share:
        """The positions that are left to compute.

        When a lost worker's positions were assigned again this may be more than usual. The
        micro-batches are then no larger than usual: they must fit into the GPU's memory.
        """
        assigned, kept = state.assigned, state.kept
        if kept is None and (self._gathers or not assigned.attempt):
            share = self._shares.of(assigned, assigned.epoch, assigned.positions, assigned.batch)
            self._usual = -(-state.samples // share.parts)
            return share
        done = () if kept is None else kept.positions
        # A newcomer's first share: a batch of a cadence is larger than the script's.
        batch = min(len(assigned.batch), self._feeder.batch_size)
        limit = self._usual or -(-batch // assigned.world_size)
        left = subtract(assigned.positions, done)
        return Share(assigned.epoch, left, limit, batch=assigned.batch)

    def gather(self, data: bytes) -> Rows | None:
        """See `LoopSteps`."""
        self._processes.refuse_gather()
        state = self._state
        assert state is not None
        first, self._gathers, state.gathered = not self._gathers, True, True
        if state.phase is StepPhase.VOID:
            return None
        if not state.last or state.micro_batches or state.kept is not None:
            self._refuse_part(state, first=first)
            return None
        if state.assigned.alone:
            return None
        state.phase = StepPhase.VOID  # In case the wait raises.
        mine = Given(b"", 0) if state.borrowed else Given(data, state.waiting)
        found = self._averager.gather(mine)
        if found is None:
            return None
        state.phase = StepPhase.ACCUMULATING
        total = sum_in_order(each.weight for each in found)
        return Rows(
            given=[each.data for each in found],
            rank=state.assigned.rank,
            factor=total / mine.weight if mine.weight else 0.0,
        )

    def _refuse_part(self, state: StepState, *, first: bool) -> None:
        """Refuses a gather of a part of the share; the line tries the step again if it may help.

        Raises:
            RuntimeError: the script, or the line's schedule, divides shares.
        """
        if not (first and state.assigned.attempt):
            raise RuntimeError(
                "line.gather in a loop body gathers each worker's whole share, and this body has "
                "a part of it: leave micro_batch_size out of line.prepare, and give the line a "
                "schedule without windows of several batches (--schedule every-step)"
            )
        # Positions of a lost worker came in parts, since nobody knew that the script gathers.
        self._kept = None
        state.phase = StepPhase.VOID
        self._member.abandon("its script gathers in the loop body, which had a part of the share")

    def _complete(self, state: StepState, scalar: torch.Tensor, *, whole: bool) -> None:
        """Runs the step's last backward, averages and reports."""
        self._accumulation.refuse_other_bodies()
        # Whatever raises below (the script's own backward, a halt), the step is then over.
        state.phase = StepPhase.VOID
        # Its values lie in the buffers that backward fills.
        self._kept = None
        if self._processes.several or not whole or state.assigned.world_size > 1:
            self._hooked.look()  # A backward sees a part of the step's samples only.
        weighed = self._processes.weigh(state, whole=whole, stop_wanted=self.stop_wanted)
        if weighed is None:
            self._drop()
            return
        self.stop_wanted = weighed.stop_wanted
        if state.kept is not None and state.borrowed:
            averaged = self._averager.resend(scalar, weighed.weight)
        else:
            averaged = self._averager.run(scalar, weighed.weight, weighed.scale)
        state.overflow = state.overflow or self._averager.overflowed
        # Before the result is looked at: it is in a void round that a kept gradient is needed.
        if self._averager.intact and not state.gathered:
            self._kept = state.keep()
        if averaged is None:
            self._drop()
            return
        self._report(state, averaged)

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
            # Not by an overflow: a script that spares its scheduler one (`if not line.overflowed`)
            # must not find the scheduler moved in the next step's first loop body.
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


class StepperGate:
    """What gates ask: the stepper, or the answers of a worker that has not joined yet."""

    def __init__(self) -> None:
        """There is no stepper before the worker has joined."""
        self.stepper: LoopSteps | None = None

    @property
    def committed(self) -> bool:
        """Whether the last `optimizer.step()` moved the weights."""
        return self.stepper is not None and self.stepper.moved

    @property
    def identity(self) -> StepIdentity:
        """The step that the script computes now."""
        return StepIdentity(0, 0, 0) if self.stepper is None else self.stepper.identity

    @property
    def learning_rate_scale(self) -> float:
        """What the line multiplies learning rates with in this step."""
        return 1.0 if self.stepper is None else self.stepper.learning_rate_scale

    def try_commit(self) -> bool:
        """Waits for the current step's commit; returns whether the weights are to move."""
        return self.stepper is not None and self.stepper.try_commit()

    @property
    def moves(self) -> int:
        """Counts the steps that moved the weights."""
        return 0 if self.stepper is None else self.stepper.moves

    @property
    def overflowed(self) -> bool:
        """Whether the commit said that scaled gradients overflowed."""
        return self.stepper is not None and self.stepper.overflowed

    def has_gradients(self) -> bool:
        """Whether `p.grad` is what optimizers are to step by now; may wait for the commit."""
        return self.stepper is not None and self.stepper.has_gradients()

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has moved the weights."""
        assert self.stepper is not None
        self.stepper.stepped(optimizer)
