"""Averaging: from a loss to gradients that are the mean over all workers.

This is where a gradient enters the line, and where the mean comes back.
"""

from __future__ import annotations

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
from andon_trainer.gradients.guards import LateGradients
from andon_trainer.gradients.model_layout import ModelPlan
from andon_trainer.gradients.norms import l2_norm
from andon_trainer.gradients.staging import make_staging
from andon_trainer.gradients.tap import GradientTap
from andon_trainer.member import SoloMember
from andon_trainer.membership import Membership

__all__ = ["Averaged", "Averager", "LineAverager", "SoloAverager"]


@dataclass(frozen=True, slots=True)
class Averaged:
    """`p.grad` is the mean: what its weights came to, over how many workers, in what time."""

    total_weight: float
    world_size: int
    timings: Timings
    gradient_norm: float | None = None
    """Of all averages together, if the line asks for it."""


class Averager(Protocol):
    """Runs a step's last backward and puts the mean over all workers into `p.grad`."""

    late: LateGradients
    """What comes after it."""

    @property
    def intact(self) -> bool:
        """Whether this worker's own gradient of the last run is there, whole and finite."""

    def refuse_loss(self, value: float) -> None:
        """Stops the line: this worker's loss is not finite."""

    def run(self, loss: torch.Tensor, weight: float, scale: float | None) -> Averaged | None:
        """Runs backward; None if the round is void: `p.grad` is no mean then.

        Args:
            loss: a scalar to go backward from.
            weight: this worker's weight in the mean; 0: it abstains.
            scale: what its accumulated gradients are multiplied with; None: nothing.

        Raises:
            LineHalted: the line stopped, and this worker raises.
        """

    def resend(self, loss: torch.Tensor, weight: float) -> Averaged | None:
        """Gives the intact gradient to another round; `loss` is for the script's graph alone.

        Raises:
            LineHalted: the line stopped, and this worker raises.
        """

    def recall(self, weight: float) -> None:
        """Puts the intact gradient, times its weight, into `p.grad`, for more to be added."""

    def committed(self) -> None:
        """The step whose mean is in `p.grad` is committed."""


class LineAverager:
    """Over the reducer, block by block while backward runs."""

    def __init__(
        self,
        member: Membership,
        plan: ModelPlan,
        device: torch.device,
        statistics: RunningStatistics,
    ) -> None:
        """Puts hooks on the parameters; `statistics` follow the gradients, if there are any."""
        self._member = member
        self._plan = plan
        self._statistics = statistics
        staging = make_staging(plan, device, lambda block: lent_by(member.exchange, block))
        self.late = LateGradients(plan, watch=False)
        self._tap = GradientTap(plan, device, staging, self.late)
        self._whole = False
        """Whether the buffers hold all of this worker's last gradient."""

    @property
    def intact(self) -> bool:
        """See `Averager`: a bad value may have been found long after it was sent."""
        return self._whole and not self._member.exchange.refused

    def refuse_loss(self, value: float) -> None:
        """Reports the loss and waits for the halt that follows."""
        self._member.report_loss(describe_value(value))
        self._member.await_averages()

    def run(self, loss: torch.Tensor, weight: float, scale: float | None) -> Averaged | None:
        """Sends each block as soon as backward has made it; returns with the mean in place."""
        self._whole = False
        return self._average(weight, lambda: self._compute(loss, weight, scale))

    def resend(self, loss: torch.Tensor, weight: float) -> Averaged | None:
        """Sends the buffers as they are, block by block; then runs a backward for nothing."""
        assert self.intact
        return self._average(weight, lambda: self._send_again(loss))

    def recall(self, weight: float) -> None:
        """Multiplies on the device; the next backward's hooks send the sum."""
        assert self.intact
        self._tap.recall(weight)

    def committed(self) -> None:
        """Takes over rank 0's running statistics, which came with the mean."""
        self._statistics.take_over()

    def _average(self, weight: float, send: Callable[[], None]) -> Averaged | None:
        began = time.perf_counter()
        self._statistics.drop()
        assigned = self._member.assigned
        follows = bool(self._statistics) and assigned is not None and assigned.world_size > 1
        if not self._member.begin(weight):
            return None
        exchange = self._member.exchange
        self._member.show("COMPUTING")
        send()
        computed = time.perf_counter()
        self._member.show("EXCHANGING")
        complete = self._member.await_averages(last=not follows)
        if complete is None:
            return None
        done = time.perf_counter()
        for block, average in enumerate(exchange.averages):
            self._tap.write_back(block, torch.from_numpy(average))
        self.late.averaged(range(len(self._plan.parameters)))
        self._member.show("COMMITTING")
        first = exchange.first_sent or computed
        timings = Timings(
            compute_s=computed - began, exchange_s=done - first, wait_s=done - computed
        )
        norm = l2_norm(exchange.averages) if self._member.wants_gradient_norm else None
        if follows and not self._share_statistics():
            return None
        return Averaged(complete.total_weight, complete.world_size, timings, norm)

    def _share_statistics(self) -> bool:
        """Brings rank 0's running statistics to all; False if the round is void."""
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

    def _compute(self, loss: torch.Tensor, weight: float, scale: float | None) -> None:
        if weight == 0.0:
            self._member.exchange.abstain()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
            return
        self._tap.arm(self._submit, scale)
        try:
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
            self._tap.finish()
        except BaseException:
            self._tap.disarm()
            self._member.abandon("backward raised")
            raise
        self._whole = True

    def _send_again(self, loss: torch.Tensor) -> None:
        self._tap.deliver_again(self._submit)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature

    def _submit(self, block: int, flat: torch.Tensor) -> None:
        self._member.exchange.submit(block, flat.numpy())


