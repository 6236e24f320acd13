"""The present step: what this worker has done of it so far."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from andon_trainer.core.events import Assigned
from andon_trainer.core.keeping import Kept
from andon_trainer.core.reports import NO_DIGEST, Digest
from andon_trainer.gradients.averaging import Averaged

__all__ = ["Phase", "Present"]


class Phase(enum.Enum):
    """Where a step stands on this worker."""

    ACCUMULATING = enum.auto()
    """Micro-batches are missing."""
    AVERAGED = enum.auto()
    """`p.grad` is the mean; the commit is missing."""
    COMMITTED = enum.auto()
    """Over: the weights moved, or may."""
    VOID = enum.auto()
    """Over without a commit: the same positions are dealt again."""


@dataclass(slots=True)
class Present:
    """One step, from its assignment to its end."""

    assigned: Assigned
    samples: int
    """Samples of this worker's share."""
    doubts: int = 0
    """How often this worker's numbers had been doubted when it began."""
    kept: Kept | None = None
    """What an earlier attempt left of this share: it counts, and is not computed again."""
    borrowed: bool = False
    """Whether there is nothing to compute, and its samples are borrowed."""
    digest: Digest = NO_DIGEST
    phase: Phase = Phase.ACCUMULATING
    waiting: int = 0
    """Samples of the micro-batch that the loop has, until backward took it."""
    last: bool = False
    """Whether that micro-batch is the share's last."""
    micro_batches: int = 0
    """How many of them went backward."""
    weight: float = 0.0
    loss_sum: float = 0.0
    correct: int | None = 0
    """Samples that the model got right; None once a micro-batch did not say."""
    data_s: float = 0.0
    averaged: Averaged | None = field(default=None)
