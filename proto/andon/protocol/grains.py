"""Grains, and the tree along which their gradients are added: the same bits on any roster.

Theory of operation. A batch is cut into grains of `m` positions, and one worker computes each of
them whole. Over the G grains stands one binary tree, which depends on G alone. A leaf is a grain's
gradient times u = float32(w / m), with w the grain's weight; a node is left + right; the mean is
root / float32(W / m), with W the sum of all weights. Each is rounded to float32. So the sum does
not depend on who computed which grain: a worker adds up the nodes that lie in its share, and
whoever has the rest adds those to the same root.

Dividing by m keeps a full grain's factor at exactly 1, and a mean that is finite does not overflow
on the way to it. A batch of one grain is neither multiplied nor divided: its mean is its gradient.

An absent gradient is -0.0, the identity of addition: x + -0.0 has the bits of x, for every x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from andon.protocol.records import PositionRange
from andon.protocol.shards import Ranges, Split, merged, reassign

__all__ = [
    "TREE_VERSION",
    "Grains",
    "Node",
    "NodeLoss",
    "children",
    "cover",
    "fold",
    "is_node",
    "leaf_factor",
    "root_divisor",
]

TREE_VERSION = 1
"""The tree and the arithmetic of this module; a line whose workers have another one refuses."""

Value = TypeVar("Value")
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, order=True)
class Node:
    """The node of the tree over grains `first` up to, not including, `stop`."""

    first: int
    stop: int

    def __post_init__(self) -> None:
        """Refuses a node without grains."""
        if not 0 <= self.first < self.stop:
            raise ValueError(f"not a node: [{self.first}, {self.stop})")

    def __len__(self) -> int:
        """How many grains it has."""
        return self.stop - self.first

    def __str__(self) -> str:
        """The node as people read it: `grains 4 to 7`."""
        last = self.stop - 1
        return f"grain {last}" if len(self) == 1 else f"grains {self.first} to {last}"


def children(node: Node) -> tuple[Node, Node] | None:
    """The left and the right child; None for a leaf.

    A node is divided after the greatest power of two of its grains that is less than all of them.
    """
    if len(node) == 1:
        return None
    middle = node.first + (1 << ((len(node) - 1).bit_length() - 1))
    return Node(node.first, middle), Node(middle, node.stop)


@dataclass(frozen=True, slots=True)
class NodeLoss:
    """What a node adds to a step's loss: sums over its grains, in float64, along the tree."""

    node: Node
    weight: float
    loss_sum: float
    """Of weight times loss."""


def is_node(node: Node, count: int) -> bool:
    """Whether the tree over `count` grains has this node."""
    at = Node(0, count)
    while at != node:
        below = children(at)
        if below is None:
            return False
        at = below[node.first >= below[1].first]
    return True


def cover(grains: Iterable[PositionRange], count: int) -> tuple[Node, ...]:
    """The maximal nodes of the tree over `count` grains that lie in `grains`, in rising order.

    Raises:
        ValueError: there is a grain that the tree does not have.
    """
    owned = merged(grains)
    if owned and owned[-1].stop > count:
        raise ValueError(f"a tree of {count} grains has no grain {owned[-1].stop - 1}")
    return tuple(_cover(Node(0, count), owned)) if owned else ()


def _cover(node: Node, owned: Ranges) -> Iterator[Node]:
    inside = [part for part in owned if part.start < node.stop and node.first < part.stop]
    if not inside:
        return
    if inside[0].start <= node.first and node.stop <= inside[0].stop:
        yield node
        return
    below = children(node)
    assert below is not None, "a leaf is in a range or outside of it"
    for child in below:
        yield from _cover(child, tuple(inside))


def fold(values: Mapping[Node, Value], root: Node, add: Callable[[Value, Value], Value]) -> Value:
    """The root's value from those of nodes that partition it.

    `add` gets the left child's value first. With the values of one float32 vector a grain it must
    round each sum to float32.

    Raises:
        ValueError: the nodes don't partition the root, or one is not of its tree.
    """
    if sum(map(len, values)) != len(root):
        raise ValueError(f"{len(values)} nodes don't partition {root}")

    def of(node: Node) -> Value:
        if node in values:
            return values[node]
        below = children(node)
        if below is None:
            raise ValueError(f"{node} is missing, or is in a node that the tree does not have")
        left, right = below
        return add(of(left), of(right))

    return of(root)


