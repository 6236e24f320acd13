"""Waits: what a script waits for. See `conversation`."""

from __future__ import annotations

import enum

__all__ = ["Wait"]


class Wait(enum.Enum):
    """What the script waits for."""

    WEIGHTS = enum.auto()
    """The line's weights, after the first Join."""
    WORK = enum.auto()
    """An assignment."""
    TURN = enum.auto()
    """The round that takes up a share which is computed, and whose own round went on without it."""
    EPOCH_END = enum.auto()
    """The end of the present epoch, for everybody."""
    AVERAGES = enum.auto()
    """The averages of the exchange that was begun."""
    VERDICT = enum.auto()
    """The end of a round that this worker can't finish: it has reported a value of its own."""
    COMMIT = enum.auto()
    """The record of the round whose averages are held."""
    NUMBER = enum.auto()
    """The result of a scalar all-reduce."""
    ANSWER = enum.auto()
    """An operator's answer to the halt that the line is in, or that this worker brings about."""
