"""Comparing: the weights that workers' loops end with (rule 17).

A worker whose loop is over sends the digest of its weights with a scalar all-reduce, and waits for
the answer before it leaves. So weights that differ stop the line while every worker is still there
to hear of it. What workers leave with is compared once all are gone, for those that gave none.
"""

from __future__ import annotations

from andon_coordinator.core import syncing
from andon_coordinator.core.board import Board
from andon_coordinator.core.defects import divergence
from andon_coordinator.core.events import ScalarAllReduceArrived
from andon_coordinator.core.roster import Member

__all__ = ["scalar_all_reduce_arrived"]


def scalar_all_reduce_arrived(board: Board, member: Member, event: ScalarAllReduceArrived) -> None:
    """A worker has a number to average; with its last weights these are compared, too."""
    syncing.scalar_all_reduce_arrived(board, member, event)
    if event.digest and member.stream is not None:
        member.last_weights = event
        _judge(board)


def _judge(board: Board) -> None:
    """Compares the last weights once everybody has given them, or has left."""
    head = board.chain.head
    members = [each for each in board.roster.in_sync(head) if not each.asked]
    given = {
        each.worker: each.last_weights
        for each in members
        if each.last_weights is not None and each.last_weights.digest_head == head
    }
    if board.final_judged or board.roster.in_grace() or len(given) < len(members):
        return
    defect = divergence(
        {worker: weights.digest for worker, weights in given.items()},
        board.chain.step,
        {worker: weights.digest_prefixes for worker, weights in given.items()},
        board.layout,
    )
    if defect is not None:
        # An answer to this halt accepts them: they are not looked at again when workers leave.
        board.final_judged = True
        board.stop_line(defect)
