"""Progress: after every event, what the line can go on with.

One thing at a time: an end of the run, founding, transfers, then a round. No round is opened while
a record is being saved, a term is not yet durable, a transfer runs (rule 10), a broken stream may
still come back, or the back-off of a void round lasts.
"""

from __future__ import annotations

from andon.protocol.halts import HaltReason
from andon.protocol.reasons import Reason
from andon.protocol.records import Cursor, PositionRange, Record, RecordKind
from andon.protocol.run_settings import DRAINED, Topology
from andon.protocol.shards import next_batch, reassign
from andon_coordinator.core import departures
from andon_coordinator.core.board import Board, Saving
from andon_coordinator.core.checkpoints import choose_writer
from andon_coordinator.core.defects import Defect, divergence
from andon_coordinator.core.effects import (
    LineState,
    Refusal,
    RefuseJoin,
    SaveDeparture,
    SendShutdown,
    SendTransfer,
    Skip,
    TransferRole,
)
from andon_coordinator.core.ending import WELL, is_complete, not_gone
from andon_coordinator.core.registration import equipped
from andon_coordinator.core.roster import Member
from andon_coordinator.core.round import Round
from andon_coordinator.core.states import Trigger
from andon_coordinator.core.status import waiting_for
from andon_coordinator.core.syncing import answer_scalar_all_reduces

__all__ = ["go_on"]


def go_on(board: Board) -> None:
    """Does whatever the board allows."""
    answer_scalar_all_reduces(board)
    if board.state is LineState.COMPLETE or board.saving is not None:
        return
    if board.state is LineState.HALTED:
        if board.draining:
            _shut_down(board)
        return
    if board.draining and board.state is not LineState.DRAINING:
        board.enter(Trigger.DRAIN_BEGAN)
    if _finished(board):
        _complete(board)
    elif board.stop:
        if not board.roster.live():
            _mind_the_wait(board)  # Nobody has left with the run's weights, so far.
    elif board.round is None and board.keys.saved:
        _go_on_training(board)


def _go_on_training(board: Board) -> None:
    if not _gathered(board) or not equipped(board):
        _wait(board)
    elif board.chain.head is None or _may_found_anew(board):
        _found(board)
    elif _state_is_lost(board):
        board.stop_line(
            Defect(
                reason=HaltReason.STATE_LOST,
                message=f"no worker holds the weights of step {board.chain.step}",
            )
        )
    elif not board.roster.in_grace():
        _begin_transfers(board)
        if len(board.transfers):
            board.forming_since = None
            board.enter(Trigger.TRANSFER_BEGAN)
        elif len(board.roster.in_sync(board.chain.head)) < board.needed:
            _wait(board)
        else:
            board.forming_since = None
            board.enter(Trigger.FORMED)
            _open_round(board)


def _gathered(board: Board) -> bool:
    """Whether recovery or founding need wait for nobody (rule 9)."""
    live = len(board.roster.live())
    if not board.formed:
        window = board.settings.recovery_window_s
        waited = board.first_join_at is not None and board.now - board.first_join_at >= window
        recovered = board.chain.head is not None and waited and live >= board.needed
        board.formed = live >= board.expected or recovered
    return board.formed


def _wait(board: Board) -> None:
    """Goes back to FORMING; a line that drains does not wait, it ends."""
    board.enter(Trigger.FELL_SHORT)
    if not board.draining:
        _mind_the_wait(board)
    elif not board.roster.in_grace():
        _shut_down(board)


def _mind_the_wait(board: Board) -> None:
    """Halts a line that has waited for company for as long as it may."""
    timeout_s = board.settings.forming_timeout_s
    if board.forming_since is None:
        board.forming_since = board.now
    if timeout_s is not None and board.now - board.forming_since >= timeout_s:
        board.forming_since = None  # An answer lets it wait as long again.
        message = f"the line waited {timeout_s:g} s for {waiting_for(board)}"
        board.stop_line(Defect(reason=HaltReason.TOO_FEW_WORKERS, message=message))


