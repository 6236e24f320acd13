"""The loop: what every schedule of steps has in common on this worker.

Theory of operation. A training loop touches a step at three places. Its loader begins the step
(`batches`), `line.backward` accumulates and, on the last micro-batch, leaves a mean in `p.grad`
(`backward`), and `optimizer.step()` asks whether the weights may move (`try_commit`). What the mean
is over, and when the weights move, is the schedule's: `Stepper` averages the gradients of each
step, `LocalStepper` exchanges the change of the weights after several steps.

Between two micro-batches `p.grad` is empty, and a step's phase is set to VOID before anything that
may raise, and to its real phase after it: a script that catches a halt and iterates again then
finds the step over, and its gradients dropped.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from andon_trainer.averaging.averager import LoopAverager
from andon_trainer.averaging.step_gather import Rows
from andon_trainer.core.events import Assigned, Committed
from andon_trainer.data.feed import Feeder
from andon_trainer.data.loader import move_to
from andon_trainer.errors import RunOver
from andon_trainer.model.graph import FREED, Graph
from andon_trainer.model.guards import AccumulatedGradients
from andon_trainer.model.lone_samples import LoneSamples
from andon_trainer.place.member import RunMember
from andon_trainer.schedules.carried_rows import CarriedRows
from andon_trainer.schedules.coupled_samples import CoupledSamples
from andon_trainer.schedules.loop_checks import (
    MovedParameters,
    check_loop_body,
    no_batch,
    step_was_not_called,
)
from andon_trainer.schedules.processes import Processes
from andon_trainer.schedules.shares import Shares
from andon_trainer.schedules.step_state import StepPhase, StepState
from andon_trainer.script.gates import StepIdentity
from andon_trainer.script.loss_check import LossCheck
from andon_trainer.script.prepared import is_on_several_devices
from andon_trainer.script.scaling import ScalerGate
from andon_trainer.script.script_checks import JoinedWeights
from andon_trainer.state.replica import Replica

__all__ = ["LoopParts", "LoopSteps"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopParts:
    """What a loop of steps works with."""

    member: RunMember
    accumulated: AccumulatedGradients
    feeder: Feeder
    replica: Replica
    device: torch.device
    micro_batch_size: int | None = None
    """The most samples in a micro-batch, if the script says so."""
    scaling: ScalerGate | None = None
    """The script's GradScaler, if it prepared one."""
    grain: int = 0
    """Positions of a grain, on a line of equal bits; else 0."""


