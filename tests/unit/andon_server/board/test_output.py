"""The last lines of a worker's output: plain text, of a plain file, and of nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon_server.board.output import last_lines
from unit.andon_server.board.boards import OPERATORS, RUN, Board, MakeBoard


def test_the_last_fifty_lines_are_shown_without_what_a_terminal_obeys(tmp_path: Path) -> None:
    lines = [f"\x1b[32mstep {step}\x1b[0m" for step in range(100)]
    progress = "\r 10 %\r 100 %\r"
    (tmp_path / "worker-1.log").write_text("\n".join([*lines, progress, "cut \x07of"]))

    shown = last_lines(tmp_path, 1)

    assert shown == [*(f"step {step}" for step in range(52, 100)), " 100 %", "cut of"]


def test_of_a_long_log_only_whole_lines_of_its_end_are_shown(tmp_path: Path) -> None:
    (tmp_path / "worker-0.log").write_bytes(b"x" * (1 << 20) + b"\n\xff last\n")

    assert last_lines(tmp_path, 0) == ["\N{REPLACEMENT CHARACTER} last"]


def test_an_empty_log_has_no_lines_and_one_that_is_missing_or_no_plain_file_is_none(
    tmp_path: Path,
) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "worker-0.log").touch()
    (tmp_path / "worker-1.log").symlink_to(tmp_path / "secret")
    (tmp_path / "worker-2.log").mkdir()

    assert [last_lines(tmp_path, worker) for worker in range(4)] == [[], None, None, None]


def test_the_board_shows_a_workers_output(board: Board, tmp_path: Path) -> None:
    (tmp_path / "7f3a" / "worker-1.log").write_text("<b>step 1</b>\n")

    answer = board.get("/board/api/workers/1/output")

    assert (answer.status, answer.json) == (200, {"lines": ["<b>step 1</b>"]})


@pytest.mark.parametrize("worker", ["2", "-1", "", "1.log", "..", "\u0661", "%31", "9" * 30])
def test_what_is_no_workers_number_or_has_no_log_is_not_found(
    board: Board, tmp_path: Path, worker: str
) -> None:
    (tmp_path / "7f3a" / "worker-1.log").write_text("step 1\n")

    answer = board.get(f"/board/api/workers/{worker}/output")

    assert answer.status == 404
    assert "not kept beside its service" in answer.text


def test_output_needs_the_same_token_as_the_rest_of_the_board(
    make_board: MakeBoard, tmp_path: Path
) -> None:
    board = make_board(run_token=RUN, operator_token=OPERATORS)
    (tmp_path / "7f3a" / "worker-0.log").write_text("step 1\n")
    path = "/board/api/workers/0/output"

    refused = board.get(path)
    shown = board.get(path, HTTP_AUTHORIZATION=f"Bearer {RUN.decode()}")

    assert refused.status == 401
    assert "step 1" not in refused.text
    assert shown.json == {"lines": ["step 1"]}
