"""Accumulation: the gradients of a step's earlier micro-batches, out of the script's reach.

Between two micro-batches `p.grad` is None: a script that clips, logs or zeroes gradients in each
loop body would otherwise change a sum that is not complete.

Late gradients: what a backward adds once the mean over all workers is in `p.grad`.

It would be this worker's alone: the weights would move apart from the others', without a word.
Hooks on the parameters note it; whoever is about to let the weights move asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from andon_trainer.gradients.model_layout import ModelPlan

__all__ = ["Accumulation", "LateGradients"]


class Accumulation:
    """Takes gradients out of `p.grad` and puts them back, without a copy."""

    def __init__(self, plan: ModelPlan) -> None:
        """Holds nothing."""
        self._parameters = [part for parameters in plan.parameters for part in parameters]
        self._names = [name for names in plan.names for name in names]
        self._held: list[torch.Tensor | None] | None = None

    def hold(self) -> None:
        """Takes every gradient; `p.grad` is None after it."""
        self._held = [parameter.grad for parameter in self._parameters]
        self._forget()

    def give_back(self) -> None:
        """Puts what is held into `p.grad`, where the next backward adds to it.

        Raises:
            RuntimeError: a backward of the script's own left a gradient there meanwhile.
        """
        if self._held is not None:
            for place, (parameter, gradient) in enumerate(
                zip(self._parameters, self._held, strict=True)
            ):
                if parameter.grad is not None:
                    raise RuntimeError(
                        f"{self._names[place]} got a gradient between two micro-batches of one "
                        "step, which would be lost: add up the losses and go backward once, "
                        "line.backward(loss + other)"
                    )
                parameter.grad = gradient
            self._held = None

    def nothing(self) -> torch.Tensor:
        """A scalar whose backward adds zeros to the gradients that there are, and nothing else."""
        there = [parameter for parameter in self._parameters if parameter.grad is not None]
        return torch.stack([(parameter * 0).sum() for parameter in there]).sum()

    def drop(self) -> None:
        """Forgets what is held and what lies in `p.grad`."""
        self._held = None
        self._forget()

    def _forget(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class LateGradients:
    """Which gradients came after their block's mean. Hooks on any of autograd's threads call it."""

    def __init__(self, plan: ModelPlan, *, watch: bool) -> None:
        """Nothing is averaged yet; with `watch` hooks are put on the parameters."""
        self._plan = plan
        self._averaged: set[int] = set()
        self._late: dict[tuple[int, int], None] = {}
        self._guard: RemovableHandle | None = None
        for block, parameters in enumerate(plan.parameters if watch else ()):
            for index, parameter in enumerate(parameters):
                put = parameter.register_post_accumulate_grad_hook
                put(self._hook(block, index))  # type: ignore[no-untyped-call]  # torch's own

    def averaged(self, blocks: range) -> None:
        """The mean of `blocks` is in `p.grad`: what is added from now on is late."""
        self._averaged.update(blocks)
        for block, index in list(self._late):
            if block in blocks:
                del self._late[block, index]

    def came(self, block: int, index: int) -> None:
        """A backward that the line does not average added to a parameter's gradient."""
        if block in self._averaged:
            self._late[block, index] = None

    def guard_steps(self, remedy: str) -> None:
        """From now on any optimizer that holds a late gradient's parameter raises at its step."""

        def look(optimizer: Optimizer, _arguments: Any, _named: Any) -> None:
            if self._late:
                groups = optimizer.param_groups
                self.refuse(remedy, {id(part) for group in groups for part in group["params"]})

        self._guard = register_optimizer_step_pre_hook(look)

    def close(self) -> None:
        """Lets optimizers be; a second call does nothing."""
        if self._guard is not None:
            self._guard.remove()
            self._guard = None

    def forget(self) -> None:
        """The step is over: its gradients move nothing any more."""
        self._averaged.clear()
        self._late.clear()

    def refuse(self, remedy: str, among: set[int] | None = None) -> None:
        """Raises RuntimeError if there is a late gradient, with its name and what to write.

        Args:
            remedy: what to write.
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
        return lambda _parameter: self.came(block, index)
