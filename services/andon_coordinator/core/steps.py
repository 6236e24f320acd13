"""Steps: work is asked for and done, and becomes a record or does not (rules 4 to 7)."""

from __future__ import annotations

from andon.protocol.halts import HaltReason
from andon.protocol.records import TERM_AHEAD_S, Cursor, Record, RecordKind
from andon.protocol.run_settings import DRAINED, Topology
from andon.protocol.shards import cursor_after
from andon_coordinator.core import checkpoints, syncing
from andon_coordinator.core.board import Board, Saving, Tries
from andon_coordinator.core.defects import Defect, corruption, in_fault, in_ready, in_round
from andon_coordinator.core.effects import SendShutdown
from andon_coordinator.core.events import (
    Fault,
    FaultKind,
    FaultReported,
    JournalFailed,
    RecordSaved,
    TermSaved,
    WorkerReady,
    WorkRequested,
)
from andon_coordinator.core.roster import LastStep, Member
from andon_coordinator.core.round import Round

__all__ = ["fault", "journal_failed", "ready", "record_saved", "term_saved", "work_requested"]


def work_requested(board: Board, member: Member, event: WorkRequested) -> None:
    """A worker's loop wants the next batch; a request from another head is ignored.

    It also says where the worker is: a report that a cancelled transfer went well is lost.
    """
    chain = board.chain
    member.takes_state = not event.leaves_epoch
    checkpoints.written(board, member, event.checkpoint)
    if event.head is not None and event.head == chain.head:
        member.head = event.head
        member.step = chain.step
    elif member.head != chain.head and chain.record is not None:
        mark = chain.record.kind is RecordKind.MARK
        if mark and event.head is not None and event.head == chain.record.parent:
            member.head = event.head
            board.announce(member, chain.record, chain.result)
    if event.head is None or event.head not in board.chain.standing:
        return
    if board.stop:
        board.emit(SendShutdown(event.stream, f"the run is over: {board.stop}", board.stop))
        return
    if board.settings.policy.topology is Topology.RING and not event.ring_address:
        board.stop_line(
            Defect(
                reason=HaltReason.PROTOCOL_VIOLATION,
                message=f"worker {member.worker} asked for work on a ring without an address for "
                "its neighbour",
                worker=member.worker,
            )
        )
        return
    if event.leaves_epoch and event.head != chain.head:
        # Another worker's request has ended the epoch; this one comes again if it wants work. In a
        # round that is open already it has a part, and its older request must stand after it.
        member.asked = member.asked and board.round is not None
        return
    member.asked = True
    member.leaves_epoch = event.leaves_epoch
    member.ring_address = event.ring_address
    round_ = board.round
    if event.leaves_epoch and round_ is not None and member.worker in round_.roster:
        board.void(f"worker {member.worker} left epoch {round_.epoch}", pause=False)


def ready(board: Board, member: Member, event: WorkerReady) -> None:
    """A worker holds all averages; with the last one's word the step goes to the journal."""
    round_, report = board.round, event.ready
    if round_ is None or report.key != round_.key or event.stream not in round_.streams:
        return
    assert board.plan is not None
    share = sum(map(len, round_.shares[round_.roster.index(member.worker)]))
    # A stream of unknown length may end within the share.
    ended = report.end_of_data and board.plan.dataset_size is None
    defect = in_ready(member.worker, report, range(0 if ended else share, share + 1))
    if defect is not None:
        board.stop_line(defect)
        return
    round_.take(member.worker, report)
    member.held = round_.key
    if round_.complete:
        _prepare(board, round_)


def fault(board: Board, member: Member, event: FaultReported) -> None:
    """A worker saw something wrong: the round is void, and a defect stops the line."""
    seen, round_ = event.fault, board.round
    greatest = seen.greatest
    made_up = greatest is not None and not board.keys.may_be(greatest.term, board.wall)
    if greatest is not None and not made_up and not board.keys.knows(greatest):
        board.raise_term(greatest.term)
    if seen.kind is FaultKind.SCRIPT_RAISED:
        member.raised = f"{seen.error_type}: {seen.message}" if seen.error_type else seen.message
        member.asked = False  # It will leave, and wants no further work.
    current = round_ is not None and board.round is round_ and event.stream in round_.streams
    if seen.key is not None and (round_ is None or not current or seen.key != round_.key):
        return
    roster = round_.roster if round_ is not None and current else ()
    defect = in_fault(seen, member.worker, roster, board.layout)
    if current and seen.kind is FaultKind.DATA_STREAM_LOST:
        defect = _unreachable(board, member, seen)
    elif current and seen.kind is FaultKind.CORRUPT_CHUNK:
        defect = _corrupting(board, seen, roster)
    elif current and made_up:
        defect = _out_of_time(member, seen)
    if defect is not None:
        board.stop_line(defect)
    elif current:
        script = seen.kind is FaultKind.SCRIPT_RAISED
        if script:
            member.broke_attempt = board.tries.attempt
        why = f"worker {member.worker}: {seen.message or seen.kind.name.lower().replace('_', ' ')}"
        board.void(why, pause=not script)


