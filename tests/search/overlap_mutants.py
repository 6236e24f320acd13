"""Mutants of overlapped windows: the cores with one of their rules taken out.

As in `mutants`, both ends lose a rule that both keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from andon.protocol.records import Cursor, PositionRange
from andon.protocol.shards import cursor_after
from andon_coordinator.core import dealing, overlap, steps
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.round import StepRound
from andon_coordinator.core.state import CoreState
from andon_trainer.core.computed import Computed
from andon_trainer.core.conversation import Conversation
from andon_trainer.core.effects import Effect
from andon_trainer.core.events import ExchangeFailed
from andon_trainer.core.worker_state import WorkerState
from search import local_weights, worker
from search.messages import Out
from search.mutants import Mutant, Patch, Right, mutants_of, wrap
from search.state import RAISED, Bounds

__all__ = ["OVERLAP_MUTANTS"]

OVERLAP_MUTANTS: list[Mutant] = []
_mutant = mutants_of(OVERLAP_MUTANTS)


def _world(faults: int, *kinds: str, steps: int = 2, windows: int = 0) -> Bounds:
    return Bounds(faults=faults, steps=steps, kinds=frozenset(kinds), overlap=True, windows=windows)


@_mutant(_world(0), "were due", steps, "_prepare")
def _record_covers_what_is_ahead(right: Right, core: CoreState, round_: StepRound) -> None:
    """The record of a round covers what was computed during it."""
    _cover_ahead(round_)
    right(core, round_)


@_mutant(_world(0, windows=2), "were due", steps, "_prepare")
def _epoch_ends_ahead(right: Right, core: CoreState, round_: StepRound) -> None:
    """An epoch is over once its last window is computed; nobody waits for its record."""
    assert core.plan is not None
    ahead = round_.terms.ahead_batch
    if ahead is not None and ahead.stop == core.plan.epoch_size:
        _cover_ahead(round_)
    right(core, round_)


def _cover_ahead(round_: StepRound) -> None:
    ahead = round_.terms.ahead_batch
    if ahead is not None:
        batch = PositionRange(round_.terms.batch.start, ahead.stop)
        round_.terms = replace(round_.terms, batch=batch)


@_mutant(_world(0, windows=2), "F-DP-002", dealing, "cursor_behind")
def _pipe_over_an_epochs_end(_: Right, core: CoreState, batch: PositionRange) -> Cursor:
    """The first window of the next epoch is dealt ahead during an epoch's last round."""
    assert core.plan is not None
    return cursor_after(core.chain.cursor, batch, core.plan.epoch_size)


@_mutant(_world(1, "crash", steps=1), "in the pipe", overlap, "lets_transfer")
def _transfer_from_a_full_pipe(_: Right, core: CoreState) -> bool:
    """A transfer begins while the sender has something computed ahead."""
    return True


@_mutant(
    replace(_world(1, "crash", windows=3), overlap=False, local=True, fragments=2),
    "in the pipe",
    overlap,
    "_left_over",
)
def _transfer_with_something_left_over(_: Right, core: CoreState) -> bool:
    """A transfer begins while the sender has changes of blocks that were not exchanged."""
    return False


def _drops_all_but(patch: Patch, why: str) -> None:
    def drops(right: Right, state: WorkerState, reason: str) -> Any:
        return [] if reason == why else right(state, reason)

    wrap(patch, WorkerState, "drop_computed", drops)


@_mutant(replace(_world(1, "crash", steps=1), min_workers=2), "which no record has")
def _state_with_the_pipe(patch: Patch) -> None:
    """A sender's state has what it computed since its head."""
    _drops_all_but(patch, "state moves")


@_mutant(_world(1, "defect"), "in doubt")
def _doubtful_change_again(patch: Patch) -> None:
    """A worker whose numbers were in doubt sends them again after the answer."""
    _drops_all_but(patch, "its numbers are in doubt")


@_mutant(_world(1, "cord"), "F-DP-002")
def _skipped_change_sent(patch: Patch) -> None:
    """A worker keeps what it computed of positions that a MARK skips."""
    _drops_all_but(patch, "a MARK moved the cursor")
    patch.setattr(Computed, "serves", lambda self, work: True)


@_mutant(_world(1, "break"), "F-DP-002", Computed, "missing")
def _change_sent_twice(_: Right, self: Computed, work: Any) -> Any:
    """After a void round a worker computes its whole share again, and adds it to what it has."""
    return work.positions


@_mutant(_world(1, "data"), "away", WorkerState, "void")
def _change_dropped_at_a_void(right: Right, state: WorkerState, message: str) -> list[Effect]:
    """After a void round a worker's weights are the head's again."""
    return [*right(state, message), *state.drop_computed(message)]


@_mutant(_world(1, "data"), "F-DP-002", worker.Worker, "_begin")
def _change_forgotten_at_a_void(right: Right, each: worker.Worker, out: list[Out]) -> Any:
    """A worker's weights are the head's again after a void round, and it does not know."""
    assigned = each.state.assigned
    assert assigned is not None
    if assigned.attempt:
        each.local.forget()
    return right(each, out)


@_mutant(_world(0), "F-DP-002", local_weights, "without")
def _change_not_taken_off(_: Right, positions: Any, taken: Any) -> Any:
    """At a commit a worker adds its whole displacement to the new head's weights."""
    return positions


@_mutant(_world(1, "data"), "throws away", overlap, "deal_ahead")
def _dealt_to_others(
    right: Right, core: CoreState, batch: PositionRange, roster: Sequence[LineMember]
) -> None:
    """After a void round the window ahead is dealt anew, whoever has computed which part."""
    core.attempts.ahead = {}
    again = core.attempts.voided > 0
    right(core, batch, roster[::-1] if again else roster)
    ahead = core.attempts.ahead
    core.attempts.ahead = {each.worker: ahead[each.worker] for each in roster if ahead}


@_mutant(_world(1, RAISED, windows=2), "", Conversation, "begin_anew")
def _left_in_the_middle(_: Right, conversation: Conversation) -> list[Effect]:
    """A worker that asks for work in the middle of a round does not give the round up."""
    return []


@_mutant(_world(1, "nan", windows=2), "", Conversation, "refuse")
def _refusal_holds_the_averages(
    right: Right, conversation: Conversation, fault: ExchangeFailed
) -> Any:
    """A worker that finds a bad value ahead takes the averages of its round, if they are here."""
    # A fault of a round that is held is not reported: the round may be committed already.
    return [] if conversation.take_averages() is not None else right(conversation, fault)


@_mutant(
    Bounds(faults=1, steps=1, computes=True, kinds=frozenset({"nan"})), "", Conversation, "refuse"
)
def _refusal_needs_an_exchange(
    right: Right, conversation: Conversation, fault: ExchangeFailed
) -> Any:
    """A worker says nothing of a bad value that it finds before its exchange has begun."""
    return right(conversation, fault) if conversation.state.begun else []
