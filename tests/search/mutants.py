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
    standing,
    steps,
    syncing,
)
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.round import PendingRecord, StepRound
from andon_coordinator.core.state import CoreState
from andon_trainer.core.effects import Effect, JoinAgain
from andon_trainer.core.events import Assigned, Committed
from andon_trainer.core.worker_state import RoundPhase, WorkerState
from search.messages import Accepted
from search.state import Bounds
from search.worker import Worker

__all__ = ["MUTANTS", "Mutant", "shrinking_roster"]

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True)
class Mutant:
    """A missing rule, and the world in which the search finds the consequence."""

    name: str
    rule: str
    apply: Callable[[Patch], None]
    bounds: Bounds
    sign: str
    """A part of what the search says of it; empty: it gets stuck."""


def _world(faults: int, *kinds: str, patient: bool = False, means: int = 0) -> Bounds:
    return Bounds(faults=faults, steps=1, kinds=frozenset(kinds), patient=patient, means=means)


def _commit_before_ready(patch: Patch) -> None:
    """The first StepReady commits."""
    patch.setattr(StepRound, "complete", property(lambda self: bool(self.ready)))
    patch.setattr(
        StepRound,
        "in_rank_order",
        property(lambda self: [(w, self.ready[w]) for w in self.roster if w in self.ready]),
    )
    patch.setattr(steps, "in_round", lambda *round_: None)


def _announce_before_durable(patch: Patch) -> None:
    """A record is announced while the journal writes it."""
    save = CoreState.save

    def saved(core: CoreState, saving: PendingRecord, **more: Any) -> None:
        save(core, saving, **more)
        steps.record_saved(core, events.RecordSaved(saving.record.key))

    patch.setattr(CoreState, "save", saved)


def _any_averages_apply(patch: Patch) -> None:
    """A worker applies a step with whatever averages it holds; the key is not looked at."""
    _apply_with(patch, lambda state: state.held_key is not None, lambda m: m.held is not None)


def _no_averages_apply(patch: Patch) -> None:
    """A worker applies a step though it holds no averages."""
    _apply_with(patch, lambda state: True, lambda member: True)


def _apply_with(
    patch: Patch, holds: Callable[[WorkerState], bool], may: Callable[[LineMember], bool]
) -> None:
    received, can_apply = WorkerState.receive, CoreState.can_apply

    def receive(state: WorkerState, event: Any) -> list[Effect]:
        if isinstance(event, Committed) and event.record.kind is RecordKind.STEP:
            record = event.record
            if record.parent == state.head and holds(state):
                state.assigned = _round_of(record)
                state.phase = RoundPhase.HELD
        return received(state, event)

    def applies(core: CoreState, member: LineMember, record: Record) -> bool:
        if record.kind is RecordKind.STEP:
            return member.head == record.parent and may(member)
        return can_apply(core, member, record)

    patch.setattr(WorkerState, "receive", receive)
    patch.setattr(CoreState, "can_apply", applies)


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


def _step_in_place_of_id(patch: Patch) -> None:
    """A worker at the line's step counts as in sync."""
    joined = line._OF_OTHERS[events.WorkerJoined]
    accepted = Worker.accepted

    def at_step(core: CoreState, event: events.WorkerJoined) -> None:
        request, head = event.request, core.chain.head
        if request.head is not None and head is not None and request.step == core.chain.step:
            event = replace(event, request=replace(request, head=head))
        joined(core, event)

    def takes(worker: Worker, answer: Accepted, out: Any) -> Any:
        if answer.in_sync:
            worker.state.head = answer.head
        return accepted(worker, answer, out)

    patch.setitem(line._OF_OTHERS, events.WorkerJoined, at_step)
    patch.setattr(Worker, "accepted", takes)


