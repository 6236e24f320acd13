"""Syncing: reports about state that moves, and numbers to average: what runs beside the rounds."""

from __future__ import annotations

import math

from andon.protocol.records import Key
from andon_coordinator.core import departures
from andon_coordinator.core.board import Board
from andon_coordinator.core.effects import SendScalarAllReduceResult
from andon_coordinator.core.events import ScalarAllReduceArrived, StateReported
from andon_coordinator.core.roster import Member
from andon_coordinator.core.scalar_all_reduces import ScalarAllReduceMean, own_mean

__all__ = [
    "answer_scalar_all_reduces",
    "close_scalar_all_reduces",
    "scalar_all_reduce_arrived",
    "state_reported",
]


def state_reported(board: Board, member: Member, event: StateReported) -> None:
    """One end of a transfer is done; the joiner counts once it reports the head (rule 10).

    A report about a transfer that is no more is ignored, and so is a donor's success: what
    counts is what the joiner holds.
    """
    transfer = board.transfers.get(event.transfer_id)
    if transfer is None or member.worker not in (transfer.donor, transfer.joiner):
        return
    joiner = board.roster.get(transfer.joiner)
    assert joiner is not None, "a lost worker's transfers are cancelled"
    if not event.failure and member is not joiner:
        return
    board.transfers.end(transfer)
    if not event.failure and event.head == transfer.head:
        joiner.head = transfer.head
        joiner.step = board.chain.step
        joiner.held = None
        joiner.takes_state = False
        board.transfers.setbacks.pop(joiner.worker, None)
        _pass_marks_on(board, joiner)
        return
    board.note_setback(transfer, joiner, event.failure or "it reported another head")
    if event.failure:
        departures.release(board, transfer.donor if member is joiner else transfer.joiner)


def _pass_marks_on(board: Board, joiner: Member) -> None:
    """Samples were skipped while the state travelled: no weight moved, and the MARK follows."""
    record = board.chain.record
    if joiner.head != board.chain.head and record is not None and board.can_apply(joiner, record):
        board.announce(joiner, record, board.chain.result)


def scalar_all_reduce_arrived(board: Board, member: Member, event: ScalarAllReduceArrived) -> None:
    """A worker has a number to average.

    One whose weights are not the line's has been left behind: nobody will pair with its number,
    and its script must not hang, so it gets that number back. Its state comes once it asks for
    work, and replaces whatever its script makes of the answer.
    """
    weight, head = event.weight, event.head
    if not (math.isfinite(weight) and weight >= 0):
        text = f"a scalar all-reduce's weight must be finite and at least 0, not {weight}"
        departures.cut_off(board, member, text, text, grace_s=board.settings.rejoin_grace_s)
        return
    if member.head != board.chain.head or head is None or head not in board.chain.standing:
        _answer(board, member, head, own_mean(event.sequence, event.value, weight))
        return
    mean = board.scalar_all_reduces.give(member.worker, event.sequence, event.value, weight)
    if mean is not None:
        _answer(board, member, board.chain.head, mean)


def answer_scalar_all_reduces(board: Board) -> None:
    """Answers what everybody in sync gave a number for, or went past."""
    members = board.roster.in_sync(board.chain.head)
    # Until recovery is over, workers are missing that say again what they gave. A run that is over
    # gathers nobody any more.
    gathered = board.formed or bool(board.stop)
    if not gathered or not members or board.roster.in_grace():
        return
    awaited = {member.worker for member in members if not member.asked}
    for mean in board.scalar_all_reduces.settle(awaited):
        for member in members:
            _answer(board, member, board.chain.head, mean)


def close_scalar_all_reduces(board: Board) -> None:
    """The weights are about to move: whoever still waits in a scalar all-reduce was left behind."""
    for mean, givers in board.scalar_all_reduces.close():
        for member in board.roster.live():
            if member.worker in givers:
                _answer(board, member, board.chain.head, mean)


def _answer(board: Board, member: Member, head: Key | None, mean: ScalarAllReduceMean) -> None:
    assert member.stream is not None
    board.emit(
        SendScalarAllReduceResult(
            member.stream, head, mean.sequence, mean.value, mean.weight, mean.contributors
        )
    )
