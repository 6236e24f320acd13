"""The report: what a run came to, read from a small journal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from andon.host.errors import ExitCode
from andon.protocol.halts import HaltAnswer, HaltEvidence, HaltReason
from andon.protocol.run_settings import DRAINED
from andon_cli.commands.history import history_lines
from andon_cli.commands.run import RunReport, read_report
from andon_coordinator.core.events import LeaveReason
from andon_server.past_runs import read_runs
from unit.andon_cli.books import DIGESTS, Book


def report_of(journal: Path, verdict: ExitCode = ExitCode.COMPLETE) -> RunReport:
    return read_report(
        journal,
        run_id="7f3a",
        seconds=118.0,
        metrics_url="http://127.0.0.1:9400/metrics",
        verdict=verdict,
    )


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "7f3a" / "journal.sqlite"


@pytest.fixture
def book(journal: Path) -> Book:
    journal.parent.mkdir()
    book = Book(journal)
    book.found()
    book.step(1, 2.5)
    book.step(2, 1.871)
    return book


def test_a_complete_run_is_reported_step_by_step(book: Book, journal: Path) -> None:
    for worker, digest in DIGESTS.items():
        book.leave(worker, LeaveReason.COMPLETE, digest)
    book.close()

    report = report_of(journal)

    assert (report.steps, report.losses, report.samples) == (2, [2.5, 1.871], [4, 4])
    assert report.digests == {"0": "9c1e04" * 8, "1": "9c1e04" * 8}
    assert report.training_seconds == 4.0
    assert report.complete
    assert report.exit_code == 0
    assert report.outcome == (
        f"complete: 2 steps, loss 1.871, 4.0s, all workers at digest 9c1e04..., {journal.parent}"
    )


DONE, DRAINS, STOPPED = LeaveReason.COMPLETE, LeaveReason.DRAINED, LeaveReason.INTERRUPTED


@pytest.mark.parametrize(
    ("ends", "complete"),
    [
        pytest.param([(0, DONE)], False, id="one is not heard of"),
        pytest.param([(0, DRAINS), (1, DRAINS)], True, id="drained"),
        pytest.param([(1, None), (0, DONE), (1, DONE)], True, id="lost, and came back"),
        pytest.param([(1, STOPPED), (0, DONE)], True, id="one of two interrupted"),
        pytest.param([(1, LeaveReason.FAILED), (0, DONE)], True, id="one of two failed"),
        pytest.param([(1, None), (0, DONE)], True, id="one of two lost"),
        pytest.param([(1, STOPPED), (0, None)], False, id="all in trouble"),
    ],
)
def test_a_run_is_complete_if_one_left_in_order_after_the_last_step_and_all_are_heard_of(
    book: Book, journal: Path, ends: list[tuple[int, LeaveReason | None]], *, complete: bool
) -> None:
    for worker, how in ends:
        book.leave(worker, how, DIGESTS[worker] if how in (DONE, DRAINS) else b"")
    book.close()

    report = report_of(journal)

    assert report.complete is complete
    assert report.exit_code == (ExitCode.COMPLETE if complete else ExitCode.FAILED)


@pytest.mark.parametrize("accepted", [False, True])
def test_workers_that_end_with_different_weights_complete_a_run_only_if_a_person_says_so(
    book: Book, journal: Path, *, accepted: bool
) -> None:
    book.leave(0, LeaveReason.COMPLETE, DIGESTS[0])
    book.leave(1, LeaveReason.COMPLETE, bytes(32))
    book.halt(HaltEvidence(id=1, reason=HaltReason.REPLICA_DIVERGENCE, step=3))
    if accepted:
        book.answer(1, HaltAnswer.RETRY, None, "lea@alpha")
    book.close()

    assert report_of(journal).complete is accepted


def test_a_halt_that_nobody_answered_is_reported_as_halted(book: Book, journal: Path) -> None:
    book.halt(
        HaltEvidence(
            id=1, reason=HaltReason.NON_FINITE_GRADIENT, step=3, worker=1, block=0,
            parameter="w", element=(17, 204), value="nan", message="worker 1 sent nan",
        )
    )  # fmt: skip
    for worker in DIGESTS:
        book.leave(worker, LeaveReason.HALTED, b"")
    book.close()

    report = report_of(journal)

    assert report.exit_code == ExitCode.HALTED
    assert report.halts == [
        {"id": 1, "reason": "non_finite_gradient", "step": 3, "key": None, "worker": 1, "block": 0,
         "parameter": "w", "element": [17, 204], "value": "nan", "message": "worker 1 sent nan",
         "at_unix_s": 0.0, "epoch": None, "positions": None, "reported_by": None,
         "place": "w[17, 204] (block 0)",
         "answer": None, "operator": "", "dropped": None}
    ]  # fmt: skip


def test_a_verdict_of_the_processes_stands(book: Book, journal: Path) -> None:
    book.close()

    report = report_of(journal, ExitCode.INTERRUPTED)

    assert report.exit_code == 130
    assert report.outcome.startswith("stopped (interrupted): 2 steps")


def test_the_summary_says_the_time_and_the_end_that_the_history_says(
    book: Book, journal: Path
) -> None:
    book.step(3, 1.5, stop=DRAINED)
    for worker, digest in DIGESTS.items():
        book.leave(worker, LeaveReason.COMPLETE, digest)
    book.close()

    [row] = history_lines(read_runs(journal.parent.parent))[1:]

    assert row.split()[-1] == "drained"
    assert "  6.0s  " in row
    assert report_of(journal).outcome.startswith("drained: 3 steps, loss 1.500, 6.0s, ")
    assert report_of(journal, ExitCode.FAILED).outcome.startswith("drained (failed): 3 steps")


def test_a_run_without_steps_has_no_time_as_in_the_history(tmp_path: Path) -> None:
    journal = tmp_path / "7f3a" / "journal.sqlite"
    journal.parent.mkdir()
    Book(journal).close()

    report = report_of(journal, ExitCode.INTERRUPTED)

    assert report.outcome == f"stopped (interrupted): 0 steps, {journal.parent}"


def test_a_run_without_a_journal_is_reported_too(tmp_path: Path) -> None:
    report = report_of(tmp_path / "journal.sqlite", ExitCode.LOST)

    assert (report.steps, report.losses, report.digests) == (0, [], {})
    assert report.exit_code == ExitCode.LOST


def test_a_report_is_written_as_json(book: Book, journal: Path, tmp_path: Path) -> None:
    book.close()

    report_of(journal).write(tmp_path / "deep" / "report.json")

    told = json.loads((tmp_path / "deep" / "report.json").read_text())
    assert {"run_id", "steps", "losses", "samples", "digests", "seconds", "journal",
            "exit_code", "halts"} <= set(told)  # fmt: skip
    assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep" / "report.json"]


def test_a_run_that_goes_on_without_a_dropped_worker_is_complete(book: Book, journal: Path) -> None:
    book.halt(HaltEvidence(id=1, reason=HaltReason.NON_FINITE_GRADIENT, step=3, worker=1))
    book.drop(1, 1, "lea@alpha")
    book.leave(0, LeaveReason.COMPLETE, DIGESTS[0])
    book.close()

    report = report_of(journal)

    assert (report.complete, report.exit_code) == (True, 0)
    [halt] = report.halts
    assert (halt["answer"], halt["dropped"], halt["operator"]) == ("drop", 1, "lea@alpha")


def test_a_run_whose_workers_were_all_dropped_is_not_complete(book: Book, journal: Path) -> None:
    for worker in (0, 1):
        book.halt(HaltEvidence(id=worker + 1, reason=HaltReason.OPERATOR, step=3))
        book.drop(worker + 1, worker, "lea@alpha")
    book.close()

    assert not report_of(journal).complete


def test_a_worker_that_went_before_the_last_step_does_not_count(book: Book, journal: Path) -> None:
    book.step(3, 1.5, roster=(0,))
    book.leave(1, LeaveReason.INTERRUPTED, b"")
    book.leave(0, LeaveReason.COMPLETE, DIGESTS[0])
    book.close()

    assert report_of(journal).complete


@pytest.mark.parametrize(("stop", "complete"), [("steps", True), ("", False)])
def test_departures_that_could_not_be_written_do_not_undo_a_run_that_reached_its_end(
    book: Book, journal: Path, stop: str, *, complete: bool
) -> None:
    book.step(3, 1.5, stop=stop)
    book.close()

    assert report_of(journal).complete is complete


def test_a_clock_that_was_set_back_after_a_resume_changes_nothing(
    book: Book, journal: Path
) -> None:
    book.halt(HaltEvidence(id=1, reason=HaltReason.NON_FINITE_GRADIENT, step=3, worker=1))
    book.answer(1, HaltAnswer.SKIP, None, "lea@alpha")
    book.set_clock(3700.0)
    book.roll_back(to_step=1)
    book.set_clock(100.0)
    book.step(2, 1.9, after_roll_back=True)
    for worker, digest in DIGESTS.items():
        book.leave(worker, LeaveReason.COMPLETE, digest)
    book.close()

    report = report_of(journal)

    assert (report.complete, report.exit_code, report.steps) == (True, 0, 2)


def test_a_halt_with_a_record_after_it_was_answered_though_the_answer_is_not_there(
    book: Book, journal: Path
) -> None:
    book.halt(HaltEvidence(id=1, reason=HaltReason.OPERATOR, step=3))
    book.step(3, 1.5)
    for worker, digest in DIGESTS.items():
        book.leave(worker, LeaveReason.COMPLETE, digest)
    book.close()

    report = report_of(journal)

    assert (report.complete, report.exit_code) == (True, 0)
    [run] = read_runs(journal.parent.parent)
    assert history_lines([run])[-1].endswith("Its answer is not recorded.")


def test_ends_from_before_a_roll_back_do_not_count(book: Book, journal: Path) -> None:
    for worker, digest in DIGESTS.items():
        book.leave(worker, LeaveReason.COMPLETE, digest)
    book.roll_back(to_step=1)
    book.close()

    report = report_of(journal)

    assert (report.complete, report.steps, report.losses) == (False, 1, [2.5])
