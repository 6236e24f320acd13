"""The gate alone: no loss and no gradient moves a weight unless it is finite, as on a line.

A script that runs alone pays for that with one wait a step, whatever the number of parameters: one
vector of norms travels to the host behind backward, and the losses of the step with it.
"""

from __future__ import annotations

import math
import time

import numpy as np
import torch

from andon.protocol.halts import HaltEvidence, HaltReason, describe_value
from andon_trainer.averaging.averager import TrainedModels
from andon_trainer.averaging.finite import PlacedGradient, groups_of, signs_of
from andon_trainer.averaging.readings import LossReadings, Reader, make_reader
from andon_trainer.errors import LineHalted
from andon_trainer.model.guards import LateGradients
from andon_trainer.place.member import RunMember

__all__ = ["SoloGate"]


class SoloGate:
    """Makes one worker's gradients what a line of one would, and halts as that would."""

    def __init__(
        self, member: RunMember, models: TrainedModels, reader: Reader | None = None
    ) -> None:
        """Puts hooks on the parameters.

        Args:
            member: this worker.
            models: whose gradients they are.
            reader: brings numbers to the host; None: what suits the device.
        """
        self._member = member
        self._plan, self._blocks = models.plan, models.blocks
        self._loss_scale = models.loss_scale
        self.late = LateGradients(models.plan, watch=True)
        self.losses = LossReadings(reader or make_reader(models.device))
        self.overflowed = False

    def refuse_loss(self, value: float) -> None:
        """Raises LineHalted."""
        self._halt(
            HaltReason.NON_FINITE_LOSS,
            message=f"worker 0 has a loss of {describe_value(value)}",
            value=describe_value(value),
        )

    def close(self) -> None:
        """Removes the hooks from the parameters; a second call does nothing."""
        self.late.close()

    def settle(self, blocks: range, weight: float, scale: float | None = None) -> None:
        """Makes the gradients of `blocks` what a line of one worker would: scaled, and checked.

        Raises:
            LineHalted: a gradient is not finite.
        """
        there = []
        for block in blocks:
            for index, parameter in enumerate(self._plan.parameters[block]):
                if parameter.grad is None:
                    continue
                if weight == 0.0:
                    # A line would have nothing to divide by; its reducer returns zeros.
                    parameter.grad = torch.zeros_like(parameter)
                    continue
                if parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()  # As an average is.
                if scale is not None:
                    parameter.grad.mul_(float(np.float32(scale)))
                there.append((block, index, parameter.grad))
        self._look(there)

    def _look(self, there: list[PlacedGradient]) -> None:
        """Halts at the first loss of this step, or gradient, that is not finite."""
        looks = [(alike, self.losses.reader.begin(signs_of(alike))) for alike in groups_of(there)]
        # The last that was queued is waited for first: everything before it is then there, too.
        norms = [each.numbers() for _, each in reversed(looks)][::-1]
        loss = self.losses.first_not_finite()
        if loss is not None:
            self.refuse_loss(loss)
        # A norm is finite only if every element is: one cheap look for the usual case.
        suspects = [
            gradient
            for (alike, _), those in zip(looks, norms, strict=True)
            for gradient, norm in zip(alike, those, strict=True)
            if not math.isfinite(norm)
        ]
        for block, index, gradient in sorted(suspects, key=lambda each: each[:2]):
            self._check_elements(block, index, gradient)

    def _check_elements(self, block: int, index: int, gradient: torch.Tensor) -> None:
        """Halts at the first element that is not finite."""
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        wrong = torch.nonzero(~torch.isfinite(gradient))
        if not len(wrong):
            return  # The norm overflowed; no element did.
        if self.overflowed or (self._loss_scale is not None and self._loss_scale.tolerates()):
            self.overflowed = True  # The scaler finds it, and skips the step.
            return
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
                step=self._member.position.step + 1,
                worker=0,
                block=block,
                parameter=parameter,
                element=element,
                value=value,
                message=message,
                at_unix_s=time.time(),
            )
        )
