"""The board's application: its answers, its stream, and what it makes of hostile requests."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from andon.protocol.halts import HaltAnswer
from andon.protocol.reasons import Reason
from andon_coordinator.core.line_state import LineState
from andon_coordinator.transport.errors import LineError
from andon_server.board.app import MAX_VIEWERS
from unit.andon_server.board.boards import RUN, Answer, Board, MakeBoard, commit, line_of, nan_halt


@pytest.fixture
def board(make_board: MakeBoard) -> Board:
    board = make_board()
    board.feed.tick(line_of(1))
    return board


def messages(answer: Answer) -> list[tuple[str, Any]]:
    """The messages of a stream that is closed already."""
    found = []
    for block in answer.text.split("\n\n"):
        fields = dict(line.partition(": ")[::2] for line in block.splitlines())
        if "data" in fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


def test_the_state_is_json_that_nobody_stores(board: Board) -> None:
    answer = board.get("/board/api/state")

    assert answer.status == 200
    assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.json["run_id"] == "7f3a"


def test_every_answer_says_what_a_browser_must_not_do(board: Board) -> None:
    for answer in (board.get("/board/api/state"), board.get("/nowhere"), board.get("/")):
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
        assert policy.endswith("base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer"


def test_before_the_first_snapshot_one_is_told_to_ask_again(make_board: MakeBoard) -> None:
    answer = make_board().get("/board/api/state")

    assert (answer.status, answer.json["error"]) == (
        503, "the line is starting: ask again in a moment",
    )  # fmt: skip


def test_a_number_that_is_not_finite_is_null(board: Board) -> None:
    board.feed.tick(replace(line_of(), loss=float("nan")))

    assert board.get("/board/api/state").json["loss"] is None


# ---------------------------------------------------------------------------- answers


def test_an_answer_goes_to_the_line_with_the_halt_that_was_seen(board: Board) -> None:
    seen = str(nan_halt().id)

    retry = board.post("answer", {"halt_id": seen, "answer": "retry", "worker": None})
    drop = board.post("answer", {"halt_id": seen, "answer": "drop", "worker": 1})

    assert (retry.json, drop.json) == ({"ok": True}, {"ok": True})
    assert board.line.asked == [
        ("answer", 2**60 + 1, HaltAnswer.RETRY, None, "board@127.0.0.1"),
        ("answer", 2**60 + 1, HaltAnswer.DROP, 1, "board@127.0.0.1"),
    ]


def test_halt_and_drain_go_to_the_line(board: Board) -> None:
    board.post("halt", {"reason": "loss looks odd"})
    board.post("drain")

    assert board.line.asked == [
        ("halt", "loss looks odd", "board@127.0.0.1"),
        ("drain", "board@127.0.0.1"),
    ]


def test_what_the_line_refuses_is_told_in_its_own_words(board: Board) -> None:
    board.line.refusal = LineError(Reason.OPERATOR_REFUSED, "the line is not halted")

    answer = board.post("answer", {"halt_id": "1", "answer": "retry"})

    assert (answer.status, answer.json) == (409, {"error": "the line is not halted"})


def test_a_service_that_goes_away_or_is_busy_says_so(board: Board) -> None:
    board.line.refusal = LineError(Reason.SERVICE_LEAVING, "the coordinator is going away")
    leaving = board.post("drain")
    board.late = True
    busy = board.post("drain")

    assert (leaving.status, busy.status) == (503, 503)
    assert "look at the line's state" in busy.json["error"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"halt_id": 1, "answer": "retry"},
        {"halt_id": "-1", "answer": "retry"},
        {"halt_id": "１", "answer": "retry"},
        {"halt_id": "1" * 21, "answer": "retry"},
        {"halt_id": "1", "answer": "explode"},
        {"halt_id": "1", "answer": ["retry"]},
        {"halt_id": "1", "answer": "drop", "worker": "1"},
        {"halt_id": "1", "answer": "drop", "worker": True},
        {"halt_id": "1", "answer": "drop", "worker": -1},
        {"halt_id": "1", "answer": "drop", "worker": 2**40},
        [],
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 16000,
        b"null",
        b'"retry"',
    ],
)
def test_a_body_that_is_no_answer_is_refused_and_changes_nothing(board: Board, body: Any) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    answer = board.post("answer", data)

    assert answer.status == 400
    assert answer.json["error"]
    assert board.line.asked == []


@pytest.mark.parametrize("what", ["halt", "login", "answer"])
def test_half_a_character_is_refused_and_logged_by_nobody(
    make_board: MakeBoard, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    board = make_board(run_token=RUN)
    half = "\ud800"
    body = {"token": half, "reason": half, "halt_id": half, "answer": half}

    answer = board.post(what, body, HTTP_AUTHORIZATION=f"Bearer {RUN.decode()}")

    assert answer.status == 400
    assert board.line.asked == []
    assert not caplog.records


@pytest.mark.parametrize(
    ("length", "status"),
    [("", 411), (None, 411), ("-5", 411), ("1e3", 411), ("99999", 413), ("9" * 40, 413)],
)
def test_a_body_without_an_honest_length_is_not_read(
    board: Board, length: str | None, status: int
) -> None:
    class Unread:
        def read(self, count: int) -> bytes:
            raise AssertionError(f"{count} bytes were read")

    answer = board.post("halt", CONTENT_LENGTH=length, **{"wsgi.input": Unread()})

    assert answer.status == status


def test_a_failure_of_the_board_is_an_answer_without_its_insides(
    board: Board, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def read(self, count: int) -> bytes:
            raise ValueError("a secret")

    answer = board.post("halt", **{"wsgi.input": Broken()})

    assert answer.status == 500
    assert "secret" not in answer.text
    assert "board_failed" in caplog.text


# ------------------------------------------------------------------------------ paths


@pytest.mark.parametrize(
    "path",
    [
        "/board/../app.py",
        "/board/static/../../app.py",
        "/board//etc/passwd",
        "/board/api",
        "/board/api/",
        "/board/api/nothing",
        "/board/api/runs/",
        "/board/api/runs/nope",
        "/board/api/runs/../7f3a",
        "/board/api/runs/7f3a/",
        "/board/api/runs/7f3a/curves/x",
        "/board/api/runs//curves",
        "/board/api/runs/%2e%2e",
        "/board/api/runs/\x00",
        "/board/api/runs/" + "x" * 9000,
        "/board/vendor",
        "/board/\xff\xfe",
    ],
)
def test_a_path_leads_to_what_is_listed_or_to_nothing(board: Board, path: str) -> None:
    answer = board.get(path)

    assert answer.status == 404
    assert len(answer.text) < 300


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "TRACE", "x" * 500])
def test_other_methods_are_refused(board: Board, method: str) -> None:
    assert board.get("/", method).status == 405
    assert board.get("/board/api/state", method).status == 405


def test_reading_what_is_written_and_the_other_way_round_finds_nothing(board: Board) -> None:
    assert board.get("/board/api/halt").status == 404
    assert board.post("state").status == 404


# ----------------------------------------------------------------------------- stream


def test_a_stream_begins_with_the_line_as_it_is(board: Board) -> None:
    answer = board.get("/board/api/live")
    board.app.close(timeout_s=0.0)

    [(event, state)] = messages(answer)

    assert answer.headers["Content-Type"] == "text/event-stream"
    assert (event, state) == ("state", board.get("/board/api/state").json)


def test_what_happens_while_one_watches_follows_in_order(board: Board) -> None:
    answer = board.get("/board/api/live")
    parts = iter(answer.body)
    first, state = next(parts), next(parts)
    commit(board.feed, 1)
    commit(board.feed, 2, loss=float("inf"))
    board.feed.tick(replace(line_of(), state=LineState.COMPLETE))
    board.app.close(timeout_s=0.0)

    rest = b"".join(parts).decode()

    assert first == b"retry: 2000\n\n"
    assert state.startswith(b"event: state\ndata: {")
    (told, complete), (kind, points) = messages(Answer(200, {}, [rest.encode()]))
    assert (told, complete["state"], kind) == ("state", "COMPLETE", "points")
    assert points == {
        "steps": [
            [1, 1.5, 0.5, 4, 0.75, 2.0, 1000.0],
            [2, None, 0.5, 4, 0.75, 2.0, 1000.0],
        ],
        "scalars": [],
    }


def test_a_viewer_that_is_too_slow_is_sent_away(board: Board) -> None:
    parts = iter(board.get("/board/api/live").body)
    next(parts), next(parts)
    for step in range(1, 100):
        commit(board.feed, step)

    assert list(parts) == []


def test_viewers_are_bounded_and_a_place_is_free_again_after_one_left(board: Board) -> None:
    streams = [board.get("/board/api/live").body for _ in range(MAX_VIEWERS)]

    refused = board.get("/board/api/live")
    assert refused.status == 503
    assert "32 viewers" in refused.json["error"]
    for _ in range(2):  # a place is given back once, however often it is closed
        streams[0].close()  # type: ignore[attr-defined]
    assert board.get("/board/api/live").status == 200
    assert board.get("/board/api/live").status == 503


def test_after_the_end_no_stream_begins(board: Board) -> None:
    board.app.close(timeout_s=0.0)

    refused = board.get("/board/api/live")
    assert refused.status == 503
    assert refused.json["error"] == "the service is going away"
