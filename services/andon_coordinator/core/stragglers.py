"""Stragglers: workers that the others wait for though their streams live.

Slowness is shown, never punished, unless the line has a straggler time-out. Then a worker that the
others have waited for so long is cut off, and they go on without it; it may come back, as any lost
worker. A worker counts as slow while another one waits for it:

- between two steps, if it has not asked for work and another one has;
- in a round, if another one holds all averages and it does not;
- in a round in which nobody holds them yet, if it says that it still loads or computes, and another
  one has sent its gradient and waits. Who sends slowly can't be told from who waits.
"""

from __future__ import annotations

from andon_coordinator.core import departures
from andon_coordinator.core.board import Board
from andon_coordinator.core.effects import LineState
from andon_coordinator.core.events import Activity
from andon_coordinator.core.roster import Member

__all__ = ["watch"]

_STILL_WORKS = (Activity.LOADING, Activity.COMPUTING, Activity.BUSY, Activity.EVALUATING)
_WAITS = (Activity.EXCHANGING, Activity.COMMITTING)


def watch(board: Board) -> None:
    """Cuts off who was slow for too long, unless too few would be left to go on."""
    timeout_s = board.settings.straggler_timeout_s
    if timeout_s is None:
        return
    slow = _slow(board)
    for member in board.roster:
        if member not in slow:
            member.slow_since = None
        elif member.slow_since is None:
            member.slow_since = board.now
    late = [each for each in slow if board.now - (each.slow_since or 0.0) >= timeout_s]
    if len(board.roster.in_sync(board.chain.head)) - len(late) < board.needed:
        return
    for member in late:
        message = f"the others waited {timeout_s:g} s for worker {member.worker}"
        why = f"too slow: {message}"
        departures.cut_off(board, member, message, why, grace_s=0.0, crash=False)


def _slow(board: Board) -> list[Member]:
    """Those in sync whom another one waits for now."""
    running = board.state in (LineState.RUNNING, LineState.DRAINING)
    if not running or board.saving is not None or board.stop:
        return []
    members, round_ = board.roster.in_sync(board.chain.head), board.round
    if round_ is not None:
        members = [each for each in members if each.worker in round_.roster]
    if round_ is None:
        if len(board.transfers):
            return []
        slow = [each for each in members if not each.asked]
    elif round_.ready:
        slow = [each for each in members if each.worker not in round_.ready]
    elif any(each.activity in _WAITS for each in members):
        slow = [each for each in members if each.activity in _STILL_WORKS]
    else:
        return []
    return slow if len(slow) < len(members) else []
