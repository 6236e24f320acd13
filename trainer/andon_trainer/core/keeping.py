"""Keeping: reusing the gradient of a void step, so that a worker computes no position twice.

Theory of operation. The gradient that a worker sent stays in the host buffers that it was sent
from until the next one is staged there, so keeping it costs no memory. It is the float32 mean over
the positions of the worker's share, and it belongs to the head whose weights it was computed from.
If the next share at that head is the same, the same bytes are sent again. If the next share is
larger, `p.grad` starts as the mean times its weight in the share's unit (one float32 product an
element), backward adds the missing positions, and the last micro-batch's scale turns the sum into a
mean. Otherwise everything is computed anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from andon.protocol.halts import HaltEvidence, HaltReason
from andon.protocol.records import Key
from andon.protocol.shards import Ranges, subtract
from andon_trainer.core.events import Assigned

__all__ = ["Kept", "doubted"]

# Halts that say nothing about anybody's numbers.
_HARMLESS = {
    HaltReason.OPERATOR,
    HaltReason.REPEATED_FAILURE,
    HaltReason.JOURNAL,
    HaltReason.STATE_LOST,
    HaltReason.TOO_FEW_WORKERS,
}

# Halts that name the one worker whose numbers were wrong before they were averaged.
_OF_ONE_WORKER = {HaltReason.NON_FINITE_GRADIENT, HaltReason.NON_FINITE_LOSS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The gradient of a share whose round became void; its values are in the staging buffers."""

    parent: Key | None
    """The head whose weights it was computed from."""
    epoch: int
    positions: Ranges
    weight: float
    loss_sum: float
    correct: int | None
    """Samples that the model got right; None if the script does not count them."""
    doubts: int
    """`Conversation.doubts` when its computation began."""
    overflow: bool = False
    """Whether it was computed with a scale at which it overflowed, and holds zeros for that."""
    grains: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """On a line of grains: the weight and the weighted loss of each, whose sums are kept."""

    def serves(self, assigned: Assigned, doubts: int) -> bool:
        """Whether all of it belongs to what `assigned` asks of this worker."""
        return (
            self.doubts == doubts
            and self.parent == assigned.parent
            and self.epoch == assigned.epoch
            # Positions can be added to a mean, but none can be taken out of it.
            and not subtract(self.positions, assigned.positions)
        )


def doubted(halt: HaltEvidence, worker: int) -> bool:
    """Whether a halt casts doubt on what `worker` computed, so that it must be computed anew.

    If the worker that caused the halt sent the same bytes again, the retry would halt again. If the
    halt does not say for certain whose numbers were wrong, everybody's are doubted.
    """
    if halt.reason in _HARMLESS:
        return False
    uncertain = halt.worker is None or halt.claimed
    return halt.reason not in _OF_ONE_WORKER or uncertain or halt.worker == worker