def shrinking_roster(patch: Patch) -> None:
    """A round goes on without the worker that was lost; nothing compares the rosters."""
    break_away = departures._leave_stream

    def shrink(core: CoreState, member: LineMember, message: str, *, crash: bool = True) -> None:
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
        break_away(core, member, message, crash=crash)

    patch.setattr(departures, "_leave_stream", shrink)
    patch.setattr(steps, "in_round", lambda *round_: None)


def _old_ready_counts(patch: Patch) -> None:
    """A StepReady counts for the present round, whatever its key."""
    ready = line._OF_WORKERS[events.WorkerReady]

    def any_key(core: CoreState, member: LineMember, event: events.WorkerReady) -> None:
        if core.round is not None:
            event = replace(event, ready=replace(event.ready, key=core.round.key))
        ready(core, member, event)

    patch.setitem(line._OF_WORKERS, events.WorkerReady, any_key)


def _any_samples(patch: Patch) -> None:
    """A StepReady counts whatever it says: nothing is compared with the worker's share."""
    patch.setattr(steps, "in_ready", lambda *_: None)
    patch.setattr(steps, "in_round", lambda *_: None)


def _resumed_stream(patch: Patch) -> None:
    """A lost stream voids nothing: its worker may come back to the round."""
    break_away = departures._leave_stream

    def keep(core: CoreState, member: LineMember, message: str, *, crash: bool = True) -> None:
        round_, core.round = core.round, None
        break_away(core, member, message, crash=crash)
        core.round = round_

    patch.setattr(departures, "_leave_stream", keep)


def _keys_used_again(patch: Patch) -> None:
    """The next try at a step has the key of the last one."""
    drop = CoreState._drop_round

    def again(core: CoreState) -> StepRound | None:
        round_ = drop(core)
        if round_ is not None:
            core.keys._round -= 1
        return round_

    patch.setattr(CoreState, "_drop_round", again)


def _nobody_applies_a_second_bootstrap(patch: Patch) -> None:
    """An INITIAL record applies only if it has no parent."""
    received = WorkerState.receive

    def receive(state: WorkerState, event: Any) -> list[Effect]:
        if isinstance(event, Committed) and event.record.parent != state.head:
            known = event.record.key == state.head
            return [] if known else [JoinAgain("got a record that can't be applied here")]
        return received(state, event)

    patch.setattr(WorkerState, "receive", receive)


def _endless_transfer(patch: Patch) -> None:
    """One end of a state transfer is never told that the other is gone."""
    patch.setattr(departures, "release", lambda core, worker: None)


def _never_goes_back(patch: Patch) -> None:
    """A line whose head nobody holds halts, whatever its workers have loaded."""
    patch.setattr(lost_state, "heads_here", lambda core: ())


def _marks_end_scalar_all_reduces(patch: Patch) -> None:
    """A MARK counts as if weights moved: numbers that were given are forgotten at both ends."""
    saved, received = line._OF_OTHERS[events.RecordSaved], WorkerState.receive

    def forgets(core: CoreState, event: events.RecordSaved) -> None:
        if core.pending_record is not None and core.pending_record.record.kind is RecordKind.MARK:
            core.scalar_all_reduces.close()
        saved(core, event)

    def receive(state: WorkerState, event: Any) -> list[Effect]:
        if isinstance(event, Committed) and event.record.kind is RecordKind.MARK:
            state._forget_scalar_all_reduces()
        return received(state, event)

    patch.setitem(line._OF_OTHERS, events.RecordSaved, forgets)
    patch.setattr(WorkerState, "receive", receive)


def _old_scalar_all_reduces_ignored(patch: Patch) -> None:
    """A number of another head than the line's gets no answer."""
    arrived = line._OF_WORKERS[events.ScalarAllReduceArrived]

    def ignores(core: CoreState, member: LineMember, event: events.ScalarAllReduceArrived) -> None:
        if event.head == core.chain.head:
            arrived(core, member, event)

    patch.setitem(line._OF_WORKERS, events.ScalarAllReduceArrived, ignores)


def _any_donor(patch: Patch) -> None:
    """A worker gives its state before it has asked for work."""
    _transfers_as_if(patch, "wants_work")


