"""Mutants: the cores with one rule of the protocol taken out, wherever it is kept.

Each is a rule that somebody might think superfluous. If both ends keep a rule, both lose it: with
one end's check alone the line is still safe, and a search would rightly find nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from andon.protocol.records import PositionRange, Record, RecordKind
from andon_coordinator.core import (
    departures,
    effects,
    events,
    line,
    lost_state,
    notices,
    standing,
    steps,
    syncing,
)
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.round import PendingRecord, StepRound
from andon_coordinator.core.state import CoreState
from andon_trainer.core.effects import JoinAgain
from andon_trainer.core.events import Assigned, Committed
from andon_trainer.core.worker_state import RoundPhase, WorkerState
from search.messages import Accepted
from search.state import NOTICE, Bounds
from search.worker import Worker

__all__ = [
    *("MUTANTS", "Mutant", "Patch", "Right"),
    *("complete_round", "mutants_of", "shrinking_roster", "wrap"),
]

Patch = pytest.MonkeyPatch
Right = Callable[..., Any]
"""What a mutant is called in place of: it gets that first."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A missing rule, and the world in which the search finds the consequence."""

    name: str
    apply: Callable[[Patch], None]
    bounds: Bounds
    sign: str
    """A part of what the search says of it; empty: it gets stuck."""


MUTANTS: list[Mutant] = []


def wrap(patch: Patch, owner: Any, name: Any, wrong: Callable[..., Any]) -> None:
    """Calls `wrong` in place of what a class, a module or a table has, with that one first."""
    table = isinstance(owner, dict)
    right = owner[name] if table else getattr(owner, name)
    put: Any = patch.setitem if table else patch.setattr
    put(owner, name, lambda *arguments, **more: wrong(right, *arguments, **more))


def mutants_of(found: list[Mutant]) -> Callable[..., Callable[[Callable[..., Any]], None]]:
    """The decorator of mutants, which adds them to `found`; each has its function's name.

    The decorator takes the world, then a part of what the search says, then owner and name of what
    the decorated function replaces. Without these it is a function that applies the mutant.
    """

    def mutant(bounds: Bounds, sign: str, *replaced: Any) -> Callable[[Callable[..., Any]], None]:
        def add(wrong: Callable[..., Any]) -> None:
            def apply(patch: Patch) -> None:
                wrap(patch, replaced[0], replaced[1], wrong) if replaced else wrong(patch)

            name = wrong.__name__.strip("_").replace("_", " ")
            found.append(Mutant(name, apply, bounds, sign))

        return add

    return mutant


_mutant = mutants_of(MUTANTS)


def complete_round(core: CoreState, ready: events.Ready) -> None:
    """What a worker reports completes the round that it attends."""
    round_ = core.round
    if round_ is not None and ready.key == round_.key:
        for rank, worker in enumerate(round_.roster):
            share = sum(map(len, round_.shares[rank]))
            round_.take(worker, replace(ready, weight=float(share), samples=share))
        steps._prepare(core, round_)


def _world(faults: int, *kinds: str, patient: bool = False, means: int = 0) -> Bounds:
    return Bounds(faults=faults, steps=1, kinds=frozenset(kinds), patient=patient, means=means)


@_mutant(_world(0), "is not ready")
def _commit_before_all_are_ready(patch: Patch) -> None:
    """Rule 6: the first StepReady commits."""
    patch.setattr(StepRound, "complete", property(lambda self: bool(self.ready)))
    patch.setattr(
        StepRound,
        "in_rank_order",
        property(lambda self: [(w, self.ready[w]) for w in self.roster if w in self.ready]),
    )
    patch.setattr(steps, "in_round", lambda *round_: None)


@_mutant(_world(0), "and is not", CoreState, "save")
def _announced_before_durable(
    right: Right, core: CoreState, saving: PendingRecord, **more: Any
) -> None:
    """Rule 2: a record is announced while the journal writes it."""
    right(core, saving, **more)
    steps.record_saved(core, events.RecordSaved(saving.record.key))


@_mutant(_world(1, "break"), "averages of")
def _key_not_checked_at_apply(patch: Patch) -> None:
    """Rule 7: a worker applies a step with whatever averages it holds, whatever their key."""
    _apply_with(patch, lambda state: state.held_key is not None, lambda m: m.held is not None)


@_mutant(_world(1, "break"), "of None")
def _applied_without_averages(patch: Patch) -> None:
    """Rule 7: a worker applies a step though it holds no averages."""
    _apply_with(patch, lambda state: True, lambda member: True)


