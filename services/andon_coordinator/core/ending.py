"""Ending: when a run is complete, by how the workers of its last step went.

The line decides by it, and so does whoever reads the line's journal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from andon_coordinator.core.events import LeaveReason

__all__ = ["WELL", "is_complete", "not_gone"]

WELL = frozenset({LeaveReason.COMPLETE, LeaveReason.DRAINED})
"""Who leaves so has the run's last weights, and is done with it."""


def not_gone(roster: Collection[int], ended: Mapping[int, bool]) -> list[int]:
    """Workers of the last step of which nobody knows that they went."""
    return [worker for worker in roster if worker not in ended]


def is_complete(roster: Collection[int], ended: Mapping[int, bool], *, over: bool) -> bool:
    """Whether a run is complete, once nobody is on the line who has its weights.

    Somebody of the last step left in order: then it does not matter how the others went, after
    that step, by a signal, an error or a crash. Nobody may be missing, though, unless the journal
    itself says that the step was the last one: then those of whom nothing is known (they left
    while no coordinator was there, or their departure could not be saved) are taken to have left.

    Args:
        roster: the workers of the last step; none if there was none since the run was begun or
            resumed.
        ended: who went since then, and whether in order; see `WELL`.
        over: whether the line had reached the end of the run.
    """
    well = any(ended.values()) if not roster else any(ended.get(worker) for worker in roster)
    unknown = bool(not_gone(roster, ended)) or not (roster or ended)
    return well or unknown if over else well and not unknown