def leaf_factor(weight: float, micro_batch: int, count: int) -> np.float32:
    """What a grain's mean gradient is multiplied with; 1 for a full grain that counts samples.

    A grain of weight 0 is absent, and multiplied with nothing; `count` are the batch's grains.
    """
    return np.float32(1 if count == 1 else weight / micro_batch)


def root_divisor(total_weight: float, micro_batch: int, count: int) -> np.float32:
    """What the root's value is divided by to be the mean; the total weight is not 0."""
    return np.float32(1 if count == 1 else total_weight / micro_batch)


@lru_cache(maxsize=256)
def _aligned(cuts: tuple[int, ...], targets: tuple[int, ...]) -> tuple[int, ...]:
    """Where the ranks' runs of grains end, moved so that they have fewer maximal nodes.

    No rank needs longer for its share than the slowest one did before.

    Args:
        cuts: where the runs end by the rule of shares; each has a grain.
        targets: how the shares compare.
    """
    count, sizes = cuts[-1], [stop - start for start, stop in pairwise((0, *cuts))]
    slowest = max(map(Fraction, sizes, targets))
    most = [int(slowest * target) for target in targets]
    moved = [0]
    for rank, cut in enumerate(cuts):
        later = most[rank + 1 :]
        least = max(moved[-1] + 1, count - sum(later))
        greatest = min(moved[-1] + most[rank], count - len(later))
        found = range(least, greatest + 1)
        moved.append(min(found, key=lambda at: (-(at & -at), abs(at - cut), at)))
    if _nodes(moved, count) < _nodes((0, *cuts), count):
        return tuple(moved[1:])
    return cuts


def _nodes(cuts: Sequence[int], count: int) -> int:
    """How many maximal nodes runs have that end at these grains."""
    return sum(len(cover([PositionRange(*pair)], count)) for pair in pairwise(cuts))


@dataclass(frozen=True, slots=True)
class Grains:
    """A batch cut into grains."""

    batch: PositionRange
    micro_batch: int
    """Positions of a grain; the last one may have fewer."""

    def __post_init__(self) -> None:
        """Refuses grains without positions, and a batch without grains."""
        if self.micro_batch < 1 or not len(self.batch):
            raise ValueError(f"{self.batch} can't be cut into grains of {self.micro_batch}")

    @property
    def count(self) -> int:
        """How many grains the batch has."""
        return -(-len(self.batch) // self.micro_batch)

    @property
    def root(self) -> Node:
        """All grains."""
        return Node(0, self.count)

    def positions(self, grain: int) -> PositionRange:
        """The positions of one grain."""
        if not 0 <= grain < self.count:
            raise ValueError(f"{self.batch} has {self.count} grains, and no grain {grain}")
        start = self.batch.start + grain * self.micro_batch
        return PositionRange(start, min(start + self.micro_batch, self.batch.stop))

    def deal(self, kept: Sequence[Iterable[PositionRange]], split: Split) -> tuple[Ranges, ...]:
        """The grains of each rank: those that it keeps, and its part of those that nobody has.

        In a first attempt each rank has one run, of as few maximal nodes as cost no balance.

        Args:
            kept: for each rank, the *grains* that it has computed; none in a first attempt.
            split: how shares compare.

        Raises:
            ValueError: see `reassign`.
        """
        dealt = reassign(PositionRange(0, self.count), kept, split)
        if split.interleaved or not all(dealt) or any(any(map(len, each)) for each in kept):
            return dealt
        cuts = _aligned(tuple(run.stop for (run,) in dealt), split.targets_of(len(dealt)))
        return tuple((PositionRange(*pair),) for pair in pairwise((0, *cuts)))

    def ranges(self, grains: Iterable[PositionRange]) -> Ranges:
        """The positions of some grains."""
        start, size, stop = self.batch.start, self.micro_batch, self.batch.stop
        return merged(
            PositionRange(start + part.start * size, min(start + part.stop * size, stop))
            for part in grains
            if len(part)
        )

    def of(self, positions: Iterable[PositionRange]) -> Ranges:
        """The grains whose positions these are.

        Raises:
            ValueError: they are not whole grains of this batch.
        """
        grains = []
        for part in merged(positions):
            first, before = divmod(part.start - self.batch.start, self.micro_batch)
            stop = -(-(part.stop - self.batch.start) // self.micro_batch)
            if (
                before
                or first < 0
                or stop > self.count
                or self.ranges([PositionRange(first, stop)]) != (part,)
            ):
                raise ValueError(f"{part} is not whole grains of {self}")
            grains.append(PositionRange(first, stop))
        return merged(grains)
