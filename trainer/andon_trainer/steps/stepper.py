"""Stepping: a step's life on this worker, from its assignment to its commit.

Theory of operation. The loader's loop, `backward` and `optimizer.step()` are three doors of one
room: the loop opens a step (`batches`), backward fills it and leaves the mean in `p.grad`, and
`optimizer.step()` asks whether it is committed (`try_commit`). If the step is void, the gradient
that was sent is kept (see `keeping`), and under the next assignment the loop computes only the
positions that are new to this worker. If none are, the loop body runs all the same, on borrowed
samples, and what was kept is sent again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from andon.protocol.records import Cursor
from andon.protocol.shards import cursor_after, next_batch, shard_of, subtract
from andon_trainer.core.events import Assigned, Committed
from andon_trainer.core.keeping import Kept
from andon_trainer.core.reports import StepReport, Timings
from andon_trainer.data.feed import Feed
from andon_trainer.data.feeder import Share, move_to
from andon_trainer.errors import RunOver
from andon_trainer.gradients.averaging import Averager
from andon_trainer.gradients.guards import Accumulation
from andon_trainer.member import Member
from andon_trainer.state.replica import Replica
from andon_trainer.steps.gates import Trial
from andon_trainer.steps.loop_checks import Objective, UnoptimizedParameters
from andon_trainer.steps.step_state import Phase, Present

__all__ = ["Stepper"]

log = logging.getLogger(__name__)


class Stepper:
    """The present step of this worker. Used by one thread."""

    def __init__(
        self,
        member: Member,
        averager: Averager,
        accumulation: Accumulation,
        feed: Feed,
        replica: Replica,
        device: torch.device,
    ) -> None:
        """Stands between steps."""
        self._member = member
        self._averager = averager
        self._accumulation = accumulation
        self._feed = feed
        self._device = device
        self._replica = replica
        self._present: Present | None = None
        self._kept: Kept | None = None
        self._usual = 0
        """Samples of the last share that was dealt first, and not again."""
        self._bystanders = UnoptimizedParameters(replica)
        self._in_backward = False
        self._commits = 0
        self.epoch: int | None = None
        """The epoch of the batches that the script asked for last."""
        self._objective = Objective()
        self.stop_wanted = ""
        self.last_commit: Committed | None = None

    # ------------------------------------------------------------------ the loader's door

    def batches(self, between_steps: Callable[[], None]) -> Iterator[Any]:
        """This worker's micro-batches of the present epoch, on its device.

        `between_steps` is called whenever a step is over and before the next one is asked for.
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
                # Its donor had asked for this epoch's work, so its state is that of a script that
                # has done the ends of all epochs before. This loop goes on with the new epoch: its
                # end, run here for the old one, would move the schedulers once more.
                self.epoch = epoch = transfer.cursor.epoch
            if assigned.epoch != epoch:
                return  # a MARK ended the epoch; the next one takes this up
            yield from self._share(assigned)

    def leave_epoch(self) -> None:
        """Ends the present epoch, whose batches the script left early.

        Raises:
            RuntimeError: the script left between `line.backward(loss)` and `optimizer.step()`.
            LineHalted, LineLost, RunOver: as when it asks for work.
        """
        present, self._present = self._present, None
        if present is not None and present.phase is Phase.AVERAGED:
            raise self._no_step(present)
        if present is not None and present.phase is Phase.ACCUMULATING and present.micro_batches:
            log.warning(
                "epoch %d was left in the midst of step %d: the %d micro-batches of it that went "
                "backward count for nothing",
                present.assigned.epoch,
                present.assigned.step,
                present.micro_batches,
            )
        self._accumulation.drop()
        self._kept = None
        self._averager.late.forget()
        self._member.leave_epoch()

    def _share(self, assigned: Assigned) -> Iterator[Any]:
        self._check_device()
        if self._present is not None and self._present.phase is not Phase.COMMITTED:
            self._accumulation.drop()  # what an attempt that came to nothing left in p.grad
        self._averager.late.forget()
        self._present = present = self._begun(assigned)
        share = self._missing(present)
        samples, present.borrowed = len(share), not len(share)
        if present.kept is not None and samples:
            self._averager.recall(present.kept.weight)
            self._accumulation.hold()
        every = self._member.digest_every
        if every and self._member.step % every == 0:
            present.digest = self._replica.weights()
        began, seen = time.perf_counter(), 0
        if present.borrowed:
            batches = iter([(self._feed.borrow(assigned.epoch, assigned.batch.start), 1)])
        else:
            batches = self._feed.batches(share, lambda: self._foresee(assigned))
        for batch, count in batches:
            present.data_s += time.perf_counter() - began
            seen += count
            present.waiting = count
            present.last = present.borrowed or seen == samples
            before = self._bystanders.versions()
            yield move_to(self._device, batch)
            if present is not self._present:
                return  # The script left the epoch, and took the loop up again.
            self._bystanders.check(before, present)
            if present.phase is Phase.VOID:
                return
            self._check_body(present)
            began = time.perf_counter()

    def _check_device(self) -> None:
        """Refuses a model that was taken elsewhere: its gradients would be, too."""
        for module in self._replica.modules:
            for parameter in module.parameters():
                here = parameter.device
                if (here.type, here.index or 0) != (self._device.type, self._device.index or 0):
                    raise RuntimeError(
                        f"a prepared model is on {here}, and this worker computes on "
                        f"{self._device}: leave model.cuda() and model.to(...) out after "
                        "line.prepare, which moves it, and the batches; Line(device=...) picks "
                        "another device"
                    )
                break  # they move together

    def _begun(self, assigned: Assigned) -> Present:
        """The step that an assignment begins, with what is kept of it."""
        doubts = self._member.doubts
        if self._kept is not None and not self._kept.serves(assigned, doubts):
            self._kept = None
        present = Present(assigned, sum(map(len, assigned.positions)), doubts, self._kept)
        if present.kept is not None:
            present.weight = present.kept.weight
            present.loss_sum = present.kept.loss_sum
            present.correct = present.kept.correct
        return present

    def _missing(self, present: Present) -> Share:
        """What is left to compute; dealt again it may be more than usual, in no larger pieces."""
        assigned, kept = present.assigned, present.kept
        if not assigned.attempt and kept is None:
            self._usual = present.samples
            return Share(assigned.epoch, assigned.positions)
        done = () if kept is None else kept.positions
        most = self._usual or -(-len(assigned.batch) // assigned.world_size)
        return Share(assigned.epoch, subtract(assigned.positions, done), most)

    def _foresee(self, assigned: Assigned) -> Iterator[Share]:
        """The shares of the steps to come, if the roster stays."""
        size = self._feed.epoch_size
        cursor = cursor_after(Cursor(assigned.epoch, assigned.batch.start), assigned.batch, size)
        while True:
            batch = next_batch(cursor, self._feed.batch_size, size)
            part = shard_of(batch, assigned.rank, assigned.world_size)
            yield Share(cursor.epoch, (part,))
            cursor = cursor_after(cursor, batch, size)

    def _check_body(self, present: Present) -> None:
        if present.waiting:
            raise RuntimeError(
                f"step {present.assigned.step}: the loop body ended without line.backward(loss): "
                "every sample must be counted, so call it for each batch (weight=0 counts none)"
            )
        if present.last and present.phase is Phase.AVERAGED:
            raise self._no_step(present)

    @staticmethod
    def _no_step(present: Present) -> RuntimeError:
        return RuntimeError(
            f"step {present.assigned.step}: the gradients are averaged, and the loop body ended "
            "without optimizer.step(): call it each time; line.step counts the commits"
        )

    # ------------------------------------------------------------------ backward's door

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
            correct: how many samples the model got right; None: not counted.
            scaler: scales what goes backward, and not what is reported.

        Raises:
            RuntimeError: there is no batch to go backward from.
            ValueError: the weight is negative or not finite, more samples are right than there
                are, or the loss is no scalar.
            LineHalted: the line stopped, and this worker raises.
        """
        present = self._present
        if present is None or not present.waiting:
            raise RuntimeError(
                "line.backward(loss) is called once for each batch that the prepared loader "
                "yields: there is none now"
            )
        given = self._weighed(present, loss, weight)
        if scaler is None:
            self._objective.look_for_scale(loss)
        self._count(present, correct)
        present.waiting = 0
        self._accumulation.give_back()
        value = float(loss.detach())
        if given and not math.isfinite(value):
            present.phase = Phase.VOID
            self._kept = None
            self._accumulation.drop()
            self._averager.refuse_loss(value)
            return
        if not given and not math.isfinite(value) and not present.borrowed:
            # Of a mean over no target, say. 0 times its gradient would be NaN: none of it is added.
            if not present.last:
                present.micro_batches += 1
                self._accumulation.hold()
                return
            if present.weight:
                loss = self._accumulation.nothing()
        present.weight += given
        present.loss_sum += given * value if given else 0.0
        if scaler is not None:
            loss = scaler.scale(loss)
        alone = present.kept is None or present.borrowed
        whole = present.last and present.micro_batches == 0 and alone
        present.micro_batches += 1
        scalar = loss.reshape(()) if whole else loss.reshape(()) * given
        self._in_backward = True
        try:
            if present.last:
                self._complete(present, scalar, whole=whole)
            else:
                scalar.backward()  # type: ignore[no-untyped-call]  # torch's own signature
                self._accumulation.hold()
        finally:
            self._in_backward = False

    def _weighed(self, present: Present, loss: torch.Tensor, weight: float | None) -> float:
        """The weight of a micro-batch's loss; 0 for borrowed samples."""
        if loss.numel() != 1:
            raise ValueError(f"the loss must be a scalar, not of shape {tuple(loss.shape)}")
        given = float(present.waiting if weight is None else weight)
        if not (math.isfinite(given) and given >= 0):
            raise ValueError(f"weight must be finite and at least 0, not {given}")
        if present.borrowed:
            return 0.0
        if weight is None:
            self._objective.look(loss, present.waiting)
        return given

    @staticmethod
    def _count(present: Present, correct: int | None) -> None:
        """Adds what the model got right of a micro-batch; of a borrowed sample, nothing."""
        if correct is None or present.correct is None:
            present.correct = None
        elif not present.borrowed:
            if not 0 <= correct <= present.waiting:
                raise ValueError(
                    f"correct counts samples, of which this batch has {present.waiting}: not "
                    f"{correct}"
                )
            present.correct += correct

    def _complete(self, present: Present, scalar: torch.Tensor, *, whole: bool) -> None:
        weight = present.weight
        scale = None if whole or not weight else 1.0 / weight
        present.phase = Phase.VOID  # until the averages are here
        self._kept = None  # unless this goes well
        if present.kept is not None and present.borrowed:
            averaged = self._averager.resend(scalar, weight)
        else:
            averaged = self._averager.run(scalar, weight, scale)
        self._keep(present)
        if averaged is None:
            self._accumulation.drop()
            return
        present.averaged = averaged
        present.phase = Phase.AVERAGED
        timings = averaged.timings
        self._member.report(
            StepReport(
                key=present.assigned.key,
                loss_sum=present.loss_sum,
                correct=present.correct,
                weight=weight,
                samples=present.samples,
                timings=Timings(
                    compute_s=timings.compute_s,
                    exchange_s=timings.exchange_s,
                    wait_s=timings.wait_s,
                    data_s=present.data_s,
                ),
                digest=present.digest,
                digest_head=present.assigned.parent,
                stop_reason=self.stop_wanted,
                total_weight=averaged.total_weight,
                world_size=averaged.world_size,
                gradient_norm=averaged.gradient_norm,
            )
        )

    def _keep(self, present: Present) -> None:
        """Keeps this share's gradient until the commit, if it is all there."""
        if self._averager.intact:
            self._kept = Kept(
                parent=present.assigned.parent,
                epoch=present.assigned.epoch,
                positions=present.assigned.positions,
                weight=present.weight,
                loss_sum=present.loss_sum,
                correct=present.correct,
                doubts=present.doubts,
            )

    # ------------------------------------------------------------------ the optimizer's door

    @property
    def midway(self) -> bool:
        """Whether a step was begun that is neither committed nor void."""
        present = self._present
        return present is not None and present.phase in (Phase.ACCUMULATING, Phase.AVERAGED)

    @property
    def committed(self) -> bool:
        """Whether the last `optimizer.step()` was a commit."""
        return self._present is not None and self._present.phase is Phase.COMMITTED

    @property
    def trial(self) -> Trial:
        """What the script computes now; it goes on to the next one with each commit."""
        world_size = self._present.assigned.world_size if self._present is not None else 0
        return Trial(self._commits, self._member.doubts, world_size)

    def try_commit(self) -> bool:
        """Waits for the present step's commit; whether the weights are to move.

        They do not if the step is not complete, or void, or if its total weight is 0.
        """
        present = self._present
        if self._in_backward:
            raise RuntimeError(
                "optimizer.step() was called inside backward, where gradients are this worker's "
                "alone: call it once line.backward(loss) has returned"
            )
        self._averager.late.refuse(
            "add up the losses and go backward once, line.backward(loss + other), before "
            "optimizer.step()"
        )
        if present is not None and present.phase is Phase.AVERAGED:
            present.phase = Phase.VOID  # until the record is here
            commit = self._member.await_commit()
            if commit is None:
                self._accumulation.drop()
                return False
            present.phase = Phase.COMMITTED
            self._commits += 1
            self._kept = None
            self._averager.committed()
            self.last_commit = commit
        return self.committed and present is not None and self._moves(present)

    @staticmethod
    def _moves(present: Present) -> bool:
        return present.averaged is not None and present.averaged.total_weight > 0
