"""Earlier sums: what a worker attested of a step before it computes that anew.

Theory of operation. After two workers differed all of them compute the disputed grains anew. Who
was wrong once is right now, and contradicts itself: it alone has had both results. So when an
attempt begins that is computed anew, what was attested of the one before is looked for where it
lies: in the memory that sums were sent from, or in the sums themselves. Only a vector that still
has the digest that was attested is kept. As long as nobody differs, nothing is copied or compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from andon.protocol.attestations import Attestation, NodeApart
from andon.protocol.grains import Node
from andon_trainer.averaging.attesting import component_hash, digest_of
from andon_trainer.averaging.grain_sums import GrainSums, NodeStaging
from andon_trainer.averaging.mean_checks import element_apart, pieces_of
from andon_trainer.core.calls import Floats
from andon_trainer.model.layout import ModelPlan

__all__ = ["EarlierSums"]


class EarlierSums:
    """Finds where a worker has attested two results of one node. Used by one thread."""

    def __init__(
        self, plan: ModelPlan, sums: tuple[GrainSums, GrainSums], staging: NodeStaging
    ) -> None:
        """Knows nothing yet.

        Args:
            plan: the blocks.
            sums: this worker's own ones, and those that it verifies.
            staging: has the vectors of its own ones, as they were sent.
        """
        self._sizes = [[part.numel() for part in block] for block in plan.parameters]
        self._sums = sums
        self._staging = staging
        self._attested: list[tuple[Node, bytes]] = []
        """By the last report."""
        self._kept: list[tuple[Node, bytes, list[Floats]]] = []

    def begin(self, *, anew: bool) -> None:
        """An attempt begins, and its sums are to be dropped; `anew`: since results differ."""
        # A void attempt has no report: what was attested before it stays.
        attested, self._attested = self._attested, []
        if not anew:
            self._kept = []
            return
        for node, digest in attested:
            vectors = self._find(node, digest)
            if vectors is not None:
                self._kept.append((node, digest, [each.copy() for each in vectors]))

    def compare(self, attested: Sequence[Attestation]) -> Iterator[NodeApart]:
        """What is attested now, beside what was before the attempt: where the two differ."""
        self._attested = [(each.node, each.digest) for each in attested]
        for node, digest in self._attested if self._kept else ():
            for earlier, other, vectors in self._kept:
                if earlier != node or other == digest:
                    continue
                now = self._find(node, digest)
                element = None if now is None else element_apart(now, vectors)
                if element is not None:
                    yield NodeApart(node=node, own=digest, other=other, element=element)

    def _find(self, node: Node, digest: bytes) -> list[Floats] | None:
        """The vectors of a maximal node, by block; None: they are no longer what was attested."""
        return next((it for it in self._candidates(node) if self._digest(it) == digest), None)

    def _candidates(self, node: Node) -> Iterator[list[Floats]]:
        own = self._sums[0].nodes
        if node in own:
            number = own.index(node)
            blocks = range(len(self._sizes))
            yield [self._staging.flats(block)[number].numpy() for block in blocks]
        for sums in self._sums:
            if node in sums.nodes:
                yield [sums.flat(block, node) for block in range(len(self._sizes))]

    def _digest(self, vectors: Sequence[Floats]) -> bytes:
        return digest_of(map(component_hash, pieces_of(vectors, self._sizes)))
