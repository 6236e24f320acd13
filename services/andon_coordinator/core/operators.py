"""Operators: what people ask of the line: stop, go on, end."""

from __future__ import annotations

from andon.protocol.halts import HaltAnswer, HaltEvidence, HaltReason
from andon.protocol.records import Record, RecordKind
from andon.protocol.shards import cursor_after, next_batch
from andon_coordinator.core import departures
from andon_coordinator.core.board import Board, Saving
from andon_coordinator.core.defects import Defect
from andon_coordinator.core.effects import (
    LineState,
    RefuseOperator,
    SaveAnswer,
    SaveDeparture,
    SaveTerm,
    SendResume,
    SendShutdown,
    Skip,
)
from andon_coordinator.core.events import CordPulled, DrainRequested, HaltCleared
from andon_coordinator.core.states import Trigger

__all__ = ["clear", "drain", "pull_cord", "roll_back"]


def pull_cord(board: Board, event: CordPulled) -> None:
    """Stops the line because a person says so."""
    if board.state in (LineState.HALTED, LineState.COMPLETE):
        board.emit(RefuseOperator(f"the line is {board.state.name.lower()} already"))
        return
    who = event.operator or "an operator"
    why = f": {event.reason}" if event.reason else ""
    board.stop_line(Defect(reason=HaltReason.OPERATOR, message=f"{who} pulled the cord{why}"))


def drain(board: Board, event: DrainRequested) -> None:
    """Ends the run after the present step."""
    board.draining = board.draining or board.state is not LineState.COMPLETE


def clear(board: Board, event: HaltCleared) -> None:
    """Answers the present halt, as far as that can be done now."""
    halt = board.halt
    if board.state is not LineState.HALTED or halt is None:
        board.emit(RefuseOperator("the line is not halted"))
        return
    objection = _objection(board, halt, event)
    if objection:
        board.emit(RefuseOperator(objection))
        return
    # What an answer does is in the journal before the answer is: a coordinator that finds the one
    # without the other asks again, or sees that the halt is older than the last record.
    answer = SaveAnswer(halt.id, event.answer, event.worker, event.operator)
    skipped = event.answer is HaltAnswer.SKIP
    if skipped:
        _skip(board, event, answer)
    else:
        if event.answer is HaltAnswer.DROP:
            _drop(board, event)
        board.emit(answer)
    board.detectors.answered(halt, event.answer)
    if not skipped:
        for member in board.roster.live():
            assert member.stream is not None
            board.emit(SendResume(member.stream, halt.id, event.answer))
    board.halt = None
    board.tries.forgive()
    board.enter(Trigger.ANSWERED)
    if not board.keys.saved and halt.reason is HaltReason.JOURNAL:
        board.emit(SaveTerm(board.keys.term))
    if halt.reason is HaltReason.STATE_LOST and board.found_anew:
        _close_all(board)


def roll_back(board: Board) -> None:
    """Makes the chosen head the line's by a MARK, before there is any stream (rule 12).

    It answers whatever halt the run stood in: the step is tried again.
    """
    chain, halt = board.chain, board.halt
    board.rolling_back = False
    record = Record(
        key=board.keys.draw(),
        parent=chain.head,
        kind=RecordKind.MARK,
        step=chain.step,
        cursor=chain.cursor,
        roster=(),
    )
    saving = Saving(record=record, rolls_back=True)
    if halt is not None:
        saving.answer = SaveAnswer(halt.id, HaltAnswer.RETRY, None, "andon run --resume")
        board.halt = None
    board.save(saving, note=f"resumed after step {chain.step}")


def _objection(board: Board, halt: HaltEvidence, event: HaltCleared) -> str:
    """Why an answer can't be given now; empty if it can."""
    if event.halt_id != halt.id:
        return f"the present halt is {halt.id}, not {event.halt_id}"
    if board.saving is not None:
        return "a record is being saved; answer again in a moment"
    if halt.reason is HaltReason.STATE_LOST and not board.roster.in_sync(board.chain.head):
        return _objection_to_founding_anew(board, event)
    match event.answer:
        case HaltAnswer.SKIP if board.chain.head is None or board.stop:
            return "there is no step whose samples could be skipped"
        case HaltAnswer.SKIP if not board.roster.in_sync(board.chain.head):
            # A MARK that nobody can apply would leave nobody at the line's head.
            return f"no worker holds the weights of step {board.chain.step}: wait for one"
        case HaltAnswer.SKIP if not board.keys.saved:
            return "the coordinator's term is being saved; answer again in a moment"
        case HaltAnswer.DROP if event.worker is None:
            return "name the worker to drop"
        case HaltAnswer.DROP if board.roster.get(event.worker or 0) is None:
            return f"there is no worker {event.worker}"
        case _:
            return ""


def _objection_to_founding_anew(board: Board, event: HaltCleared) -> str:
    """Lost state at step 0 is founded anew if the operator says RETRY: nothing was trained."""
    live = board.roster.live()
    fresh = any(member.head is None for member in live) and all(each.step == 0 for each in live)
    if event.answer is HaltAnswer.RETRY and board.chain.step == 0 and fresh:
        board.found_anew = True
        return ""
    return f"no worker holds the weights of step {board.chain.step}: bring one back that does"


def _skip(board: Board, event: HaltCleared, answer: SaveAnswer) -> None:
    """Moves the cursor past the batch with a MARK; the line resumes once it is durable."""
    chain, plan = board.chain, board.plan
    assert plan is not None
    batch = next_batch(chain.cursor, plan.global_batch, plan.epoch_size)
    record = Record(
        key=board.keys.draw(),
        parent=chain.head,
        kind=RecordKind.MARK,
        step=chain.step,
        cursor=cursor_after(chain.cursor, batch, plan.epoch_size),
        roster=(),
    )
    skip = Skip(chain.cursor.epoch, batch, event.halt_id, event.operator)
    saving = Saving(
        record=record,
        stop=board.end_reached(record.step, record.cursor),
        answer=answer,
        resume=lambda stream: SendResume(stream, event.halt_id, HaltAnswer.SKIP),
    )
    note = f"skipped positions {batch.start} to {batch.stop} of epoch {skip.epoch}"
    board.save(saving, note=note, skipped=skip)


def _drop(board: Board, event: HaltCleared) -> None:
    """Sends a worker away for good; the line goes on with one fewer."""
    assert event.worker is not None
    member = board.roster.get(event.worker)
    assert member is not None
    why = "dropped by an operator"
    board.emit(SaveDeparture(member.worker, None, why, member.step, b"", dropped=True))
    board.note_end(member.worker, well=False)
    if member.stream is not None:
        board.emit(SendShutdown(member.stream, "an operator dropped this worker"))
    departures.cancel_transfer(board, member, why)
    board.roster.remove(member.worker)
    board.dropped.add(member.worker)


def _close_all(board: Board) -> None:
    """Rule 12: founding anew closes every stream first."""
    for member in board.roster.live():
        message, grace_s = "the line is founded anew; join again", board.settings.liveness.lease_s
        departures.cut_off(board, member, message, "founded anew", grace_s=grace_s)
