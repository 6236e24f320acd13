"""Averaging in a prepared script: from a loss to gradients that are the mean over all workers.

This is where a gradient enters the line, block by block while backward runs, and where the mean
comes back into `p.grad`. `LineAverager` exchanges; `SoloAverager` computes what a line of one
worker would.

The line may limit the norm of what each worker sends. The norm is known only after backward, so no
block leaves before: the limit costs the time by which exchange and backward overlap, and up to two
passes over the staging buffers. A gradient is limited where it lies. One that is kept is therefore
sent again as it was, and put back into `p.grad` without the factor, so that no gradient is ever
limited twice. If the line only wants to know the norm, blocks leave during backward as ever.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from andon.protocol.halts import HaltEvidence, HaltReason, describe_value
from andon_trainer.core.reports import Timings
from andon_trainer.errors import LineHalted
from andon_trainer.exchange.path import lent_by
from andon_trainer.gradients.broadcast import RunningStatistics
from andon_trainer.gradients.compute_clock import ComputeClock, make_clock
from andon_trainer.gradients.guards import LateGradients
from andon_trainer.gradients.model_layout import ModelPlan
from andon_trainer.gradients.norms import l2_norm, limiting_factor, sum_of_squares
from andon_trainer.gradients.staging import make_staging
from andon_trainer.gradients.tap import GradientTap
from andon_trainer.member import SoloMember
from andon_trainer.membership import Membership

__all__ = ["Averaged", "Averager", "LineAverager", "SoloAverager"]


@dataclass(frozen=True, slots=True)
class Averaged:
    """The result of one averaging; `p.grad` is the mean."""

    total_weight: float
    """Sum of all workers' weights."""
    world_size: int
    timings: Timings
    """Of this averaging: `exchange_s` and `wait_s`."""
    gradient_norm: float | None = None
    """L2 norm of all averages together; None if the line does not ask for it."""
    own_gradient_norm: float | None = None
    """That of this worker's contribution, before it was limited; None if it made none."""
    computed_at: float = 0.0
    """When the last backward was over, by `time.perf_counter`."""


