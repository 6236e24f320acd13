"""Arrivals: workers join, reducers register.

A worker's Join reports its head and everything else that it knows of the line's history. The answer
is its join status: in sync, behind, or one record behind, in which case the record follows at once
(rule 8). The same Join is how a coordinator recovers what its journal lacks (rule 9), so a fresh
worker, one that came back, and everybody after a coordinator's crash take this one path.
"""

from __future__ import annotations

import dataclasses

from andon.protocol.capabilities import VERIFIES
from andon.protocol.halts import HaltAnswer, HaltEvidence
from andon.protocol.limits import clipped
from andon.protocol.reasons import Reason
from andon.protocol.records import Key
from andon.protocol.scalars import Scalar
from andon_coordinator.core import departures, learning, spares, suspects, syncing
from andon_coordinator.core.defects import violation
from andon_coordinator.core.effects import (
    AcceptJoin,
    CloseReducer,
    NoteArithmetic,
    NoteScalarsRefused,
    RefuseJoin,
    SaveArithmetic,
    SaveHalt,
    SaveRun,
    SaveScalars,
    SendHeartbeatAnswer,
    SendResume,
)
from andon_coordinator.core.events import (
    HeartbeatArrived,
    JoinRequest,
    ReducerRegistered,
    ScalarsSaved,
    WorkerJoined,
)
from andon_coordinator.core.join_answers import JoinRefusal, JoinStatus
from andon_coordinator.core.join_checks import adopts, check_join, greatest_term
from andon_coordinator.core.line_state import LineState, Trigger
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.state import CoreState

__all__ = ["heartbeat", "joined", "reducer_registered"]


def joined(core: CoreState, event: WorkerJoined) -> None:
    """Takes a worker onto the line, or refuses it and says what differs."""
    request = event.request
    slot = check_join(core, request, attends=event.attends)
    known = core.members.of_incarnation(request.incarnation)
    if isinstance(slot, JoinRefusal):
        core.emit(RefuseJoin(event.stream, slot))
        if slot.reason is Reason.COMPLETE and known is not None:
            known.expected_until = None  # Now it knows.
        return
    doubted = None if known is None else known.doubted
    if known is None and request.plan.grain and VERIFIES in request.capabilities:
        core.unattested.add(slot)
    if request.head is not None and known is None:
        # From a checkpoint, or from before this coordinator: what it was compared with is unknown.
        core.note_uncompared(slot)
    # The older stream ends first: its round is void before anything new is known (rule 8).
    _replace(core, slot, request)
    # Before `_recover`, which asks the plan whether the run's end is reached.
    if core.plan is None or core.totals_reopened:
        _take_plan(core, request)
    elif request.plan.data_digest and not core.plan.data_digest:
        _take_plan(core, request)  # The first worker that reports a digest of its samples.
    # All layouts are equal. Keeping one object instead of one per worker saves memory.
    assert core.layout is not None
    request = dataclasses.replace(request, layout=core.layout)
    if core.first_join_at is None:
        core.first_join_at = core.now
    # The term rises before the head is adopted, because the next record must be above everything
    # that this worker has seen. A head of our own term that we never issued is such a case too.
    greatest, head = greatest_term(request), request.head
    if greatest > core.keys.term or (head is not None and not core.keys.covers(head)):
        core.raise_term(greatest)
    _recover(core, request, slot)
    member = LineMember(
        worker=slot,
        request=request,
        stream=event.stream,
        head=None if request.head == doubted else request.head,
        held=request.held_key,
        step=request.step,
        heard_at=core.now,
        spare=request.spare or request.incarnation in core.evicted,
        doubted=doubted,
        weights_from=None if known is None else known.weights_from,
    )
    core.members.put(member)
    mistaken_s = suspects.came_back(core, known, member)
    core.dropped.discard(slot)
    if request.plan.grain:
        _note_arithmetic(core, member)
    # The answer goes first: a worker that is ahead hears that it joined, and then of the halt.
    _answer(core, member, mistaken_s)
    _halt_if_ahead(core, member)


