"""Boards whose journals are closed after the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from unit.andon_server.board.boards import Board, MakeBoard


@pytest.fixture
def make_board(tmp_path: Path) -> Iterator[MakeBoard]:
    """Makes boards of runs in `tmp_path`; the keywords are those of `Board`."""
    with ExitStack() as boards:

        def make(**how: Any) -> Board:
            board = Board(tmp_path, **how)
            boards.callback(board.book.close)
            return board

        yield make


@pytest.fixture
def board(make_board: MakeBoard) -> Board:
    return make_board()
