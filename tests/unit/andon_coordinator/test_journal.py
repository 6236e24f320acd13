"""The journal: what is written is read back, and two coordinators never share it."""

from __future__ import annotations

import itertools
import math
import queue
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from andon.halts import HaltAnswer, HaltEvidence, HaltReason
from andon.layout import Block, BlockKind, Component, DType, Layout
from andon.records import Cursor, Key, PositionRange, Record, RecordKind
from andon.terms import RunPlan
from andon_coordinator.core import effects, events
from andon_coordinator.core.detectors import WINDOW
from andon_coordinator.core.settings import History
from andon_coordinator.transport import rows
from andon_coordinator.transport.journal import (
    Journal,
    JournalError,
    JournalFenced,
    JournalLocked,
)
from andon_coordinator.transport.reader import JournalReader
from andon_coordinator.transport.schema import key_blob, key_of

TERM = 2**63 + 5  # beyond SQLite's integers
PLAN = RunPlan(global_batch=4, dataset_size=10, seed=2**64 - 1, total_epochs=2)
LAYOUT = Layout(
    (
        Block(BlockKind.LM_HEAD, "head", (Component("head.weight", (3, 4), DType.BFLOAT16),)),
        Block(BlockKind.OTHER, "rest", (Component("scale", ()),)),
    )
)
FOUND = Record(Key(TERM, 1), None, RecordKind.FOUND, 0, Cursor(0, 0), (0,))
STEP = Record(Key(TERM, 4), FOUND.key, RecordKind.STEP, 1, Cursor(0, 4), (0, 2))
RESULT = effects.StepResult(
    epoch=0,
    batch=PositionRange(0, 4),
    loss=0.1,
    samples=4,
    weight=4.0,
    attempt=2,
    seconds=0.25,
    contributions=(
        effects.Contribution(
            worker=0,
            rank=0,
            positions=(PositionRange(0, 2), PositionRange(3, 4)),
            samples=3,
            weight=3.0,
            loss_sum=0.3,
        ),
        effects.Contribution(
            worker=2, rank=1, positions=(PositionRange(2, 3),), samples=1, weight=1.0, loss_sum=0.1
        ),
    ),
    stop_reason="steps",
    correct=3,
)
HALT = HaltEvidence(
    id=2**64 - 1,
    reason=HaltReason.NON_FINITE_GRADIENT,
    step=2,
    key=Key(TERM, 5),
    worker=2,
    block=0,
    parameter="head.weight",
    element=(2, 1),
    value="nan",
    message="worker 2 sent nan",
    at_unix_s=12.5,
)


class Writing:
    """A started journal, and what it reports."""

    def __init__(self, path: Path, term: int = TERM) -> None:
        self.journal = Journal.open(path, "7f3a", clock=lambda: 100.0)
        self.journal.begin_term(term)
        self.reports: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
        self.deposed: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.journal.start(self.reports.put, self.deposed.put)

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, *_: object) -> None:
        self.journal.close()

    def save(self, *changes: effects.SaveRecord | effects.SaveTerm) -> list[events.Event]:
        """Saves, and waits for one report each."""
        for change in changes:
            self.journal.save(change)
        return [self.reports.get(timeout=10) for _ in changes]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "7f3a" / "journal.sqlite"


def reopened(path: Path) -> History:
    journal = Journal.open(path, "7f3a")
    journal.close()
    return journal.history


def test_new_journal_has_no_history(path: Path) -> None:
    assert reopened(path) == History()


def test_records_are_reported_once_durable_and_read_back(path: Path) -> None:
    with Writing(path) as writing:
        reports = writing.save(effects.SaveRecord(FOUND), effects.SaveRecord(STEP, RESULT))

        # Durable: another connection sees what was reported.
        with JournalReader(path) as reader:
            assert [entry.record for entry in reader.entries()] == [FOUND, STEP]

    assert reports == [events.RecordSaved(FOUND.key), events.RecordSaved(STEP.key)]
    history = reopened(path)
    assert (history.head, history.result) == (STEP, RESULT)