class LoopSteps(ABC):
    """The current step of a prepared script. Used by one thread."""

    _in_parts = False
    """Whether shares are divided into parts even if the line does not say so."""
    _holds_weights = True
    """Whether the models have the line's weights between two commits."""

    def __init__(self, parts: LoopParts, averager: LoopAverager, processes: Processes) -> None:
        """Stands between steps; `processes` are those of its host."""
        self._processes = processes
        self._member = parts.member
        self._accumulated = parts.accumulated
        self._feeder = parts.feeder
        self._shares = Shares(
            parts.feeder, self._processes, in_parts=self._in_parts, grain=parts.grain
        )
        self._device = parts.device
        self._scaling = parts.scaling
        self._replica = parts.replica
        self._averager = averager
        self._state: StepState | None = None
        """The current step, or the last one between two steps."""
        trained = parts.accumulated if self._holds_weights else None
        self._moved = MovedParameters(parts.replica, trained)
        self._joined = JoinedWeights(parts.accumulated, parts.member.position.installed_from)
        # Looked at once: a model that is on several devices is not moved by `to`.
        self._on_one_device = [
            each for each in parts.replica.modules if not is_on_several_devices(each)
        ]
        self._loss_check = LossCheck(averager.losses.reader)
        self._coupled = CoupledSamples()
        chosen = min(parts.feeder.batch_size, parts.micro_batch_size or parts.feeder.batch_size)
        self._lone = LoneSamples(parts.replica.modules, wanted=chosen == 1)
        self._in_backward = False
        self._begun = False
        """Whether the script has begun to iterate its loader."""
        self._commits = 0
        """Counts whatever a script sets a learning rate by: commits, and steps of its own."""
        self._moves = 0
        self.plan_steps: range | None = None
        """Which steps of one process the present one stands for; None: it is one of them."""
        self.epoch: int | None = None
        """The epoch of the batches that the script iterated last, or that `line.epochs` began."""
        self.stop_wanted = ""
        """Why the script wants the run to end; empty if it does not."""
        self.last_commit: Committed | None = None
        self.rows = CarriedRows(parts.feeder.batch_size)
        """Which rows of their batches loop bodies have, one after another."""

    # ------------------------------------------------------------------ what schedules differ in

    @abstractmethod
    def _micro_batches(self, assigned: Assigned) -> Iterator[Any]:
        """The loop's batches of one assignment; the loop body runs at each `yield`."""

    @abstractmethod
    def _go_backward(
        self,
        state: StepState,
        losses: tuple[torch.Tensor, torch.Tensor],
        given: float,
        graph: Graph,
    ) -> None:
        """Goes backward from the micro-batch that waits; the last one leaves the mean in `p.grad`.

        Args:
            state: the step.
            losses: to go backward from, and as people read it.
            given: the weight.
            graph: what becomes of autograd's graph.
        """

    @abstractmethod
    def _forget(self) -> None:
        """Drops what was computed of a step that is void, or was left."""

    @abstractmethod
    def try_commit(self) -> bool:
        """Returns whether the weights are to move; may wait for the others."""

    @property
    @abstractmethod
    def committed(self) -> bool:
        """Whether the last `optimizer.step()` committed the line's step."""

    @property
    def moved(self) -> bool:
        """Whether the last `optimizer.step()` moved this worker's weights."""
        return self.committed

    @property
    def moves(self) -> int:
        """Counts the steps that moved this worker's weights; schedulers follow it."""
        return self._moves

    @property
    def left_over(self) -> int:
        """Number of committed batches whose gradients wait for more of their accumulation."""
        return 0

    @property
    def local_steps(self) -> int:
        """How many optimizer steps of this worker's own are in the last commit."""
        return 1

    def common_weights(self) -> AbstractContextManager[None]:
        """Within it the models hold the line's weights, the same on all workers."""
        return nullcontext()

    def accumulate(self, every: int) -> AbstractContextManager[None]:
        """Around loop bodies: every `every`-th batch moves the weights.

        Raises:
            RuntimeError: gradients can't be accumulated on this schedule.
        """
        raise RuntimeError(
            "line.accumulate adds up averaged gradients, and this line makes local steps "
            "(--schedule local), which average none: make batch_size larger, and bound the memory "
            "by line.prepare(..., micro_batch_size=n)"
        )

    @property
    def in_body(self) -> bool:
        """Whether the script has a batch that has not gone backward."""
        return self._state is not None and self._state.waiting > 0

    def gather(self, data: bytes) -> Rows | None:
        """What all workers give in this loop body; None: this worker's rows are all there are.

        They are so if it is alone, and in a step that is void.

        Raises:
            RuntimeError: the loop body has not all of this worker's samples, or no model that all
                workers share.
            ValueError: the model is too small to carry so many bytes.
            LineHalted: the line stopped, and this worker raises.
        """
        raise RuntimeError(
            "line.gather in a loop body is for a loss of all workers' samples, and this line makes "
            "local steps (--schedule local), in which each worker has weights of its own: gather "
            "between two steps, or use another schedule"
        )

    @property
    @abstractmethod
    def overflowed(self) -> bool:
        """Whether the commit said that scaled gradients overflowed, so that no weight moves."""

    @abstractmethod
    def has_gradients(self) -> bool:
        """Whether `p.grad` is what optimizers are to step by now; may wait for the commit."""

    @abstractmethod
    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer's step, which `try_commit` allowed, is done."""

    @abstractmethod
    def pause(self) -> None:
        """The script leaves its loop: the models must hold the line's weights."""

    @abstractmethod
    def _before_work(self) -> None:
        """The thread is about to wait for work, and may have to send the line's state meanwhile."""

    def close(self) -> None:
        """Gives the models back without hooks; a second call does nothing."""
        self._averager.close()

    # ------------------------------------------------------------------ the loader

    def begin_epoch(self, epoch: int) -> None:
        """`line.epochs` begins an epoch."""
        self.epoch = epoch

    def batches(self, between_steps: Callable[[], None]) -> Iterator[Any]:
        """This worker's micro-batches of the current epoch, on its device.

        `between_steps` is called whenever a step is over, before the next one is asked for.
        """
        if self._scaling is not None:
            self._scaling.check_body()  # A script may have left one by an exception.
        if not self._begun:
            self._joined.check(self._member.position.installed_from)
            self._begun = True
        self.epoch = epoch = self._member.position.cursor.epoch
        while not (here := self._member.position).stop_reason and here.cursor.epoch == epoch:
            # Before the wait, in which the line may ask this worker for its state.
            self._before_work()
            between_steps()
            self._member.talk.show("IDLE")
            # Compared by identity after the wait: two transfers may be equal.
            before = self._member.position.installed_from
            try:
                assigned = self._member.next_round()
            except RunOver:
                return
            transfer = self._member.position.installed_from
            if transfer is not None and transfer is not before:
                # The donor had asked for this epoch's work, so its state is that of a script that
                # has done what comes at the end of all epochs before. This loop goes on with the
                # new epoch. If it ended here, the script would run the old epoch's end on the new
                # state, and move its schedulers once more.
                if transfer.cursor.epoch != epoch:
                    log.warning(
                        "the line went on to epoch %d without this worker, and the loop body of "
                        "epoch %d has begun: its next batches are of epoch %d. line.epoch is right "
                        "in it, and so is the next body's epoch",
                        transfer.cursor.epoch,
                        epoch,
                        transfer.cursor.epoch,
                    )
                self.epoch = epoch = transfer.cursor.epoch
            if assigned.epoch != epoch:
                return  # A MARK ended the epoch; the next epoch's loop takes this round up.
            yield from self._micro_batches(assigned)

    def leave_epoch(self) -> None:
        """Ends the current epoch, whose batches the script left early.

        Raises:
            RuntimeError: the script left between `line.backward(loss)` and `optimizer.step()`.
            LineHalted, LineLost, RunOver: as when it asks for work.
        """
        # First: a generator that the script resumes afterwards finds its step gone.
        state, self._state = self._state, None
        if state is not None and state.phase is StepPhase.AVERAGED:
            # The other workers may have committed the step: it can't be taken back.
            raise step_was_not_called(state)
        if self._scaling is not None:
            self._scaling.check_body()
        if state is not None and state.phase is StepPhase.ACCUMULATING and state.micro_batches:
            log.warning(
                "epoch %d was left in the middle of step %d: the %d micro-batches of it that went "
                "backward are dropped",
                state.assigned.epoch,
                state.assigned.step,
                state.micro_batches,
            )
        self._accumulated.drop()
        self._forget()
        self._averager.late.clear()
        self._averager.clock.begin()
        # Last: it may raise, and nothing of the step is left by then.
        self._member.leave_epoch()

    def _hand_over(self, state: StepState, batch: Any) -> Any:
        """A micro-batch for the loop body, on the device; the clock runs from now on."""
        moved = move_to(self._device, batch)
        if state.borrowed or state.verifying:
            # A worker's speed is that at which it computes its own share.
            self._averager.clock.borrow()
        else:
            self._averager.clock.take(state.waiting)
        return moved

    def _run_body(self, state: StepState, batch: Any) -> Generator[Any, None, bool]:
        """One loop body with a micro-batch; returns whether its step, and the loop, go on."""
        was = self._written_by_line
        self._moved.begin()
        with self._lone.allowed(state.waiting):
            yield self._hand_over(state, batch)
        if state is not self._state:
            return False  # The script left the epoch, and resumed this generator afterwards.
        settled = self.committed or was != self._written_by_line
        self._moved.check(state.phase, committed=settled)
        if state.phase is StepPhase.VOID:
            return False  # The next assignment has the positions that are left.
        check_loop_body(state, self._scaling)
        return True

    @property
    def _written_by_line(self) -> tuple[int, int]:
        """Changes when a state may have come that replaced the weights."""
        here = self._member.position
        return id(here.installed_from), here.doubts

    def _loaded(self, state: StepState, began: float) -> None:
        """The loop has waited for a batch since `began`."""
        now = time.perf_counter()
        state.data_s += now - began
        if (timeline := self._member.timeline) is not None:
            timeline.span("data", began, now)

    def _ends_epoch(self, assigned: Assigned) -> bool:
        """Ends the epoch, for everybody, if its stream ended before the step's batch.

        Without this the step would be committed, though nobody has a sample of it.
        """
        end = self._feeder.end_of(assigned.epoch)
        if end is None or end > assigned.batch.start:
            return False
        # If the run is over, the loop ends by itself.
        with suppress(RunOver):
            self.leave_epoch()
        return True

    def _note_end(self, state: StepState) -> None:
        """If the stream ended in this step, positions of its share have no sample."""
        assigned = state.assigned
        end = self._feeder.end_of(assigned.epoch)
        if end is not None and end <= assigned.batch.stop:
            state.end_of_data = True
            state.samples = self._feeder.samples_of(assigned.epoch, assigned.positions)

    # ------------------------------------------------------------------ backward

    def backward(
        self,
        loss: torch.Tensor,
        weight: float | None,
        *,
        correct: int | torch.Tensor | None = None,
        graph: Graph = FREED,
    ) -> None:
        """Goes backward from a micro-batch's mean loss; the last one leaves the mean in `p.grad`.

        Args:
            loss: a scalar; scaled by the prepared GradScaler, or as it is.
            weight: what it is the mean over; None: the samples.
            correct: number of samples that the model got right; None: not counted.
            graph: what becomes of autograd's graph.

        Raises:
            RuntimeError: there is no batch to go backward from.
            ValueError: the weight is negative or not finite, more samples are right than there
                are, the loss is no scalar, or a part of it is scaled.
            LineHalted: the line stopped, and this worker raises.
        """
        state = self._state
        if state is None or not state.waiting:
            raise no_batch("line.backward(loss)", begun=self._begun)
        given = self._weight(state, loss, weight)
        if self._scaling is None:
            self._loss_check.look_for_scale(loss)
            reported = loss
        else:
            loss, reported = self._scaling.loss_scale.take(loss)
        reader = self._averager.losses.reader
        state.count(None if correct is None else reader.begin(torch.as_tensor(correct)))
        # Only now, after all checks of the arguments: a call that was refused may be repeated.
        self._go_backward(state, (loss, reported), given, graph)

    def refuse_rows(self, value: float) -> None:
        """Halts the line, before a gather, for a row of this worker's that is not finite.

        Everybody's loss would be, and nobody could say whose row it was.
        """
        state = self._state
        assert state is not None
        if not state.borrowed:
            self._refuse_loss(state, value)

    def _refuse_loss(self, state: StepState, loss: float) -> None:
        """Halts the line for a loss that is not finite; the step is void."""
        state.phase = StepPhase.VOID
        self._forget()
        self._drop()
        self._averager.refuse_loss(loss)

    def _drop(self) -> None:
        """Drops the gradients of a void attempt; what the script does to weights now is undone."""
        self._accumulated.drop()
        self._moved.hold()

    def _weight(self, state: StepState, loss: torch.Tensor, weight: float | None) -> float:
        """The weight of a micro-batch's loss; 0 for borrowed samples."""
        if loss.numel() != 1:
            raise ValueError(f"the loss must be a scalar, not of shape {tuple(loss.shape)}")
        given = float(state.waiting if weight is None else weight)
        if not (math.isfinite(given) and given >= 0):
            raise ValueError(f"weight must be finite and at least 0, not {given}")
        if state.gathered and given != state.waiting:
            raise ValueError(
                f"line.backward was given the weight {given:g}, and line.gather in this loop body "
                f"has weighed this worker by its {state.waiting} samples: leave weight out"
            )
        if state.borrowed:
            return 0.0
        if state.gathered:  # The loss is of all workers' samples.
            if state.assigned.world_size > 1:
                self._coupled.look_at_gathered(loss)
            return given
        if state.assigned.world_size > 1:
            self._coupled.look(loss, state.waiting)
        if weight is None:
            self._loss_check.look(loss, state.waiting)
        return given

    # ------------------------------------------------------------------ the optimizer

    @property
    def midway(self) -> bool:
        """Whether a step was begun that is neither committed nor void."""
        return self._state is not None and self._state.is_under_way

    @property
    def identity(self) -> StepIdentity:
        """The step that the script computes now."""
        world_size = self._state.assigned.world_size if self._state is not None else 0
        return StepIdentity(self._commits, self._member.position.doubts, world_size)

    @property
    def learning_rate_scale(self) -> float:
        """What the line multiplies learning rates with in this step."""
        return 1.0 if self._state is None else self._state.assigned.learning_rate_scale

    def _refuse_early_step(self) -> None:
        """Raises RuntimeError if the gradients are not what an optimizer's step needs."""
        if self._in_backward:
            raise RuntimeError(
                "optimizer.step() was called inside backward, where gradients are this worker's "
                "alone: call it once line.backward(loss) has returned"
            )
        if not self._begun and self._accumulated.there:
            raise no_batch("optimizer.step()", begun=False)
        self._averager.late.refuse(
            "add up the losses and go backward once, line.backward(loss + other), before "
            "optimizer.step()"
        )
