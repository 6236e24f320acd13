"""Who may look at the board and who may answer, and which requests are other sites'."""

from __future__ import annotations

from typing import Any

import pytest

from andon.host.endpoint import ENCRYPTED
from unit.andon_server.board.boards import OPERATORS, RUN, Board, MakeBoard, line_of

BEYOND = {"HTTP_HOST": "andon.example:9400", "REMOTE_ADDR": "10.0.0.9"}


@pytest.fixture
def watched(make_board: MakeBoard) -> MakeBoard:
    """Makes boards that show a line."""

    def make(**how: Any) -> Board:
        board = make_board(**how)
        board.feed.tick(line_of())
        return board

    return make


def test_without_tokens_everybody_on_the_host_looks_and_answers(watched: MakeBoard) -> None:
    state = watched().get("/board/api/state").json

    assert (state["may_operate"], state["needs_login"]) == (True, False)


@pytest.mark.parametrize("host", ["localhost:9400", "127.0.0.1", "[::1]:9400", "127.8.8.8:1"])
def test_loopback_has_several_names(watched: MakeBoard, host: str) -> None:
    assert watched().get("/board/api/state", HTTP_HOST=host).status == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example:9400", "10.0.0.7:9400", "", None, "a b", "[::1", "127.0.0.1.evil.example"],
)
@pytest.mark.parametrize("path", ["/", "/board/api/state", "/board/api/live"])
def test_another_name_for_loopback_is_refused_because_a_page_may_have_rebound_it(
    watched: MakeBoard, host: str | None, path: str
) -> None:
    answer = watched().get(path, HTTP_HOST=host)

    assert answer.status == 403
    assert "open it as http://127.0.0.1" in answer.json["error"]


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:9999", "%%"])
@pytest.mark.parametrize("path", ["state", "live", "halt"])
def test_a_request_of_another_sites_page_is_refused(
    watched: MakeBoard, origin: str, path: str
) -> None:
    made = watched()

    answer = made.post(path, {"reason": ""}, HTTP_ORIGIN=origin)

    assert answer.status == 403
    assert made.line.asked == []


def test_the_boards_own_page_may_send_its_origin(watched: MakeBoard) -> None:
    made = watched()

    answer = made.post("drain", HTTP_ORIGIN="http://127.0.0.1:9400")

    assert (answer.status, answer.json) == (200, {"ok": True})


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"HTTP_X_ANDON_BOARD": None}, 403),
        ({"HTTP_X_ANDON_BOARD": "0"}, 403),
        ({"CONTENT_TYPE": "text/plain"}, 415),
        ({"CONTENT_TYPE": None}, 415),
    ],
)
@pytest.mark.parametrize("path", ["halt", "answer", "drain", "login", "logout"])
def test_what_a_form_of_another_site_could_send_is_refused(
    watched: MakeBoard, headers: dict[str, Any], status: int, path: str
) -> None:
    made = watched()

    assert made.post(path, {"reason": ""}, **headers).status == status
    assert made.line.asked == []


def test_with_the_runs_token_alone_its_owner_looks_and_answers(watched: MakeBoard) -> None:
    made = watched(run_token=RUN)
    stranger = made.get("/board/api/state")

    cookie = made.log_in(RUN)
    state = made.get("/board/api/state", HTTP_COOKIE=cookie).json

    assert stranger.status == 401
    assert stranger.json["needs_login"]
    assert "run_id" not in stranger.json
    assert (state["may_operate"], state["needs_login"]) == (True, False)


def test_with_operators_the_runs_token_only_looks(watched: MakeBoard) -> None:
    made = watched(run_token=RUN, operator_token=OPERATORS)
    looks, operates = made.log_in(RUN), made.log_in(OPERATORS)

    state = made.get("/board/api/state", HTTP_COOKIE=looks).json
    refused = made.post("drain", HTTP_COOKIE=looks)
    accepted = made.post("drain", HTTP_COOKIE=operates)

    assert (state["may_operate"], state["needs_login"]) == (False, True)
    assert refused.status == 403
    assert "--operator-token-file" in refused.json["error"]
    assert accepted.status == 200
    assert made.line.asked == [("drain", "board@127.0.0.1")]


def test_on_loopback_operators_alone_leave_looking_to_everybody(watched: MakeBoard) -> None:
    made = watched(operator_token=OPERATORS)

    state = made.get("/board/api/state").json

    assert (state["may_operate"], state["needs_login"]) == (False, True)
    assert made.post("halt", {"reason": ""}).status == 403


def test_a_program_may_show_its_token_in_a_header(watched: MakeBoard) -> None:
    made = watched(run_token=RUN)

    shown = f"Bearer {RUN.decode()}"

    assert made.get("/board/api/state", HTTP_AUTHORIZATION=shown).status == 200
    assert made.get("/board/api/state", HTTP_AUTHORIZATION=f"{shown}x").status == 401


@pytest.mark.parametrize("token", ["", "wrong", "x" * 16000, "ünï"])
def test_a_wrong_token_begins_no_session(watched: MakeBoard, token: str) -> None:
    answer = watched(run_token=RUN).post("login", {"token": token})

    assert answer.status == 401
    assert "Set-Cookie" not in answer.headers
    assert token[:6] not in answer.json["error"] or not token