def _any_joiner(patch: Patch) -> None:
    """A worker gets state before it has asked for work."""
    _transfers_as_if(patch, "accepts_state")


def _transfers_as_if(patch: Patch, wish: str) -> None:
    begin = syncing.begin_transfers

    def begins(core: CoreState) -> None:
        wishes = [(member, getattr(member, wish)) for member in core.members]
        for member, _ in wishes:
            setattr(member, wish, True)
        begin(core)
        for member, was in wishes:
            setattr(member, wish, was)

    patch.setattr(syncing, "begin_transfers", begins)


def _standing_requests_stay(patch: Patch) -> None:
    """A request that came with a report counts as one of a script that waits for work."""
    take = standing.take

    def takes(core: CoreState, pending: PendingRecord, able: Sequence[LineMember]) -> None:
        take(core, pending, able)
        for member in able:
            member.wants_work = member.worker in core.standing

    patch.setattr(standing, "take", takes)


def _assigned_before_durable(patch: Patch) -> None:
    """The step after a record is assigned while the journal writes that."""
    save = CoreState.save

    def saved(core: CoreState, saving: PendingRecord, **more: Any) -> None:
        save(core, saving, **more)
        if saving.standing:
            steps.record_saved(core, events.RecordSaved(saving.record.key))
            sent = [each for each in core.effects if isinstance(each, effects.SendCommitted)]
            core.effects = [each for each in core.effects if each not in sent]

    patch.setattr(CoreState, "save", saved)


MUTANTS = [
    Mutant("commit before all are ready", "6", _commit_before_ready, _world(0), "is not ready"),
    Mutant("announced before durable", "2", _announce_before_durable, _world(0), "and is not"),
    Mutant("key not checked at apply", "7", _any_averages_apply, _world(1, "break"), "averages of"),
    Mutant("applied without averages", "7", _no_averages_apply, _world(1, "break"), "of None"),
    Mutant("step in place of id", "3", _step_in_place_of_id, _world(1, "lost"), "counts as at"),
    Mutant("roster shrinks in place", "5", shrinking_roster, _world(1, "break"), "of its roster"),
    Mutant("old StepReady counts", "6", _old_ready_counts, _world(1, "data"), "is not ready"),
    Mutant("samples not looked at", "6", _any_samples, _world(1, "number"), "is not ready"),
    Mutant("keys used again", "1", _keys_used_again, _world(1, "break"), "refuses"),
    Mutant("stream resumed", "5", _resumed_stream, _world(1, "break"), "is not ready"),
    Mutant(
        "nobody applies a second bootstrap",
        "12",
        _nobody_applies_a_second_bootstrap,
        _world(1, "crash"),
        "",
    ),
    Mutant(
        "never goes back",
        "12",
        _never_goes_back,
        Bounds(workers=1, faults=1, steps=1, checkpoint=0, kinds=frozenset({"power"})),
        "",
    ),
    Mutant("transfer without end", "10", _endless_transfer, _world(1, "break", patient=True), ""),
    Mutant(
        "a MARK ends scalar all-reduces",
        "13",
        _marks_end_scalar_all_reduces,
        _world(1, "cord", means=1),
        "",
    ),
    Mutant(
        "old scalar all-reduces ignored",
        "7",
        _old_scalar_all_reduces_ignored,
        _world(1, "lost", means=1),
        "",
    ),
    Mutant("donor in its script", "10", _any_donor, _world(1, "crash", means=1), "its scheduler"),
    Mutant(
        "standing requests stay",
        "10",
        _standing_requests_stay,
        Bounds(faults=1, means=1, standing=True, kinds=frozenset({"crash"})),
        "its scheduler",
    ),
    Mutant(
        "assigned before durable",
        "2",
        _assigned_before_durable,
        Bounds(faults=0, standing=True),
        "which is not durable",
    ),
    Mutant("joiner in its script", "10", _any_joiner, _world(1, "lost", means=1), ""),
]
