"""History: runs as their journals have them, newest first."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from andon.protocol.halts import HaltAnswer, HaltEvidence, HaltReason
from andon_cli.commands.history import history_json, history_lines
from andon_coordinator.core.events import LeaveReason
from andon_server.past_runs import read_runs
from andon_server.runs import JOURNAL, ServiceAddress
from unit.andon_cli.books import DIGESTS, Book

NAN = HaltEvidence(
    id=1, reason=HaltReason.NON_FINITE_GRADIENT, step=3, worker=1, message="worker 1 sent nan"
)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def book_of(runs: Path, run_id: str, *, at: float, steps: int = 2) -> Book:
    folder = runs / run_id
    folder.mkdir(parents=True)
    book = Book(folder / JOURNAL, run_id, at=at)
    book.found()
    for step in range(1, steps + 1):
        book.step(step, 3.0 - step / 2)
    return book


def complete(book: Book) -> None:
    for worker, digest in DIGESTS.items():
        book.leave(worker, LeaveReason.COMPLETE, digest)
    book.close()


def test_the_newest_run_comes_first_under_aligned_headings(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    complete(book_of(runs, "0001", at=1e9))
    book_of(runs, "0002", at=1e9 + 3600, steps=0).close()

    first, *rows = history_lines(read_runs(runs))

    assert first.split() == [
        "run",
        "started",
        "took",
        "steps",
        "epoch",
        "loss",
        "accuracy",
        "workers",
        "halts",
        "state",
    ]
    assert [row.split() for row in rows] == [
        ["0002", "2001-09-09", "02:46", "-", "0", "-", "-", "-", "0", "0", "stopped"],
        ["0001", "2001-09-09", "01:46", "4.0s", "2", "0", "2.000", "-", "2", "0", "complete"],
    ]


def test_a_halt_is_told_below_its_run_with_the_answer_and_who_gave_it(runs: Path) -> None:
    book = book_of(runs, "0001", at=1e9)
    book.halt(NAN)
    book.drop(1, 1, "lea@alpha")
    book.leave(0, LeaveReason.COMPLETE, DIGESTS[0])
    book.close()

    lines = history_lines(read_runs(runs))

    assert lines[1].split()[-1] == "complete"
    assert lines[2] == (
        "      HALTED at step 3: worker 1 sent nan. No weight moved. Answered by lea@alpha: drop 1."
    )


def test_a_run_that_ended_halted_says_that_nobody_answered(runs: Path) -> None:
    book = book_of(runs, "0001", at=1e9)
    book.halt(NAN)
    book.close()

    [run] = read_runs(runs)

    assert run.state == "halted"
    assert history_lines([run])[-1].endswith("No weight moved. Not answered.")


def test_only_the_last_halts_of_a_run_are_told_and_the_others_counted(runs: Path) -> None:
    book = book_of(runs, "0001", at=1e9)
    for number in range(1, 6):
        book.halt(HaltEvidence(id=number, reason=HaltReason.OPERATOR, step=number))
        book.answer(number, HaltAnswer.RETRY, None, "")
    book.close()

    lines = history_lines(read_runs(runs))

    assert len(lines) == 6
    assert lines[2].startswith("      2 earlier halts")


def test_a_run_whose_service_lives_is_running(runs: Path) -> None:
    book = book_of(runs, "0001", at=1e9)
    ServiceAddress(
        address="127.0.0.1:1", metrics_url="", run_id="0001", journal="", pid=os.getpid()
    ).write(runs / "0001")

    [run] = read_runs(runs)
    book.close()

    assert run.state == "running"


def test_a_journal_that_can_not_be_read_hides_no_other_run(runs: Path) -> None:
    complete(book_of(runs, "0001", at=1e9))
    (runs / "0002").mkdir()
    (runs / "0002" / JOURNAL).write_text("not a database, but long enough to be taken for one")

    lines = history_lines(read_runs(runs))

    assert lines[1].split()[-1] == "complete"
    assert lines[2].split() == ["0002", *["-"] * 8, "unreadable"]
    assert "can't be read" in lines[3]


def test_json_has_the_evidence_and_the_answer_of_each_halt(runs: Path) -> None:
    book = book_of(runs, "0001", at=1e9)
    book.halt(NAN)
    book.answer(1, HaltAnswer.SKIP, None, "lea@alpha")
    complete(book)

    [run] = json.loads(history_json(read_runs(runs)))

    assert (run["run_id"], run["state"], run["steps"], run["loss"]) == ("0001", "complete", 2, 2.0)
    [halt] = run["halts"]
    assert (halt["reason"], halt["worker"], halt["message"]) == (
        "non_finite_gradient", 1, "worker 1 sent nan",
    )  # fmt: skip
    assert (halt["answer"], halt["operator"]) == ("skip", "lea@alpha")


def test_no_runs_are_no_rows(runs: Path) -> None:
    assert read_runs(runs) == []


def test_a_drained_run_says_so(runs: Path) -> None:
    book = book_of(runs, "0001", at=1e9)
    for worker, digest in DIGESTS.items():
        book.leave(worker, LeaveReason.DRAINED, digest)
    book.close()

    [run] = read_runs(runs)

    assert run.state == "drained"
