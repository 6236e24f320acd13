"""Step results: what a step came to, and what of its epoch a MARK skips.

The journal keeps either with its record.
"""

from __future__ import annotations

from dataclasses import dataclass

from andon.protocol.records import PositionRange
from andon.protocol.run_settings import LEAST_TRIMMED

__all__ = ["Skip", "StepContribution", "StepResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContribution:
    """What one worker of the roster contributed to a step."""

    worker: int
    rank: int
    positions: tuple[PositionRange, ...]
    samples: int
    weight: float
    loss_sum: float
    late: int = 0
    """Out of how many consecutive records it was left before, while it computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of a step; its positions are in epoch `epoch`.

    `loss` is the weighted mean over the roster, in float64; `seconds` is the time since the round's
    assignments were sent.
    """

    epoch: int
    batch: PositionRange
    loss: float
    samples: int
    weight: float
    attempt: int
    seconds: float
    contributions: tuple[StepContribution, ...]
    stop_reason: str = ""
    correct: int | None = None
    gradient_norm: float | None = None
    """The L2 norm of the averaged gradients, if the policy asks for it."""
    overflow: bool = False
    """Whether scaled gradients overflowed: the step counts, and moved no weight."""
    gradient_scale: float = 1.0
    """What everybody multiplies the averaged gradient with, before the optimizer."""
    change_scale: float | None = None
    """What the mean change of the weights was multiplied with; None: the line has no quorum. If it
    has one, the contributions say what the step covers, of the batch and of what was owed."""
    trimmed: int | None = None
    """How many of each element's contributions its mean left out at each end; 0 if they were too
    few, so that it was the weighted mean. None: the line trims nothing."""

    @property
    def contributors(self) -> int:
        """How many workers contributed with a weight above 0."""
        return sum(part.weight > 0 for part in self.contributions)

    @property
    def mean_in_words(self) -> str:
        """Which mean it had, of a line that trims."""
        if not self.trimmed:
            return (
                f"the weighted mean: {self.contributors} contributed, and a trimmed mean needs "
                f"{LEAST_TRIMMED}"
            )
        return (
            f"the trimmed mean: of {self.contributors} contributions to each element the "
            f"{self.trimmed} lowest and the {self.trimmed} highest are left out"
        )


@dataclass(frozen=True, slots=True)
class Skip:
    """Positions that a MARK skips, and the halt whose answer asked for it; 0: the script did."""

    epoch: int
    positions: PositionRange
    halt_id: int
    operator: str
    ranges: tuple[PositionRange, ...] | None = None
    """What of them, and of what was owed, it skips on a line with a quorum; None: `positions`."""
    earlier: tuple[tuple[int, PositionRange], ...] = ()
    """Epochs before that one and what it skips of them, if the line went back over their ends."""

    @property
    def by_epoch(self) -> tuple[tuple[int, PositionRange], ...]:
        """Each epoch of which it skips something, and what."""
        return (*self.earlier, (self.epoch, self.positions))
