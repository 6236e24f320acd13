"""The tree over grains, as docs/protocol-same-bits.md has it: written from its text alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from andon.v1 import coordinator_pb2 as pb
from andon.v1 import reducer_pb2
from andon_conformance.runner.checks import Violation
from andon_conformance.runner.gradients import Part
from andon_conformance.runner.reference import f32

__all__ = [
    "Span",
    "along",
    "grains_of",
    "leaf",
    "losses_of",
    "maximal",
    "mean_part",
    "node_message",
    "node_part",
]

Span = tuple[int, int]
"""The grains of a node: the first one, and the one after its last."""

_Value = TypeVar("_Value")


def children(span: Span) -> tuple[Span, Span]:
    """The children of a node of several grains (section 32)."""
    first, stop = span
    size = 1
    while 2 * size < stop - first:
        size *= 2
    return (first, first + size), (first + size, stop)


def maximal(owned: Iterable[int], span: Span) -> list[Span]:
    """The maximal nodes of some grains, in rising order (section 33)."""
    grains = set(owned)
    if grains.issuperset(range(*span)):
        return [span]
    if span[1] - span[0] == 1:
        return []
    return [node for child in children(span) for node in maximal(grains, child)]


def along(leaves: Sequence[_Value], span: Span, add: Callable[[_Value, _Value], _Value]) -> _Value:
    """A node's sum of values, one for each grain of the batch."""
    if span[1] - span[0] == 1:
        return leaves[span[0]]
    left, right = children(span)
    return add(along(leaves, left, add), along(leaves, right, add))


def grains_of(work: pb.ShardAssignment, grain: int) -> tuple[set[int], int]:
    """The grains of an assignment, and how many its batch has.

    Raises:
        Violation: it has a part of one.
    """
    start, stop = work.batch.start, work.batch.stop
    positions = {at for part in work.positions for at in range(part.start, part.stop)}
    grains = {(at - start) // grain for at in positions}
    whole = {
        at
        for each in grains
        for at in range(start + each * grain, min(start + (each + 1) * grain, stop))
    }
    if whole != positions:
        expected = f"whole grains of {grain} positions of the batch {start} to {stop}"
        raise Violation(expected, f"the positions {sorted(positions)}")
    return grains, -(-(stop - start) // grain)


def losses_of(
    work: pb.ShardAssignment, grain: int, loss: Callable[[int], float] = lambda _: 1.0
) -> list[pb.NodeLoss]:
    """The `node_losses` of a share whose weights are samples, with `loss` for each grain."""
    grains, count = grains_of(work, grain)
    weights = [
        float(min(grain, work.batch.stop - work.batch.start - each * grain))
        for each in range(count)
    ]
    sums = [weight * loss(each) for each, weight in enumerate(weights)]
    return [
        pb.NodeLoss(
            first=span[0],
            grains=span[1] - span[0],
            weight=along(weights, span, float.__add__),
            loss_sum=along(sums, span, float.__add__),
        )
        for span in (maximal(grains, (0, count)) if grains else [])
    ]


def leaf(part: Part, grain: int, count: int) -> Part:
    """A grain's mean gradient and weight as a leaf."""
    factor = 1.0 if count == 1 else f32(part.weight / grain)
    blocks = tuple(tuple(f32(factor * number) for number in block) for block in part.blocks)
    return Part(part.weight, blocks)


def node_part(leaves: Sequence[Part], span: Span) -> Part:
    """What is contributed for a node."""
    return along(leaves, span, _added)


def mean_part(leaves: Sequence[Part], grain: int) -> Part:
    """The mean of a batch, with its total weight, which is not 0."""
    root = node_part(leaves, (0, len(leaves)))
    divisor = 1.0 if len(leaves) == 1 else f32(root.weight / grain)
    blocks = tuple(tuple(f32(number / divisor) for number in block) for block in root.blocks)
    return Part(root.weight, blocks)


def node_message(span: Span, count: int, grain: int) -> reducer_pb2.TreeNode:
    """A node as a contribution names it."""
    return reducer_pb2.TreeNode(
        first=span[0], grains=span[1] - span[0], batch_grains=count, grain=grain
    )


def _added(left: Part, right: Part) -> Part:
    blocks = tuple(
        tuple(f32(one + other) for one, other in zip(*pair, strict=True))
        for pair in zip(left.blocks, right.blocks, strict=True)
    )
    return Part(left.weight + right.weight, blocks)
