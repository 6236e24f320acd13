"""The stepper: a step's life on this worker, from its assignment to its commit.

Theory of operation. A training loop touches a step at three places. Its loader begins the step
(`batches`), `line.backward` accumulates and leaves the mean in `p.grad` (`backward`), and
`optimizer.step()` asks whether the step is committed (`try_commit`). If the step is void, the
gradient that was sent is kept (see `core.keeping`), and under the next assignment the loop computes
only the positions that are new to this worker. If none are, the loop body runs all the same, on
borrowed samples, and what was kept is sent again.

Between two micro-batches `p.grad` is empty, and a step's phase is set to VOID before anything that
may raise, and to its real phase after it: a script that catches a halt and iterates again then
finds the step over, and its gradients dropped.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from andon.protocol.records import Cursor
from andon.protocol.shards import cursor_after, deal, next_batch, subtract
from andon_trainer.core.events import Assigned, Committed
from andon_trainer.core.keeping import Kept
from andon_trainer.data.feed import Feeder, Share
from andon_trainer.data.loader import move_to
from andon_trainer.errors import RunOver
from andon_trainer.gradients.averaging import Averager
from andon_trainer.gradients.guards import AccumulatedGradients
from andon_trainer.member import RunMember
from andon_trainer.state.replica import Replica
from andon_trainer.steps.gates import StepIdentity
from andon_trainer.steps.loop_checks import (
    LossCheck,
    UnoptimizedParameters,
    check_device,
    check_loop_body,
    step_was_not_called,
)
from andon_trainer.steps.step_state import StepPhase, StepState

__all__ = ["Stepper", "StepperGate"]

log = logging.getLogger(__name__)


class Stepper:
    """The current step of a prepared script. Used by one thread."""

    def __init__(
        self,
        member: RunMember,
        averager: Averager,
        accumulated: AccumulatedGradients,
        feeder: Feeder,
        replica: Replica,
        device: torch.device,
    ) -> None:
        """Stands between steps."""
        self._member = member
        self._averager = averager
        self._accumulated = accumulated
        self._feeder = feeder
        self._device = device
        self._replica = replica
        self._state: StepState | None = None
        """The current step, or the last one between two steps."""
        self._kept: Kept | None = None
        """This worker's gradient of a void step."""
        self._usual = 0
        """Samples of the last share that was assigned at a first attempt."""
        self._unoptimized = UnoptimizedParameters(replica)
        self._loss_check = LossCheck()
        self._in_backward = False
        self._commits = 0
        self.epoch: int | None = None
        """The epoch of the batches that the script iterated last."""
        self.stop_wanted = ""
        """Why the script wants the run to end; empty if it does not."""
        self.last_commit: Committed | None = None

    # ------------------------------------------------------------------ the loader

    def batches(self, between_steps: Callable[[], None]) -> Iterator[Any]:
        """This worker's micro-batches of the current epoch, on its device.

        `between_steps` is called whenever a step is over, before the next one is asked for.
        """
        self.epoch = epoch = self._member.cursor.epoch
        while not self._member.stop_reason and self._member.cursor.epoch == epoch:
            between_steps()
            self._member.show("IDLE")
            before = self._member.installed_from
            try:
                assigned = self._member.next_round()
            except RunOver:
                return
            transfer = self._member.installed_from
            if transfer is not None and transfer is not before:
                # The donor had asked for this epoch's work, so its state is that of a script that
                # has done what comes at the end of all epochs before. This loop goes on with the
                # new epoch. If it ended here, the script would run the old epoch's end on the new
                # state, and move its schedulers once more.
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
        state, self._state = self._state, None
        if state is not None and state.phase is StepPhase.AVERAGED:
            # The other workers may have committed the step: it can't be taken back.
            raise step_was_not_called(state)
        if state is not None and state.phase is StepPhase.ACCUMULATING and state.micro_batches:
            log.warning(
                "epoch %d was left in the middle of step %d: the %d micro-batches of it that went "
                "backward are dropped",
                state.assigned.epoch,
                state.assigned.step,
                state.micro_batches,
            )
        self._accumulated.drop()
        self._kept = None
        self._averager.late.clear()
        self._averager.clock.begin()
        self._member.leave_epoch()

    def _micro_batches(self, assigned: Assigned) -> Iterator[Any]:
        """The loop's batches of one assignment; the loop body runs at each `yield`."""
        check_device(self._replica.modules, self._device)
        if self._state is not None and self._state.phase is not StepPhase.COMMITTED:
            self._accumulated.drop()  # A void attempt left gradients.
        self._averager.late.clear()
        self._averager.clock.begin()
        self._state = state = self._begin(assigned)
        share = self._share_to_compute(state)
        samples, state.borrowed = len(share), not len(share)
        if state.kept is not None and samples:
            # The kept gradient, times its weight, is what the missing positions are added to.
            self._averager.recall(state.kept.weight)
            self._accumulated.hold()
        every = self._member.digest_every
        if every and self._member.step % every == 0:
            state.digest = self._replica.weights()
        began, seen = time.perf_counter(), 0
        if state.borrowed:
            batches = iter([(self._feeder.borrow(assigned.epoch, assigned.batch.start), 1)])
        else:
            batches = self._feeder.batches(share, lambda: self._upcoming(assigned))
        for batch, count in batches:
            state.data_s += time.perf_counter() - began
            seen += count
            state.waiting = count
            state.last = state.borrowed or seen == samples
            before = self._unoptimized.versions()
            yield self._hand_over(state, batch)
            if state is not self._state:
                return  # The script left the epoch, and resumed this generator afterwards.
            self._unoptimized.check(before, state)
            if state.phase is StepPhase.VOID:
                return  # The next assignment has the positions that are left.
            check_loop_body(state)
            began = time.perf_counter()

    def _hand_over(self, state: StepState, batch: Any) -> Any:
        """A micro-batch for the loop body, on the device; the clock runs from now on."""
        moved = move_to(self._device, batch)
        if not state.borrowed:
            self._averager.clock.take(state.waiting)
        return moved

    def _begin(self, assigned: Assigned) -> StepState:
        """The step that an assignment begins, with what is kept of an earlier attempt."""
        doubts = self._member.doubts
        if self._kept is not None and not self._kept.serves(assigned, doubts):
            self._kept = None
        return StepState.begin(assigned, doubts, self._kept)

    def _share_to_compute(self, state: StepState) -> Share:
        """The positions that are left to compute.

        When a lost worker's positions were assigned again this may be more than usual. The
        micro-batches are then no larger than usual: they must fit into the GPU's memory.
        """
        assigned, kept = state.assigned, state.kept
        if not assigned.attempt and kept is None:
            self._usual = state.samples
            return Share(assigned.epoch, assigned.positions)
        done = () if kept is None else kept.positions
        limit = self._usual or -(-len(assigned.batch) // assigned.world_size)
        return Share(assigned.epoch, subtract(assigned.positions, done), limit)

    def _upcoming(self, assigned: Assigned) -> Iterator[Share]:
        """The shares of the steps to come, if roster, window and split stay as they are."""
        size, window = self._feeder.epoch_size, assigned.window or self._feeder.batch_size
        cursor = cursor_after(Cursor(assigned.epoch, assigned.batch.start), assigned.batch, size)
        while True:
            batch = next_batch(cursor, window, size)
            shares = deal(batch, assigned.split, assigned.world_size)
            yield Share(cursor.epoch, shares[assigned.rank])
            cursor = cursor_after(cursor, batch, size)

    # ------------------------------------------------------------------ backward

    def backward(
        self,
        loss: torch.Tensor,
        weight: float | None,
        *,
        correct: int | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Goes backward from a micro-batch's mean loss; the last one leaves the mean in `p.grad`.

        Args:
            loss: a scalar, not scaled.
            weight: what it is the mean over; None: the samples.
            correct: number of samples that the model got right; None: not counted.
            scaler: scales what goes backward, and not what is reported.

        Raises:
            RuntimeError: there is no batch to go backward from.
            ValueError: the weight is negative or not finite, more samples are right than there
                are, or the loss is no scalar.
            LineHalted: the line stopped, and this worker raises.
        """
        state = self._state
        if state is None or not state.waiting:
            raise RuntimeError(
                "line.backward(loss) is called once for each batch that the prepared loader "
                "yields: there is none now"
            )
        given = self._weight(state, loss, weight)
        if scaler is None:
            self._loss_check.look_for_scale(loss)
        state.count(correct)
        # Only now, after all checks of the arguments: a call that was refused may be repeated.
        state.waiting = 0
        self._accumulated.put_back()
        value = float(loss.detach())
        if given and not math.isfinite(value):
            state.phase = StepPhase.VOID
            self._kept = None
            self._accumulated.drop()
            self._averager.refuse_loss(value)
            return
        if not given and not math.isfinite(value) and not state.borrowed:
            # For example the mean over no target. Its weight is 0, but 0 times its gradient would
            # be nan: so it does not go backward at all.
            if not state.last:
                self._averager.clock.done()
                state.micro_batches += 1
                self._accumulated.hold()
                return
            if state.weight:
                loss = self._accumulated.zero_loss()
        state.weight += given
        state.loss_sum += given * value if given else 0.0
        if scaler is not None:
            loss = scaler.scale(loss)
        # The only micro-batch of its step is a mean already. Otherwise the sum of the products is
        # accumulated, and scaled to a mean when it is sent.
        alone = state.kept is None or state.borrowed
        whole = state.last and state.micro_batches == 0 and alone
        state.micro_batches += 1
        scalar = loss.reshape(()) if whole else loss.reshape(()) * given
        self._in_backward = True
        try:
            if state.last:
                self._complete(state, scalar, whole=whole)
            else:
                scalar.backward()  # type: ignore[no-untyped-call]  # torch's own signature
                self._averager.clock.done()
                self._accumulated.hold()
        finally:
            self._in_backward = False

    def _weight(self, state: StepState, loss: torch.Tensor, weight: float | None) -> float:
        """The weight of a micro-batch's loss; 0 for borrowed samples."""
        if loss.numel() != 1:
            raise ValueError(f"the loss must be a scalar, not of shape {tuple(loss.shape)}")
        given = float(state.waiting if weight is None else weight)
        if not (math.isfinite(given) and given >= 0):
            raise ValueError(f"weight must be finite and at least 0, not {given}")
        if state.borrowed:
            return 0.0
        if weight is None:
            self._loss_check.look(loss, state.waiting)
        return given

    def _complete(self, state: StepState, scalar: torch.Tensor, *, whole: bool) -> None:
        """Runs the step's last backward, averages and reports."""
        weight = state.weight
        scale = None if whole or not weight else 1.0 / weight
        # Whatever raises below (the script's own backward, a halt), the step is then over.
        state.phase = StepPhase.VOID
        self._kept = None
        if state.kept is not None and state.borrowed:
            averaged = self._averager.resend(scalar, weight)
        else:
            averaged = self._averager.run(scalar, weight, scale)
        # Before the result is looked at: it is in a void round that a kept gradient is needed.
        if self._averager.intact:
            self._kept = state.keep()
        if averaged is None:
            self._accumulated.drop()
            return
        state.averaged = averaged
        state.phase = StepPhase.AVERAGED
        # All averages are here, so the last backward is over: reading the clock waits for nothing.
        busy = self._averager.clock.read()
        self._member.report(state.report(averaged, busy, self.stop_wanted))

    # ------------------------------------------------------------------ the optimizer

    @property
    def midway(self) -> bool:
        """Whether a step was begun that is neither committed nor void."""
        return self._state is not None and self._state.is_under_way

    @property
    def committed(self) -> bool:
        """Whether the last `optimizer.step()` committed the step."""
        return self._state is not None and self._state.phase is StepPhase.COMMITTED

    @property
    def identity(self) -> StepIdentity:
        """The step that the script computes now."""
        world_size = self._state.assigned.world_size if self._state is not None else 0
        return StepIdentity(self._commits, self._member.doubts, world_size)

    def try_commit(self) -> bool:
        """Waits for the current step's commit; returns whether the weights are to move.

        They do not move if the step is incomplete or void, or if its total weight is 0. With
        several optimizers the first call waits, and the others get the same answer.
        """
        state = self._state
        if self._in_backward:
            raise RuntimeError(
                "optimizer.step() was called inside backward, where gradients are this worker's "
                "alone: call it once line.backward(loss) has returned"
            )
        self._averager.late.refuse(
            "add up the losses and go backward once, line.backward(loss + other), before "
            "optimizer.step()"
        )
        if state is not None and state.phase is StepPhase.AVERAGED:
            state.phase = StepPhase.VOID  # In case the wait raises.
            commit = self._member.await_commit()
            if commit is None:
                self._accumulated.drop()
                return False
            state.phase = StepPhase.COMMITTED
            self._commits += 1
            self._kept = None
            self._averager.committed()
            self.last_commit = commit
        return self.committed and state is not None and state.moves_weights


class StepperGate:
    """What gates ask: the stepper, or the answers of a worker that has not joined yet."""

    def __init__(self) -> None:
        """There is no stepper before the worker has joined."""
        self.stepper: Stepper | None = None

    @property
    def committed(self) -> bool:
        """Whether the last `optimizer.step()` committed the step."""
        return self.stepper is not None and self.stepper.committed

    @property
    def identity(self) -> StepIdentity:
        """The step that the script computes now."""
        return StepIdentity(0, 0, 0) if self.stepper is None else self.stepper.identity

    def try_commit(self) -> bool:
        """Waits for the current step's commit; returns whether the weights are to move."""
        return self.stepper is not None and self.stepper.try_commit()
