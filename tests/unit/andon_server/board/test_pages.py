"""The files of the board's page: what is served under which name, and how."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon_server import board as package
from unit.andon_server.board.boards import Board, MakeBoard

STATIC = Path(package.__file__).parent / "static"
FILES = sorted(str(each.relative_to(STATIC)) for each in STATIC.rglob("*") if each.is_file())


def test_the_page_is_at_the_root(board: Board) -> None:
    root, named = board.get("/"), board.get("/board/index.html")

    assert (root.status, root.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert root.text == named.text == (STATIC / "index.html").read_text()


@pytest.mark.parametrize("name", FILES)
def test_each_file_is_served_as_what_it_is(board: Board, name: str) -> None:
    answer = board.get(f"/board/{name}")

    kinds = {
        "html": "text/html",
        "css": "text/css",
        "js": "text/javascript",
        "svg": "image/svg+xml",
    }
    kind = kinds.get(name.rpartition(".")[2], "text/plain")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith(kind)
    assert b"".join(answer.body) == (STATIC / name).read_bytes()


def test_a_browser_that_has_a_file_gets_it_once_more_only_after_a_change(board: Board) -> None:
    first = board.get("/")

    again = board.get("/", HTTP_IF_NONE_MATCH=first.headers["ETag"])

    assert first.headers["Cache-Control"] == "no-cache"
    assert (again.status, again.text) == (304, "")


def test_the_head_of_a_page_is_its_answer_without_the_content(board: Board) -> None:
    head, page = board.get("/", "HEAD"), board.get("/")

    assert (head.status, head.text) == (200, "")
    assert head.headers == page.headers


def test_the_page_is_shown_before_anybody_logs_in(make_board: MakeBoard) -> None:
    board = make_board(bind="0.0.0.0", run_token=b"the-token-of-the-run")

    assert board.get("/", HTTP_HOST="andon:9400").status == 200
    assert board.get("/board/board.js", HTTP_HOST="andon:9400").status == 200
