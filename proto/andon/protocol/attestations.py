"""Attestations: what a worker says that it has computed, so that somebody else's can be compared.

docs/protocol-same-bits.md, "Verification", says which hashes they are, and who judges them.
"""

from __future__ import annotations

from dataclasses import dataclass

from andon.protocol.grains import Node

__all__ = [
    "COMPONENT_BYTES",
    "DIGEST_BYTES",
    "SAMPLE_BYTES",
    "Attestation",
    "ElementApart",
    "MeanCheck",
    "NodeApart",
    "NodeOwner",
]

DIGEST_BYTES = 16
"""XXH3-128, in its canonical form."""
COMPONENT_BYTES = DIGEST_BYTES
SAMPLE_BYTES = 8
"""XXH3-64, likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attestation:
    """What a worker has computed for one node."""

    node: Node
    digest: bytes
    """Of the sum's components, `DIGEST_BYTES`."""
    samples: bytes = b""
    """Of a leaf: `SAMPLE_BYTES` for each of its positions, or once for all of them."""
    components: bytes = b""
    """`COMPONENT_BYTES` for each component of the layout; empty if nobody asked for them."""

    def __post_init__(self) -> None:
        """Refuses what can't be an attestation."""
        if len(self.digest) != DIGEST_BYTES:
            raise ValueError(f"a digest has {DIGEST_BYTES} bytes, not {len(self.digest)}")
        if len(self.samples) % SAMPLE_BYTES or (self.samples and len(self.node) > 1):
            raise ValueError(f"{len(self.samples)} bytes are no samples of {self.node}")
        if len(self.components) % COMPONENT_BYTES:
            raise ValueError(f"{len(self.components)} bytes are no hashes of components")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOwner:
    """A maximal node of somebody's share."""

    node: Node
    rank: int
    """Who contributes it."""
    relayed: bool
    """Whether its owner sends it to all, since somebody has neither computed nor verified it."""


@dataclass(frozen=True, slots=True)
class ElementApart:
    """An element of which there are two values."""

    block: int
    element: int
    """Counted from the block's first."""
    expected: float
    came: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanCheck:
    """The mean that a worker made of all nodes by itself, beside the one that came."""

    expected: bytes
    """`DIGEST_BYTES`, of its own mean."""
    came: bytes
    """Likewise of what the reducers sent."""
    relayed: tuple[bytes, ...] = ()
    """Likewise of each relayed node, in rising order, as it came here."""
    apart: ElementApart | None = None
    """The first element in which the two means differ."""

    def __post_init__(self) -> None:
        """Refuses digests of another length."""
        for each in (self.expected, self.came, *self.relayed):
            if len(each) != DIGEST_BYTES:
                raise ValueError(f"a digest has {DIGEST_BYTES} bytes, not {len(each)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeApart:
    """Two results of a node, and the first element in which they differ.

    Whoever says so has both. Of averages the node is the root.
    """

    node: Node
    own: bytes
    """`DIGEST_BYTES`: of its own result, as it attested it. Its value is `element.expected`."""
    other: bytes
    """Likewise of the other one, whose value is `element.came`."""
    element: ElementApart

    def __post_init__(self) -> None:
        """Refuses digests of another length."""
        for each in (self.own, self.other):
            if len(each) != DIGEST_BYTES:
                raise ValueError(f"a digest has {DIGEST_BYTES} bytes, not {len(each)}")
