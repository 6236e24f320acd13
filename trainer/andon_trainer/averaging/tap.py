"""The gradient tap: blocks of gradients as backward produces them, and averages back into place.

Theory of operation. A post-accumulate hook on each parameter tells that its gradient is there. Once
all gradients of a block are, the block is staged (see `staging`). Staged blocks are delivered in
the layout's order, each after all before it. A block that is complete early waits in its staging
buffer; a parameter that backward never reaches holds up its block and those after it, until
`finish`.

Activation checkpointing with `use_reentrant=True` runs a backward of its own inside the backward,
for each segment. A parameter of several segments (a tied one, a layer that is called again) then
gets its gradient in several parts, and nothing tells which is the last. Such segments are found in
the graph of the first loss. If there are any, every block waits for `finish`.

Autograd calls hooks on the thread that called backward for a CPU, but on a thread of its own for
each CUDA device. So a lock guards the tap, and `deliver` runs under it: calls come in order and one
at a time, though not always on the same thread. An exception from `deliver` ends the armed backward
and is raised from `loss.backward()`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from andon_trainer.averaging.missing import MissingGradients
from andon_trainer.averaging.staging import Factor, Staging, make_staging
from andon_trainer.model.guards import LateGradients
from andon_trainer.model.layout import ModelPlan

__all__ = ["Deliver", "GradientTap", "dense_gradient", "put_average"]

log = logging.getLogger(__name__)

Deliver = Callable[[int, torch.Tensor], None]
"""Takes a block's index and its gradients: contiguous float32 in host memory."""


