"""What a loss is a sum of: the terms that its graph shows, and what each was multiplied by.

Theory of operation. From the loss the walk goes back through what keeps a scalar a scalar: sums and
differences of losses, products with numbers, changes of shape and dtype, a stack of losses. Where
it ends there is the node that made a scalar of many values, with a reduction that can be read off:
a sum or a mean, and over how many. A factor that lies on the host is read at once. One on a GPU is
only handed on, since reading it here would wait for the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["Term", "is_divided", "scale_of", "scales_of", "terms_of"]

_MEAN, _SUM = 1, 2
"""Reductions, as torch numbers them."""
_MOST_NODES = 32
_MOST_BELOW = 24
"""Nodes that are looked at to tell a regulariser from a loss."""
_SHAPES = frozenset(
    {
        "AliasBackward0",
        "CloneBackward0",
        "ExpandBackward0",
        "NegBackward0",
        "ReshapeAliasBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "SqueezeBackward2",
        "ToCopyBackward0",
        "UnsafeViewBackward0",
        "UnsqueezeBackward0",
        "ViewBackward0",
    }
)
"""They leave a scalar's size as it is."""
_ADDS = frozenset({"AddBackward0", "SubBackward0", "AddBackward1", "SubBackward1", "RsubBackward1"})
_PRODUCTS = frozenset({"MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1"})
_ELEMENTWISE = _PRODUCTS | _ADDS | {"CatBackward0", "StackBackward0"}
_MATMULS = frozenset({"MmBackward0", "BmmBackward0"})
_REDUCES = frozenset({"SumBackward0", "SumBackward1", "MeanBackward0", "MeanBackward1"})


@dataclass(slots=True)
class Term:
    """One of the terms that a loss is the sum of."""

    node: Any
    """What made a scalar of it."""
    factors: tuple[float, ...] = ()
    """The numbers that it was multiplied by, as far as they lie on the host; divisors as 1/d."""
    divisors: tuple[torch.Tensor, ...] = ()
    """What it was divided by, as tensors: the number of targets that count may be one of them."""
    unread: bool = False
    """Whether it was multiplied by a number that is not on the host."""
    place: tuple[int, ...] = field(default=())
    """Where it is in the loss: the same place in every loss of the same script."""

    @property
    def factor(self) -> float:
        """All factors together."""
        product = 1.0
        for each in self.factors:
            product *= each
        return product

    @property
    def name(self) -> str:
        """Of the node's class."""
        return type(self.node).__name__

    @property
    def summed(self) -> int:
        """How many values it is the sum of; 0: it is no sum."""
        if self.name in ("SumBackward0", "SumBackward1"):
            return torch.Size(self.node._saved_self_sym_sizes).numel()
        if getattr(self.node, "_saved_reduction", _MEAN) != _SUM:
            return 0
        values = getattr(self.node, "_saved_self", None)
        if self.name.startswith("NllLoss"):
            values = self.node._saved_target
        return values.numel() if isinstance(values, torch.Tensor) else 1

    @property
    def meant(self) -> int:
        """How many values it is the plain mean of; 0: it is none."""
        if self.name in ("MeanBackward0", "MeanBackward1"):
            return torch.Size(self.node._saved_self_sym_sizes).numel()
        return 0

    @property
    def is_mean_over_targets(self) -> bool:
        """Whether it is a cross-entropy's mean."""
        return self.name.startswith("NllLoss") and self.node._saved_reduction == _MEAN

    @property
    def is_of_parameters(self) -> bool:
        """Whether it is a function of parameters alone, value by value: a regulariser."""
        return self.name in _REDUCES and _leads_to_parameters(self.node)

    @property
    def weights(self) -> torch.Tensor | None:
        """What its values were multiplied by before they were summed, if they were."""
        below = [each for each, _ in self.node.next_functions if each is not None]
        if self.name not in _REDUCES or len(below) != 1:
            return None
        name, node = type(below[0]).__name__, below[0]
        found = _other(node) if name == "MulBackward0" else None
        return found if isinstance(found, torch.Tensor) and found.numel() > 1 else None

    @property
    def mask(self) -> torch.Tensor | None:
        """What says which of its values count, if that can be seen."""
        if self.weights is not None:
            return self.weights
        below = [each for each, _ in self.node.next_functions if each is not None]
        node = below[0] if self.name in _REDUCES and len(below) == 1 else None
        condition = getattr(node, "_saved_condition", None)  # torch.where
        filled = getattr(node, "_saved_mask", None)  # masked_fill
        return ~filled if isinstance(filled, torch.Tensor) else condition

    def is_shared_among(self, samples: int) -> bool:
        """Whether a factor divides by the number of samples, or a multiple of it."""
        return any(_is_multiple(1 / abs(each), samples) for each in self.factors if each)


def terms_of(loss: torch.Tensor) -> Iterator[Term]:
    """The terms that a loss is a sum of, as far as its graph shows them."""
    if loss.grad_fn is None:
        return
    waiting = [Term(loss.grad_fn)]
    for _ in range(_MOST_NODES):
        if not waiting:
            return
        term = waiting.pop()
        parts = _parts(term)
        if parts is None:
            yield term
        else:
            waiting += parts
    yield from waiting


