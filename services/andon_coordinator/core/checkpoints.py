"""Checkpoints: which worker writes them, and what was written last.

One worker writes, and goes on writing for as long as it takes part: so a run's checkpoints lie in
one place. The first one is the lowest on the service's own host that can write, since that is
where a run is resumed. A worker is told with each assignment whether it is the writer, and the
step of the last checkpoint. The writer writes after the first step at or past a multiple of its
`every` that has none. So one that was missed, because its writer died, is made up for.
"""

from __future__ import annotations

from collections.abc import Sequence

from andon_coordinator.core.board import Board
from andon_coordinator.core.effects import NoteCheckpoint, NoteOverdue, NoteWriter
from andon_coordinator.core.events import Checkpoint
from andon_coordinator.core.roster import Member

__all__ = ["choose_writer", "written"]


def written(board: Board, member: Member, checkpoint: Checkpoint | None) -> None:
    """Takes note of the last checkpoint that a worker says it wrote, or goes on from."""
    known = board.checkpoints
    # A step beyond the line's, which a worker may make up, would be the last one for ever.
    if checkpoint is None or not known.step < checkpoint.step <= board.chain.step:
        return
    known.step, known.folder = checkpoint.step, checkpoint.folder
    board.emit(NoteCheckpoint(member.worker, checkpoint.step, checkpoint.folder))


def choose_writer(board: Board, roster: Sequence[Member]) -> int | None:
    """Who of a round's roster writes what its step makes due."""
    known = board.checkpoints
    able = [each for each in roster if each.request.checkpoints is not None]
    if not any(each.request.incarnation == known.incarnation for each in able):
        here = [each for each in able if each.request.node_id == board.settings.host]
        _appoint(board, next(iter(here or able), None))
    _look_for_overdue(board)
    return known.writer


def _appoint(board: Board, member: Member | None) -> None:
    known = board.checkpoints
    if member is None and known.writer is None:
        return
    plan = member.request.checkpoints if member is not None else None
    known.writer = member.worker if member is not None else None
    known.incarnation = member.request.incarnation if member is not None else None
    known.host = member.request.node_id if member is not None else ""
    known.every = plan.every if plan is not None else 0
    known.place = plan.folder if plan is not None else ""
    board.emit(NoteWriter(known.writer, known.host, known.place, board.writes_elsewhere))


def _look_for_overdue(board: Board) -> None:
    """Says, once each, that a step has no checkpoint that it should have."""
    known, step = board.checkpoints, board.chain.step
    due = step - step % known.every if known.every else 0
    known.overdue = due if due > known.step else 0
    if known.overdue > known.told:
        known.told = known.overdue
        board.emit(NoteOverdue(known.overdue, known.writer, known.step))
