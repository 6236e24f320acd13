"""Attesting: hashes of the sums that a worker makes of its grains, and of those that it verifies.

Theory of operation. In a verified round a worker computes some grains of others as well, and says
what it has made of each. Of its own grains it hashes each leaf as the addition reads it, before the
addition changes it, and each maximal node as it is sent. The grains that it verifies are added up
in sums of their own, of which nothing is sent. docs/protocol-same-bits.md, section 37, defines the
hashes. On a CPU they are taken where the numbers lie; a GPU's numbers are brought to the host.

Rounds that are not verified have none of this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from andon.protocol.attestations import Attestation
from andon.protocol.grains import Node
from andon_trainer.averaging.node_sums import Parts
from andon_trainer.model.layout import ModelPlan

try:
    import xxhash
except ImportError:  # Then this worker does not say that it verifies.
    if not TYPE_CHECKING:
        xxhash = None

__all__ = ["SumHashes", "averages_hashes", "can_attest", "component_hash", "digest_of"]


def can_attest() -> bool:
    """Whether this process can hash: `andon[trainer]` brings what that takes."""
    return xxhash is not None


def component_hash(values: torch.Tensor | None) -> bytes:
    """XXH3-128 of a component as float32, C-contiguous and little-endian; None: absent, no bytes.

    A float32 tensor in host memory is not copied, if it is contiguous.
    """
    if values is None:
        return xxhash.xxh3_128_digest(b"")
    dense = values.detach()
    dense = dense.to_dense() if dense.is_sparse else dense
    return xxhash.xxh3_128_digest(dense.float().cpu().contiguous().numpy().data)


def digest_of(hashes: Iterable[bytes]) -> bytes:
    """The digest of a sum: XXH3-128 over the hashes of all of its components, in their order."""
    return xxhash.xxh3_128_digest(b"".join(hashes))


def averages_hashes(plan: ModelPlan) -> list[bytes]:
    """The hashes of the averages' components, as the optimizer will read them in `p.grad`."""
    return [component_hash(parameter.grad) for block in plan.parameters for parameter in block]


class SumHashes:
    """The hashes of some sums, by node and block. Used by one thread at a time."""

    def __init__(self, plan: ModelPlan) -> None:
        """There are none yet."""
        self._sizes = [[part.numel() for part in block] for block in plan.parameters]
        self._hashes: dict[Node, dict[int, bytes]] = {}
        self.samples: dict[int, bytes] = {}
        """Of each grain, what the loop was given for it; see `data.sample_hashes`."""

    def take(self, node: Node, block: int, parts: Parts) -> None:
        """Hashes a block of a node's sum; one that was hashed before is replaced."""
        self._hashes.setdefault(node, {})[block] = b"".join(map(component_hash, parts))

    def take_flat(self, node: Node, block: int, flat: torch.Tensor, parts: Parts) -> None:
        """The same of the vector that is sent.

        Args:
            node: the node.
            block: the block's index.
            flat: its components one after another, float32 in host memory.
            parts: the sum that was copied there; it says which components are absent.
        """
        pieces = zip(torch.split(flat, self._sizes[block]), parts, strict=True)
        self.take(node, block, [None if part is None else piece for piece, part in pieces])

    def digest(self, node: Node) -> bytes:
        """The digest of a sum all of whose blocks were hashed."""
        return digest_of(self._hashes[node][block] for block in range(len(self._sizes)))

    def take_over(self, other: SumHashes) -> None:
        """Adds what another process of this worker has hashed of its own grains."""
        self._hashes |= other._hashes
        self.samples |= other.samples

    def clear(self) -> None:
        """Nothing was hashed."""
        self._hashes, self.samples = {}, {}

    def attested(
        self, nodes: Sequence[Node], itemised: frozenset[int] = frozenset()
    ) -> Iterator[Attestation]:
        """What is attested: every grain of some maximal nodes, and those nodes; in rising order.

        `itemised`: the grains whose components' hashes are wanted.
        """
        leaves = (Node(at, at + 1) for node in nodes for at in range(node.first, node.stop))
        for node in sorted({*nodes, *leaves}):
            hashes = [self._hashes[node][block] for block in range(len(self._sizes))]
            single = len(node) == 1
            yield Attestation(
                node=node,
                digest=digest_of(hashes),
                samples=self.samples.get(node.first, b"") if single else b"",
                components=b"".join(hashes) if single and node.first in itemised else b"",
            )
