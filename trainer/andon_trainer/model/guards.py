"""Guards of `p.grad`: sums that are not complete stay out of it, and additions to a mean are found.

Between two micro-batches `p.grad` is None (`AccumulatedGradients`): a script that clips, logs or
zeroes gradients in each loop body would otherwise change a sum that is not complete. Once the mean
over all workers is in `p.grad`, another backward would add this worker's own gradient to it, and
its weights would silently move apart from the others' (`LateGradients`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from andon_trainer.model.layout import ModelPlan

__all__ = ["AccumulatedGradients", "LateGradients"]


class AccumulatedGradients:
    """The gradients of a step's earlier micro-batches: taken out of `p.grad`, and put back."""

    def __init__(self, plan: ModelPlan) -> None:
        """Holds nothing."""
        self._parameters = [part for parameters in plan.parameters for part in parameters]
        self._names = [name for names in plan.names for name in names]
        self._held: list[torch.Tensor | None] | None = None

    @property
    def there(self) -> bool:
        """Whether a parameter has a gradient."""
        return any(parameter.grad is not None for parameter in self._parameters)

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters with their names, in the order of the layout."""
        return zip(self._names, self._parameters, strict=True)

    def hold(self) -> None:
        """Takes every gradient out of `p.grad`, without a copy; `p.grad` is None afterwards."""
        self._held = [parameter.grad for parameter in self._parameters]
        self._clear()

    def put_back(self, factor: float = 1.0) -> None:
        """Puts what is held into `p.grad`, times `factor`, where the next backward adds to it.

        Raises:
            RuntimeError: a backward of the script's own left a gradient there meanwhile.
        """
        if self._held is not None:
            for index, (parameter, gradient) in enumerate(
                zip(self._parameters, self._held, strict=True)
            ):
                if parameter.grad is not None:
                    raise self._lost(self._names[index])
                parameter.grad = gradient
                if gradient is not None and factor != 1.0:
                    with torch.no_grad():
                        gradient.mul_(factor)
            self._held = None

    def refuse_other(self, *, first: bool) -> None:
        """Raises RuntimeError if a gradient would be added to what backward makes next.

        `first`: that is the first backward of a step, and `zero_grad` may have left zeros.
        """
        for name, parameter in self.named():
            gradient = parameter.grad
            if gradient is None:
                continue
            if not first:
                raise self._lost(name)
            if gradient.is_sparse or bool(gradient.count_nonzero()):
                raise RuntimeError(
                    f"{name} has a gradient before the step's first line.backward: with same_bits "
                    "nothing may be added to a grain's gradient. Call optimizer.zero_grad() first"
                )
            parameter.grad = None

    def _lost(self, name: str) -> RuntimeError:
        return RuntimeError(
            f"{name} got a gradient between two micro-batches of one step, which would be lost: "
            "add up the losses and go backward once, line.backward(loss + other)"
        )

    def detach(self) -> None:
        """Takes the graph off the gradients that a backward with `create_graph` left."""
        for parameter in self._parameters:
            if parameter.grad is not None and parameter.grad.requires_grad:
                parameter.grad = parameter.grad.detach()

    def zero_loss(self) -> torch.Tensor:
        """A scalar whose backward adds zeros to the existing gradients, and runs their hooks."""
        there = [parameter for parameter in self._parameters if parameter.grad is not None]
        # A model may be on several devices.
        return torch.stack([(part * 0).sum().to(there[0].device) for part in there]).sum()

    def drop(self) -> None:
        """Forgets what is held, and clears `p.grad`."""
        self._held = None
        self._clear()

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class LateGradients:
    """Notes gradients that were added to `p.grad` after the mean was put there.

    Hooks on the parameters call it, from any of autograd's threads; the thread that trains asks
    before it lets weights move. A hook only adds a key to a dict, which is atomic.
    """

    def __init__(self, plan: ModelPlan, *, watch: bool) -> None:
        """Nothing is averaged yet.

        Args:
            plan: the blocks.
            watch: whether to put hooks on the parameters; if not, `added` is called by another's.
        """
        self._plan = plan
        self._averaged: set[int] = set()
        self._late: dict[tuple[int, int], None] = {}
        self._guard: RemovableHandle | None = None
        self._hooks: list[RemovableHandle] = []
        for block, parameters in enumerate(plan.parameters if watch else ()):
            for index, parameter in enumerate(parameters):
                register = parameter.register_post_accumulate_grad_hook
                self._hooks.append(register(self._hook(block, index)))  # type: ignore[no-untyped-call]  # torch's own

    def averaged(self, blocks: range) -> None:
        """The mean of `blocks` is in `p.grad`: what is added from now on is late."""
        self._averaged.update(blocks)
        # What was late has been averaged with it now.
        for block, index in list(self._late):
            if block in blocks:
                del self._late[block, index]

    def added(self, block: int, index: int) -> None:
        """A backward outside the line added to a parameter's gradient."""
        if block in self._averaged:
            self._late[block, index] = None

    def guard_steps(self, remedy: str) -> None:
        """From now on an optimizer's step raises if one of its parameters has a late gradient."""

        def look(optimizer: Optimizer, _arguments: Any, _named: Any) -> None:
            if self._late:
                groups = optimizer.param_groups
                self.refuse(remedy, {id(part) for group in groups for part in group["params"]})

        self._guard = register_optimizer_step_pre_hook(look)

    def close(self) -> None:
        """Removes all hooks; a second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._guard is not None:
            self._guard.remove()
            self._guard = None

    def clear(self) -> None:
        """Begins a new step, in which no block is averaged yet."""
        self._averaged.clear()
        self._late.clear()

    def refuse(self, remedy: str, among: set[int] | None = None) -> None:
        """Raises RuntimeError if there is a late gradient, with its name and the remedy.

        Args:
            remedy: what to write instead.
            among: ids of the parameters that are about to move; None: all.
        """
        for block, index in self._late:
            if among is None or id(self._plan.parameters[block][index]) in among:
                raise RuntimeError(
                    f"{self._plan.names[block][index]} got a gradient after the mean over all "
                    "workers was in its .grad. It is this worker's alone, and the workers' "
                    f"weights would move apart: {remedy}"
                )

    def _hook(self, block: int, index: int) -> Callable[[torch.Tensor], None]:
        # One call for each gradient of each step: `averaged` and `clear` keep these objects.
        averaged, late = self._averaged, self._late

        def added(_parameter: torch.Tensor) -> None:
            if block in averaged:
                late[block, index] = None

        return added
