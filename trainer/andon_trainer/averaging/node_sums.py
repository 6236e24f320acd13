"""Sums of grains by node: how a worker adds gradients so that the bits are the same on any roster.

Theory of operation. Each grain's gradient is taken out of `p.grad` and made a leaf of the tree (see
`andon.protocol.grains`). As soon as both children of a node are here, they are added into the left
one, and the right one is let go: so what is left are the maximal nodes of the grains that were
added, whatever their order. Each operation is rounded to float32 by itself. An absent gradient is
None here, and nothing is added to it: x + -0.0 has the bits of x.

A leaf that has a gradient gets 0.0 added to its first element, so that no sum of it looks like a
missing one (docs/protocol-same-bits.md, section 32). That is done to each leaf, and not to what is
sent: the bits must not depend on who adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from andon.protocol.grains import Node, children, root_divisor

__all__ = ["NodeSums", "Parts", "added", "divided", "gradient_of", "leaves_of"]

Parts = list[torch.Tensor | None]
"""A block's numbers, one float32 tensor a parameter; None: absent."""


def leaves_of(
    gradients: Iterable[torch.Tensor | None], factor: float, unscale: torch.Tensor | None = None
) -> Parts:
    """A grain's gradients as leaves of the tree; may be the same tensors, changed.

    Args:
        gradients: means over the grain, of any dtype; nobody else may use them.
        factor: `leaf_factor` of the grain, a float32 number.
        unscale: the inverse of the loss scale that is in them, a float32 scalar.
    """
    with torch.no_grad():
        leaves = [
            None if gradient is None else _leaf_of(gradient, factor, unscale)
            for gradient in gradients
        ]
        firsts = [
            each.as_strided((1,), (1,)) for each in leaves if each is not None and each.numel()
        ]
        if firsts:
            torch._foreach_add_(firsts, 0.0)
    return leaves


def _leaf_of(gradient: torch.Tensor, factor: float, unscale: torch.Tensor | None) -> torch.Tensor:
    leaf = gradient.detach()
    leaf = (leaf.to_dense() if leaf.is_sparse else leaf).float()
    # Two products, each rounded: the first is the gradient without its scale.
    if unscale is not None:
        leaf.mul_(unscale.to(leaf.device))
    if factor != 1:
        leaf.mul_(factor)
    return leaf


def divided(root: torch.Tensor, total_weight: float, micro_batch: int, count: int) -> torch.Tensor:
    """The mean, from the root's sum: in place, float32."""
    divisor = root_divisor(total_weight, micro_batch, count)
    if divisor == 1:
        return root
    # A tensor on its device: CUDA multiplies by the reciprocal of a number of the host's.
    return root.div_(torch.tensor(float(divisor), dtype=torch.float32, device=root.device))


def gradient_of(
    parameter: nn.Parameter, mean: torch.Tensor, scale: torch.Tensor | None
) -> torch.Tensor:
    """What `p.grad` is for a mean: in the parameter's type and strides, as on every line.

    `scale`: the loss scale that gradients have there; None: none.
    """
    gradient = mean
    if (mean.dtype, mean.stride()) != (parameter.dtype, parameter.stride()):
        # With the parameter's strides, as on a line: a norm depends on them.
        gradient = torch.empty_like(parameter, requires_grad=False).copy_(mean)
    if scale is not None:
        gradient.mul_(scale.to(gradient.device))
    return gradient


class NodeSums:
    """The sums of one block over a batch's grains, by maximal node."""

    def __init__(self, count: int) -> None:
        """Of a batch of `count` grains, none of which is here."""
        self._root = Node(0, count)
        self._sums: dict[Node, Parts] = {}

    @property
    def nodes(self) -> list[Node]:
        """The maximal nodes of the grains that were added, in rising order."""
        return sorted(self._sums)

    def __getitem__(self, node: Node) -> Parts:
        """A maximal node's sum."""
        return self._sums[node]

    def add(self, grain: int, leaf: Parts) -> None:
        """Adds a grain, and joins what has both children; takes the tensors over."""
        self.add_node(Node(grain, grain + 1), leaf)

    def add_node(self, node: Node, parts: Parts) -> None:
        """The same with a node that somebody else has summed."""
        assert not any(each.first < node.stop and node.first < each.stop for each in self._sums), (
            "a grain came twice"
        )
        self._sums[node] = parts
        for parent, left, right in _above(self._root, node):
            if left not in self._sums or right not in self._sums:
                return
            self._sums[parent] = _added(self._sums.pop(left), self._sums.pop(right))

    def clear(self) -> None:
        """No grain is here any more."""
        self._sums = {}


def _above(root: Node, node: Node) -> Sequence[tuple[Node, Node, Node]]:
    """The nodes over another one, each with its children, from below."""
    return list(_path(root, node))[::-1]


def _path(at: Node, node: Node) -> Iterator[tuple[Node, Node, Node]]:
    while at != node and (below := children(at)) is not None:
        yield at, *below
        at = below[node.first >= below[1].first]


def added(left: Parts, right: Parts) -> Parts:
    """Left + right, in new tensors where both are present."""
    pairs = zip(left, right, strict=True)
    with torch.no_grad():
        return [
            one + other if one is not None and other is not None else other if one is None else one
            for one, other in pairs
        ]


def _added(left: Parts, right: Parts) -> Parts:
    """Left + right, in place where both are present."""
    pairs = list(zip(left, right, strict=True))
    both = [(one, other) for one, other in pairs if one is not None and other is not None]
    if both:
        with torch.no_grad():
            # Without a factor: another one than 1 would be a fused multiply-add on a CPU.
            torch._foreach_add_([one for one, _ in both], [other for _, other in both])
    return [other if one is None else one for one, other in pairs]
