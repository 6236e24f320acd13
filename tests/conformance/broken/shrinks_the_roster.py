"""A round goes on without the member that it lost."""

from __future__ import annotations

from andon_coordinator.core import departures, steps
from andon_coordinator.core.board import Board
from andon_coordinator.core.roster import Member
from conformance.breaking import serve_with

break_away = departures._break_away


def shrink(board: Board, member: Member, message: str) -> None:
    round_ = board.round
    if round_ is not None and member.worker in round_.roster and len(round_.roster) > 1:
        rank = round_.roster.index(member.worker)
        round_.roster = round_.roster[:rank] + round_.roster[rank + 1 :]
        round_.streams = round_.streams[:rank] + round_.streams[rank + 1 :]
        round_.ready.pop(member.worker, None)
        if round_.complete:
            steps._prepare(board, round_)
    break_away(board, member, message)


if __name__ == "__main__":
    serve_with((departures, "_break_away", shrink), (steps, "in_round", lambda round_: None))