def _may_found_anew(board: Board) -> bool:
    live = board.roster.live()
    fresh = any(member.head is None for member in live)
    lost = board.found_anew and not board.roster.in_sync(board.chain.head)
    return lost and fresh and len(live) >= board.expected


def _found(board: Board) -> None:
    """Makes the lowest fresh worker's initial weights the line's (rule 11)."""
    live = board.roster.live()
    if len(live) < board.expected:
        _wait(board)
        return
    founder = next(member for member in live if member.head is None)
    board.founder = founder.request.incarnation
    board.found_anew = False
    record = Record(
        key=board.keys.draw(),
        parent=board.chain.head,
        kind=RecordKind.INITIAL,
        step=0,
        cursor=board.chain.cursor,
        roster=(founder.worker,),
    )
    board.save(Saving(record=record), note=f"initial weights of worker {founder.worker}")


def _state_is_lost(board: Board) -> bool:
    """Whether everybody is here and nobody holds the head (rule 12)."""
    if board.roster.in_sync(board.chain.head) or board.roster.in_grace():
        return False
    return len(board.roster.live()) >= board.expected


def _begin_transfers(board: Board) -> None:
    """Pairs each worker that is behind with one in sync, as far as both wait for the line.

    A script between two waits may have moved a part of its state already, such as a scheduler
    after an evaluation: what a donor then gives is of no commit, and what a joiner then gets is
    moved once more. So donors have asked for work, and joiners too, or are in their first join.
    """
    chain, transfers = board.chain, board.transfers
    assert chain.head is not None
    in_sync = board.roster.in_sync(chain.head)
    trains = len(in_sync) >= board.needed
    donors = [
        each
        for each in in_sync
        # Who leaves an epoch early asks for its end, and has that epoch's end still to do.
        if each.asked and not each.leaves_epoch and not transfers.busy(each.worker)
    ]
    joiners = [
        each
        for each in board.roster.behind(chain.head)
        if each.takes_state
        and not transfers.busy(each.worker)
        and transfers.may_begin(
            each.worker, each.request.node_id, chain.step, board.now, trains=trains
        )
    ]
    for donor, joiner in zip(donors, joiners, strict=False):
        transfer = transfers.begin(
            chain.head,
            donor.worker,
            joiner.worker,
            term=board.keys.term,
            relay=board.reducers.addresses[0],
            now=board.now,
        )
        board.settled = True
        ends = ((joiner, TransferRole.RECEIVE, donor), (donor, TransferRole.SEND, joiner))
        for member, role, peer in ends:
            assert member.stream is not None
            board.emit(
                SendTransfer(
                    stream=member.stream,
                    transfer_id=transfer.id,
                    role=role,
                    head=chain.head,
                    step=chain.step,
                    cursor=chain.cursor,
                    peer=peer.worker,
                    relay=transfer.relay,
                )
            )


def _open_round(board: Board) -> None:
    """Assigns the next step, if everybody on the roster asked for it."""
    chain, plan = board.chain, board.plan
    roster = board.roster.in_sync(chain.head)
    if board.now < board.tries.not_before or not all(member.asked for member in roster):
        return
    assert plan is not None
    assert chain.head is not None
    if any(member.leaves_epoch for member in roster):
        _end_epoch(board)
        return
    batch = next_batch(chain.cursor, plan.global_batch, plan.epoch_size)
    workers = tuple(member.worker for member in roster)
    ring = board.settings.policy.topology is Topology.RING
    shares = reassign(batch, [board.tries.dealt.get(worker, ()) for worker in workers])
    board.tries.dealt = dict(zip(workers, shares, strict=True))
    _note_company(board, workers)
    writer = choose_writer(board, roster)
    board.round = Round(
        key=board.keys.draw(),
        parent=chain.head,
        step=chain.step + 1,
        attempt=board.tries.attempt,
        epoch=chain.cursor.epoch,
        batch=batch,
        roster=workers,
        streams=tuple(_stream(member) for member in roster),
        shares=shares,
        opened_at=board.now,
        reducers=board.reducer_map,
        ring_addresses=tuple(member.ring_address for member in roster) if ring else (),
        writer=writer,
        checkpoint_step=board.checkpoints.step,
    )
    board.settled = True
    board.emit(*board.round.assignments())


