"""Keeping: what a void step leaves behind, so that a worker computes no position twice.

Theory of operation. The gradient that a worker sent lies in the tap's host buffers until the next
one is staged there, so keeping it takes no memory. It is the float32 mean over the positions of
that share, and belongs to the head whose weights it was computed from. If the next share at that
head is the same, the same bytes are sent again. If it is larger, `p.grad` starts at mean times
weight (one float32 product an element), backward adds the missing positions, and the last one's
scale makes a mean of it. Anything else is computed anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from andon.protocol.halts import HaltEvidence, HaltReason
from andon.protocol.records import Key
from andon.protocol.shards import Ranges, subtract
from andon_trainer.core.events import Assigned

__all__ = ["Kept", "doubted"]

# Nothing was wrong with anybody's numbers.
_HARMLESS = {
    HaltReason.OPERATOR,
    HaltReason.REPEATED_FAILURE,
    HaltReason.JOURNAL,
    HaltReason.STATE_LOST,
    HaltReason.TOO_FEW_WORKERS,
}

# One worker's numbers were wrong before they were averaged, and the halt names it.
_OF_ONE_WORKER = {HaltReason.NON_FINITE_GRADIENT, HaltReason.NON_FINITE_LOSS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A share's gradient that was sent in vain; its values lie in the buffers they left from."""

    parent: Key | None
    """The head that it was computed from."""
    epoch: int
    positions: Ranges
    weight: float
    loss_sum: float
    correct: int | None
    """Samples of it that the model got right; None if the script does not count them."""
    doubts: int
    """How often this worker's numbers had been doubted when its computing began."""

    def serves(self, assigned: Assigned, doubts: int) -> bool:
        """Whether it is part of what an assignment wants of this worker."""
        return (
            self.doubts == doubts
            and self.parent == assigned.parent
            and self.epoch == assigned.epoch
            and not subtract(self.positions, assigned.positions)
        )


def doubted(halt: HaltEvidence, worker: int) -> bool:
    """Whether a halt throws doubt on what `worker` computed, so that it must be computed anew.

    A retry would come to the same end if whoever caused the halt sent the same bytes again. Where
    the halt does not say for sure whose numbers were wrong, everybody's are doubted.
    """
    if halt.reason in _HARMLESS:
        return False
    return halt.reason not in _OF_ONE_WORKER or halt.worker in (None, worker)
