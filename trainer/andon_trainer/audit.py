"""The audit: what moves the weights, and by which gradients.

Theory of operation. Weights are the same on all workers as long as all of them move by the same
averaged gradients, on commits. Three things would move one worker's apart, without a word: a
parameter whose gradient nobody averages, an optimizer that no commit holds back, and a gradient
that comes after the mean (see `late`). The first is looked for when a script prepares, and before
each step among the parameters that were frozen then, or were not there yet. The second is met at
its first step: torch calls a hook before any optimizer's step.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer, SparseAdam
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from andon_trainer.model_layout import ModelPlan, module_prefixes

__all__ = ["Audit", "refuse_optimizers"]


def refuse_optimizers(modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Looks through what a script prepares.

    Raises:
        ValueError: an optimizer can't work with averaged gradients, or trains a parameter that
            belongs to none of the modules.
    """
    ours = {id(part) for module in modules for part in module.parameters()}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if isinstance(optimizer, SparseAdam):
            raise ValueError(
                "SparseAdam takes sparse gradients alone, and averages are dense: use Adam, and "
                "nn.Embedding without sparse=True"
            )
        if _needs_closure(optimizer):
            raise ValueError(
                f"{kind} evaluates the loss several times in one step, and a step on the line has "
                "one gradient: use an optimizer whose step() needs no closure, such as AdamW"
            )
        for place, part in _numbered(optimizer):
            if part.requires_grad and part.numel() and id(part) not in ours:
                raise ValueError(
                    f"{place} of the {kind}, of shape {tuple(part.shape)}, belongs to none of the "
                    "prepared models: nobody would average its gradient, and it would train apart "
                    "on every worker. Give the module that holds it to line.prepare, too; a lone "
                    "parameter as nn.ParameterList([parameter])"
                )


class Audit:
    """What may move the weights of one line's models."""

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Knows the names; `open` begins to look."""
        self._names = {
            id(part): prefix + name
            for prefix, module in zip(module_prefixes(modules), modules, strict=True)
            for name, part in module.named_parameters()
        }
        self._prepared = {id(optimizer) for optimizer in optimizers}
        self._exchanged: set[int] = set()
        self._strangers: dict[int, tuple[int, list[tuple[str, nn.Parameter]]]] = {}
        self._harmless: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._moving = False
        self._handle: RemovableHandle | None = None

    def open(self, plan: ModelPlan) -> None:
        """From now on no optimizer but the prepared ones moves what `plan` exchanges."""
        self._exchanged = {id(part) for parameters in plan.parameters for part in parameters}
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> None:
        """Looks no more; a second call does nothing."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def check(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError if `optimizer` would move a parameter by a gradient of this worker's.

        Such parameters were frozen when the script prepared, or came to the optimizer later.
        """
        size = _size(optimizer)
        known, strangers = self._strangers.get(id(optimizer), (-1, []))
        if size != known:
            strangers = [
                (self._names.get(id(part), place), part)
                for place, part in _numbered(optimizer)
                if id(part) not in self._exchanged and part.numel()
            ]
            self._strangers[id(optimizer)] = size, strangers
        for name, part in strangers:
            if part.grad is not None:
                raise RuntimeError(
                    f"{name} has a gradient that nobody averaged, since it was not trained when "
                    f"the script called line.prepare: this {type(optimizer).__name__} would move "
                    "it apart from the other workers'. Prepare with every parameter that will "
                    "ever train, and call requires_grad_(False) after line.prepare on those that "
                    "are to wait"
                )

    @contextmanager
    def moving(self) -> Iterator[None]:
        """A commit is here: what steps now does so for a prepared optimizer."""
        self._moving = True
        try:
            yield
        finally:
            self._moving = False

    def _before_step(
        self, optimizer: Optimizer, _arguments: tuple[Any, ...], _named: dict[str, Any]
    ) -> None:
        size = _size(optimizer)
        if self._moving or self._harmless.get(optimizer) == size:
            return
        for _place, part in _numbered(optimizer):
            if id(part) in self._exchanged:
                self._refuse(optimizer, self._names[id(part)])
        self._harmless[optimizer] = size

    def _refuse(self, optimizer: Optimizer, name: str) -> None:
        kind = type(optimizer).__name__
        if id(optimizer) in self._prepared:
            fact = f"{kind}.step was called past the optimizer's own step(), which waits for the"
            raise RuntimeError(f"{fact} commit: call optimizer.step()")
        raise RuntimeError(
            f"this {kind} was not prepared and moves {name}, which the line trains: it would not "
            "wait for the others. Pass it to line.prepare(model, optimizer, ...), and call its "
            "step() once line.backward(loss) has returned"
        )


def _numbered(optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    for group, content in enumerate(optimizer.param_groups):
        for index, part in enumerate(content["params"]):
            yield f"parameter {index} of group {group}", part


def _size(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step` can't be called without an argument."""
    try:
        parameters = inspect.signature(type(optimizer).step).parameters.values()
    except (TypeError, ValueError):
        return False  # Nothing is known of it; it will say so itself.
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [each for each in parameters if each.kind in kinds and each.default is each.empty]
    return len(required) > 1  # besides self
