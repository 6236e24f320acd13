"""The report: what a run came to, read from a small journal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from andon.halts import HaltEvidence, HaltReason
from andon.records import Cursor, Key, PositionRange, Record, RecordKind
from andon_cli.errors import ExitCode
from andon_cli.report import RunReport, read_report
from andon_coordinator.core.effects import (
    Contribution,
    SaveDeparture,
    SaveHalt,
    SaveRecord,
    StepResult,
)
from andon_coordinator.core.events import LeaveReason
from andon_coordinator.transport.store import Store

TERM = 2**32
DIGESTS = {0: bytes.fromhex("9c1e04") * 8, 1: bytes.fromhex("9c1e04") * 8}


class Book:
    """A journal that a test fills."""

    def __init__(self, path: Path) -> None:
        self._now = 100.0
        self._store = Store(path, "7f3a", sync="normal", clock=self._clock)
        self._store.begin_term(TERM)

    def _clock(self) -> float:
        return self._now

    def found(self) -> None:
        record = Record(Key(TERM, 1), None, RecordKind.FOUND, 0, Cursor(0, 0), (0,))
        self._store.save_record(SaveRecord(record))

    def step(self, step: int, loss: float) -> None:
        self._now += 2.0
        batch = PositionRange(4 * step - 4, 4 * step)
        parts = tuple(
            Contribution(
                worker=rank, rank=rank, samples=2, weight=2.0, loss_sum=2 * loss,
                positions=(PositionRange(batch.start + 2 * rank, batch.start + 2 * rank + 2),),
            )
            for rank in (0, 1)
        )  # fmt: skip
        record = Record(
            Key(TERM, step + 1), Key(TERM, step), RecordKind.STEP, step, Cursor(0, 4 * step), (0, 1)
        )
        result = StepResult(
            epoch=0, batch=batch, loss=loss, samples=4, weight=4.0, attempt=0, seconds=2.0,
            contributions=parts,
        )  # fmt: skip
        self._store.save_record(SaveRecord(record, result))

    def leave(self, worker: int, reason: LeaveReason | None, digest: bytes) -> None:
        self._store.save_departure(SaveDeparture(worker, reason, "", 2, digest))

    def halt(self, evidence: HaltEvidence) -> None:
        self._store.save_halt(SaveHalt(evidence))

    def close(self) -> None:
        self._store.close()


def report_of(journal: Path, verdict: ExitCode = ExitCode.COMPLETE) -> RunReport:
    return read_report(
        journal,
        run_id="7f3a",
        workers=2,
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
        f"complete: 2 steps, loss 1.871, 1m58s, all workers at digest 9c1e04..., {journal.parent}"
    )


def test_a_worker_that_was_lost_and_came_back_counts_by_its_last_end(
    book: Book, journal: Path
) -> None:
    book.leave(1, None, b"")
    for worker, digest in DIGESTS.items():
        book.leave(worker, LeaveReason.COMPLETE, digest)
    book.close()

    assert report_of(journal).complete


def test_a_run_that_a_worker_did_not_complete_is_not_complete(book: Book, journal: Path) -> None:
    book.leave(0, LeaveReason.COMPLETE, DIGESTS[0])
    book.close()

    report = report_of(journal)

    assert not report.complete
    assert report.exit_code == ExitCode.FAILED


def test_workers_that_end_with_different_weights_are_no_complete_run(
    book: Book, journal: Path
) -> None:
    book.leave(0, LeaveReason.COMPLETE, DIGESTS[0])
    book.leave(1, LeaveReason.COMPLETE, bytes(32))
    book.close()

    assert not report_of(journal).complete


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
        {"id": 1, "reason": "non_finite_gradient", "step": 3, "worker": 1, "block": 0,
         "parameter": "w", "element": [17, 204], "value": "nan", "message": "worker 1 sent nan",
         "answer": None}
    ]  # fmt: skip


def test_a_verdict_of_the_processes_stands(book: Book, journal: Path) -> None:
    book.close()

    report = report_of(journal, ExitCode.INTERRUPTED)

    assert report.exit_code == 130
    assert report.outcome.startswith("interrupted: 2 steps")


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
