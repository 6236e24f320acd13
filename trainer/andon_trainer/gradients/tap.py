"""The gradient tap: blocks of gradients as backward produces them, and averages back in place.

Theory of operation. A post-accumulate hook on each parameter tells that its gradient is there. When
all of a block's are, the block is staged (see `staging`); staged blocks are delivered in the
layout's order, each after all before it. A block that is complete early waits in its staging
buffer; a parameter that backward never reaches holds its block, and those after it, until `finish`.

Autograd calls hooks on the thread that called backward for a CPU, but on a thread of its own for
each CUDA device. A lock therefore guards the tap, and `deliver` runs under it: calls are in order
and never at once, though not always on the same thread. What `deliver` raises ends the round and
surfaces from backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from andon_trainer.gradients.guards import LateGradients
from andon_trainer.gradients.missing import Absence
from andon_trainer.gradients.model_layout import ModelPlan
from andon_trainer.gradients.staging import Staging, make_staging

__all__ = ["Deliver", "GradientTap", "put_average"]

Deliver = Callable[[int, torch.Tensor], None]
"""Takes a block's index and its gradients: contiguous float32 in host memory."""


@dataclass(slots=True)
class _Round:
    """One armed backward."""

    deliver: Deliver
    scale: float | None
    missing: list[set[int]]
    """For each block, the components whose gradients are not there yet."""
    staged: set[int]
    delivered: int = 0
    """Blocks below this index were delivered."""


