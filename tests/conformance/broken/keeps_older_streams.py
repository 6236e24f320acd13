"""The stream that a Join replaces is left open."""

from __future__ import annotations

from andon_coordinator.core.board import Board
from andon_coordinator.core.roster import Member
from conformance.breaking import serve_with

close = Board.close


def leave_open(board: Board, member: Member, message: str) -> None:
    if "joined again" not in message:
        close(board, member, message)


if __name__ == "__main__":
    serve_with((Board, "close", leave_open))
