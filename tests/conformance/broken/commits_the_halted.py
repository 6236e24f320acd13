"""A halt voids no round: who says that it is ready still commits it."""

from __future__ import annotations

from andon_coordinator.core.board import Board
from andon_coordinator.core.defects import Defect
from conformance.breaking import serve_with

stop_line = Board.stop_line


def stop(board: Board, defect: Defect) -> None:
    round_ = board.round
    stop_line(board, defect)
    board.round = round_


if __name__ == "__main__":
    serve_with((Board, "stop_line", stop))