def _apply_with(
    patch: Patch, holds: Callable[[WorkerState], bool], may: Callable[[LineMember], bool]
) -> None:
    def receive(right: Right, state: WorkerState, event: Any) -> Any:
        if isinstance(event, Committed) and event.record.kind is RecordKind.STEP:
            record = event.record
            if record.parent == state.head and holds(state):
                state.assigned = _round_of(record)
                state.phase = RoundPhase.HELD
        return right(state, event)

    def applies(right: Right, core: CoreState, member: LineMember, record: Record) -> Any:
        if record.kind is RecordKind.STEP:
            return member.head == record.parent and may(member)
        return right(core, member, record)

    wrap(patch, WorkerState, "receive", receive)
    wrap(patch, CoreState, "can_apply", applies)


def _round_of(record: Record) -> Assigned:
    return Assigned(
        key=record.key,
        parent=record.parent,
        roster=record.roster,
        rank=0,
        step=record.step,
        attempt=0,
        epoch=0,
        positions=(),
        batch=PositionRange(0, 0),
    )


@_mutant(_world(1, "lost"), "counts as at")
def _step_in_place_of_id(patch: Patch) -> None:
    """Rule 3: a worker at the line's step counts as in sync."""

    def at_step(right: Right, core: CoreState, event: events.WorkerJoined) -> None:
        request, head = event.request, core.chain.head
        if request.head is not None and head is not None and request.step == core.chain.step:
            event = replace(event, request=replace(request, head=head))
        right(core, event)

    def takes(right: Right, worker: Worker, answer: Accepted, out: Any) -> Any:
        if answer.in_sync:
            worker.state.head = answer.head
        return right(worker, answer, out)

    wrap(patch, line._OF_OTHERS, events.WorkerJoined, at_step)
    wrap(patch, Worker, "accepted", takes)


def shrinking_roster(patch: Patch) -> None:
    """Rule 5: a round goes on without the worker that was lost; nothing compares the rosters."""

    def shrink(
        right: Right, core: CoreState, member: LineMember, message: str, *, crash: bool = True
    ) -> None:
        round_ = core.round
        if round_ is not None and member.worker in round_.roster and len(round_.roster) > 1:
            rank = round_.roster.index(member.worker)
            core.round = round_ = replace(
                round_,  # A new one, so that what it derives from its roster shrinks, too.
                terms=replace(
                    round_.terms, roster=round_.roster[:rank] + round_.roster[rank + 1 :]
                ),
                streams=round_.streams[:rank] + round_.streams[rank + 1 :],
            )
            round_.ready.pop(member.worker, None)
            if round_.complete:
                steps._prepare(core, round_)
        right(core, member, message, crash=crash)

    wrap(patch, departures, "_leave_stream", shrink)
    patch.setattr(steps, "in_round", lambda *round_: None)


_mutant(_world(1, "break"), "of its roster")(shrinking_roster)


@_mutant(_world(1, "data"), "is not ready", line._OF_WORKERS, events.WorkerReady)
def _old_stepready_counts(
    right: Right, core: CoreState, member: LineMember, event: events.WorkerReady
) -> None:
    """Rule 6: a StepReady counts for the present round, whatever its key."""
    if core.round is not None:
        event = replace(event, ready=replace(event.ready, key=core.round.key))
    right(core, member, event)


@_mutant(_world(1, "number"), "is not ready")
def _samples_not_looked_at(patch: Patch) -> None:
    """Rule 6: a StepReady counts, though nothing is compared with the worker's share."""
    patch.setattr(steps, "in_ready", lambda *_: None)
    patch.setattr(steps, "in_round", lambda *_: None)


@_mutant(_world(1, "break"), "refuses", CoreState, "_drop_round")
def _keys_used_again(right: Right, core: CoreState) -> StepRound | None:
    """Rule 1: the next try at a step has the key of the last one."""
    round_: StepRound | None = right(core)
    if round_ is not None:
        core.keys._round -= 1
    return round_


@_mutant(_world(1, "break"), "is not ready", departures, "_leave_stream")
def _stream_resumed(right: Right, core: CoreState, *arguments: Any, **more: Any) -> None:
    """Rule 5: a lost stream voids nothing: its worker may come back to the round."""
    round_, core.round = core.round, None
    right(core, *arguments, **more)
    core.round = round_


@_mutant(_world(1, "crash"), "", WorkerState, "receive")
def _nobody_applies_a_second_bootstrap(right: Right, state: WorkerState, event: Any) -> Any:
    """Rule 12: an INITIAL record applies only if it has no parent."""
    if isinstance(event, Committed) and event.record.parent != state.head:
        known = event.record.key == state.head
        return [] if known else [JoinAgain("got a record that can't be applied here")]
    return right(state, event)


