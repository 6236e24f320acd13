"""Values of the line with defaults, so that a test says only what it is about."""

from __future__ import annotations

from typing import Any

from andon.protocol.layout import Layout
from andon.protocol.records import Key, PositionRange
from andon.protocol.run_settings import RunPlan
from andon_coordinator.core import effects as do
from andon_coordinator.core import events as on
from andon_coordinator.core.join_answers import JoinStatus
from andon_coordinator.core.step_results import StepContribution, StepResult

__all__ = ["KEY", "PLAN", "accepted", "assignment", "contribution", "joining", "ready", "result"]

KEY = Key(1, 1)
PLAN = RunPlan(global_batch=4, dataset_size=8)


def assignment(**told: Any) -> do.Assignment:
    """Rank 0's work in a round of two: the first batch, and none of it."""
    usual: dict[str, Any] = {
        **{"key": KEY, "parent": None, "roster": (0, 1), "rank": 0, "step": 1, "attempt": 0},
        **{"epoch": 0, "positions": (), "batch": PositionRange(0, 4)},
    }
    return do.Assignment(**{**usual, **told})


def contribution(**given: Any) -> StepContribution:
    """A worker alone gave the first batch."""
    usual: dict[str, Any] = {
        **{"worker": 0, "rank": 0, "positions": (PositionRange(0, 4),)},
        **{"samples": 4, "weight": 4.0, "loss_sum": 4.0},
    }
    return StepContribution(**{**usual, **given})


def result(**more: Any) -> StepResult:
    """What the first batch came to."""
    usual: dict[str, Any] = {
        **{"epoch": 0, "batch": PositionRange(0, 4), "loss": 1.0, "samples": 4, "weight": 4.0},
        **{"attempt": 0, "seconds": 1.0, "contributions": ()},
    }
    return StepResult(**{**usual, **more})


def ready(**said: Any) -> on.Ready:
    """A right report of one of two workers."""
    usual: dict[str, Any] = {
        **{"key": KEY, "loss_sum": 2.0, "weight": 2.0, "samples": 2},
        **{"total_weight": 4.0, "world_size": 2},
    }
    return on.Ready(**{**usual, **said})


def joining(**said: Any) -> on.JoinRequest:
    """A fresh worker's Join."""
    usual: dict[str, Any] = {"run_id": "7f3a", "incarnation": 1, "layout": Layout(()), "plan": PLAN}
    return on.JoinRequest(**{**usual, **said})


def accepted(**told: Any) -> do.AcceptJoin:
    """The answer to it."""
    usual: dict[str, Any] = {
        **{"stream": 5, "worker": 1, "plan": PLAN, "join_status": JoinStatus.FRESH},
        **{"head": None, "step": 0, "halt": None},
    }
    return do.AcceptJoin(**{**usual, **told})