def _note_arithmetic(core: CoreState, member: LineMember) -> None:
    known, stated = core.arithmetics, member.arithmetic
    if not known.note(member.worker, stated):
        return  # People and the journal know it.
    host = member.request.node_id
    core.emit(SaveArithmetic(member.worker, host, stated, core.chain.step))
    differs = known.difference(stated)
    if differs is not None:
        core.emit(NoteArithmetic(member.worker, *differs))
    elif not stated and len(known.stated) > 1:
        core.emit(NoteArithmetic(member.worker))


def heartbeat(core: CoreState, member: LineMember, event: HeartbeatArrived) -> None:
    """Notes what a worker is doing, and keeps what its script logged."""
    member.activity = event.activity
    member.detail = event.detail
    member.use = event.use
    suspects.ask_next(core, member)
    # A learner makes up steps whose scalars the others have logged.
    scalars = () if member.learning is not None else event.scalars
    kept = _kept(core, member.worker, scalars)
    if kept:
        # The answer acknowledges them, so it waits until they are durable: see `scalars_saved`.
        core.emit(SaveScalars(member.worker, kept, event.stream, event.sequence))
    else:
        core.emit(SendHeartbeatAnswer(event.stream, event.sequence))


def scalars_saved(core: CoreState, event: ScalarsSaved) -> None:
    """A heartbeat's scalars are durable: it is answered, if its stream is still there."""
    if core.members.on_stream(event.stream) is not None:
        core.emit(SendHeartbeatAnswer(event.stream, event.sequence))