def test_history_of_a_run_has_plan_layout_and_greatest_term(path: Path) -> None:
    with Writing(path) as writing:
        writing.journal.save(effects.SaveRun(PLAN, LAYOUT))
        assert writing.save(effects.SaveTerm(TERM + 7)) == [events.TermSaved(TERM + 7)]

    history = reopened(path)
    assert (history.plan, history.layout) == (PLAN, LAYOUT)
    assert history.layout is not None
    assert history.layout.digest == LAYOUT.digest
    assert history.greatest_term == TERM + 7


def test_term_is_durable_before_the_writer_starts(path: Path) -> None:
    journal = Journal.open(path, "7f3a")
    journal.begin_term(TERM)

    with JournalReader(path) as reader:
        assert reader.terms() == [TERM]
    journal.close()


def test_unanswered_halt_is_in_the_history_and_an_answered_one_is_not(path: Path) -> None:
    with Writing(path) as writing:
        writing.journal.save(effects.SaveHalt(HALT))
    assert reopened(path).halt == HALT

    with Writing(path, TERM + 1) as writing:
        answer = effects.SaveAnswer(HALT.id, HaltAnswer.DROP, 2, "ann")
        writing.journal.save(answer)
    history = reopened(path)
    assert history.halt is None
    assert history.next_halt_id == HALT.id + 1
    assert history.dropped == {2}


def test_skipped_positions_are_recorded_with_their_answer(path: Path) -> None:
    mark = Record(Key(TERM, 6), STEP.key, RecordKind.MARK, 1, Cursor(0, 8), ())
    skip = effects.Skip(0, PositionRange(4, 8), 7, "bob")
    with Writing(path) as writing:
        writing.save(
            effects.SaveRecord(FOUND),
            effects.SaveRecord(STEP, RESULT),
            effects.SaveRecord(mark, note="skipped", skipped=skip),
        )

    with JournalReader(path) as reader:
        last = reader.chain()[-1]
        assert (last.record, last.skipped, last.note) == (mark, skip, "skipped")
        assert reader.ledger_faults() == []
    assert reopened(path).result is None


def test_departures_give_the_digests(path: Path) -> None:
    with Writing(path) as writing:
        for departure in (
            effects.SaveDeparture(0, None, "silent for 3 s", 1, b""),
            effects.SaveDeparture(0, events.LeaveReason.COMPLETE, "", 3, b"\x01" * 32),
            effects.SaveDeparture(1, events.LeaveReason.FAILED, "ValueError", 2, b""),
        ):
            writing.journal.save(departure)

    with JournalReader(path) as reader:
        assert [gone.reason for gone in reader.departures()] == ["LOST", "COMPLETE", "FAILED"]
        assert reader.digests() == {0: "01" * 32}


def test_loss_that_is_not_a_number_is_read_back_as_one(path: Path) -> None:
    lossless = effects.StepResult(
        epoch=0,
        batch=PositionRange(0, 4),
        loss=math.nan,
        samples=0,
        weight=0.0,
        attempt=0,
        seconds=0.0,
        contributions=(),
    )
    with Writing(path) as writing:
        writing.save(effects.SaveRecord(STEP, lossless))

    with JournalReader(path) as reader:
        (loss,) = reader.losses()
        assert math.isnan(loss)


def test_second_coordinator_is_refused_while_the_first_lives(path: Path) -> None:
    with Writing(path), pytest.raises(JournalLocked, match=r"another coordinator \(process \d+\)"):
        Journal.open(path, "7f3a")

    Journal.open(path, "7f3a").close()


