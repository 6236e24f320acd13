"""Mutants of overlapped windows: the cores with one of their rules taken out.

As in `mutants`, both ends lose a rule that both keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from andon.protocol.records import Cursor, PositionRange
from andon.protocol.shards import cursor_after
from andon_coordinator.core import overlap, steps
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.round import StepRound
from andon_coordinator.core.state import CoreState
from andon_trainer.core.computed import Computed
from andon_trainer.core.conversation import Conversation
from andon_trainer.core.effects import Effect
from andon_trainer.core.events import Assigned, ExchangeFailed
from andon_trainer.core.worker_state import WorkerState
from search import local_weights, worker
from search.messages import Out
from search.mutants import Mutant
from search.state import RAISED, Bounds

__all__ = ["OVERLAP_MUTANTS"]

Patch = pytest.MonkeyPatch


def _world(faults: int, *kinds: str, steps: int = 2, windows: int = 0) -> Bounds:
    return Bounds(faults=faults, steps=steps, kinds=frozenset(kinds), overlap=True, windows=windows)


def _record_covers_what_is_ahead(patch: Patch) -> None:
    """The record of a round covers what was computed during it."""
    _cover(patch, lambda core, ahead: True)


def _epoch_ends_ahead(patch: Patch) -> None:
    """An epoch is over once its last window is computed; nobody waits for its record."""
    _cover(patch, _ends_epoch)


def _cover(patch: Patch, when: Callable[[CoreState, PositionRange], bool]) -> None:
    prepare = steps._prepare

    def prepared(core: CoreState, round_: StepRound) -> None:
        ahead = round_.terms.ahead_batch
        if ahead is not None and when(core, ahead):
            batch = PositionRange(round_.terms.batch.start, ahead.stop)
            round_.terms = replace(round_.terms, batch=batch)
        prepare(core, round_)

    patch.setattr(steps, "_prepare", prepared)


def _ends_epoch(core: CoreState, ahead: PositionRange) -> bool:
    assert core.plan is not None
    return ahead.stop == core.plan.epoch_size


def _transfer_from_a_full_pipe(patch: Patch) -> None:
    """A transfer begins while the sender has something computed ahead."""
    patch.setattr(overlap, "lets_transfer", lambda core: True)


def _drops_all_but(patch: Patch, why: str) -> None:
    drop = WorkerState.drop_computed

    def drops(state: WorkerState, reason: str) -> list[Effect]:
        return [] if reason == why else drop(state, reason)

    patch.setattr(WorkerState, "drop_computed", drops)


def _state_with_the_pipe(patch: Patch) -> None:
    """A sender's state has what it computed since its head."""
    _drops_all_but(patch, "state moves")


def _doubtful_change_again(patch: Patch) -> None:
    """A worker whose numbers were in doubt sends them again after the answer."""
    _drops_all_but(patch, "its numbers are in doubt")


def _skipped_change_sent(patch: Patch) -> None:
    """A worker keeps what it computed of positions that a MARK skips."""
    _drops_all_but(patch, "a MARK moved the cursor")
    patch.setattr(Computed, "serves", lambda self, work: True)


def _change_sent_twice(patch: Patch) -> None:
    """After a void round a worker computes its whole share again, and adds it to what it has."""
    patch.setattr(Computed, "missing", lambda self, work: work.positions)


def _change_dropped_at_a_void(patch: Patch) -> None:
    """After a void round a worker's weights are the head's again."""
    void = WorkerState.void

    def voids(state: WorkerState, message: str) -> list[Effect]:
        return [*void(state, message), *state.drop_computed(message)]

    patch.setattr(WorkerState, "void", voids)


def _change_forgotten_at_a_void(patch: Patch) -> None:
    """A worker's weights are the head's again after a void round, and it does not know."""
    take = worker.Worker._begin

    def begins(each: worker.Worker, out: list[Out]) -> Assigned:
        assigned = each.state.assigned
        assert assigned is not None
        if assigned.attempt:
            each.local.forget()
        return take(each, out)

    patch.setattr(worker.Worker, "_begin", begins)


def _change_not_taken_off(patch: Patch) -> None:
    """At a commit a worker adds its whole displacement to the new head's weights."""
    patch.setattr(local_weights, "without", lambda positions, taken: positions)


