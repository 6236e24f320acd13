"""Averaging alone: what a line of one worker would make of its gradients."""

from __future__ import annotations

import time

import numpy as np
import torch

from andon.protocol.halts import HaltEvidence, HaltReason, describe_value
from andon_trainer.core.reports import Timings
from andon_trainer.errors import LineHalted
from andon_trainer.gradients.averaging import Averaged
from andon_trainer.gradients.compute_clock import make_clock
from andon_trainer.gradients.guards import LateGradients
from andon_trainer.gradients.model_layout import ModelPlan
from andon_trainer.member import SoloMember

__all__ = ["SoloAverager"]


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

    def begin(self, *, kept: bool) -> None:
        """Does nothing: no step is tried again."""

    def put_away(self) -> None:
        """Does nothing."""

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

    def close(self) -> None:
        """Removes the hooks from the parameters; a second call does nothing."""
        self.late.close()

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
