"""Checks of the line's results: by a worker's own mean of all nodes, and by its earlier sums.

See `mean_checks` for the first, and `earlier_sums` for the second.
"""

from __future__ import annotations

from collections.abc import Sequence

from andon.protocol.attestations import Attestation, MeanCheck, NodeApart
from andon.protocol.grains import Grains
from andon_trainer.averaging.averaging import Averaging
from andon_trainer.averaging.earlier_sums import EarlierSums
from andon_trainer.averaging.grain_sums import GrainSums, NodeStaging
from andon_trainer.averaging.mean_checks import MeanChecks
from andon_trainer.model.layout import ModelPlan

__all__ = ["ResultChecks"]


class ResultChecks:
    """Compares what a worker can of a round's results. Used by one thread."""

    def __init__(
        self,
        averaging: Averaging,
        plan: ModelPlan,
        sums: tuple[GrainSums, GrainSums],
        staging: NodeStaging,
        *,
        scaled: bool,
    ) -> None:
        """Compares nothing yet; see `MeanChecks` for the arguments.

        `scaled`: whether the mean has a loss scale in `p.grad`, and is no copy of what came.
        """
        self.means = MeanChecks(averaging, plan, sums, staging)
        """Has exchanges of its own, behind that of the gradients."""
        self._earlier = EarlierSums(plan, sums, staging)
        self._scaled = scaled
        self._grains: Grains | None = None
        self.mean_check: MeanCheck | None = None
        """What the last round's end has shown; None: nobody asked."""

    def begin(self, grains: Grains, *, anew: bool) -> None:
        """An attempt begins; `anew`: results of the one before differed."""
        self._earlier.begin(anew=anew)
        self._grains = grains

    def finish(self, total_weight: float | None) -> None:
        """The round is over; `total_weight`: that of the averages, None if it is void."""
        self.mean_check = None
        if total_weight is not None:
            assert self._grains is not None
            self.mean_check = self.means.finish(self._grains, total_weight)

    def apart(
        self, hashes: Sequence[bytes], attested: Sequence[Attestation]
    ) -> tuple[NodeApart, ...]:
        """Results that differ and of which this worker has both; ask once, after `finish`.

        Args:
            hashes: those of the components of `p.grad`.
            attested: what this worker attests.
        """
        assert self._grains is not None
        if not self._scaled:
            self.means.compare_written(hashes, self._grains.root)
        return (*self.means.apart, *self._earlier.compare(attested))