def _dealt_to_others(patch: Patch) -> None:
    """After a void round the window ahead is dealt anew, whoever has computed which part."""
    deal = overlap.deal_ahead

    def anew(core: CoreState, batch: PositionRange, roster: Sequence[LineMember]) -> None:
        core.attempts.ahead = {}
        again = core.attempts.voided > 0
        deal(core, batch, roster[::-1] if again else roster)
        ahead = core.attempts.ahead
        core.attempts.ahead = {each.worker: ahead[each.worker] for each in roster if ahead}

    patch.setattr(overlap, "deal_ahead", anew)


def _pipe_over_the_end(patch: Patch) -> None:
    """The first window of the next epoch is dealt ahead during an epoch's last round."""

    def ahead(core: CoreState, batch: PositionRange) -> Cursor:
        assert core.plan is not None
        return cursor_after(core.chain.cursor, batch, core.plan.epoch_size)

    patch.setattr(overlap, "_cursor_ahead", ahead)


def _refusal_holds_the_averages(patch: Patch) -> None:
    """A worker that finds a bad value ahead takes the averages of its round, if they are here."""
    refuse = Conversation.refuse

    def takes(conversation: Conversation, fault: ExchangeFailed) -> list[Effect]:
        # A fault of a round that is held is not reported: the round may be committed already.
        return [] if conversation.take_averages() is not None else refuse(conversation, fault)

    patch.setattr(Conversation, "refuse", takes)


def _refusal_needs_an_exchange(patch: Patch) -> None:
    """A worker says nothing of a bad value that it finds before its exchange has begun."""
    refuse = Conversation.refuse

    def only_begun(conversation: Conversation, fault: ExchangeFailed) -> list[Effect]:
        return refuse(conversation, fault) if conversation.state.begun else []

    patch.setattr(Conversation, "refuse", only_begun)


def _left_in_the_middle(patch: Patch) -> None:
    """A worker that asks for work in the middle of a round does not give the round up."""
    patch.setattr(Conversation, "begin_anew", lambda conversation: [])


OVERLAP_MUTANTS = [
    Mutant(
        "record covers what is ahead", "overlap", _record_covers_what_is_ahead, _world(0), "ends at"
    ),
    Mutant("epoch ends ahead", "overlap", _epoch_ends_ahead, _world(0, windows=2), "ends at"),
    Mutant(
        "pipe over an epoch's end", "overlap", _pipe_over_the_end, _world(0, windows=2), "F-DP-002"
    ),
    Mutant(
        "transfer from a full pipe",
        "overlap",
        _transfer_from_a_full_pipe,
        _world(1, "crash", steps=1),
        "in the pipe",
    ),
    Mutant(
        "state with the pipe",
        "overlap",
        _state_with_the_pipe,
        replace(_world(1, "crash", steps=1), min_workers=2),
        "which no record has",
    ),
    Mutant(
        "doubtful change again", "overlap", _doubtful_change_again, _world(1, "defect"), "in doubt"
    ),
    Mutant("skipped change sent", "overlap", _skipped_change_sent, _world(1, "cord"), "F-DP-002"),
    Mutant("change sent twice", "overlap", _change_sent_twice, _world(1, "break"), "F-DP-002"),
    Mutant(
        "change dropped at a void", "overlap", _change_dropped_at_a_void, _world(1, "data"), "away"
    ),
    Mutant(
        "change forgotten at a void",
        "overlap",
        _change_forgotten_at_a_void,
        _world(1, "data"),
        "F-DP-002",
    ),
    Mutant("change not taken off", "overlap", _change_not_taken_off, _world(0), "F-DP-002"),
    Mutant("dealt to others", "overlap", _dealt_to_others, _world(1, "data"), "throws away"),
    Mutant("left in the middle", "overlap", _left_in_the_middle, _world(1, RAISED, windows=2), ""),
    Mutant(
        "refusal holds the averages",
        "overlap",
        _refusal_holds_the_averages,
        _world(1, "nan", windows=2),
        "",
    ),
    Mutant(
        "refusal needs an exchange",
        "overlap",
        _refusal_needs_an_exchange,
        Bounds(faults=1, steps=1, computes=True, kinds=frozenset({"nan"})),
        "",
    ),
]
