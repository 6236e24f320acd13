"""Sums along the tree over a batch's grains, a tile at a time.

Theory of operation. The nodes that came partition the root. Which sums make the root of them is
worked out once, as a list of additions between registers: the contributions, which are only read,
and a few tiles. The last addition is into the tile of the result. With the left operand in a
register of its own the right one needs the next; so there are as many as the tree is deep, and
mostly one or two.

No addition is left out or done in another order for the sake of speed: the result is defined to the
bit (docs/protocol-same-bits.md).

Where the C module was built, it makes a float32 mean in one pass over memory, to the same bits.
`_tree.h` and this file must be changed together.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from andon.protocol.encoding import fused
from andon.protocol.grains import Node, children, fold, root_divisor
from andon.protocol.messages import BlockGradient

__all__ = ["TreeSum"]

Floats = npt.NDArray[np.float32]

Operand = tuple[bool, int]
"""Whether it is a register, and its number; else the number of a contribution."""


class TreeSum:
    """The nodes of one chunk, and their mean."""

    def __init__(self, contributions: Sequence[BlockGradient]) -> None:
        """Takes contributions that partition the root of their tree, all of FLOAT32."""
        count, grain = _tree_of(contributions[0])
        self._contributions = contributions
        self._root = Node(0, count)
        self._indices = {_node_of(each): at for at, each in enumerate(contributions)}
        weights = {_node_of(each): each.weight for each in contributions}
        self.weight: float = fold(weights, self._root, operator.add)
        """The sum of all weights, added along the tree."""
        self.divisor = root_divisor(self.weight, grain, count) if self.weight else np.float32(0)
        """What the root is divided by; 0 if by nothing."""
        self._additions: list[tuple[Operand, Operand, int]] = []
        self._in_order: list[int] = []
        """The contributions in the order of their grains."""
        self._sums = bytearray()
        """After each of these, how many additions have both operands and are not done yet."""
        self._result = self._compile(self._root, 0)
        # The tile of the result is register 0.
        others = max((into for _, _, into in self._additions), default=0)
        self._registers = [np.empty(0, np.float32)] * others

    @property
    def is_divided_well(self) -> bool:
        """Whether the divisor says as a float32 what the weights say."""
        return bool(np.isfinite(self.divisor)) and (self.weight > 0) == (self.divisor > 0)

    @property
    def is_gradient(self) -> bool:
        """Whether the mean is the only contribution, as it is."""
        return self.divisor == 1 and not self._additions

    def mean_in_one_pass(self, out: memoryview, *, past_caches: bool) -> bool:
        """Makes the whole mean in C. Returns whether that was possible, and all of it is finite.

        Set `past_caches` if this thread does not read `out` soon.
        """
        # Beside the sources there may be a module that was built from older ones.
        if fused is None or not hasattr(fused, "tree_mean"):
            return False
        payloads = tuple(self._contributions[at].payload for at in self._in_order)
        divisor = float(self.divisor)
        return bool(fused.tree_mean(out, payloads, bytes(self._sums), divisor, past_caches))

    def mean_into(self, start: int, out: Floats) -> None:
        """Makes the mean of as many elements, from `start` on, as `out` has."""
        count = out.size
        if self._registers and self._registers[0].size < count:
            self._registers = [np.empty(count, np.float32) for _ in self._registers]
        tiles = [out, *(each[:count] for each in self._registers)]

        def value(operand: Operand) -> Floats:
            in_register, at = operand
            if in_register:
                return tiles[at]
            return np.frombuffer(self._contributions[at].payload, "<f4")[start : start + count]

        for left, right, into in self._additions:
            np.add(value(left), value(right), out=tiles[into])
        if self.divisor:
            np.divide(value(self._result), self.divisor, out=out)
            return
        # Zeros, +0.0 each: but what is not finite must stay so, to be found.
        np.multiply(value(self._result), np.float32(0), out=out)
        np.add(out, np.float32(0), out=out)

    def _compile(self, node: Node, register: int) -> Operand:
        """Notes the additions that make a node's sum; returns where it is then."""
        if node in self._indices:
            self._in_order.append(self._indices[node])
            self._sums.append(0)
            return False, self._indices[node]
        below = children(node)
        assert below is not None, "the contributions partition the root"
        left = self._compile(below[0], register)
        right = self._compile(below[1], register + left[0])
        self._additions.append((left, right, register))
        self._sums[-1] += 1
        return True, register


def _node_of(contribution: BlockGradient) -> Node:
    assert contribution.node is not None, "the core mixes no nodes with other contributions"
    return contribution.node.node


def _tree_of(contribution: BlockGradient) -> tuple[int, int]:
    assert contribution.node is not None, "the core mixes no nodes with other contributions"
    return contribution.node.tree