def test_lock_of_a_killed_coordinator_is_free(path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path;"
        "from andon_coordinator.transport.journal import Journal;"
        "journal = Journal.open(Path(sys.argv[1]), '7f3a'); journal.begin_term(9);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=False, timeout=60)

    assert reopened(path).greatest_term == 9


def test_append_under_an_older_term_fails(path: Path) -> None:
    with Writing(path) as writing:
        # As if a coordinator on another host, which the lock does not reach, took over.
        with sqlite3.connect(path) as other:
            other.execute("INSERT INTO terms VALUES (?, 0)", (f"{TERM + 1:016x}",))
        other.close()

        writing.journal.save(effects.SaveRecord(FOUND))

        assert "another coordinator took the run over" in writing.deposed.get(timeout=10)
        assert writing.reports.empty()
    assert reopened(path).head is None


def test_record_of_an_older_term_than_the_own_fails(path: Path) -> None:
    with Writing(path) as writing:
        _, report = writing.save(effects.SaveTerm(TERM + 1), effects.SaveRecord(FOUND))

        assert isinstance(report, events.JournalFailed)
        assert "older term" in report.message


def test_term_that_is_not_above_all_others_is_refused(path: Path) -> None:
    with Writing(path):
        pass

    journal = Journal.open(path, "7f3a")
    with pytest.raises(JournalFenced):
        journal.begin_term(TERM)
    journal.close()


def test_own_term_may_be_saved_again(path: Path) -> None:
    with Writing(path) as writing:
        assert writing.save(effects.SaveTerm(TERM)) == [events.TermSaved(TERM)]


def test_record_that_is_not_newer_fails_and_nothing_of_it_stays(path: Path) -> None:
    with Writing(path) as writing:
        _, report = writing.save(effects.SaveRecord(STEP, RESULT), effects.SaveRecord(FOUND))
        assert isinstance(report, events.JournalFailed)

    assert reopened(path).head == STEP


def test_number_that_sqlite_cannot_hold_is_a_failure_not_a_crash(path: Path) -> None:
    beyond = Record(Key(TERM, 1), None, RecordKind.FOUND, 0, Cursor(0, 2**63), ())
    with Writing(path) as writing:
        failed, saved = writing.save(effects.SaveRecord(beyond), effects.SaveRecord(FOUND))

    assert isinstance(failed, events.JournalFailed)
    assert saved == events.RecordSaved(FOUND.key)


def test_halt_that_tells_of_the_journal_is_not_reported_as_a_failure_again(path: Path) -> None:
    with Writing(path) as writing:
        with sqlite3.connect(path) as other:
            other.execute("DROP TABLE halts")
        other.close()
        for reason in (HaltReason.JOURNAL, HaltReason.OPERATOR):
            writing.journal.save(effects.SaveHalt(HaltEvidence(id=1, reason=reason, step=1)))
    assert writing.reports.qsize() == 1


def test_journal_of_another_run_is_refused(path: Path) -> None:
    Journal.open(path, "7f3a").close()

    with pytest.raises(JournalError, match="is of run 7f3a, not beef"):
        Journal.open(path, "beef")


def test_journal_of_a_later_version_is_refused(path: Path) -> None:
    Journal.open(path, "7f3a").close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()

    with pytest.raises(JournalError, match="version 99"):
        Journal.open(path, "7f3a")
    with pytest.raises(JournalError, match="version 99"):
        JournalReader(path)


def test_file_that_is_no_database_is_refused_and_unlocked(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no database" * 1000)

    for _ in range(2):
        with pytest.raises(JournalError, match="can't be opened"):
            Journal.open(path, "7f3a")


def test_missing_journal_is_not_made_by_reading(path: Path) -> None:
    with pytest.raises(JournalError, match="no journal"):
        JournalReader(path)
    assert not path.exists()


@pytest.mark.parametrize(("sync", "level"), [("normal", 1), ("full", 2)])
def test_sync_is_as_configured(path: Path, sync: str, level: int) -> None:
    journal = Journal.open(path, "7f3a", sync=sync)  # type: ignore[arg-type]  # one of both
    assert journal._store._database.execute("PRAGMA synchronous").fetchone() == (level,)
    assert journal._store._database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    journal.close()


def test_counts_agree_with_what_was_written(path: Path) -> None:
    with Writing(path) as writing:
        writing.save(effects.SaveRecord(FOUND), effects.SaveRecord(STEP, RESULT))
        writing.journal.save(effects.SaveHalt(HALT))

    journal = Journal.open(path, "7f3a")
    counted = journal.counts()
    journal.close()
    assert (counted.steps, counted.samples) == (1, 4)
    assert counted.halts == {"NON_FINITE_GRADIENT": 1}


def long_run(path: Path, steps: int) -> None:
    """A journal of so many steps, each with its number as its loss and norm."""
    with Writing(path) as writing:
        writing.save(effects.SaveRecord(FOUND))
        head = FOUND.key
        for step in range(1, steps + 1):
            record = Record(
                Key(TERM, 10 + step), head, RecordKind.STEP, step, Cursor(0, 4 * step), (0, 2)
            )
            result = replace(RESULT, loss=float(step), gradient_norm=float(step))
            writing.save(effects.SaveRecord(record, result))
            head = record.key


def test_history_has_what_the_last_steps_came_to_for_the_detectors(path: Path) -> None:
    long_run(path, WINDOW + 3)

    recent = reopened(path).recent

    assert [result.loss for result in recent] == [float(step) for step in range(4, WINDOW + 4)]
    assert recent[-1].gradient_norm == WINDOW + 3
    assert recent[-1].contributions == ()


def roll_back(path: Path) -> Record:
    """Rolls a long run back to its first step."""
    back = Record(Key(TERM + 1, 1), Key(TERM, 11), RecordKind.MARK, 1, Cursor(0, 4), ())
    with Writing(path, TERM + 1) as writing:
        writing.save(effects.SaveRecord(back))
    return back


def test_history_of_the_last_steps_leaves_out_what_was_rolled_back(path: Path) -> None:
    long_run(path, 3)
    back = roll_back(path)

    assert [result.loss for result in reopened(path).recent] == [1.0]
    with closing(sqlite3.connect(path)) as database:
        assert list(rows.ancestry(database)) == [back.key, Key(TERM, 11), FOUND.key]


def test_a_roll_back_is_known_without_looking_for_it(path: Path) -> None:
    long_run(path, 3)
    with closing(sqlite3.connect(path)) as database:
        assert (rows.abandoned(database), rows.rolled_back_at(database)) == (None, 0.0)

    roll_back(path)

    with closing(sqlite3.connect(path)) as database:
        assert (rows.abandoned(database), rows.rolled_back_at(database)) == (Key(TERM, 13), 100.0)


def test_every_record_is_found_by_its_key_and_no_other(path: Path) -> None:
    long_run(path, 5)

    with closing(sqlite3.connect(path)) as database:
        for key in (FOUND.key, *(Key(TERM, 10 + step) for step in range(1, 6))):
            row = rows.find(database, key)
            assert row is not None
            assert rows.record_of(row).key == key
        for strange in (Key(1, 1), Key(TERM, 9), Key(TERM + 1, 1)):
            assert rows.find(database, strange) is None


@pytest.mark.parametrize(
    ("reason", "answer", "accepted"),
    [
        (HaltReason.LOSS_SPIKE, HaltAnswer.RETRY, 2),
        (HaltReason.LOSS_SPIKE, HaltAnswer.SKIP, None),
        (HaltReason.OPERATOR, HaltAnswer.RETRY, None),
    ],
)
def test_a_spike_that_was_accepted_is_in_the_history(
    path: Path, reason: HaltReason, answer: HaltAnswer, accepted: int | None
) -> None:
    with Writing(path) as writing:
        writing.journal.save(effects.SaveHalt(replace(HALT, reason=reason)))
        writing.journal.save(effects.SaveAnswer(HALT.id, answer, None, "ann"))

    assert reopened(path).accepted_step == accepted


def instructions(database: sqlite3.Connection, act: Callable[[], object]) -> int:
    """Instructions of SQLite's machine that an act takes."""
    count = itertools.count()
    database.set_progress_handler(lambda: next(count) and None, 1)
    act()
    database.set_progress_handler(None, 1)
    return next(count)


def test_a_start_and_a_history_cost_no_more_after_many_steps(tmp_path: Path) -> None:
    costs = []
    for steps in (2 * WINDOW, 10 * WINDOW):
        path = tmp_path / str(steps) / "journal.sqlite"
        long_run(path, steps)
        journal = Journal.open(path, "7f3a")
        store = journal._store
        with JournalReader(path) as reader:
            costs.append(
                {
                    "history": instructions(store._database, store.history),
                    "counts": instructions(store._database, store.counts),
                    "head": instructions(reader._database, lambda: next(reader.backwards())),
                    "steps": instructions(reader._database, reader.steps),
                    "began": instructions(reader._database, reader.began_at_unix_s),
                    "most": instructions(reader._database, reader.most_workers),
                }
            )
        journal.close()

    short, long = costs
    assert long == short


def keys() -> Iterator[Key]:
    edges = (1, 9, 10, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
    return (Key(term, number) for term, number in itertools.product(edges, edges))


def test_blobs_of_keys_are_ordered_as_the_keys() -> None:
    ordered = sorted(keys())

    assert sorted(keys(), key=key_blob) == ordered
    assert [key_of(key_blob(key)) for key in ordered] == ordered
