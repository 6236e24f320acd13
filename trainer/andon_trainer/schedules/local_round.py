"""What a worker of local steps knows of one assignment, and of the steps of a pile."""

from __future__ import annotations

from dataclasses import dataclass

from andon.protocol.shards import Ranges
from andon_trainer.schedules.step_state import StepState

__all__ = ["LocalRound", "PileSums"]


@dataclass(slots=True)
class PileSums:
    """The sums over the local steps of a pile."""

    steps: int = 0
    weight: float = 0.0
    loss_sum: float = 0.0
    correct: int | None = 0

    def add(self, state: StepState) -> None:
        """Adds a local step, which is made."""
        self.steps += 1
        self.weight += state.weight
        self.loss_sum += state.loss_sum
        both = self.correct is not None and state.correct is not None
        self.correct = (self.correct or 0) + (state.correct or 0) if both else None


@dataclass(slots=True)
class LocalRound:
    """One assignment, and how far this worker is with it."""

    state: StepState
    """What is reported of it."""
    parts: list[Ranges]
    """The positions of each local step that is to be made, those of the due pile first."""
    due: int
    """How many of them are of the due pile."""
    left: int = 0
    """How many local steps of the other pile are left for the next round."""
    made: int = 0
    """How many of them were made."""
    sent: bool = False
    """Whether the exchange was begun, or could not be."""
    void: bool = False
    """Whether it could not be begun."""
    over: bool = False
    """Whether the round's outcome was awaited."""

    @property
    def is_last(self) -> bool:
        """Whether the present local step is the last one."""
        return self.made == len(self.parts) - 1