@dataclass(slots=True)
class _ArmedBackward:
    """One backward whose gradients are delivered."""

    deliver: Deliver
    scale: Factor | None
    missing: list[set[int]]
    """For each block, the components whose gradients are not there yet."""
    staged: set[int]
    at_end: bool
    """Whether no block is complete before backward is over."""
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
        *,
        in_order: bool = False,
    ) -> None:
        """Puts hooks on the parameters.

        Args:
            plan: the blocks; the parameters stay the same objects while the tap lives.
            device: the model's.
            staging: how blocks reach the host; None: what suits the device.
            late: is told of gradients that are added while the tap is not armed.
            in_order: whether blocks are staged in their order, and each once. Else a block is
                staged when it is complete, and again if it grows.
        """
        self._plan = plan
        self._staging = staging or make_staging(plan, device)
        self._missing = MissingGradients(plan)
        self._late = late
        self._in_order = in_order
        self._lock = threading.Lock()
        self._armed: _ArmedBackward | None = None
        self._reentrant: bool | None = None
        """Whether backward runs others inside it; None before the first."""
        self._hooks: list[RemovableHandle] = []
        for block, parameters in enumerate(plan.parameters):
            for index, parameter in enumerate(parameters):
                register = parameter.register_post_accumulate_grad_hook
                self._hooks.append(register(self._hook(block, index)))  # type: ignore[no-untyped-call]  # torch's own

    def arm(self, deliver: Deliver, scale: Factor | None, loss: torch.Tensor | None = None) -> None:
        """Makes the next backward deliver its gradients.

        Args:
            deliver: called once for each block, in rising order, inside backward, with the block's
                gradients: a contiguous float32 vector in host memory, MISSING for parameters
                without a gradient. The vector belongs to the tap and is valid until the next `arm`.
            scale: factor for the gradients, in float32; None leaves them unchanged.
            loss: what the backward begins with.
        """
        if self._reentrant is None and loss is not None:
            self._reentrant = _runs_backward_inside(loss)
        with self._lock:
            if self._armed is not None:
                raise RuntimeError("the tap is armed already: finish or disarm it first")
            missing = [set(range(len(block))) for block in self._plan.parameters]
            self._armed = _ArmedBackward(
                deliver, scale, missing, staged=set(), at_end=bool(self._reentrant)
            )

    def finish(self) -> None:
        """Delivers what is left after backward has returned, and disarms.

        Gradients that an earlier backward left in `p.grad` are delivered too, even if this backward
        added nothing to them.
        """
        with self._lock:
            armed = self._require_armed()
            try:
                for block in range(armed.delivered, len(self._plan.parameters)):
                    if block not in armed.staged:
                        self._stage(armed, block)
                self._deliver(armed, wait=True)
            finally:
                # Also if a delivery raised: no later hook may deliver behind it.
                self._armed = None

    def deliver_again(self, deliver: Deliver) -> None:
        """Delivers the buffers of the last finished backward once more; `p.grad` is not read."""
        for block in range(len(self._plan.parameters)):
            # Without the lock: the tap is not armed, so no hook writes to the buffers.
            deliver(block, self._staging.collect(block))

    def rescale(self, factor: float) -> None:
        """Multiplies the buffers of the last finished backward, in place; `p.grad` stays as it is.

        Args:
            factor: a float32 number above 0.
        """
        for block, parameters in enumerate(self._plan.parameters):
            flat = self._staging.collect(block)
            flat.mul_(factor)
            # Products may be too small for float32, and all of them -0.0.
            self._missing.mark_present(block, flat, parameters)

    def recall(self, weight: float, loss_scale: torch.Tensor | None = None) -> None:
        """Puts what the last finished backward delivered into `p.grad`, times `weight`.

        Args:
            weight: turns a mean into a sum; the product is computed in float32. A parameter of
                another dtype gets it rounded to that dtype.
            loss_scale: the scale that gradients have in `p.grad`, and not where they lie.
        """
        factor = float(np.float32(weight))
        for block in range(len(self._plan.parameters)):
            for target in self._put(block, self._staging.collect(block)):
                target.mul_(factor)
                if loss_scale is not None:
                    target.mul_(loss_scale.to(target.device))

    def disarm(self) -> None:
        """Ends the armed backward; nothing more is delivered."""
        with self._lock:
            self._armed = None

    def write_back(
        self, block: int, flat: torch.Tensor, loss_scale: torch.Tensor | None = None
    ) -> None:
        """Puts a block's average into `p.grad`, cast to each parameter's dtype.

        An existing dense gradient keeps its storage; a sparse one becomes dense. A parameter that
        no worker has a gradient for gets None.

        Args:
            block: its index in the layout.
            flat: float32 in host memory, shape (elements of the block,).
            loss_scale: multiplies the average; None: it stays as it is.

        Raises:
            ValueError: the vector's size is not the block's.
        """
        elements = self._plan.layout.blocks[block].elements
        if flat.shape != (elements,):
            raise ValueError(
                f"block {block} has {elements} elements, its average is of shape "
                f"{tuple(flat.shape)}"
            )
        for target in self._put(block, flat):
            if loss_scale is not None:
                target.mul_(loss_scale.to(target.device))

    def clear(self) -> None:
        """Sets every gradient to None."""
        for parameters in self._plan.parameters:
            for parameter in parameters:
                parameter.grad = None

    def close(self) -> None:
        """Removes the hooks, and lets go of lent memory; a second call does nothing."""
        self.disarm()
        self._staging.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _hook(self, block: int, index: int) -> Callable[[torch.Tensor], None]:
        def added(_parameter: torch.Tensor) -> None:
            # CUDA devices call this on threads of their own.
            with self._lock:
                if self._armed is None:
                    if self._late is not None:
                        self._late.added(block, index)
                    return
                try:
                    self._added(self._armed, block, index)
                except BaseException:
                    # Later hooks of this backward must not deliver on top of a failed delivery.
                    self._armed = None
                    raise

        return added

    def _added(self, armed: _ArmedBackward, block: int, index: int) -> None:
        if block < armed.delivered or (self._in_order and block in armed.staged):
            # Checkpointing that the first loss's graph did not show.
            name = self._plan.layout.blocks[block].components[index].name
            raise RuntimeError(
                f"{name} got a second gradient in one backward, after the first had been sent: "
                "call checkpoint with use_reentrant=False"
            )
        # Noted also if `finish` stages the block: the side stream must wait for this thread's
        # stream.
        self._staging.note(block)
        if armed.at_end:
            return
        # `discard`: a gradient may grow again before its block is delivered.
        armed.missing[block].discard(index)
        if self._in_order:
            while (block := len(armed.staged)) < len(armed.missing) and not armed.missing[block]:
                self._stage(armed, block)
        elif not armed.missing[block]:
            # A second time if a gradient grew after the block was staged, and before its delivery.
            self._stage(armed, block)
        self._deliver(armed, wait=False)

    def _stage(self, armed: _ArmedBackward, block: int) -> None:
        gradients = [parameter.grad for parameter in self._plan.parameters[block]]
        self._staging.begin(block, gradients, armed.scale)
        armed.staged.add(block)

    def _deliver(self, armed: _ArmedBackward, *, wait: bool) -> None:
        """Delivers blocks in order, up to the first that is not staged or not copied yet."""
        while armed.delivered in armed.staged:
            block = armed.delivered
            # Inside backward nothing waits: the next hook, or `finish`, delivers the block.
            if not (wait or self._staging.ready(block)):
                return
            flat = self._staging.collect(block)
            # Before it leaves: a real gradient that is -0.0 throughout would be taken for a missing
            # one (rule 16).
            self._missing.mark_present(block, flat, self._plan.parameters[block])
            # Counted before the call: whatever `deliver` raises, no block is delivered twice.
            armed.delivered += 1
            armed.deliver(block, flat)

    def _put(self, block: int, flat: torch.Tensor) -> list[torch.Tensor]:
        parameters = self._plan.parameters[block]
        return put_average(self._staging, block, parameters, flat, self._missing)

    def _require_armed(self) -> _ArmedBackward:
        if self._armed is None:
            raise RuntimeError("the tap is not armed, or this backward failed")
        return self._armed


def _runs_backward_inside(loss: torch.Tensor) -> bool:
    """Whether the graph of a loss has a segment of reentrant checkpointing."""
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        # Torch's class, and those of the libraries that were modelled on it.
        if node.name() == "CheckpointFunctionBackward":
            log.info(
                "activation checkpointing with use_reentrant=True: gradients are sent at the end "
                "of backward. With use_reentrant=False they are sent while it runs"
            )
            return True
        seen.add(node)
        waiting += [each for each, _ in node.next_functions]
    return False


def put_average(
    staging: Staging,
    block: int,
    parameters: Sequence[nn.Parameter],
    flat: torch.Tensor,
    missing: MissingGradients,
) -> list[torch.Tensor]:
    """Puts a block's average into `p.grad`; None where no worker has a gradient.

    Returns:
        The gradients that it was put into.
    """
    absent = missing.find(block, flat)
    for index in absent:
        parameters[index].grad = None
    targets: list[torch.Tensor | None] = [
        None if index in absent else dense_gradient(parameter)
        for index, parameter in enumerate(parameters)
    ]
    staging.put(block, targets, flat)
    return [target for target in targets if target is not None]


def dense_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """The parameter's gradient; a new one if it has none that a dense average fits into."""
    gradient = parameter.grad
    if gradient is None or gradient.is_sparse or gradient.dtype != parameter.dtype:
        gradient = parameter.grad = torch.empty_like(parameter, requires_grad=False)
    return gradient.detach()