def test_an_address_with_many_wrong_tokens_has_to_wait_and_the_log_stays_short(
    watched: MakeBoard, caplog: pytest.LogCaptureFixture
) -> None:
    made = watched(run_token=RUN)
    cookie = made.log_in(RUN)
    wrong = {"token": "wrong"}
    bearer = {"HTTP_AUTHORIZATION": "Bearer wrong"}

    statuses = [made.post("login", wrong).status for _ in range(6)]
    statuses += [made.get("/board/api/state", **bearer).status for _ in range(6)]

    assert statuses == [401] * 10 + [429] * 2
    assert "try again in 60 s" in made.post("login", wrong).json["error"]
    assert len(caplog.records) == 2
    # Everybody on loopback has the same address: no session has to wait, and no right token.
    assert made.get("/board/api/state", HTTP_COOKIE=cookie).status == 200
    right = {"HTTP_AUTHORIZATION": f"Bearer {RUN.decode()}"}
    assert made.get("/board/api/state", **right).status == 200
    assert made.log_in(RUN)
    made.time_s = 61.0
    assert made.post("login", wrong).status == 401


def test_wrong_tokens_from_everywhere_do_not_fill_the_log(
    watched: MakeBoard, caplog: pytest.LogCaptureFixture
) -> None:
    made = watched(run_token=RUN)

    for number in range(200):
        made.post("login", {"token": "wrong"}, REMOTE_ADDR=f"10.0.0.{number}")

    assert len(caplog.records) == 30


def test_the_cookie_is_the_browsers_alone_and_is_not_the_token(watched: MakeBoard) -> None:
    made = watched(run_token=RUN)

    cookie = made.post("login", {"token": RUN.decode()}).headers["Set-Cookie"]

    assert cookie.endswith("; Path=/board/api; Max-Age=43200; HttpOnly; SameSite=Strict")
    assert RUN.decode() not in cookie


def test_a_session_ends_with_its_time_or_by_logging_out(watched: MakeBoard) -> None:
    made = watched(run_token=RUN)
    first, second = made.log_in(RUN), made.log_in(RUN)

    out = made.post("logout", HTTP_COOKIE=first)
    assert "Max-Age=0" in out.headers["Set-Cookie"]
    assert made.get("/board/api/state", HTTP_COOKIE=first).status == 401
    assert made.get("/board/api/state", HTTP_COOKIE=second).status == 200
    made.time_s = 12 * 3600.0
    assert made.get("/board/api/state", HTTP_COOKIE=second).status == 401


def test_logins_are_bounded_and_the_oldest_ends_first(watched: MakeBoard) -> None:
    made = watched(run_token=RUN)
    cookies = [made.log_in(RUN) for _ in range(257)]

    assert made.get("/board/api/state", HTTP_COOKIE=cookies[0]).status == 401
    assert made.get("/board/api/state", HTTP_COOKIE=cookies[1]).status == 200


@pytest.mark.parametrize("cookie", ["andon-7f3a", "andon-7f3a=", "\x00", "a=b; ;;=", "x" * 9000])
def test_a_made_up_cookie_is_nobodys(watched: MakeBoard, cookie: str) -> None:
    made = watched(run_token=RUN)

    assert made.get("/board/api/state", HTTP_COOKIE=cookie).status == 401


def test_beyond_loopback_without_any_token_nothing_is_shown(watched: MakeBoard) -> None:
    made = watched(bind="0.0.0.0")

    for path in ("/", "/board/api/state", "/board/api/live"):
        answer = made.get(path, **BEYOND)
        assert answer.status == 403
        assert "--token-file" in answer.json["error"]
    assert made.gate.url("andon", 9400) == ""


def test_beyond_loopback_operators_alone_do_not_leave_looking_to_everybody(
    watched: MakeBoard,
) -> None:
    made = watched(bind="0.0.0.0", operator_token=OPERATORS)

    assert made.get("/board/api/state", **BEYOND).status == 401
    cookie = made.log_in(OPERATORS, **BEYOND)
    assert made.get("/board/api/state", HTTP_COOKIE=cookie, **BEYOND).status == 200


def test_beyond_loopback_a_line_with_certificates_shows_its_board_over_tls_only(
    watched: MakeBoard,
) -> None:
    made = watched(bind="0.0.0.0", encrypts=True, run_token=RUN)

    page, state = made.get("/", **BEYOND), made.get("/board/api/state", **BEYOND)
    login = made.post("login", {"token": RUN.decode()}, **BEYOND)
    encrypted: dict[str, Any] = {**BEYOND, ENCRYPTED: True}
    weaker = made.post("login", HTTP_ORIGIN="http://andon.example:9400", **encrypted)
    cookie = made.post("login", {"token": RUN.decode()}, **encrypted).headers["Set-Cookie"]

    assert (page.status, page.headers["Location"]) == (307, "https://andon.example:9400/")
    assert (state.status, login.status, weaker.status) == (403, 403, 403)
    assert "https://" in state.json["error"]
    assert cookie.endswith("; Secure")
    assert made.gate.url("andon", 9400) == "https://andon:9400/"


def test_a_page_is_not_sent_to_what_is_no_host(watched: MakeBoard) -> None:
    made = watched(bind="0.0.0.0", encrypts=True, run_token=RUN)

    for host in ("", "a\r\nSet-Cookie: x", "evil/..", "x" * 400):
        assert made.get("/", HTTP_HOST=host).status == 400