def record_saved(board: Board, event: RecordSaved) -> None:
    """A record is durable: it is the line's head, and whoever can apply it is told."""
    saving = board.saving
    if saving is None or saving.record.key != event.key:
        return
    board.saving = None
    record = saving.record
    board.stop = saving.stop
    able = [each for each in board.roster.live() if board.can_apply(each, record)]
    _end_what_is_of_the_head(board, record)
    board.chain.append(record, saving.result)
    if saving.result is not None:
        board.detectors.committed(saving.result)
        board.last_roster, board.ended = record.roster, saving.ended
    board.tries = Tries()
    for member in board.roster:
        member.broke_attempt = None
        # A MARK keeps requests for work; who asked for the end of an epoch wanted none.
        mark = record.kind is RecordKind.MARK
        member.asked = member.asked and mark and not member.leaves_epoch
        member.leaves_epoch = False
    if saving.answer is not None:
        board.emit(saving.answer)
    for member in able:
        board.announce(member, record, saving.result)
    for member in board.roster.live():
        assert member.stream is not None
        if saving.resume is not None:
            board.emit(saving.resume(member.stream))
        if board.stop and member not in able:
            board.emit(SendShutdown(member.stream, f"the run is over: {board.stop}", board.stop))
    if not board.halt_told:
        board.tell_halt()


def _end_what_is_of_the_head(board: Board, record: Record) -> None:
    """Ends scalar all-reduces and transfers before the weights move; a MARK moves none."""
    if record.kind is not RecordKind.MARK:
        syncing.close_scalar_all_reduces(board)
        board.transfers.cancel_all()


def term_saved(board: Board, event: TermSaved) -> None:
    """A term is durable: its keys may be used."""
    if event.term == board.keys.term:
        board.keys.saved = True


def journal_failed(board: Board, event: JournalFailed) -> None:
    """Nothing commits unrecorded."""
    halt = board.halt
    if halt is not None and halt.reason is HaltReason.JOURNAL and board.saving is None:
        return
    board.stop_line(
        Defect(
            reason=HaltReason.JOURNAL,
            message=f"the journal can't be written: {event.message}",
        )
    )


def _unreachable(board: Board, member: Member, seen: Fault) -> Defect | None:
    """What is wrong if the same workers lose a stream to the same reducers again and again.

    A reducer that is lost to all is lost to the coordinator too, and off the map: this one isn't.
    """
    tries, attempts = board.tries, board.settings.max_attempts
    tries.unreached += bool(tries.company[1])
    if tries.unreached < attempts:
        return None
    return Defect(
        reason=HaltReason.REPEATED_FAILURE,
        message=f"step {board.chain.step + 1}: in {attempts} attempts on end a stream to a reducer "
        f"was lost, the last one by worker {member.worker}: {seen.message or 'it said no more'}. "
        "Let every worker reach every reducer's address, or end the reducer that can't be reached",
        worker=member.worker,
    )


def _corrupting(board: Board, seen: Fault, roster: tuple[int, ...]) -> Defect | None:
    """What is wrong if chunks are changed on their way again and again.

    Once may be a cosmic ray, and costs an attempt. A network or a memory that does it every time
    would keep the line at one step for ever, and no person would know.
    """
    board.tries.corrupt += 1
    if board.tries.corrupt < board.settings.max_attempts:
        return None
    return corruption(seen, roster, board.layout, board.chain.step + 1, board.tries.corrupt)


def _out_of_time(member: Member, seen: Fault) -> Defect:
    """What is wrong if a reducer holds a round of a term that no coordinator ever had.

    No round of this line would ever be above it, so to try again would be to try for ever.
    """
    assert seen.greatest is not None
    term = seen.greatest.term
    return Defect(
        reason=HaltReason.PROTOCOL_VIOLATION,
        message=f"worker {member.worker} was told of a round of the term {term}, whose counter "
        f"{term >> 32} is more than {TERM_AHEAD_S} s ahead of the coordinator's clock: some worker "
        "made it up, and the reducer that believed it must be started again",
        value=str(term),
    )


def _prepare(board: Board, round_: Round) -> None:
    """Judges a complete round and gives its record to the journal."""
    defect = in_round(round_, board.layout) or board.detectors.judge(round_)
    if defect is not None:
        board.stop_line(defect)
        return
    assert board.plan is not None
    seconds = board.now - round_.opened_at
    cursor = cursor_after(board.chain.cursor, round_.batch, board.plan.epoch_size)
    if round_.end_of_data and board.plan.epoch_size is None:
        cursor = Cursor(cursor.epoch + 1, 0)
    stop = round_.stop_reason or board.end_reached(round_.step, cursor)
    stop = stop or (DRAINED if board.draining else "")
    for worker, report in round_.in_rank_order:
        member = board.roster.get(worker)
        assert member is not None
        member.last_step = LastStep(report.samples, seconds, report.timings)
    record = Record(
        key=round_.key,
        parent=round_.parent,
        kind=RecordKind.STEP,
        step=round_.step,
        cursor=cursor,
        roster=round_.roster,
    )
    board.round = None
    result = round_.result(seconds=seconds, stop_reason=stop)
    board.save(Saving(record=record, result=result, stop=stop))