class GradientTap:
    """Delivers gradients block by block during an armed backward."""

    def __init__(
        self,
        plan: ModelPlan,
        device: torch.device,
        staging: Staging | None = None,
        late: LateGradients | None = None,
    ) -> None:
        """Puts hooks on the parameters.

        Args:
            plan: the blocks; the parameters stay the same objects while the tap lives.
            device: where the model is.
            staging: how blocks reach the host; None: what suits the device.
            late: is told of gradients that come while the tap is not armed.
        """
        self._plan = plan
        self._staging = staging or make_staging(plan, device)
        self._absence = Absence(plan)
        self._late = late
        self._lock = threading.Lock()
        self._round: _Round | None = None
        self._hooks: list[RemovableHandle] = []
        for block, parameters in enumerate(plan.parameters):
            for index, parameter in enumerate(parameters):
                put = parameter.register_post_accumulate_grad_hook
                self._hooks.append(put(self._hook(block, index)))  # type: ignore[no-untyped-call]  # torch's own

    def arm(self, deliver: Deliver, scale: float | None) -> None:
        """Makes the next backward deliver its gradients.

        Args:
            deliver: called once a block, in rising order, with the block's gradients: a contiguous
                float32 vector in host memory, ABSENT for parameters without a gradient. It belongs
                to the tap, and is valid until the next `arm`. It runs inside backward.
            scale: what gradients are multiplied with, in float32; None leaves them untouched.
        """
        with self._lock:
            if self._round is not None:
                raise RuntimeError("the tap is armed already: finish or disarm it first")
            missing = [set(range(len(block))) for block in self._plan.parameters]
            self._round = _Round(deliver, scale, missing, staged=set())

    def finish(self) -> None:
        """Delivers what is left once backward has returned, and disarms.

        Gradients that an earlier backward left in `p.grad` count, though this one added nothing.
        """
        with self._lock:
            present = self._armed()
            try:
                for block in range(present.delivered, len(self._plan.parameters)):
                    if block not in present.staged:
                        self._stage(present, block)
                self._deliver(present, wait=True)
            finally:
                self._round = None

    def deliver_again(self, deliver: Deliver) -> None:
        """Delivers what the last finished round did: the same buffers, whatever `p.grad` is."""
        for block in range(len(self._plan.parameters)):
            deliver(block, self._staging.collect(block))

    def recall(self, weight: float) -> None:
        """Puts what the last finished round delivered back into `p.grad`, times `weight`.

        Args:
            weight: what a mean is multiplied with to be a sum, in float32; a parameter of another
                type gets the sum rounded to that type.
        """
        factor = float(np.float32(weight))
        for block in range(len(self._plan.parameters)):
            for target in self._put(block, self._staging.collect(block)):
                target.mul_(factor)

    def disarm(self) -> None:
        """Drops the round; nothing is delivered any more."""
        with self._lock:
            self._round = None

    def write_back(self, block: int, flat: torch.Tensor) -> None:
        """Puts a block's average into `p.grad`, cast to each parameter's type.

        A gradient that is there keeps its storage. A sparse one becomes dense. A parameter that
        no worker has a gradient of has none afterwards.

        Args:
            block: its index in the layout.
            flat: float32 in host memory, shape (elements of the block,).

        Raises:
            ValueError: the vector has another size than the block.
        """
        elements = self._plan.layout.blocks[block].elements
        if flat.shape != (elements,):
            raise ValueError(
                f"block {block} has {elements} elements, its average is of shape "
                f"{tuple(flat.shape)}"
            )
        self._put(block, flat)

    def clear(self) -> None:
        """Sets every gradient to None."""
        for parameters in self._plan.parameters:
            for parameter in parameters:
                parameter.grad = None

    def close(self) -> None:
        """Takes the hooks off; a second call does nothing."""
        self.disarm()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _hook(self, block: int, index: int) -> Callable[[torch.Tensor], None]:
        def arrived(_parameter: torch.Tensor) -> None:
            with self._lock:
                if self._round is None:
                    if self._late is not None:
                        self._late.came(block, index)
                    return
                try:
                    self._arrived(self._round, block, index)
                except BaseException:
                    self._round = None
                    raise

        return arrived

    def _arrived(self, present: _Round, block: int, index: int) -> None:
        if block < present.delivered:
            name = self._plan.layout.blocks[block].components[index].name
            raise RuntimeError(
                f"{name} got a second gradient in one backward, after the first had been sent: "
                "call checkpoint with use_reentrant=False"
            )
        self._staging.note(block)
        present.missing[block].discard(index)
        if not present.missing[block]:
            # Once more if a gradient grew after the block was staged.
            self._stage(present, block)
        self._deliver(present, wait=False)

    def _stage(self, present: _Round, block: int) -> None:
        gradients = [parameter.grad for parameter in self._plan.parameters[block]]
        self._staging.begin(block, gradients, present.scale)
        present.staged.add(block)

    def _deliver(self, present: _Round, *, wait: bool) -> None:
        """Delivers blocks in order, up to the first that is not staged, or not copied yet."""
        while present.delivered in present.staged:
            block = present.delivered
            if not (wait or self._staging.ready(block)):
                return
            flat = self._staging.collect(block)
            self._absence.tell_apart(block, flat, self._plan.parameters[block])
            present.delivered += 1
            present.deliver(block, flat)

    def _put(self, block: int, flat: torch.Tensor) -> list[torch.Tensor]:
        parameters = self._plan.parameters[block]
        return put_average(self._staging, block, parameters, flat, self._absence)

    def _armed(self) -> _Round:
        if self._round is None:
            raise RuntimeError("the tap is not armed, or this backward failed")
        return self._round


def put_average(
    staging: Staging,
    block: int,
    parameters: Sequence[nn.Parameter],
    flat: torch.Tensor,
    absence: Absence,
) -> list[torch.Tensor]:
    """Puts a block's average into `p.grad`; None where no worker has a gradient.

    Returns:
        The gradients that it was put into.
    """
    missing = absence.of(block, flat)
    for index in missing:
        parameters[index].grad = None
    targets: list[torch.Tensor | None] = [
        None if index in missing else _dense_gradient(parameter)
        for index, parameter in enumerate(parameters)
    ]
    staging.put(block, targets, flat)
    return [target for target in targets if target is not None]


def _dense_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """The parameter's gradient, made if it has none that a dense average fits into."""
    gradient = parameter.grad
    if gradient is None or gradient.is_sparse or gradient.dtype != parameter.dtype:
        gradient = parameter.grad = torch.empty_like(parameter, requires_grad=False)
    return gradient.detach()
