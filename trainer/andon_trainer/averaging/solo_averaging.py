"""Averaging alone: what a line of one worker would make of its gradients.

The value gate is as on a line: no loss and no gradient moves a weight unless it is finite. A script
that runs alone pays for that with one wait a step, whatever the number of parameters: one vector of
norms travels to the host behind backward, and the losses of the step with it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import nn

from andon.protocol.halts import HaltEvidence, HaltReason, describe_value
from andon_trainer.averaging.averaging import Averaged
from andon_trainer.averaging.broadcast import NormBuffers
from andon_trainer.averaging.compute_clock import ComputeClock, HostStopwatch
from andon_trainer.averaging.copied_buffers import script_buffers
from andon_trainer.averaging.held_buffers import Held
from andon_trainer.averaging.loss_scale import LossScale
from andon_trainer.averaging.readings import LossReadings, Reader, make_reader
from andon_trainer.averaging.step_gather import Given
from andon_trainer.core.reports import Timings
from andon_trainer.errors import LineHalted
from andon_trainer.model.guards import LateGradients
from andon_trainer.model.layout import ModelPlan
from andon_trainer.place.member import RunMember

__all__ = ["SoloAverager"]


class SoloAverager:
    """One worker's mean is its own gradient; values are checked as on a line."""

    def __init__(
        self,
        member: RunMember,
        plan: ModelPlan,
        device: torch.device,
        reader: Reader | None = None,
        loss_scale: LossScale | None = None,
        modules: Sequence[nn.Module] = (),
    ) -> None:
        """Puts hooks on the parameters.

        Args:
            member: this worker.
            plan: the blocks.
            device: the models'.
            reader: brings numbers to the host; None: what suits the device.
            loss_scale: the scale that gradients have; None: none.
            modules: those whose buffers a step that halted leaves as they were.
        """
        self._member = member
        self._plan = plan
        self.late = LateGradients(plan, watch=True)
        # The host's time on a GPU, too: nobody deals samples by it, and events would be waited for.
        self.clock = ComputeClock(HostStopwatch(), member.timeline)
        self.losses = LossReadings(reader or make_reader(device))
        self._loss_scale = loss_scale
        self._held = [Held(NormBuffers(modules)), Held(script_buffers(modules))]
        self.overflowed = False
        self.intact = False
        """Never: no step of a line of one is void."""

    def begin(self, *, kept: bool) -> None:
        """A step begins."""
        self.losses.clear()
        for each in self._held:
            each.begin()

    def put_away(self) -> None:
        """Sets the buffers back, if the step halted or was left."""
        for each in self._held:
            each.put_away()

    def refuse_loss(self, value: float) -> None:
        """Raises LineHalted."""
        self._halt(
            HaltReason.NON_FINITE_LOSS,
            message=f"worker 0 has a loss of {describe_value(value)}",
            value=describe_value(value),
        )

    def gather(self, given: Given) -> list[Given] | None:
        """Is never called: one worker has all samples."""
        raise AssertionError("a worker that is alone gathers nothing")

    def run(self, loss: torch.Tensor, weight: float, scale: float | None) -> Averaged | None:
        """Runs backward, scales and checks; no line limits anything."""
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
        self.clock.done()
        blocks = range(len(self._plan.parameters))
        self.overflowed = False
        self.settle(blocks, weight, scale)
        # After the check: from here on a gradient that is added is too late, as on a line.
        self.late.averaged(blocks)
        return Averaged(weight, 1, Timings(), computed_at=time.perf_counter())

    def resend(self, loss: torch.Tensor, weight: float) -> Averaged | None:
        """Is never called: no step is tried again."""
        raise AssertionError("a line of one tries no step again")

    def recall(self, weight: float) -> None:
        """Is never called: no step is tried again."""
        raise AssertionError("a line of one tries no step again")

    def committed(self, *, overflow: bool = False) -> None:
        """The buffers are as the step left them: this worker's are rank 0's."""
        for each in self._held:
            each.close()

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

    def _look(self, there: list[_Gradient]) -> None:
        """Halts at the first loss of this step, or gradient, that is not finite."""
        looks = [(alike, self.losses.reader.begin(_signs(alike))) for alike in _groups(there)]
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


_Gradient = tuple[int, int, torch.Tensor]
"""A parameter's block, its index there, and its gradient."""


def _groups(gradients: Iterable[_Gradient]) -> list[list[_Gradient]]:
    """The gradients by device and dtype: torch looks at all of a group in one go."""
    groups: dict[tuple[torch.device, torch.dtype], list[_Gradient]] = {}
    for each in gradients:
        groups.setdefault((each[2].device, each[2].dtype), []).append(each)
    return list(groups.values())


def _signs(alike: list[_Gradient]) -> torch.Tensor:
    """A number for each gradient, which is finite only if all elements are: shape (gradients,)."""
    dense = [each._values() if each.is_sparse else each for _, _, each in alike]
    if dense[0].device.type == "cpu":
        return torch.stack([each.sum() for each in dense])  # Quicker than a norm there.
    return torch.stack(torch._foreach_norm(dense))
