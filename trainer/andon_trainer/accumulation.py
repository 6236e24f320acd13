"""Accumulation: the gradients of a step's earlier micro-batches, out of the script's reach.

Between two micro-batches `p.grad` is None: a script that clips, logs or zeroes gradients in each
loop body would otherwise change a sum that is not complete.
"""

from __future__ import annotations

import torch

from andon_trainer.model_layout import ModelPlan

__all__ = ["Accumulation"]


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