class Averager(Protocol):
    """Runs a step's last backward and puts the mean over all workers into `p.grad`."""

    late: LateGradients
    """Gradients that were added to the mean."""
    clock: ComputeClock
    """Times forward and backward of each attempt."""

    @property
    def intact(self) -> bool:
        """Whether the buffers hold this worker's gradient of the last run, whole and finite."""

    def refuse_loss(self, value: float) -> None:
        """Halts the line: this worker's loss is not finite."""

    def run(
        self,
        loss: torch.Tensor,
        weight: float,
        scale: float | None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Averaged | None:
        """Runs backward and averages; None if the round is void (`p.grad` is no mean then).

        Args:
            loss: a scalar to go backward from.
            weight: this worker's weight in the mean; with 0 it contributes nothing.
            scale: factor for its accumulated gradients; None: they are a mean already.
            scaler: has scaled the loss; norms are those of the gradients without that.

        Raises:
            LineHalted: the line stopped, and this worker raises.
        """

    def resend(self, loss: torch.Tensor, weight: float) -> Averaged | None:
        """Sends the intact gradient to another round; None if that is void too.

        Args:
            loss: a scalar to go backward from; its gradients are not used.
            weight: as in `run`.

        Raises:
            LineHalted: the line stopped, and this worker raises.
        """

    def recall(self, weight: float) -> None:
        """Puts the intact gradient, times its weight, into `p.grad`, for more to be added."""

    def committed(self) -> None:
        """The step whose mean is in `p.grad` is committed."""


class LineAverager:
    """Averages over the line, block by block while backward runs."""

    def __init__(
        self,
        member: Membership,
        plan: ModelPlan,
        device: torch.device,
        statistics: RunningStatistics,
    ) -> None:
        """Puts hooks on the parameters; rank 0's `statistics` follow each step's gradients."""
        self._member = member
        self._plan = plan
        self._statistics = statistics
        staging = make_staging(
            plan, device, lambda block: lent_by(member.exchange, block), member.timeline
        )
        self.late = LateGradients(plan, watch=False)
        self.clock = make_clock(device, member.timeline)
        self._tap = GradientTap(plan, device, staging, self.late)
        self._whole = False
        """Whether the buffers hold all of this worker's last gradient."""
        self._squares: float | None = None
        """Sum of the squares of the blocks delivered so far; None: nobody wants to know."""
        self._own_norm: float | None = None
        """The norm of the gradient in the buffers, before it was limited."""
        self._limited_by = 1.0
        """The factor that is in the buffers."""

    @property
    def intact(self) -> bool:
        """See `Averager`: a bad value may be found long after it was sent."""
        return self._whole and not self._member.exchange.refused

    def refuse_loss(self, value: float) -> None:
        """Reports the loss, and waits for the halt that follows."""
        self._member.report_loss(describe_value(value))
        self._member.await_averages()

    def run(
        self,
        loss: torch.Tensor,
        weight: float,
        scale: float | None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Averaged | None:
        """Sends each block as soon as backward has made it, or all at its end if there is a limit.

        Returns with the mean in place.
        """
        self._whole = False
        self._own_norm = None
        return self._average(weight, lambda: self._compute(loss, weight, scale, scaler))

    def resend(self, loss: torch.Tensor, weight: float) -> Averaged | None:
        """Sends the buffers as they are, block by block; then runs a backward for nothing."""
        assert self.intact
        return self._average(weight, lambda: self._send_again(loss))

    def recall(self, weight: float) -> None:
        """Multiplies on the device; the next backward's hooks send the sum."""
        assert self.intact
        # The sum's mean is limited as a whole.
        self._tap.recall(weight / self._limited_by)

    def committed(self) -> None:
        """Loads rank 0's running statistics, which came with the mean."""
        self._statistics.load_arrived()

    def _average(self, weight: float, send: Callable[[], None]) -> Averaged | None:
        self._statistics.drop()
        assigned = self._member.assigned
        follows = bool(self._statistics) and assigned is not None and assigned.world_size > 1
        self.clock.pause()  # Opening a round may wait for the network.
        if not self._member.begin(weight):
            return None
        # After `begin`, which may replace the exchange when reducers changed.
        exchange = self._member.exchange
        self._member.show("COMPUTING")
        self.clock.resume()
        send()
        computed = time.perf_counter()
        self._member.show("EXCHANGING")
        complete = self._member.await_averages(last=not follows)
        if complete is None:
            return None
        done = time.perf_counter()
        # Before the statistics are exchanged, which may reuse the memory of the averages.
        for block, average in enumerate(exchange.averages):
            self._tap.write_back(block, torch.from_numpy(average))
        self.late.averaged(range(len(self._plan.parameters)))
        self._member.show("COMMITTING")
        first = exchange.first_sent or computed
        timings = Timings(exchange_s=done - first, wait_s=done - computed)
        norm = l2_norm(exchange.averages) if self._member.wants_gradient_norm else None
        if follows and not self._share_statistics():
            return None
        return Averaged(
            complete.total_weight,
            complete.world_size,
            timings,
            gradient_norm=norm,
            own_gradient_norm=self._own_norm,
            computed_at=computed,
        )

    def _share_statistics(self) -> bool:
        """Brings rank 0's running statistics to all workers; False if the round is void."""
        assigned = self._member.assigned
        assert assigned is not None
        source = assigned.rank == 0
        if not self._member.begin(float(source), self._statistics.call(source=source)):
            return False
        if source:
            self._member.exchange.submit_data()
        else:
            self._member.exchange.abstain()
        return self._member.await_averages() is not None

    def _compute(
        self,
        loss: torch.Tensor,
        weight: float,
        scale: float | None,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        if weight == 0.0:
            # Told before backward, so that the others need not wait for it. The script still gets
            # its backward: hooks and graph are as in any other step.
            self._member.exchange.abstain()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
            self.clock.done()
            return
        policy = self._member.policy
        limit = policy.max_grad_norm
        self._limited_by = 1.0
        self._squares = 0.0 if limit is not None or policy.own_gradient_norm else None
        self._tap.arm(self._measure_and_send if limit is None else self._measure, scale)
        try:
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
            self.clock.done()  # Before `finish`, which waits for copies and blocks to leave.
            self._tap.finish()
            if self._squares is not None:
                # Read only now: the scale may be on a GPU, and reading it waits.
                unscaled = 1.0 if scaler is None else scaler.get_scale()
                self._own_norm = math.sqrt(self._squares) / unscaled
            if limit is not None:
                self._send_limited(limit)
        except BaseException:
            # Some blocks may have been sent already: no other worker may average them.
            self._tap.disarm()
            self._member.abandon("backward raised")
            raise
        self._whole = True

    def _send_limited(self, limit: float) -> None:
        assert self._own_norm is not None
        factor = limiting_factor(self._own_norm, limit)
        if factor is not None:
            self._tap.rescale(factor)
            self._limited_by = factor
        self._tap.deliver_again(self._send)

    def _send_again(self, loss: torch.Tensor) -> None:
        self._tap.deliver_again(self._send)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
        self.clock.done()

    # While backward runs, these are called on autograd's threads: one at a time, in order.

    def _send(self, block: int, flat: torch.Tensor) -> None:
        self._member.exchange.submit(block, flat.numpy())

    def _measure(self, _block: int, flat: torch.Tensor) -> None:
        if self._squares is not None:
            self._squares += sum_of_squares(flat.numpy())

    def _measure_and_send(self, block: int, flat: torch.Tensor) -> None:
        self._measure(block, flat)
        self._send(block, flat)


class SoloAverager:
    """One worker's mean is its own gradient; values are checked as on a line."""

    def __init__(self, member: SoloMember, plan: ModelPlan, device: torch.device) -> None:
        """Puts hooks on the parameters."""
        self._member = member
        self._plan = plan
        self.late = LateGradients(plan, watch=True)
        self.clock = make_clock(device, member.timeline)
        self.intact = False
        """Never: no step of a line of one is void."""

    def refuse_loss(self, value: float) -> None:
        """Raises LineHalted."""
        self._halt(
            HaltReason.NON_FINITE_LOSS,
            message=f"worker 0 has a loss of {describe_value(value)}",
            value=describe_value(value),
        )

    def run(
        self,
        loss: torch.Tensor,
        weight: float,
        scale: float | None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Averaged | None:
        """Runs backward, scales and checks; no line limits anything."""
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
        self.clock.done()
        blocks = range(len(self._plan.parameters))
        self.settle(blocks, weight, scale)
        self.late.averaged(blocks)
        return Averaged(weight, 1, Timings(), computed_at=time.perf_counter())

    def resend(self, loss: torch.Tensor, weight: float) -> Averaged | None:
        """Is never called: no step is tried again."""
        raise AssertionError("a line of one tries no step again")

    def recall(self, weight: float) -> None:
        """Is never called: no step is tried again."""
        raise AssertionError("a line of one tries no step again")

    def committed(self) -> None:
        """Does nothing: this worker's running statistics are rank 0's."""

    def settle(self, blocks: range, weight: float, scale: float | None = None) -> None:
        """Makes the gradients of `blocks` what a line of one worker would: scaled, and checked.

        Raises:
            LineHalted: a gradient is not finite.
        """
        for block in blocks:
            for index, parameter in enumerate(self._plan.parameters[block]):
                if parameter.grad is None:
                    continue
                if weight == 0.0:
                    # A line would have nothing to divide by; its reducer returns zeros.
                    parameter.grad = torch.zeros_like(parameter)
                elif scale is not None:
                    parameter.grad.mul_(float(np.float32(scale)))
                # The sum is finite only if every element is: one cheap look for the usual case.
                if not torch.isfinite(parameter.grad.sum()):
                    self._check_elements(block, index, parameter.grad)

    def _check_elements(self, block: int, index: int, gradient: torch.Tensor) -> None:
        """Halts at the first element that is not finite."""
        wrong = torch.nonzero(~torch.isfinite(gradient))
        if not len(wrong):
            return  # The sum overflowed; no element did.
        element = tuple(int(place) for place in wrong[0])
        component = self._plan.layout.blocks[block].components[index]
        value = describe_value(float(gradient[element]))
        place = f"{component.name}[{', '.join(map(str, element))}] (block {block})"
        self._halt(
            HaltReason.NON_FINITE_GRADIENT,
            message=f"worker 0 sent {value} in {place}",
            value=value,
            block=block,
            parameter=component.name,
            element=element,
        )

    def _halt(
        self,
        reason: HaltReason,
        *,
        message: str,
        value: str,
        block: int | None = None,
        parameter: str = "",
        element: tuple[int, ...] = (),
    ) -> None:
        raise LineHalted(
            HaltEvidence(
                id=1,
                reason=reason,
                step=self._member.step + 1,
                worker=0,
                block=block,
                parameter=parameter,
                element=element,
                value=value,
                message=message,
                at_unix_s=time.time(),
            )
        )
