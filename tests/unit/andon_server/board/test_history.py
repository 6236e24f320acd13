"""Runs and curves from journals: the service's own, and those in the folders beside it."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path

import pytest

from andon.protocol.halts import HaltAnswer
from andon_coordinator.core.run_events import RunEventKind
from andon_server.runs import JOURNAL
from unit.andon_cli.books import Book
from unit.andon_server.board.boards import Board, nan_halt


def beside(folder: Path, name: str, at: float) -> Book:
    (folder / name).mkdir()
    return Book(folder / name / JOURNAL, name, at=at)


def test_runs_are_the_services_own_and_those_beside_it_newest_first(
    board: Board, tmp_path: Path
) -> None:
    board.book.found()
    board.book.step(1, 2.5)
    other = beside(tmp_path, "0b1c", at=500.0)
    other.close()
    (tmp_path / "not a run").mkdir()

    newest, own = board.get("/board/api/runs").json

    assert (newest["run_id"], newest["steps"], newest["current"]) == ("0b1c", 0, False)
    assert own == {
        "run_id": "7f3a", "state": "stopped", "started_unix_s": 100.0, "seconds": 2.0,
        "steps": 1, "loss": 2.5, "accuracy": None, "workers": 2, "halts": 0,
        "problem": "", "current": True,
    }  # fmt: skip


def test_a_run_is_read_again_once_its_journal_has_changed(board: Board) -> None:
    board.book.found()
    board.book.step(1, 2.5)
    assert board.get("/board/api/runs").json[0]["steps"] == 1

    board.book.step(2, 2.0)

    assert board.get("/board/api/runs").json[0]["steps"] == 2


def test_a_journal_that_cant_be_read_is_listed_with_its_problem(
    board: Board, tmp_path: Path
) -> None:
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / JOURNAL).write_bytes(b"not a database" * 100)

    runs = {each["run_id"]: each for each in board.get("/board/api/runs").json}

    assert runs["torn"]["state"] == "unreadable"
    assert "can't be read" in runs["torn"]["problem"]
    answer = board.get("/board/api/runs/torn/curves")
    assert answer.status == 404
    assert "can't be read" in answer.json["error"]


def test_a_journal_that_somebody_edited_does_not_hide_the_others(
    board: Board, tmp_path: Path
) -> None:
    edited = beside(tmp_path, "edited", at=500.0)
    edited.found()
    edited.close()
    with sqlite3.connect(tmp_path / "edited" / JOURNAL) as database:
        database.execute("UPDATE records SET kind = 'NONSENSE', roster = '{'")
        database.execute("DROP TABLE scalars")
        database.execute("CREATE TABLE scalars AS SELECT 'x' AS name, x'ff' AS step, 1 AS value")
    database.close()

    runs = {each["run_id"]: each for each in board.get("/board/api/runs").json}

    assert runs.keys() == {"edited", "7f3a"}
    assert runs["edited"]["state"] == "unreadable"
    assert "was it edited?" in runs["edited"]["problem"]
    for path in ("", "/curves"):
        assert board.get(f"/board/api/runs/edited{path}").status in (200, 404)


def test_one_who_reads_long_runs_does_not_keep_everybody_waiting(board: Board) -> None:
    with board.history.turn():
        busy = [
            board.get(f"/board/api/runs{path}").status for path in ("", "/7f3a", "/7f3a/curves")
        ]

    assert busy == [503, 503, 503]
    assert board.get("/board/api/runs").status == 200


def test_a_run_has_its_halts_with_their_answers(board: Board) -> None:
    board.book.found()
    board.book.step(1, 2.5)
    board.book.halt(nan_halt())
    board.book.answer(nan_halt().id, HaltAnswer.DROP, 1, "ann@alpha")

    told = board.get("/board/api/runs/7f3a").json

    [halt] = told["halts"]
    assert told["run"]["halts"] == 1
    assert (halt["id"], halt["reason"]) == (str(2**60 + 1), "non_finite_gradient")
    assert (halt["answer"], halt["operator"], halt["dropped"]) == ("drop", "ann@alpha", 1)
    assert halt["sentence"].startswith("HALTED at step 3")


def test_a_short_runs_curve_is_every_step(board: Board) -> None:
    board.book.found()
    for step, loss in ((1, 3.0), (2, math.nan), (3, 2.0)):
        board.book.step(step, loss)

    told = board.get("/board/api/runs/7f3a/curves").json

    assert told["run_id"] == "7f3a"
    assert told["steps"] == {
        "step": [1, 2, 3], "loss": [3.0, None, 2.0],
        "loss_min": [3.0, None, 2.0], "loss_max": [3.0, None, 2.0],
        "step_seconds": [2.0, 2.0, 2.0], "samples_per_second": [2.0, 2.0, 2.0],
        "at_unix_s": [102.0, 104.0, 106.0], "gradient_norm": [None, None, None],
    }  # fmt: skip


def test_a_long_runs_curve_is_reduced_to_the_points_that_were_asked_for(board: Board) -> None:
    board.book.found()
    for step in range(1, 8):
        board.book.step(step, float(step))

    steps = board.get("/board/api/runs/7f3a/curves?points=3").json["steps"]

    assert steps["step"] == [3, 6, 7]
    assert (steps["loss"], steps["loss_min"], steps["loss_max"]) == (
        [2.0, 5.0, 7.0], [1.0, 4.0, 7.0], [3.0, 6.0, 7.0],
    )  # fmt: skip


def test_a_curve_has_the_mean_of_the_gradient_norms_that_are_finite(board: Board) -> None:
    board.book.found()
    for step, norm in ((1, 1.0), (2, 3.0), (3, math.inf), (4, 5.0), (5, None), (6, None)):
        board.book.step(step, 2.0, gradient_norm=norm)

    steps = board.get("/board/api/runs/7f3a/curves?points=3").json["steps"]

    assert steps["gradient_norm"] == [2.0, 5.0, None]


def test_steps_that_were_rolled_back_are_not_in_the_curve(board: Board) -> None:
    board.book.found()
    for step, loss in ((1, 3.0), (2, 9.0), (3, 9.0)):
        board.book.step(step, loss)
    board.book.roll_back(to_step=1)
    board.book.step(2, 2.0, after_roll_back=True)

    steps = board.get("/board/api/runs/7f3a/curves").json["steps"]

    assert (steps["step"], steps["loss"]) == ([1, 2], [3.0, 2.0])


@pytest.mark.parametrize("points", ["0", "-1", "abc", "1e3", "5001", "9" * 50, "١"])
def test_a_number_of_points_that_is_none_is_refused(board: Board, points: str) -> None:
    answer = board.get(f"/board/api/runs/7f3a/curves?points={points}")

    assert answer.status == 400
    assert "1 to 5000" in answer.json["error"]


def test_what_scripts_logged_is_a_curve_of_each_name(board: Board) -> None:
    for worker in (0, 1):
        board.book.log(worker, 1, val=1.0 + worker, lr=0.1)
    board.book.log(0, 2, val=math.nan)
    board.book.log(0, 3, val=4.0)

    told = board.get("/board/api/runs/7f3a").json
    scalars = board.get("/board/api/runs/7f3a/curves").json["scalars"]
    one = board.get("/board/api/runs/7f3a/curves?points=1").json["scalars"]

    assert told["names"] == ["lr", "val"]
    assert scalars == {
        "lr": {"step": [1], "value": [0.1]},
        "val": {"step": [1, 2, 3], "value": [1.5, None, 4.0]},
    }
    assert one["val"] == {"step": [3], "value": [2.75]}


def test_of_a_run_with_very_many_events_the_last_are_told(board: Board) -> None:
    for number in range(1, 2006):
        board.book.note(number, RunEventKind.ATTEMPT, None, "a worker was lost")

    told = board.get("/board/api/runs/7f3a").json["events"]

    assert [told[0]["id"], told[-1]["id"], len(told)] == [6, 2005, 2000]


def test_a_run_has_what_happened_in_order(board: Board) -> None:
    board.book.note(1, RunEventKind.JOINED, 0, "from alpha")

    assert board.get("/board/api/runs/7f3a").json["events"] == [
        {"id": 1, "kind": "joined", "worker": 0, "step": 2, "text": "from alpha",
         "at_unix_s": 100.0},
    ]  # fmt: skip
