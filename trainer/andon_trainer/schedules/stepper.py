"""The stepper: steps whose gradients are averaged, each as one gradient of this worker.

Theory of operation. If a step is void, the gradient that was sent is kept: it is added to, or sent
again (see `averaged_steps`).

A script that gathers in its loop body computes a loss of all workers' samples. Then nothing is kept
of a void step, and each attempt is one loop body with the whole share.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from andon.protocol.shards import subtract
from andon.protocol.sums import sum_in_order
from andon_trainer.averaging.averager import Averager, IntactGradient
from andon_trainer.averaging.step_gather import Given, Rows
from andon_trainer.data.feed import Share
from andon_trainer.schedules.adding_up import AddsUp
from andon_trainer.schedules.averaged_steps import AveragedSteps
from andon_trainer.schedules.loop_steps import LoopParts, LoopSteps
from andon_trainer.schedules.processes import GradientProcesses, OneProcess
from andon_trainer.schedules.step_state import StepPhase, StepState
from andon_trainer.script.gates import StepIdentity

__all__ = ["Stepper", "StepperGate"]


class Stepper(AddsUp, AveragedSteps):
    """Steps whose gradients are averaged, one exchange a step."""

    _averager: Averager
    _processes: GradientProcesses

    def __init__(
        self,
        parts: LoopParts,
        averager: Averager,
        processes: GradientProcesses | None = None,
        gather: Callable[[Given], list[Given] | None] | None = None,
    ) -> None:
        """Stands between steps.

        Args:
            parts: of the loop.
            averager: of the gradients.
            processes: those of its host, if there are several.
            gather: gives bytes to all ranks, before the step's gradients; None: nobody else is
                there, or its host can't.
        """
        super().__init__(parts, averager, processes or OneProcess())
        self._exchange_rows = gather
        self._usual = 0
        """The most samples that a micro-batch of a first attempt had to hold."""
        self._gathers = False
        """Whether the script has gathered in a loop body, which then must have the whole share."""

    def _begin_attempt(self, state: StepState) -> None:
        self._averager.begin(kept=state.kept is not None)

    @property
    def _intact(self) -> IntactGradient:
        """The gradient that is kept."""
        intact = self._averager.intact
        assert intact is not None, "nothing is kept of a gradient that is not intact"
        return intact

    def _take_up_kept(self, state: StepState) -> None:
        """The kept gradient, times its weight, is what the missing positions are added to."""
        assert state.kept is not None
        self._intact.recall(state.kept.weight / state.unit)
        self._accumulated.hold()

    def _share_left(self, state: StepState) -> Share:
        """See `AveragedSteps`.

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
        if self._processes.several:
            raise RuntimeError(
                "line.gather in a loop body is not supported in a host whose processes average by "
                "DistributedDataParallel: start one worker for each GPU, and prepare the model "
                "itself"
            )
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
        assert self._exchange_rows is not None, "only a worker that is alone exchanges none"
        found = self._exchange_rows(mine)
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
            averaged = self._intact.resend(scalar, weighed.weight)
        else:
            averaged = self._averager.run(scalar, weighed.weight, weighed.scale)
        state.overflow = state.overflow or self._averager.overflowed
        # Before the result is looked at: it is in a void round that a kept gradient is needed.
        if self._averager.intact is not None and not state.gathered:
            self._kept = state.keep()
        if averaged is None:
            self._drop()
            return
        self._report(state, averaged)


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
    def plan_steps(self) -> range | None:
        """Which steps of one process the last one stands for; None: one of them."""
        return None if self.stepper is None else self.stepper.plan_steps

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
