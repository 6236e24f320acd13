"""Mutants of windows with a quorum: the cores with one of their rules taken out."""

from __future__ import annotations

from collections.abc import Sequence

from andon.protocol.records import Cursor, PositionRange
from andon_coordinator.core import dealing
from andon_coordinator.core.dealing import Dealt
from andon_coordinator.core.round import StepRound
from andon_coordinator.core.state import CoreState
from search.mutants import Mutant, Right, mutants_of
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
    "_must_be_whole",
)
def _owed_over_an_epochs_end(_: Right, core: CoreState, batch: PositionRange) -> bool:
    """A window that ends its epoch goes on without a late worker."""
    return False
