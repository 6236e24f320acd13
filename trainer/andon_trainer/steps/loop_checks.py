"""UnoptimizedParameters: parameters that no optimizer moves, such as an EMA's.

A script that updates them in its loop body does so once a micro-batch, and once an attempt, where
it means once a step. Torch counts the writes to a tensor, so that can be seen.

The objective: whether a loss is the mean over samples that the line takes it for.

Workers' losses are averaged by their weights, which are their samples if the script says nothing. A
sum over the batch, or a mean over some of its targets only, then trains for something else, and
differently with each number of workers. The graph behind the loss tells some of it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from andon_trainer.state.replica import Replica
from andon_trainer.steps.step_state import Phase, Present

__all__ = ["Objective", "UnoptimizedParameters"]

log = logging.getLogger(__name__)


class UnoptimizedParameters:
    """Parameters of a replica's models, and of what was registered, that no optimizer has."""

    def __init__(self, replica: Replica) -> None:
        """Looks at nothing yet."""
        self._replica = replica
        self._registered = -1
        self._parts: list[tuple[str, nn.Parameter]] = []
        self._warned = False

    def versions(self) -> list[int]:
        """How often each was written to."""
        if len(self._replica.registered) != self._registered:
            self._registered = len(self._replica.registered)
            self._parts = list(self._found())
        return [part._version for _, part in self._parts]

    def check(self, before: list[int], present: Present) -> None:
        """Looks for what was written to in a loop body that committed nothing.

        Raises:
            RuntimeError: there is such a parameter, and the step's next micro-batch would write
                again. After an attempt in vain a warning is logged.
        """
        now = self.versions()
        if present.phase is Phase.COMMITTED or now == before or len(now) != len(before):
            return
        name = next(
            name for (name, _), old, new in zip(self._parts, before, now, strict=True) if old != new
        )
        text = (
            f"{name} was changed in a loop body that committed nothing: an EMA moves once a "
            "step, so write `if line.committed: ema.update_parameters(model)`"
        )
        if present.phase is not Phase.VOID:
            raise RuntimeError(text)
        if not self._warned:
            self._warned = True
            log.warning("%s", text)

    def _found(self) -> Iterator[tuple[str, nn.Parameter]]:
        modules = list(self._replica.modules)
        modules += [
            each for each in self._replica.registered.values() if isinstance(each, nn.Module)
        ]
        moved = {
            id(part)
            for optimizer in self._replica.optimizers
            for group in optimizer.param_groups
            for part in group["params"]
        }
        for module in modules:
            for name, part in module.named_parameters():
                if id(part) not in moved and not part.is_inference():
                    moved.add(id(part))
                    yield name, part


_LOOKS = 1000
"""Losses that are looked at: later ones are made as these were."""
_MEAN, _SUM = 1, 2
"""Reductions, as torch numbers them."""
_MOST_NODES = 16


class Objective:
    """Warns, once, of a loss that the script should weigh, or divide."""

    def __init__(self) -> None:
        """Has seen none."""
        self._left = _LOOKS
        self._scale_left = _LOOKS

    def look_for_scale(self, loss: torch.Tensor) -> None:
        """Looks whether a loss was scaled by a GradScaler that the line was not told of."""
        if self._scale_left <= 0:
            return
        self._scale_left -= 1
        scale = _scale(loss.grad_fn)
        if scale is not None:
            self._scale_left = 0
            log.warning(
                "the loss was scaled by %g before line.backward saw it, so line.loss, the journal "
                "and --loss-spike have the scaled one. Give the loss as it is, and the scaler: "
                "line.backward(loss, scaler=scaler)",
                scale,
            )

    def look(self, loss: torch.Tensor, samples: int) -> None:
        """Looks at a micro-batch's loss, to which the script gave no weight."""
        if self._left <= 0:
            return
        self._left -= 1
        for node, multiplied in _terms(loss):
            if not multiplied and _sums(node, samples):
                text = (
                    "the loss is a sum over the batch (reduction='sum', or .sum()), and the line "
                    "averages it as a mean: it trains for the sum divided by the number of workers "
                    "and micro-batches. Give the mean: line.backward(loss / len(batch))"
                )
            elif partly := _partly(node):
                text = (
                    f"the loss is a mean over {partly}, and line.backward was given no weight: "
                    "parts of a batch with few count as much as those with many. Write "
                    "line.backward(loss, weight=...) with what the mean was taken over"
                )
            else:
                continue
            self._left = 0
            log.warning("%s; see docs/guide/losses.md", text)
            return


def _terms(loss: torch.Tensor) -> Iterator[tuple[Any, bool]]:
    """The nodes that a loss is a sum of, and whether a factor may have made a mean of each."""
    waiting: list[tuple[Any, bool]] = [(loss.grad_fn, False)]
    for _ in range(_MOST_NODES):
        if not waiting:
            return
        node, multiplied = waiting.pop()
        name = type(node).__name__
        inputs = [each for each, _ in getattr(node, "next_functions", ()) if each is not None]
        if name == "AddBackward0":
            waiting += [(each, multiplied) for each in inputs]
        elif name in ("MulBackward0", "DivBackward0") and len(inputs) == 1:
            waiting.append((inputs[0], multiplied or not _enlarges(name, node)))
        else:
            yield node, multiplied


def _enlarges(name: str, node: Any) -> bool:
    """Whether a product is with a number above 1, as a gradient scaler's is."""
    factor = getattr(node, "_saved_other", None)
    return name == "MulBackward0" and isinstance(factor, torch.Tensor) and float(factor) > 1


def _scale(node: Any) -> float | None:
    """The factor of a GradScaler's product, which is a float32 tensor and a power of two."""
    factor = getattr(node, "_saved_other", None)
    if type(node).__name__ != "MulBackward0" or not isinstance(factor, torch.Tensor):
        return None
    # A number that a script multiplies by is kept as a float64.
    if factor.numel() != 1 or factor.dtype is not torch.float32 or factor.requires_grad:
        return None
    scale = float(factor)
    return scale if scale > 1 and math.frexp(scale)[0] == 0.5 else None


def _sums(node: Any, samples: int) -> bool:
    if samples < 2:
        return False
    if type(node).__name__ == "SumBackward0":
        elements = torch.Size(getattr(node, "_saved_self_sym_sizes", ())).numel()
        return elements >= samples and elements % samples == 0
    return bool(getattr(node, "_saved_reduction", _MEAN) == _SUM)


def _partly(node: Any) -> str:
    """What a mean was taken over, if not over all targets alike; else empty."""
    if not type(node).__name__.startswith("NllLoss") or node._saved_reduction != _MEAN:
        return ""
    total, targets = float(node._saved_total_weight), node._saved_target.numel()
    if abs(total - targets) <= 1e-4 * targets:
        return ""
    if total == int(total):
        return f"{int(total)} of {targets} targets"
    return f"targets of unequal weight ({total:.4g} for {targets})"
