"""Attestations: what a worker says that it has computed, so that somebody else's can be compared.

docs/protocol-same-bits.md, "Verification", says which hashes they are, and who judges them.
"""

from __future__ import annotations

from dataclasses import dataclass

from andon.protocol.grains import Node

__all__ = ["COMPONENT_BYTES", "DIGEST_BYTES", "SAMPLE_BYTES", "Attestation"]

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
