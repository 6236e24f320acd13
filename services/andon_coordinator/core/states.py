"""States: what the line is doing, and the table of what may change it.

Nothing is decided by the state (design rule 1): it is what people are shown. The table is the
only way from one state to another; a pair that it lacks is a mistake of this package.
"""

from __future__ import annotations

import enum

from andon_coordinator.core.effects import LineState

__all__ = ["TRANSITIONS", "Trigger", "next_state"]


class Trigger(enum.Enum):
    """What changes the line's state."""

    FORMED = "enough workers are in sync"
    FELL_SHORT = "too few workers are in sync"
    TRANSFER_BEGAN = "state moves to a worker"
    HALTED = "a defect or a person stopped the line"
    ANSWERED = "a person answered the halt"
    DRAIN_BEGAN = "a person ends the run"
    COMPLETED = "every worker left with the run done"


TRANSITIONS: dict[tuple[LineState, Trigger], LineState] = {
    (LineState.FORMING, Trigger.FORMED): LineState.RUNNING,
    (LineState.FORMING, Trigger.FELL_SHORT): LineState.FORMING,
    (LineState.FORMING, Trigger.TRANSFER_BEGAN): LineState.SYNCING,
    (LineState.FORMING, Trigger.HALTED): LineState.HALTED,
    (LineState.FORMING, Trigger.DRAIN_BEGAN): LineState.DRAINING,
    (LineState.FORMING, Trigger.COMPLETED): LineState.COMPLETE,
    (LineState.RUNNING, Trigger.FORMED): LineState.RUNNING,
    (LineState.RUNNING, Trigger.FELL_SHORT): LineState.FORMING,
    (LineState.RUNNING, Trigger.TRANSFER_BEGAN): LineState.SYNCING,
    (LineState.RUNNING, Trigger.HALTED): LineState.HALTED,
    (LineState.RUNNING, Trigger.DRAIN_BEGAN): LineState.DRAINING,
    (LineState.RUNNING, Trigger.COMPLETED): LineState.COMPLETE,
    (LineState.SYNCING, Trigger.FORMED): LineState.RUNNING,
    (LineState.SYNCING, Trigger.FELL_SHORT): LineState.FORMING,
    (LineState.SYNCING, Trigger.TRANSFER_BEGAN): LineState.SYNCING,
    (LineState.SYNCING, Trigger.HALTED): LineState.HALTED,
    (LineState.SYNCING, Trigger.DRAIN_BEGAN): LineState.DRAINING,
    (LineState.SYNCING, Trigger.COMPLETED): LineState.COMPLETE,
    # A journal that fails replaces the halt that it could not write down.
    (LineState.HALTED, Trigger.HALTED): LineState.HALTED,
    (LineState.HALTED, Trigger.ANSWERED): LineState.FORMING,
    (LineState.HALTED, Trigger.DRAIN_BEGAN): LineState.DRAINING,
    # The last step of a draining line forms and syncs like any other.
    (LineState.DRAINING, Trigger.FORMED): LineState.DRAINING,
    (LineState.DRAINING, Trigger.FELL_SHORT): LineState.DRAINING,
    (LineState.DRAINING, Trigger.TRANSFER_BEGAN): LineState.DRAINING,
    (LineState.DRAINING, Trigger.HALTED): LineState.HALTED,
    (LineState.DRAINING, Trigger.COMPLETED): LineState.COMPLETE,
}


def next_state(state: LineState, trigger: Trigger) -> LineState:
    """The state that `trigger` leads to from `state`."""
    assert (state, trigger) in TRANSITIONS, f"{trigger.name} can't happen in {state.name}"
    return TRANSITIONS[state, trigger]
