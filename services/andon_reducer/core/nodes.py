"""Nodes of an exchange: which rank contributes which nodes of the tree over the batch's grains.

What the first chunk of a node says holds for all of its chunks. So a node that overlaps a known one
is wrong, whoever sends it: the grains of an exchange have one owner each.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from andon.protocol.grains import Node, is_node
from andon.protocol.messages import TreeNode
from andon_reducer.core.disagreement import Disagreement, differs

__all__ = ["ExchangeNodes"]


@dataclass(slots=True)
class ExchangeNodes:
    """The nodes that came so far. They are disjoint."""

    tree: tuple[int, int]
    """How many grains the batch has, and how many positions a grain."""
    ranks: set[int] = field(default_factory=set)
    """Those that sent a node."""
    _known: dict[int, tuple[Node, int, float]] = field(default_factory=dict)
    """By first grain: the node, its rank and its weight."""
    _firsts: list[int] = field(default_factory=list)
    """The first grains, rising."""

    @property
    def count(self) -> int:
        """How many grains the batch has."""
        return self.tree[0]

    def admit(self, rank: int, sent: TreeNode, weight: float) -> bool:
        """Checks a contribution's node against what is known, and remembers it.

        Returns:
            Whether it is a new one.

        Raises:
            Disagreement: it is no node of the tree, or contradicts an earlier contribution.
        """
        if sent.tree != self.tree:
            raise differs(rank, "a batch of", _batch(sent.tree), _batch(self.tree))
        node = sent.node
        known = self._known.get(node.first)
        if known is None:
            self._add(node, rank, weight)
            return True
        if known[:2] != (node, rank):
            raise self._overlap(rank, node, known)
        if known[2] != weight:
            text = f"rank {rank} has weight {known[2]:g} for {node}, and now {weight:g}"
            raise Disagreement(rank, text, weight)
        return False

    def _add(self, node: Node, rank: int, weight: float) -> None:
        if not is_node(node, self.count):
            text = f"rank {rank} sent {node}, which are no node of a tree of {self.count}"
            raise Disagreement(rank, text, node)
        at = bisect_left(self._firsts, node.first)
        # Known nodes are disjoint, so only the neighbours can overlap this one.
        for neighbour in self._firsts[max(0, at - 1) : at + 1]:
            other = self._known[neighbour]
            if other[0].first < node.stop and node.first < other[0].stop:
                raise self._overlap(rank, node, other)
        insort(self._firsts, node.first)
        self._known[node.first] = node, rank, weight
        self.ranks.add(rank)

    def _overlap(self, rank: int, node: Node, other: tuple[Node, int, float]) -> Disagreement:
        text = f"rank {rank} sent {node}, rank {other[1]} {other[0]}: no grain counts twice"
        return Disagreement(rank, text, node)


def _batch(tree: tuple[int, int]) -> str:
    return f"{tree[0]} grains of {tree[1]}"
