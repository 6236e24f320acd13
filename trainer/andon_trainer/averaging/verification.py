"""Verification on a worker: the sums of what it verifies, and what it attests of a round.

See `attesting` for the hashes. Nothing here is contributed: a grain that is verified leaves no
trace in what this worker sends, and its forward starts from the head's buffers like any other.

`mean_checks` compares what the reducers made of all sums.
"""

from __future__ import annotations

from andon.protocol.attestations import Attestation
from andon.protocol.grains import Grains
from andon_trainer.averaging.attesting import averages_hashes
from andon_trainer.averaging.grain_sums import GrainSums
from andon_trainer.averaging.loss_scale import LossScale
from andon_trainer.model.layout import ModelPlan

__all__ = ["Verification"]


class Verification:
    """What a worker of a line attests, beside the sums that it contributes. Used by one thread."""

    def __init__(
        self,
        plan: ModelPlan,
        own: GrainSums,
        loss_scale: LossScale | None = None,
    ) -> None:
        """Verifies nothing yet.

        Args:
            plan: the blocks.
            own: the sums of what this worker contributes, which hashes them.
            loss_scale: the scale that gradients have; None: none.
        """
        self._plan = plan
        self._own = own
        self._loss_scale = loss_scale
        self._verified = GrainSums(plan)

    @property
    def sums(self) -> tuple[GrainSums, GrainSums]:
        """This worker's own ones, and those that it verifies."""
        return self._own, self._verified

    @property
    def knows_own(self) -> bool:
        """Whether all grains that are in this worker's own sums were hashed."""
        return self._own.hashes is not None

    def begin(self, grains: Grains) -> None:
        """An attempt begins that attests; what was verified for an earlier one is verified anew."""
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

    def averages_hashes(self) -> list[bytes]:
        """The hashes of the components of the averages in `p.grad`."""
        return averages_hashes(self._plan)
