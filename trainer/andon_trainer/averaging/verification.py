"""Verification on a worker: the sums of what it verifies, and what it attests of a round.

See `attesting` for the hashes. Nothing here is contributed: a grain that is verified leaves no
trace in what this worker sends, and its forward starts from the head's buffers like any other.

A worker that has computed or verified all grains of the batch, as each of two workers usually has,
makes the mean by itself as well. If that is not what came from the reducer, its digest of the
averages is one that nobody else has, so that the round can't become a record.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from andon.protocol.attestations import Attestation
from andon.protocol.encoding import Encoding
from andon.protocol.grains import Grains, fold
from andon_trainer.averaging.attesting import averages_digest, component_hash, digest_of
from andon_trainer.averaging.averaging import AveragingMember
from andon_trainer.averaging.grain_sums import GrainSums
from andon_trainer.averaging.loss_scale import LossScale
from andon_trainer.averaging.node_sums import added, divided, gradient_of
from andon_trainer.model.layout import ModelPlan

__all__ = ["Verification"]


class Verification:
    """What a worker of a line attests, beside the sums that it contributes. Used by one thread."""

    def __init__(
        self,
        member: AveragingMember | None,
        plan: ModelPlan,
        own: GrainSums,
        loss_scale: LossScale | None = None,
    ) -> None:
        """Verifies nothing yet.

        Args:
            member: this worker; None: it is alone, so no reducer makes its averages.
            plan: the blocks.
            own: the sums of what this worker contributes, which hashes them.
            loss_scale: the scale that gradients have; None: none.
        """
        self._member = member
        self._plan = plan
        self._own = own
        self._loss_scale = loss_scale
        self._verified = GrainSums(plan)
        self._grains: Grains | None = None

    @property
    def knows_own(self) -> bool:
        """Whether all grains that are in this worker's own sums were hashed."""
        return self._own.hashes is not None

    def begin(self, grains: Grains) -> None:
        """An attempt begins that attests; what was verified for an earlier one is verified anew."""
        self._grains = grains
        self._verified.begin(grains, attests=True)

    def end(self) -> None:
        """What was verified is attested, or not wanted: lets the memory go."""
        self._verified.clear()

    def take(self, grain: int, weight: float) -> None:
        """The backward of a grain that is verified is over: takes its gradient out of `p.grad`."""
        inverse = None if self._loss_scale is None else self._loss_scale.inverse
        self._verified.take(grain, weight, inverse)

    def leave_out(self, grain: int) -> None:
        """A grain that is verified has the weight 0, or no sample."""
        self._verified.leave_out(grain)

    def note_samples(self, grain: int, hashes: bytes, *, verified: bool) -> None:
        """The loop body is given samples for a grain, which were hashed."""
        sums = self._verified if verified else self._own
        assert sums.hashes is not None
        sums.hashes.samples[grain] = hashes

    def attested(self, itemised: frozenset[int]) -> tuple[Attestation, ...]:
        """All grains and maximal nodes: this worker's own ones, then those that it verified.

        Call it once everything was sent. `itemised`: grains whose components' hashes are wanted.
        """
        own, verified = self._own, self._verified
        verified.hash_nodes()
        assert own.hashes is not None
        assert verified.hashes is not None
        return (
            *own.hashes.attested(own.nodes, itemised),
            *verified.hashes.attested(verified.nodes, itemised),
        )

    def averages_digest(self, total_weight: float) -> bytes:
        """The digest of the averages in `p.grad`; nobody else's, if they are not the mean.

        Call it before `end`. `total_weight`: that of the averages.
        """
        found = averages_digest(self._plan)
        if not self._has_all:
            return found
        expected = digest_of(map(component_hash, self._gradients(total_weight)))
        if expected == found:
            return found
        assigned = None if self._member is None else self._member.position.assigned
        assert assigned is not None
        return digest_of([found, expected, assigned.rank.to_bytes(4, "big")])

    @property
    def _has_all(self) -> bool:
        """Whether all grains are here, each once, and averages are sent without rounding."""
        if self._member is None:
            return False
        policy = self._member.policy
        nodes = [*self._own.nodes, *self._verified.nodes]
        grains = {at for node in nodes for at in range(node.first, node.stop)}
        assert self._grains is not None
        once = sum(map(len, nodes)) == len(grains) == self._grains.count
        return once and (policy.answer_encoding or policy.encoding) is Encoding.FLOAT32

    def _gradients(self, total_weight: float) -> Iterator[torch.Tensor | None]:
        """What should be in `p.grad`: the mean of the sums that are here."""
        grains, scale = self._grains, self._loss_scale
        assert grains is not None
        factor = None if scale is None else scale.factor
        for block, parameters in enumerate(self._plan.parameters):
            both = (self._own[block], self._verified[block])
            sums = {node: each[node] for each in both for node in each.nodes}
            root = fold(sums, grains.root, added)
            for parameter, part in zip(parameters, root, strict=True):
                yield self._gradient(parameter, part, total_weight, factor)

    def _gradient(
        self,
        parameter: nn.Parameter,
        root: torch.Tensor | None,
        total_weight: float,
        factor: torch.Tensor | None,
    ) -> torch.Tensor | None:
        if total_weight == 0.0:
            return torch.zeros_like(parameter)
        if root is None:
            return None
        grains = self._grains
        assert grains is not None
        # A copy: with one grain the root is a sum that may be sent again.
        mean = divided(root.clone(), total_weight, grains.micro_batch, grains.count)
        return gradient_of(parameter, mean, factor)
