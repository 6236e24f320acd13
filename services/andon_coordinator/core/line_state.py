"""The line's state, as people see it, and the table of what changes it.

Rules read the state only to know whether the line trains, is halted, drains or is complete.
Everything else follows from the chain, the members, the open round and the pending record.
"""

from __future__ import annotations

import enum

__all__ = ["TRANSITIONS", "LineState", "Trigger", "next_state"]


class LineState(enum.Enum):
    """What the line is doing, for people; values are those of `andon.v1.LineState`."""

    __hash__ = object.__hash__  # See `Encoding`.

    FORMING = 1
    RUNNING = 2
    SYNCING = 3
    HALTED = 4
    DRAINING = 5
    COMPLETE = 6


class Trigger(enum.Enum):
    """What changes the line's state."""

    __hash__ = object.__hash__  # See `Encoding`.

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
    # A journal that fails replaces the halt that could not be written to it.
    (LineState.HALTED, Trigger.HALTED): LineState.HALTED,
    (LineState.HALTED, Trigger.ANSWERED): LineState.FORMING,
    (LineState.HALTED, Trigger.DRAIN_BEGAN): LineState.DRAINING,
    # The last step of a draining line forms and syncs like any other, but stays DRAINING.
    (LineState.DRAINING, Trigger.FORMED): LineState.DRAINING,
    (LineState.DRAINING, Trigger.FELL_SHORT): LineState.DRAINING,
    (LineState.DRAINING, Trigger.TRANSFER_BEGAN): LineState.DRAINING,
    (LineState.DRAINING, Trigger.HALTED): LineState.HALTED,
    (LineState.DRAINING, Trigger.COMPLETED): LineState.COMPLETE,
}
"""The only way from one state to another. A pair that is not listed is a bug of this package."""


def next_state(state: LineState, trigger: Trigger) -> LineState:
    """The state that `trigger` leads to from `state`."""
    assert (state, trigger) in TRANSITIONS, f"{trigger.name} can't happen in {state.name}"
    return TRANSITIONS[state, trigger]
