"""Schedules: how much work lies between two exchanges, and what a worker must be able to do for it.

A round assigns positions, exchanges, and commits, whatever the schedule. Schedules differ in how
many positions each worker gets, in what it computes of them, and in what is exchanged:

| schedule | positions of a round | what a worker sends |
|---|---|---|
| EVERY_STEP | the run's global batch | the mean gradient of its share |
| CADENCE | as many micro-batches as the line's counts say | the same |
| LOCAL | `local_steps` global batches | the change of its weights over its own optimizer steps |

With fragments a LOCAL round takes `local_steps / fragments` global batches, and workers send the
change of a part of the blocks.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

__all__ = [
    "AVERAGING",
    "BALANCE_CAPABILITY",
    "CADENCE_CAPABILITY",
    "FRAGMENTS_CAPABILITY",
    "LOCAL_CAPABILITY",
    "NESTEROV",
    "OVERLAP_CAPABILITY",
    "QUORUM_CAPABILITY",
    "LearningRateScaling",
    "OuterOptimizer",
    "Schedule",
]

BALANCE_CAPABILITY = "balance.v1"
"""The worker reports how long it computed (`Timings.busy_s`) and how many samples that covers."""
CADENCE_CAPABILITY = "cadence.v1"
"""The worker takes steps of any size, and obeys `micro_batches` and `learning_rate_scale`."""
LOCAL_CAPABILITY = "local.v1"
"""The worker can make optimizer steps of its own, and exchange the change of its weights."""
OVERLAP_CAPABILITY = "overlap.v1"
"""The worker can compute the next window while the last one's change travels."""
QUORUM_CAPABILITY = "quorum.v1"
"""The worker can be late: it goes on computing while it attends the others' rounds. It has LEARNING
as well."""

FRAGMENTS_CAPABILITY = "fragments.v1"
"""The worker can exchange a part of the model's blocks in a round, and keep what is left."""


class Schedule(enum.Enum):
    """What lies between two exchanges."""

    EVERY_STEP = "every-step"
    CADENCE = "cadence"
    LOCAL = "local"


class LearningRateScaling(enum.Enum):
    """How a learning rate follows the size of a batch."""

    NONE = "none"
    LINEAR = "linear"
    SQRT = "sqrt"

    def of(self, ratio: float) -> float:
        """The factor for a batch that is `ratio` times the one that a rate was chosen for."""
        match self:
            case LearningRateScaling.LINEAR:
                return ratio
            case LearningRateScaling.SQRT:
                return math.sqrt(ratio)
            case LearningRateScaling.NONE:
                return 1.0


@dataclass(frozen=True, slots=True)
class OuterOptimizer:
    """What applies the mean change of a window of local steps: SGD, with Nesterov's momentum.

    The default is plain averaging. Source: A. Douillard et al., "DiLoCo: Distributed
    Low-Communication Training of Language Models", arXiv:2311.08105, which uses rate 0.7 and
    momentum 0.9.
    """

    learning_rate: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        """Refuses what no optimizer takes."""
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ValueError(f"the outer learning rate must be above 0, not {self.learning_rate}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"the outer momentum must be from 0 below 1, not {self.momentum}")


AVERAGING = OuterOptimizer()
"""The new weights are the mean of all workers' weights."""
NESTEROV = OuterOptimizer(0.7, 0.9)
"""DiLoCo's choice."""