def _kept(core: CoreState, worker: int, scalars: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
    """Those of names for which there is room, and of steps that the line has reached."""
    kept: list[Scalar] = []
    for scalar in scalars:
        # A worker learns of commits from this core, so it can't be ahead. If its number counted,
        # one worker could fill the journal with steps that never were.
        if scalar.step > core.chain.step:
            continue
        if core.scalar_names.take(scalar.name):
            kept.append(scalar)
        elif core.scalar_names.refuse(scalar.name):
            core.emit(NoteScalarsRefused(worker, scalar.name))
    return tuple(kept)


def reducer_registered(core: CoreState, event: ReducerRegistered) -> None:
    """Adds a reducer to the map, from the next round on."""
    older = core.reducers.stream_of(event.address)
    # One stream for each address: what runs through the reducer is found by its address.
    if older is not None:
        # It came back before its old stream was seen to end. The contributions that it held are
        # gone, so whatever used it is void, as if it had been lost first.
        core.emit(CloseReducer(older, "a newer stream offers the same address"))
        departures.remove_reducer(core, older, "came back without what it held")
    core.reducers.add(event.stream, event.address)
    departures.restart_learners(core, "the map of reducers changed")


def _take_plan(core: CoreState, request: JoinRequest) -> None:
    """Takes over the run's plan from a worker, or how long a resumed run is to be."""
    digest = request.plan.data_digest or (core.plan.data_digest if core.plan else "")
    core.plan = plan = dataclasses.replace(request.plan, data_digest=digest)
    core.layout = request.layout
    core.emit(SaveRun(plan, request.layout))
    if core.totals_reopened:
        core.totals_reopened = False
        core.stop_reason = core.end_reached(core.chain.step, core.chain.cursor)
        if core.pending_record is not None:
            # The MARK of the roll-back was made before the new length was known.
            core.pending_record.stop_reason = core.stop_reason


def _replace(core: CoreState, slot: int, request: JoinRequest) -> None:
    """Ends what this process, or an older process in its slot, still has on the line."""
    same = core.members.of_incarnation(request.incarnation)
    if same is not None:
        learning.started_over(core, same)
    if same is not None and same.stream is not None:
        # A stream is never resumed: the older one ends, and its round is void.
        message = "the worker joined again on a newer stream"
        grace_s = core.settings.rejoin_grace_s
        departures.cut_off(core, same, message, "it joined again", grace_s=grace_s)
    holder = core.members.get(slot)
    if holder is not None and holder is not same and holder.grace_until is not None:
        departures.lose(core, holder, "another process took its slot")
    if same is not None:
        # The process may get another slot this time; its old entry must not remain beside the new.
        core.members.remove(same.worker)


def _recover(core: CoreState, request: JoinRequest, worker: int) -> None:
    """Takes over what a worker knows and the journal does not (rule 9)."""
    chain = core.chain
    if adopts(core, request):
        assert request.head is not None
        # Before the head moves: the answers name the head that was asked with.
        syncing.close_scalar_all_reduces(core)
        chain.adopt(request.head, request.step, request.cursor)
        core.pacing.adopt(request.pacing)
        # Nobody here knows which workers took part in that step.
        core.last_roster, core.departed = (), {}
        # They move the state of a head that is no longer the line's.
        core.transfers.cancel_all()
        core.snapshots.cancel_all()
        core.stop_reason = core.end_reached(chain.step, chain.cursor)
        _close_older_halt(core)
    halt = request.halt
    # An id below the next one is a halt that this line knows, answered or not.
    if halt is None or halt.id < core.next_halt_id or not core.is_after_head(halt):
        return
    core.next_halt_id = halt.id + 1
    halt = _as_told_by(worker, halt)
    if core.line_state is not LineState.HALTED:
        core.halt = halt
        core.enter(Trigger.HALTED)
        core.emit(SaveHalt(halt))
        core.announce_halt()


def _as_told_by(worker: int, halt: HaltEvidence) -> HaltEvidence:
    """A halt that only this worker's Join tells of: nobody here knows whether it was so."""
    told = f"worker {worker} says that the line had halted: "
    message = halt.message or halt.reason.label.replace("_", " ")
    if not message.startswith(told):
        message = told + message
    return dataclasses.replace(halt, message=clipped(message), reported_by=worker)


def _close_older_halt(core: CoreState) -> None:
    """Resumes from a halt that is older than the adopted head: it was answered somewhere else."""
    if core.halt is None or core.is_after_head(core.halt):
        return
    for member in core.members.live():
        assert member.stream is not None
        core.emit(SendResume(member.stream, core.halt.id, HaltAnswer.RETRY))
    core.halt = None
    core.enter(Trigger.ANSWERED)


def _answer(core: CoreState, member: LineMember, mistaken_s: float | None) -> None:
    assert core.plan is not None
    assert member.stream is not None
    record = core.chain.record
    join_status = JoinStatus.BEHIND
    if core.chain.head is None:
        join_status = JoinStatus.FRESH
    elif member.head == core.chain.head:
        join_status = JoinStatus.IN_SYNC
    elif record is not None and core.can_apply(member, record):
        join_status = JoinStatus.RECORD_FOLLOWS
    if member.spare and join_status in (JoinStatus.IN_SYNC, JoinStatus.RECORD_FOLLOWS):
        # In sync, it would take part. If nobody is missing it learns, whatever its head is.
        member.spare = not spares.takes_place(core, member)
        join_status = JoinStatus.BEHIND if member.spare else join_status
    # A worker that joins before its script starts can take state at once. One that joins in the
    # middle of its script has to ask for work first: that says that its script waits.
    waits = join_status in (JoinStatus.FRESH, JoinStatus.BEHIND)
    member.accepts_state = waits and not member.request.mid_script
    core.emit(
        AcceptJoin(
            stream=member.stream,
            worker=member.worker,
            plan=core.plan,
            join_status=join_status,
            head=core.chain.head,
            step=core.chain.step,
            halt=core.halt if core.line_state is LineState.HALTED else None,
            reducers=core.reducer_map,
            credential=member.request.credential,
            mistaken_s=mistaken_s,
        )
    )
    if join_status is JoinStatus.RECORD_FOLLOWS:
        assert record is not None
        core.announce(member, record, core.chain.result)


def _halt_if_ahead(core: CoreState, member: LineMember) -> None:
    """Halts if a worker is ahead of a line that trains: another coordinator trained it."""
    head: Key | None = member.request.head
    # The pending record may be durable, and the worker may have it from before its stream broke.
    pending = core.pending_record
    ours = core.chain.step if pending is None else max(core.chain.step, pending.record.step)
    if not core.recovery_over or head is None or member.request.step <= ours:
        return
    if core.abandoned is not None and head <= core.abandoned:
        return  # It was away when the line was rolled back, so it is merely behind.
    what = (
        f"is at step {member.request.step}, beyond the line's step {ours}: another coordinator "
        "trained it"
    )
    core.stop_line(violation(member.worker, what))