def _end_epoch(board: Board) -> None:
    """Moves the cursor to the next epoch by a MARK: a script left the present one early.

    Whoever would have gone on in it is in the next one, too: a step takes everybody.
    """
    chain, plan = board.chain, board.plan
    assert plan is not None
    epoch, position = chain.cursor.epoch, chain.cursor.position
    record = Record(
        key=board.keys.draw(),
        parent=chain.head,
        kind=RecordKind.MARK,
        step=chain.step,
        cursor=Cursor(epoch + 1, 0),
        roster=(),
    )
    left = None
    if plan.epoch_size is not None and position < plan.epoch_size:
        left = Skip(epoch, PositionRange(position, plan.epoch_size), 0, "the script")
    note = f"the script left epoch {epoch} at position {position}"
    saving = Saving(record=record, stop=board.end_reached(record.step, record.cursor))
    board.save(saving, note=note, skipped=left)


def _note_company(board: Board, workers: tuple[int, ...]) -> None:
    """Counts lost streams anew once other workers or reducers take part."""
    if board.reducers.addresses == ("",):
        return  # The coordinator's own: without it there is no line either.
    company = (workers, board.reducer_map)
    if board.tries.company != company:
        board.tries.company = company
        board.tries.unreached = 0


def _finished(board: Board) -> bool:
    """Whether nobody is here who could go on, and the run is complete; see `ending`."""
    live, over = board.roster.live(), bool(board.stop)
    if board.roster.in_grace() or board.roster.in_sync(board.chain.head) or (over and live):
        return False
    if board.shut_down:
        return True
    if not (over or board.last_roster) and (live or not board.formed):
        return False  # There was no step yet, and others may still come.
    # A process that is behind took the slot of one that is gone.
    taken = [member.worker for member in live]
    ended = dict.fromkeys(taken, False) | board.ended
    missing = not_gone(board.last_roster, ended)
    if missing or (over and not ended):
        # They were here before this coordinator, and may come back to it.
        assert board.started_at is not None
        if board.now - board.started_at < board.settings.recovery_window_s:
            return False
    given_up = dict.fromkeys(missing, False) | ended
    return any(is_complete(board.last_roster, each, over=over) for each in (ended, given_up))


def _complete(board: Board) -> None:
    """Ends the run, unless the final weights differ (rule 17)."""
    if not board.final_judged:
        board.final_judged = True
        digests = {
            member.worker: member.final_digest
            for member in board.roster
            if member.left in WELL and member.final_digest and member.final_head == board.chain.head
        }
        defect = divergence(digests, board.chain.step, {}, None)
        if defect is not None:
            board.stop_line(defect)
            return
    for member in board.roster.live():
        _send_away(board, member)
    if any(board.ended.values()):
        # Who did not come back is written down, so that the journal says what is decided here.
        for worker in not_gone(board.last_roster, board.ended):
            why = "it did not come back to a run that is complete"
            board.emit(SaveDeparture(worker, None, why, board.chain.step, b""))
            board.note_end(worker, well=False)
    board.enter(Trigger.COMPLETED)


def _send_away(board: Board, member: Member) -> None:
    """Refuses a newcomer that waits for state which everybody who had it has taken along."""
    message = f"run {board.settings.run_id} is over after step {board.chain.step}"
    board.emit(RefuseJoin(_stream(member), Refusal(reason=Reason.COMPLETE, message=message)))
    departures.detach(board, member, "the run was complete before it had its state", grace_s=0.0)


def _shut_down(board: Board) -> None:
    """Sends everybody away: there is no last step to finish."""
    if board.state is not LineState.DRAINING:
        board.enter(Trigger.DRAIN_BEGAN)
    board.stop = board.stop or DRAINED
    board.shut_down = True
    for member in board.roster.live():
        text = f"the run is over: {board.stop}"
        board.emit(SendShutdown(_stream(member), text, board.stop))
    if _finished(board):
        _complete(board)


def _stream(member: Member) -> int:
    assert member.stream is not None
    return member.stream