class SoloAverager:
    """One worker's mean is its own gradient; the value gate is the line's."""

    def __init__(self, member: SoloMember, plan: ModelPlan) -> None:
        """Puts hooks on the parameters."""
        self._member = member
        self._plan = plan
        self.late = LateGradients(plan, watch=True)
        self.intact = False
        """Never: nothing voids a step here."""

    def refuse_loss(self, value: float) -> None:
        """Raises: there is nobody to answer."""
        self._halt(
            HaltReason.NON_FINITE_LOSS,
            message=f"worker 0 has a loss of {describe_value(value)}",
            value=describe_value(value),
        )

    def run(self, loss: torch.Tensor, weight: float, scale: float | None) -> Averaged | None:
        """Runs backward, scales and checks."""
        began = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
        blocks = range(len(self._plan.parameters))
        self.settle(blocks, weight, scale)
        self.late.averaged(blocks)
        timings = Timings(compute_s=time.perf_counter() - began)
        return Averaged(weight, 1, timings)

    def resend(self, loss: torch.Tensor, weight: float) -> Averaged | None:
        """There is never anything to send again."""
        raise AssertionError("a line of one tries no step again")

    def recall(self, weight: float) -> None:
        """There is never anything to recall."""
        raise AssertionError("a line of one tries no step again")

    def committed(self) -> None:
        """One worker's statistics are everybody's."""

    def settle(self, blocks: range, weight: float, scale: float | None = None) -> None:
        """Makes the gradients of `blocks` what a line of one worker would: scaled, and checked."""
        for block in blocks:
            for index, parameter in enumerate(self._plan.parameters[block]):
                if parameter.grad is None:
                    continue
                if weight == 0.0:
                    parameter.grad = torch.zeros_like(parameter)
                elif scale is not None:
                    parameter.grad.mul_(float(np.float32(scale)))
                if not torch.isfinite(parameter.grad.sum()):
                    self._look(block, index, parameter.grad)

    def _look(self, block: int, index: int, gradient: torch.Tensor) -> None:
        wrong = torch.nonzero(~torch.isfinite(gradient))
        if not len(wrong):
            return  # the sum overflowed, no element did
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