@_mutant(
    Bounds(workers=1, faults=1, steps=1, checkpoint=0, kinds=frozenset({"power"})),
    *("", lost_state, "heads_here"),
)
def _never_goes_back(_: Right, core: CoreState) -> tuple[()]:
    """Rule 12: a line whose head nobody holds halts, whatever its workers have loaded."""
    return ()


@_mutant(_world(1, "break", patient=True), "", departures, "release")
def _transfer_without_end(_: Right, core: CoreState, worker: int) -> None:
    """Rule 10: one end of a state transfer is never told that the other is gone."""


@_mutant(_world(1, "cord", means=1), "")
def _a_mark_ends_scalar_all_reduces(patch: Patch) -> None:
    """Rule 13: a MARK forgets the numbers that were given at both ends, as if weights moved."""

    def forgets(right: Right, core: CoreState, event: events.RecordSaved) -> None:
        if core.pending_record is not None and core.pending_record.record.kind is RecordKind.MARK:
            core.scalar_all_reduces.close()
        right(core, event)

    def receive(right: Right, state: WorkerState, event: Any) -> Any:
        if isinstance(event, Committed) and event.record.kind is RecordKind.MARK:
            state._forget_scalar_all_reduces()
        return right(state, event)

    wrap(patch, line._OF_OTHERS, events.RecordSaved, forgets)
    wrap(patch, WorkerState, "receive", receive)


@_mutant(_world(1, "lost", means=1), "", line._OF_WORKERS, events.ScalarAllReduceArrived)
def _old_scalar_all_reduces_ignored(
    right: Right, core: CoreState, member: LineMember, event: events.ScalarAllReduceArrived
) -> None:
    """Rule 7: a number of another head than the line's gets no answer."""
    if event.head == core.chain.head:
        right(core, member, event)


@_mutant(_world(1, "crash", means=1), "its scheduler", syncing, "begin_transfers")
def _donor_in_its_script(right: Right, core: CoreState) -> None:
    """Rule 10: a worker gives its state before it has asked for work."""
    _transfers_as_if(right, core, "wants_work")


@_mutant(_world(1, "lost", means=1), "", syncing, "begin_transfers")
def _joiner_in_its_script(right: Right, core: CoreState) -> None:
    """Rule 10: a worker gets state before it has asked for work."""
    _transfers_as_if(right, core, "accepts_state")


def _transfers_as_if(begin: Right, core: CoreState, wish: str) -> None:
    wishes = [(member, getattr(member, wish)) for member in core.members]
    for member, _ in wishes:
        setattr(member, wish, True)
    begin(core)
    for member, was in wishes:
        setattr(member, wish, was)


@_mutant(
    Bounds(faults=1, means=1, standing=True, kinds=frozenset({"crash"})),
    *("its scheduler", standing, "take"),
)
def _standing_requests_stay(
    right: Right, core: CoreState, pending: PendingRecord, able: Sequence[LineMember]
) -> None:
    """Rule 10: a request that came with a report counts as one of a script that waits."""
    right(core, pending, able)
    for member in able:
        member.wants_work = member.worker in core.standing


@_mutant(Bounds(faults=0, standing=True), "which is not durable", CoreState, "save")
def _assigned_before_durable(
    right: Right, core: CoreState, saving: PendingRecord, **more: Any
) -> None:
    """Rule 2: the step after a record is assigned while the journal writes that."""
    right(core, saving, **more)
    if saving.standing:
        steps.record_saved(core, events.RecordSaved(saving.record.key))
        sent = [each for each in core.effects if isinstance(each, effects.SendCommitted)]
        core.effects = [each for each in core.effects if each not in sent]


_NOTICED = Bounds(faults=1, standing=True, kinds=frozenset({NOTICE}))


@_mutant(_NOTICED, "is dealt", notices, "release")
def _a_worker_that_gave_notice_stays(right: Right, core: CoreState) -> None:
    """A worker that gave notice is on the next roster like any other."""


@_mutant(_NOTICED, "is sent away from its round", notices, "_has_part")
def _a_worker_that_gave_notice_is_sent_away_at_once(right: Right, *_: Any) -> bool:
    """A worker that gave notice is sent away in the middle of its round."""
    return False


@_mutant(replace(_NOTICED, faults=2), "the last worker that holds", notices, "_holds_alone")
def _the_last_worker_that_holds_the_state_is_sent_away(right: Right, *_: Any) -> bool:
    """A worker that gave notice is released though a newcomer waits for the state that it has."""
    return False
