"""The loss scale: what a script's GradScaler does to the loss, and how gradients get rid of it.

Theory of operation. In float16 small gradients vanish, so the loss is multiplied by a scale and the
gradients are divided by it again. Gradients enter the line without the scale, and it is put back
into the mean, where the scaler expects it. So workers need not agree on a scale to agree on a mean,
and norms and limits are those of the real gradients. The scale is a power of two, unless the script
says otherwise: then this changes no bit.

Nothing here reads the scale on the host while gradients are finite: on a GPU that would wait for
it. A loss that the script has scaled itself is told by a mark on its node of the graph.

An overflow is tolerated `max_overflows` times in a row, and not at a scale below 1: beyond that,
no scale would help, and the value that is not finite halts the line as any other does. The count is
of committed steps, so it is the same on all workers; it is kept with the scaler's own state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["LossScale"]

log = logging.getLogger(__name__)

_MARK = "andon.scaled"
_SUMS = ("AddBackward0", "SubBackward0", "StackBackward0", "CatBackward0")
_PRODUCTS = ("MulBackward0", "DivBackward0")
_UNARY = (
    *("NegBackward0", "SumBackward0", "SumBackward1", "MeanBackward0", "MeanBackward1"),
    *("ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0", "ToCopyBackward0"),
    *("CloneBackward0", "SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0"),
    *("ExpandBackward0", "SelectBackward0", "AliasBackward0", "UnbindBackward0"),
)
"""Operations after which a scaled loss is scaled by the same number."""


class LossScale:
    """A GradScaler's scale, for the code that computes and averages gradients."""

    def __init__(
        self, scaler: torch.amp.GradScaler, device: torch.device, max_overflows: int
    ) -> None:
        """Reads nothing.

        Args:
            scaler: the script's.
            device: where losses are.
            max_overflows: how many steps in a row may overflow.
        """
        self.scaler = scaler
        self.enabled = scaler.is_enabled()
        self._real_scale: Callable[[Any], Any] = scaler.scale
        self._one = torch.ones((), device=device)
        self._most = max_overflows
        self.overflows = 0
        """How many committed steps overflowed, up to the last one, without one that did not."""
        if self.enabled:
            self._real_scale(self._one)  # Makes the scale, which a state may then be loaded into.

    # ------------------------------------------------------------------ the loss

    def scale(self, outputs: Any) -> Any:
        """What `scaler.scale` returns, marked."""
        scaled = self._real_scale(outputs)
        for each in [scaled] if isinstance(scaled, torch.Tensor) else _tensors(scaled):
            node: Any = each.grad_fn
            if node is not None:
                node.metadata[_MARK] = True
        return scaled

    def take(self, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A loss as the script gave it: scaled for backward, and as it is for people.

        Raises:
            ValueError: the script has scaled a part of it.
        """
        if not self.enabled:
            return loss, loss.detach()
        if _is_scaled(loss.grad_fn):
            return loss, loss.detach() / self.factor
        return self._real_scale(loss), loss.detach()

    # ------------------------------------------------------------------ the gradients

    @property
    def factor(self) -> torch.Tensor:
        """The scale, a scalar on the device."""
        factor: torch.Tensor = self._real_scale(self._one)
        return factor

    @property
    def inverse(self) -> torch.Tensor:
        """What gradients are multiplied with to be without the scale, as torch computes it."""
        return self.factor.double().reciprocal().float()

    def tolerates(self) -> bool:
        """Whether one more step may overflow; asked only if a value is not finite.

        It reads the scale, and on a GPU waits for it.
        """
        return self.enabled and self.overflows < self._most and self.scaler.get_scale() >= 1.0

    def committed(self, *, overflow: bool) -> None:
        """Notes whether a committed step overflowed."""
        # By commits alone: a void attempt must not count, since it is tried again.
        self.overflows = self.overflows + 1 if overflow else 0
        if overflow and self.overflows == self._most:
            log.warning(
                "%d steps in a row overflowed, and moved no weight: the next one that does halts "
                "the line (Line(max_overflows=...))",
                self.overflows,
            )

    # ------------------------------------------------------------------ the state

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state, and how many overflows came last."""
        return {"scaler": dict(self.scaler.state_dict()), "overflows": self.overflows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what `state_dict` returned."""
        self.scaler.load_state_dict(state["scaler"])
        self.overflows = state["overflows"]


def _tensors(things: Any) -> list[torch.Tensor]:
    """All tensors in nested lists and tuples."""
    if isinstance(things, torch.Tensor):
        return [things]
    if isinstance(things, list | tuple):
        return [tensor for thing in things for tensor in _tensors(thing)]
    return []  # A lazy iterable; its tensors are not made yet.


def _is_scaled(root: Any) -> bool:
    """Whether the loss of a graph's node was scaled; a sum of losses, if all of them were.

    Raises:
        ValueError: some of them were.
    """
    # Without recursion, and each node once: a loss may be a sum over thousands of terms.
    found: dict[Any, bool] = {}
    waiting = [root] if root is not None else []
    while waiting:
        node = waiting[-1]
        inputs = _losses_of(node)
        missing = [each for each in inputs if each not in found]
        if missing and node not in found:
            waiting += missing
            continue
        waiting.pop()
        found[node] = _MARK in node.metadata or _combined(node, [found[it] for it in inputs])
    return found.get(root, False)


def _losses_of(node: Any) -> list[Any]:
    """The nodes that a node's loss is made of linearly; none if it is a loss by itself."""
    name = type(node).__name__
    if name not in (*_SUMS, *_PRODUCTS, *_UNARY) or _MARK in node.metadata:
        return []
    inputs = [each for each, _ in node.next_functions if each is not None]
    return inputs if name not in _UNARY or len(inputs) == 1 else []


def _combined(node: Any, scaled: list[bool]) -> bool:
    if type(node).__name__ in _SUMS and len(set(scaled)) > 1:
        raise ValueError(
            "one part of the loss is scaled by the scaler, and another is not: add the losses up "
            "first, line.backward(loss + other), which scales the sum"
        )
    return any(scaled)
