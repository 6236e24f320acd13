"""Arrivals: a worker joins, and is told where it stands (rules 8, 9 and 10)."""

from __future__ import annotations

import dataclasses

from andon.protocol.halts import HaltAnswer, HaltReason
from andon.protocol.records import Key
from andon_coordinator.core import departures, syncing
from andon_coordinator.core.board import Board
from andon_coordinator.core.defects import Defect
from andon_coordinator.core.effects import (
    AcceptJoin,
    JoinStatus,
    LineState,
    Refusal,
    RefuseJoin,
    SaveHalt,
    SaveRun,
    SendHeartbeatAnswer,
    SendResume,
)
from andon_coordinator.core.events import HeartbeatArrived, JoinRequest, WorkerJoined
from andon_coordinator.core.joining import adopts, greatest_term, judge
from andon_coordinator.core.roster import Member
from andon_coordinator.core.states import Trigger

__all__ = ["heartbeat", "joined"]


def joined(board: Board, event: WorkerJoined) -> None:
    """Takes a worker onto the line, or refuses it by name."""
    request = event.request
    slot = judge(board, request)
    if isinstance(slot, Refusal):
        board.emit(RefuseJoin(event.stream, slot))
        return
    _replace(board, slot, request)
    if board.plan is None or board.totals_open:
        _take_plan(board, request)
    elif request.plan.data_digest and not board.plan.data_digest:
        _take_plan(board, request)  # the first that tells what its samples are
    # All have the same: one of it is kept, and not one a worker.
    assert board.layout is not None
    request = dataclasses.replace(request, layout=board.layout)
    if board.first_join_at is None:
        board.first_join_at = board.now
    greatest, head = greatest_term(request), request.head
    # A head of our own term that we never drew: the next record has to be above it all the same.
    if greatest > board.keys.term or (head is not None and not board.keys.knows(head)):
        board.raise_term(greatest)
    _recover(board, request)
    member = Member(
        worker=slot,
        request=request,
        stream=event.stream,
        head=request.head,
        held=request.held_key,
        step=request.step,
        heard_at=board.now,
    )
    board.roster.put(member)
    board.dropped.discard(slot)
    _answer(board, member)
    _look_beyond(board, member)


def heartbeat(board: Board, member: Member, event: HeartbeatArrived) -> None:
    """Notes what a worker is doing."""
    member.activity = event.activity
    member.detail = event.detail
    board.emit(SendHeartbeatAnswer(event.stream, event.sequence))


def _take_plan(board: Board, request: JoinRequest) -> None:
    """The first worker says what the run is; of a resumed run, how long it is now."""
    told = request.plan.data_digest or (board.plan.data_digest if board.plan else "")
    board.plan = plan = dataclasses.replace(request.plan, data_digest=told)
    board.layout = request.layout
    board.emit(SaveRun(plan, request.layout))
    if board.totals_open:
        board.totals_open = False
        board.stop = board.end_reached(board.chain.step, board.chain.cursor)
        if board.saving is not None:
            board.saving.stop = board.stop


def _replace(board: Board, slot: int, request: JoinRequest) -> None:
    """Ends whatever the process, or an older one in its slot, still has here."""
    same = board.roster.of_incarnation(request.incarnation)
    if same is not None and same.stream is not None:
        message, grace_s = (
            "the worker joined again on a newer stream",
            board.settings.rejoin_grace_s,
        )
        departures.cut_off(board, same, message, "it joined again", grace_s=grace_s)
    holder = board.roster.get(slot)
    if holder is not None and holder is not same and holder.grace_until is not None:
        departures.lose(board, holder, "another process took its slot")
    if same is not None:
        board.roster.remove(same.worker)


def _recover(board: Board, request: JoinRequest) -> None:
    """Takes over what a worker knows and the journal does not (rule 9)."""
    chain = board.chain
    if adopts(board, request):
        assert request.head is not None
        syncing.close_scalar_all_reduces(board)
        chain.adopt(request.head, request.step, request.cursor)
        board.last_roster, board.ended = (), {}  # Who took part in that step is not known here.
        board.transfers.cancel_all()
        board.stop = board.end_reached(chain.step, chain.cursor)
        _close_older_halt(board)
    halt = request.halt
    if halt is None or halt.id < board.next_halt_id or not board.is_newer(halt):
        return
    board.next_halt_id = halt.id + 1
    if board.state is not LineState.HALTED:
        board.halt = halt
        board.enter(Trigger.HALTED)
        board.emit(SaveHalt(halt))
        board.tell_halt()


def _close_older_halt(board: Board) -> None:
    if board.halt is None or board.is_newer(board.halt):
        return
    for member in board.roster.live():
        assert member.stream is not None
        board.emit(SendResume(member.stream, board.halt.id, HaltAnswer.RETRY))
    board.halt = None
    board.enter(Trigger.ANSWERED)


def _answer(board: Board, member: Member) -> None:
    assert board.plan is not None
    assert member.stream is not None
    record = board.chain.record
    join_status = JoinStatus.BEHIND
    if board.chain.head is None:
        join_status = JoinStatus.FRESH
    elif member.head == board.chain.head:
        join_status = JoinStatus.IN_SYNC
    elif record is not None and board.can_apply(member, record):
        join_status = JoinStatus.RECORD_FOLLOWS
    # A worker in the middle of its script says when it waits, by asking for work.
    waits = join_status in (JoinStatus.FRESH, JoinStatus.BEHIND)
    member.takes_state = waits and not member.request.mid_script
    board.emit(
        AcceptJoin(
            stream=member.stream,
            worker=member.worker,
            plan=board.plan,
            join_status=join_status,
            head=board.chain.head,
            step=board.chain.step,
            halt=board.halt if board.state is LineState.HALTED else None,
            reducers=board.reducer_map,
        )
    )
    if join_status is JoinStatus.RECORD_FOLLOWS:
        assert record is not None
        board.announce(member, record, board.chain.result)


def _look_beyond(board: Board, member: Member) -> None:
    """A worker that is ahead of a line that trains has been with another coordinator."""
    head: Key | None = member.request.head
    ours = board.chain.step if board.saving is None else board.saving.record.step
    if not board.settled or head is None or member.request.step <= ours:
        return
    if board.abandoned is not None and head <= board.abandoned:
        return  # it missed that the line was rolled back
    board.stop_line(
        Defect(
            reason=HaltReason.PROTOCOL_VIOLATION,
            message=f"worker {member.worker} is at step {member.request.step}, "
            f"beyond the line's step {ours}: another coordinator trained it",
            worker=member.worker,
        )
    )
