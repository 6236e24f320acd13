"""Sums inside a host: a block of gradients is added up as soon as backward has made it.

Theory of operation. Each process stages a block of its own gradients, already times its share of
the host's weight. The sum over the host's processes is then the host's mean, and lies where the
leader sends it from. Blocks are summed in the layout's order, since all processes must call in the
same order, and none waits inside backward: a model may wait for the others there (SyncBatchNorm).

A process may have no part in a step's gradient: it computed borrowed samples, or its weight is 0.
Then it marks each parameter as one without a gradient, which is not a zero (`averaging.missing`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from andon_trainer.averaging.staging import (
    CudaStaging,
    Factor,
    HostStaging,
    Lend,
    Staging,
    lend_nothing,
)
from andon_trainer.hosts.group import HostGroup, Pending
from andon_trainer.model.layout import ModelPlan

__all__ = ["HostSums"]


class HostSums:
    """A staging whose vectors are the sums over the processes of a host."""

    def __init__(
        self, group: HostGroup, plan: ModelPlan, device: torch.device, lend: Lend = lend_nothing
    ) -> None:
        """Adds nothing up yet; `lend` returns the memory that the leader's exchange lends."""
        self._plan = plan
        self._group = group
        places = {parameter.device for block in plan.parameters for parameter in block}
        self._staging: Staging
        self._sums: list[Pending | None] = [None] * len(plan.parameters)
        """For each block the sum that was begun, until somebody has waited for it."""
        self._on_device = device.type == "cuda" and len(places) == 1
        if self._on_device:
            self._staging = CudaStaging(plan, device, lend, self._add_up)
        else:
            self._staging = HostStaging(plan, lend)
        self.takes_part = True
        """Whether this process has a part in the present step's gradient."""
        self.note = self._staging.note
        self.put = self._staging.put

    def begin(
        self, block: int, gradients: Sequence[torch.Tensor | None], scale: Factor | None
    ) -> None:
        """Begins to copy a block's gradients, times `scale`, and to add them up."""
        if not self.takes_part:
            gradients = [None] * len(gradients)
            # `mark_present` must not find the gradient of a borrowed sample.
            for parameter in self._plan.parameters[block]:
                parameter.grad = None
        self._staging.begin(block, gradients, scale)
        if not self._on_device:
            flat = self._staging.collect(block)
            mark_real(flat, self._plan.parameters[block], gradients)
            self._sums[block] = self._group.start_sum(flat)

    def ready(self, block: int) -> bool:
        """Whether the sum is there."""
        pending = self._sums[block]
        return self._staging.ready(block) if pending is None else pending.is_completed()

    def collect(self, block: int) -> torch.Tensor:
        """The host's vector; waits for it."""
        pending, self._sums[block] = self._sums[block], None
        if pending is not None:
            pending.wait()
        return self._staging.collect(block)

    def close(self) -> None:
        """Lets go of lent memory."""
        self._staging.close()

    def _add_up(
        self, block: int, flat: torch.Tensor, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Adds up on the GPUs, on the side stream, before the sum is copied to the host."""
        mark_real(flat, self._plan.parameters[block], gradients)
        # The side stream waits, and no thread: see `Pending`.
        self._group.start_sum(flat).wait()


def mark_real(
    flat: torch.Tensor,
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[torch.Tensor | None],
) -> None:
    """Makes the first element of each gradient that is there +0.0 if it is -0.0.

    Only a missing gradient may be -0.0 in all elements: then a sum is so only if all are missing.
    """
    start = 0
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            flat[start : start + 1] += 0.0
        start += parameter.numel()
