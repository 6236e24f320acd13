"""The best evaluation so far, as state that every worker, newcomer and checkpoint has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["BEST", "BestSoFar"]

BEST = "andon.best"
"""Its name in checkpoints."""

_MODES = ("min", "max")


@dataclass(slots=True)
class BestSoFar:
    """The best value, and how many evaluations came after it."""

    value: float | None = None
    step: int = 0
    """The step whose weights have it."""
    since: int = 0
    """Number of evaluations since."""

    def take(self, value: float, mode: str, step: int) -> bool:
        """Takes an evaluation; returns whether it is the best so far. NaN never is.

        Raises:
            ValueError: the mode is neither `min` nor `max`.
        """
        if mode not in _MODES:
            raise ValueError(f"mode is min or max, not {mode!r}")
        if math.isnan(value):
            better = False
        elif self.value is None:
            better = True
        else:
            better = value < self.value if mode == "min" else value > self.value
        if better:
            self.value, self.step, self.since = value, step, 0
        else:
            self.since += 1
        return better

    def state_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return {"value": self.value, "step": self.step, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over another worker's, or a checkpoint's."""
        self.value, self.step, self.since = state["value"], state["step"], state["since"]
