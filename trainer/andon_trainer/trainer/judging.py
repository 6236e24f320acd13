"""Judging: which evaluation is the best, and whether too many were no better."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from andon_trainer.trainer.callbacks import Evaluation
from andon_trainer.trainer.settings import Fit

__all__ = ["Judge"]


class Judge:
    """Compares a run's evaluations. Its state is in checkpoints, and the same on all workers."""

    def __init__(self, fit: Fit) -> None:
        """There was no evaluation yet."""
        self._name, self._mode, self._patience = fit.judged_by, fit.best_is, fit.patience
        self.best: Evaluation | None = None
        """The best evaluation of the run so far; None if there was none."""
        self._since = 0
        """Evaluations since the best one."""

    def is_better(self, evaluation: Evaluation) -> bool:
        """Whether this evaluation is the best so far; a value that is not a number never is.

        Raises:
            ValueError: it lacks the metric to judge by.
        """
        value = evaluation.value(self._name)
        if math.isnan(value) or (self.best is not None and not self._beats(value, self.best)):
            self._since += 1
            return False
        self.best, self._since = evaluation, 0
        return True

    def _beats(self, value: float, best: Evaluation) -> bool:
        than = best.value(self._name)
        return value < than if self._mode == "min" else value > than

    @property
    def verdict(self) -> str:
        """Why the run should end; empty if it should go on."""
        if self._patience is None or self._since < self._patience:
            return ""
        return f"no better {self._name} in {self._since} evaluations"

    def state_dict(self) -> dict[str, Any]:
        """The best evaluation, and how many came after it."""
        return {"best": asdict(self.best) if self.best else None, "since": self._since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a state that `state_dict` returned."""
        self.best = Evaluation(**state["best"]) if state["best"] else None
        self._since = state["since"]