def is_divided(loss: torch.Tensor, by: int) -> bool:
    """Whether a loss is a quotient by this very number, as accumulation by hand needs."""
    node = loss.grad_fn
    divisor = getattr(node, "_saved_other", None)
    if type(node).__name__ != "DivBackward0" or not isinstance(divisor, torch.Tensor):
        return False
    return divisor.numel() == 1 and divisor.device.type == "cpu" and float(divisor) == by


def scales_of(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """What a loss and its terms were multiplied by, if it may be a GradScaler's scale."""
    waiting = [loss.grad_fn]
    for _ in range(_MOST_NODES):
        if not waiting:
            return
        node = waiting.pop(0)
        if (factor := _scale_at(node)) is not None:
            yield factor
        inputs = [each for each, _ in getattr(node, "next_functions", ()) if each is not None]
        name = type(node).__name__
        if name in _ADDS or (len(inputs) == 1 and name in _SHAPES | _PRODUCTS):
            waiting += inputs


def scale_of(loss: torch.Tensor) -> torch.Tensor | None:
    """What a whole loss was multiplied by last, if it may be a GradScaler's scale."""
    return _scale_at(loss.grad_fn)


def _scale_at(node: Any) -> torch.Tensor | None:
    """The other factor of a product, if it is a float32 scalar."""
    factor = getattr(node, "_saved_other", None)
    if type(node).__name__ != "MulBackward0" or not isinstance(factor, torch.Tensor):
        return None
    # A plain number that a script multiplies by is saved as float64.
    if factor.numel() != 1 or factor.dtype is not torch.float32 or factor.requires_grad:
        return None
    return factor


def _parts(term: Term) -> list[Term] | None:
    """The terms that a term consists of; None: it is a last one."""
    node, name = term.node, term.name
    inputs = [each for each, _ in getattr(node, "next_functions", ()) if each is not None]
    if name in _ADDS:
        return [_child(term, each, at) for at, each in enumerate(inputs)]
    if name in _SHAPES and len(inputs) == 1:
        return [_child(term, inputs[0])]
    if name in _PRODUCTS and len(inputs) == 1:
        return [_multiplied(term, inputs[0])]
    if name in _REDUCES and len(inputs) == 1:
        values = torch.Size(node._saved_self_sym_sizes).numel()
        share = 1.0 if name.startswith("Sum") else 1.0 / max(values, 1)
        if values == 1:
            return [_child(term, inputs[0])]
        if type(inputs[0]).__name__ == "StackBackward0":
            losses = [each for each, _ in inputs[0].next_functions if each is not None]
            if len(losses) == values:  # Scalars, and no rows.
                parts = [_child(term, each, at) for at, each in enumerate(losses)]
                for part in parts if share != 1.0 else ():
                    part.factors += (share,)
                return parts
    return None


def _child(term: Term, node: Any, at: int = 0) -> Term:
    return Term(node, term.factors, term.divisors, term.unread, (*term.place, at))


def _multiplied(term: Term, node: Any) -> Term:
    """The other factor of a product with a number."""
    child, number = _child(term, node), _other(term.node)
    divides = term.name.startswith("Div")
    if isinstance(number, torch.Tensor):
        if divides:
            child.divisors += (number,)
        if number.device.type != "cpu" or number.numel() != 1:
            child.unread = True
            return child
        number = float(number)
    read = isinstance(number, int | float) and math.isfinite(number)  # NaN is for the halt to tell.
    if not read or (divides and not number):
        child.unread = True
        return child
    child.factors += (1 / number if divides else float(number),)
    return child


def _other(node: Any) -> Any:
    """What the input that has a graph was multiplied by, or divided by."""
    other = getattr(node, "_saved_other", None)
    return getattr(node, "_saved_self", None) if other is None else other


def _is_multiple(number: float, of: int) -> bool:
    times = number / of
    # Wide enough for float32.
    return round(times) >= 1 and abs(times - round(times)) <= 1e-6 * times


def _leads_to_parameters(node: Any) -> bool:
    """Whether a reduction's values are those of parameters, each changed by itself."""
    return _are_of_parameters(node, torch.Size(node._saved_self_sym_sizes).numel())


def _are_of_parameters(node: Any, values: int) -> bool:
    waiting, leaves = [node], list[int]()
    for _ in range(_MOST_BELOW):
        if not waiting:
            # More values than parameters have: data was multiplied in.
            return bool(leaves) and values in (max(leaves), sum(leaves))
        here = waiting.pop()
        if type(here).__name__ == "AccumulateGrad":
            if not isinstance(here.variable, nn.Parameter):
                return False
            leaves.append(here.variable.numel())
            continue
        # A layer has several inputs: only functions of one value are followed, and concatenations.
        name = type(here).__name__
        if name in _MATMULS:  # As in a penalty on what is not orthogonal.
            factors = (here._saved_self, here._saved_mat2)
            if any(each is None for each in factors) or not all(
                below is not None and _are_of_parameters(below, factor.numel())
                for (below, _), factor in zip(here.next_functions, factors, strict=True)
            ):
                return False
            leaves.append(factors[0][..., 0].numel() * factors[1].shape[-1])
            continue
        if not (len(here.next_functions) == 1 or name in _ELEMENTWISE):
            return False
        waiting += [each for each, _ in here.next_functions if each is not None]
    return False
