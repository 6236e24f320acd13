"""The board's JSON of a run whose ranks attend sessions."""

from __future__ import annotations

import json
from typing import Any

from andon.protocol.peer_calls import Call, CallKind, PendingCall
from andon.protocol.records import Key
from andon.protocol.sessions import RankFault, RankReport, SessionEnd
from andon_coordinator.core.chain import Keys
from andon_coordinator.core.events import SessionSaved
from andon_coordinator.core.session_events import (
    AttendRequest,
    RankAttended,
    RankFaulted,
    RankLeft,
    RankReported,
)
from andon_coordinator.core.session_line import with_session
from andon_coordinator.core.session_status import session_snapshot
from andon_coordinator.core.sessions import SessionsCore
from andon_server.board.view import state_view
from unit.andon_server.board.boards import line_of

KEY = Key(5, 1)
MANY = 40


class Run:
    """The sessions of a run; a rank's stream is its rank plus one."""

    def __init__(self, ranks: int = 2) -> None:
        self.core = SessionsCore(keys=Keys(5, lambda: 0))
        self.size = ranks

    def attend(self, rank: int) -> None:
        request = AttendRequest(
            rank=rank, world_size=self.size, incarnation=rank + 1, node_id=f"host-{rank}",
            backend="cuda", device="NVIDIA H100",
        )  # fmt: skip
        self.core.receive(RankAttended(rank + 1, request), 0.0)

    def form(self) -> None:
        for rank in range(self.size):
            self.attend(rank)
        self.core.receive(SessionSaved(KEY), 0.0)

    def view(self, now: float = 1.0) -> dict[str, Any]:
        line = with_session(line_of(), session_snapshot(self.core, now))
        shown = state_view(line, pace_s=None, now_unix_s=0.0)
        assert json.loads(json.dumps(shown)) == shown
        return shown


def test_a_line_has_no_session() -> None:
    assert state_view(line_of(2), pace_s=None, now_unix_s=0.0)["session"] is None


def test_a_session_that_forms_names_the_ranks_that_are_awaited() -> None:
    run = Run(3)
    run.attend(1)

    view = run.view()

    session = view["session"]
    assert (view["workers"], view["halt"]) == ([], None)
    assert (session["phase"], session["key"], session["world_size"]) == ("forming", None, 3)
    assert session["waiting_for"] == "ranks 0, 2 of 3"
    [rank] = session["ranks"]
    assert (rank["rank"], rank["state"], rank["pending"]) == (1, "waiting", None)


def test_a_rank_shows_what_it_did_and_the_call_that_it_is_in_with_whom_it_waits_for() -> None:
    run = Run(MANY)
    run.form()
    pending = PendingCall(
        group_name="default", group=1, sequence=3, call=Call(kind=CallKind.BARRIER),
        open_s=0.5, missing=tuple(range(1, MANY)),
    )  # fmt: skip
    report = RankReport(steps=4, exchange_s=0.5, bytes=2048, calls=9, overflows=1, pending=pending)

    run.core.receive(RankReported(1, KEY, 1, report), 1.0)

    session = run.view(2.0)["session"]
    rank, other = session["ranks"][:2]
    shown = rank.pop("pending")
    assert (session["phase"], session["key"], session["age_s"]) == ("live", str(KEY), 2.0)
    assert rank == {
        "rank": 0, "host": "host-0", "backend": "cuda", "device": "NVIDIA H100",
        "state": "in call", "steps": 4, "overflows": 1, "exchange_s": 0.5, "exchange_ratio": 0.0,
        "bytes": 2048, "calls": 9, "silent_s": 1.0,
    }  # fmt: skip
    assert (shown["text"], shown["open_s"]) == ("call 3 of group default: barrier", 1.5)
    assert (shown["missing"], shown["missing_count"]) == (list(range(1, 17)), MANY - 1)
    assert (other["state"], other["pending"]) == ("running", None)


def test_a_session_that_is_over_says_why_and_who_and_the_next_one_says_it_while_it_forms() -> None:
    run = Run()
    run.form()
    fault = RankFault(
        end=SessionEnd.NON_FINITE, culprit=1, message="", parameter="head.weight",
        element=(3, 1), value="nan",
    )  # fmt: skip

    run.core.receive(RankFaulted(2, KEY, fault), 1.0)
    over = run.view()["session"]
    run.attend(0)
    again = run.view()["session"]

    last = over["last"]
    assert (over["phase"], over["ranks"][0]["state"]) == ("over", "over")
    assert (last["end"], last["is_halt"], last["culprit"]) == ("non_finite", True, 1)
    assert (last["host"], last["reported_by"]) == ("host-1", 1)
    assert (last["parameter"], last["element"], last["value"]) == ("head.weight", [3, 1], "nan")
    assert last["message"].startswith("rank 1 on host-1 gave nan in head.weight[3, 1]")
    assert (again["phase"], again["waiting_for"], again["last"]) == ("forming", "rank 1 of 2", last)


def test_a_session_whose_ranks_left_in_order_has_no_reason() -> None:
    run = Run()
    run.form()

    for rank in range(2):
        run.core.receive(RankLeft(rank + 1, KEY, done=True), 1.0)

    session = run.view()["session"]
    assert (session["phase"], session["last"]) == ("over", None)
    assert [rank["state"] for rank in session["ranks"]] == ["left", "left"]
