"""Mutants of windows with a quorum: the cores with one of their rules taken out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from andon.protocol.records import Cursor, PositionRange, Record
from andon_coordinator.core import dealing, events, late, line
from andon_coordinator.core.dealing import Dealt
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.round import StepRound
from andon_coordinator.core.state import CoreState
from andon_trainer.core.computed import Computed
from search.mutants import Mutant, Right, complete_round, mutants_of
from search.state import Bounds

__all__ = ["QUORUM_MUTANTS"]

QUORUM_MUTANTS: list[Mutant] = []
_mutant = mutants_of(QUORUM_MUTANTS)

_QUORUM = Bounds(faults=0, steps=1, local=True, quorum=True)


@_mutant(_QUORUM, "F-DP-002", dealing, "cursor_of")
def _owed_lost_at_a_commit(right: Right, core: CoreState, round_: StepRound) -> Cursor:
    """The record of a window covers what a late worker still computes."""
    cursor: Cursor = right(core, round_)
    return Cursor(cursor.epoch, cursor.position)


@_mutant(Bounds(faults=0, steps=2, local=True, quorum=True), "throws away", dealing, "note")
def _owed_dealt_to_others(
    right: Right, core: CoreState, workers: Sequence[int], dealt: Dealt
) -> None:
    """What a late worker holds is free as soon as a round opens without it."""
    right(core, workers, dealt)
    core.attempts.assigned = dict(zip(workers, dealt.shares, strict=True))


@_mutant(
    Bounds(faults=0, steps=2, local=True, quorum=True, windows=1),
    "takes everything",
    dealing,
    "cursor_behind",
)
def _owed_over_an_epochs_end(_: Right, core: CoreState, batch: PositionRange) -> Cursor:
    """A window that ends its epoch goes on without a late worker."""
    return core.chain.cursor


@_mutant(_QUORUM, "F-DP-002", Computed, "missing")
def _a_change_counted_twice_after_a_window_went_on(_: Right, self: Computed, work: Any) -> Any:
    """A worker computes its whole share again when the round is dealt without a late one."""
    return work.positions


@_mutant(
    Bounds(faults=0, steps=2, local=True, quorum=True),
    *("is not ready", line._OF_LATE, events.WorkerReady),
)
def _a_late_worker_is_counted_ready(
    right: Right, core: CoreState, member: LineMember, event: events.WorkerReady
) -> None:
    """What a late worker reports of a round that it attends completes that."""
    right(core, member, event)
    complete_round(core, event.ready)


@_mutant(_QUORUM, "nobody has computed", late, "needed")
def _a_quorum_is_not_counted(_: Right, part: float, workers: int) -> int:
    """A window goes on without those that have not computed, though nobody has."""
    return 0


@_mutant(Bounds(faults=0, steps=3, local=True, quorum=True), "records in a row", late, "recorded")
def _nobody_counts_how_late(right: Right, core: CoreState, record: Record) -> None:
    """A worker is left out of any number of records."""
    right(core, record)
    for each in core.members:
        each.left_out = 0
