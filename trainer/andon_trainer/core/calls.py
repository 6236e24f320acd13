"""Calls: the exchanges of one round, in the order in which every worker makes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from andon.protocol.encoding import Encoding
from andon.protocol.messages import Operation, TreeNode
from andon.protocol.run_settings import Policy

__all__ = ["Bytes", "Call", "Floats", "NodePart", "mean_of_gradients"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class NodePart:
    """One of the contributions of a worker of a line of grains: the sum of a node."""

    node: TreeNode
    weight: float
    """Sum of its grains' weights, added along the tree; may be 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One exchange of a round: of some blocks, of bytes, or of nothing (a barrier).

    `data` is the buffer that rank 0 sends from, and that every other rank receives into. Its first
    `head_bytes` describe the bytes that follow and must be the same on every worker.
    """

    name: str
    """What the script called, for people."""
    sequence: int = 0
    """Its number in the round. Workers pair their calls by it."""
    blocks: range = range(0)
    data: Bytes | None = None
    head_bytes: int = 0
    exact: bool = False
    """Whether its numbers travel as float32, whatever the line's encoding is."""
    nodes: tuple[NodePart, ...] = ()
    """The worker's contributions by node, in rising order; empty: it has one, or abstains."""
    mean: Operation = Operation.WEIGHTED_MEAN
    """Which mean its blocks have; see `mean_of_gradients`."""

    def encoding(self, policy: Policy) -> Encoding:
        """How this call's contributions travel."""
        return Encoding.FLOAT32 if self.exact else policy.encoding

    def answer_encoding(self, policy: Policy) -> Encoding:
        """How its averages travel."""
        return Encoding.FLOAT32 if self.exact else policy.answer_encoding or policy.encoding

    @property
    def operation(self) -> Operation | None:
        """What the reducer computes; None if every worker abstains."""
        if self.data is not None:
            return Operation.BROADCAST
        return self.mean if self.blocks else None


def mean_of_gradients(policy: Policy) -> Operation:
    """The mean that gradients have, and no other numbers."""
    return Operation.TRIMMED_MEAN if policy.trims else Operation.WEIGHTED_MEAN
