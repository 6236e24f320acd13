"""The journal: what is written is read back, and two coordinators never share it."""

from __future__ import annotations

import itertools
import math
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from andon.protocol.attestations import Attestation
from andon.protocol.grains import Node
from andon.protocol.halts import HaltAnswer
from andon.protocol.records import Cursor, Key, PositionRange, Record, RecordKind
from andon.protocol.scalars import Scalar
from andon_coordinator.core import effects, events
from andon_coordinator.core.settings import History
from andon_coordinator.core.step_results import Skip
from andon_coordinator.core.verification import Proved, VerifiedTotals
from andon_coordinator.transport.audit_book import AuditBook
from andon_coordinator.transport.journal import (
    Journal,
    JournalError,
    JournalFenced,
    JournalLocked,
)
from andon_coordinator.transport.reader import JournalReader
from andon_coordinator.transport.schema import key_blob, key_of
from scenarios import line_values
from unit.andon_coordinator.journal_bench import (
    HALT,
    INITIAL,
    LAYOUT,
    PLAN,
    RESULT,
    STEP,
    TERM,
    Writing,
    reopened,
)


def test_new_journal_has_no_history(path: Path) -> None:
    assert reopened(path) == History()


def test_records_are_reported_once_durable_and_read_back(path: Path) -> None:
    with Writing(path) as writing:
        reports = writing.save(effects.SaveRecord(INITIAL), effects.SaveRecord(STEP, RESULT))

        # Durable: another connection sees what was reported.
        with JournalReader(path) as reader:
            assert [entry.record for entry in reader.entries()] == [INITIAL, STEP]

    assert reports == [events.RecordSaved(INITIAL.key), events.RecordSaved(STEP.key)]
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
        drop = effects.SaveDeparture(2, None, "dropped by an operator", 1, b"", dropped=True)
        writing.journal.save(drop)
        writing.journal.save(effects.SaveAnswer(HALT.id, HaltAnswer.DROP, 2, "ann"))
    history = reopened(path)
    assert history.halt is None
    assert history.next_halt_id == HALT.id + 1
    assert history.dropped == {2}


def test_skipped_positions_are_recorded_with_their_answer(path: Path) -> None:
    mark = Record(Key(TERM, 6), STEP.key, RecordKind.MARK, 1, Cursor(1, 4), ())
    earlier = ((0, PositionRange(4, 8)),)
    skip = Skip(1, PositionRange(0, 4), 7, "bob", earlier=earlier)
    with Writing(path) as writing:
        writing.save(
            effects.SaveRecord(INITIAL),
            effects.SaveRecord(STEP, RESULT),
            effects.SaveRecord(mark, note="skipped", skipped=skip),
        )

    with JournalReader(path) as reader:
        last = reader.chain()[-1]
        assert (last.record, last.skipped, last.note) == (mark, skip, "skipped")
        assert reader.ledger_faults() == []
    assert reopened(path).result is None


def test_departures_give_the_digests_of_the_last_weights(path: Path) -> None:
    complete = events.LeaveReason.COMPLETE
    with Writing(path) as writing:
        writing.save(effects.SaveRecord(INITIAL), effects.SaveRecord(STEP, RESULT))
        for departure in (
            effects.SaveDeparture(0, None, "silent for 3 s", 0, b""),
            effects.SaveDeparture(0, complete, "", STEP.step, b"\x01" * 32),
            effects.SaveDeparture(1, events.LeaveReason.FAILED, "ValueError", STEP.step, b""),
            effects.SaveDeparture(2, complete, "a spare that still learns", 0, b"\x02" * 32),
        ):
            writing.journal.save(departure)

    with JournalReader(path) as reader:
        reasons = [gone.reason for gone in reader.departures()]
        assert reasons == ["LOST", "COMPLETE", "FAILED", "COMPLETE"]
        assert reader.digests() == {0: "01" * 32}


def test_loss_that_is_not_a_number_is_read_back_as_one(path: Path) -> None:
    lossless = line_values.result(loss=math.nan, samples=0, weight=0.0, seconds=0.0)
    with Writing(path) as writing:
        writing.save(effects.SaveRecord(STEP, lossless))

    with JournalReader(path) as reader:
        (loss,) = reader.losses()
        assert math.isnan(loss)


def test_second_coordinator_is_refused_while_the_first_lives(path: Path) -> None:
    with Writing(path), pytest.raises(JournalLocked, match=r"another coordinator \(process \d+\)"):
        Journal.open(path, "7f3a")

    Journal.open(path, "7f3a").close()


def test_lock_of_a_killed_coordinator_is_released(path: Path) -> None:
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

        writing.journal.save(effects.SaveRecord(INITIAL))

        assert "another coordinator took the run over" in writing.deposed.get(timeout=10)
        assert writing.reports.empty()
    assert reopened(path).head is None


def test_record_of_an_older_term_than_the_stores_own_fails(path: Path) -> None:
    with Writing(path) as writing:
        _, report = writing.save(effects.SaveTerm(TERM + 1), effects.SaveRecord(INITIAL))

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
        _, report = writing.save(effects.SaveRecord(STEP, RESULT), effects.SaveRecord(INITIAL))
        assert isinstance(report, events.JournalFailed)

    assert reopened(path).head == STEP


def test_number_that_sqlite_cannot_hold_is_a_failure_not_a_crash(path: Path) -> None:
    beyond = Record(Key(TERM, 1), None, RecordKind.INITIAL, 0, Cursor(0, 2**63), ())
    with Writing(path) as writing:
        failed, saved = writing.save(effects.SaveRecord(beyond), effects.SaveRecord(INITIAL))

    assert isinstance(failed, events.JournalFailed)
    assert saved == events.RecordSaved(INITIAL.key)


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


def test_journal_whose_plan_is_of_a_later_version_is_refused_by_both_readers(path: Path) -> None:
    Journal.open(path, "7f3a").close()
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE run SET plan = ?", ('{"global_batch": 8, "curriculum": 3}',))
        database.commit()

    with pytest.raises(JournalError, match="plan has curriculum"):
        Journal.open(path, "7f3a")
    with JournalReader(path) as reader, pytest.raises(JournalError, match="plan has curriculum"):
        reader.run()


def test_file_that_is_not_a_database_is_refused_and_unlocked(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no database" * 1000)

    for _ in range(2):
        with pytest.raises(JournalError, match="can't be opened"):
            Journal.open(path, "7f3a")


def test_reading_does_not_create_a_missing_journal(path: Path) -> None:
    with pytest.raises(JournalError, match="no journal"):
        JournalReader(path)
    assert not path.exists()


@pytest.mark.parametrize(("sync", "level"), [("normal", 1), ("full", 2)])
def test_sync_is_as_configured(path: Path, sync: str, level: int) -> None:
    journal = Journal.open(path, "7f3a", sync=sync)  # type: ignore[arg-type]  # one of both
    assert journal._store._database.execute("PRAGMA synchronous").fetchone()[0] == level
    assert journal._store._database.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    journal.close()


def keys() -> Iterator[Key]:
    edges = (1, 9, 10, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
    return (Key(term, number) for term, number in itertools.product(edges, edges))


def test_blobs_of_keys_are_ordered_as_the_keys() -> None:
    ordered = sorted(keys())

    assert sorted(keys(), key=key_blob) == ordered
    assert [key_of(key_blob(key)) for key in ordered] == ordered


def test_the_workers_pace_is_durable_with_its_record_and_a_record_without_one_keeps_it(
    path: Path,
) -> None:
    with Writing(path) as writing:
        writing.save(
            effects.SaveRecord(INITIAL, pacing=b"one", comparison=b"two"),
            effects.SaveRecord(STEP, RESULT),
        )

    assert (reopened(path).pacing, reopened(path).comparison) == (b"one", b"two")


def test_the_journal_says_which_steps_overflowed_and_which_mean_they_had(path: Path) -> None:
    later = replace(STEP, key=Key(TERM, STEP.key.round + 1), parent=STEP.key, step=STEP.step + 1)
    with Writing(path) as writing:
        writing.save(
            effects.SaveRecord(INITIAL),
            effects.SaveRecord(STEP, replace(RESULT, overflow=True, trimmed=2)),
            effects.SaveRecord(later, RESULT),
        )

    with JournalReader(path) as reader:
        results = list(reader.results())
    assert [result.overflow for result in results] == [True, False]
    assert [result.trimmed for result in results] == [2, None]


def test_a_ledger_with_a_quorum_is_whole_if_each_position_is_in_one_record_or_owed(
    path: Path,
) -> None:
    def step(number: int, cursor: Cursor, start: int, *covers: PositionRange) -> None:
        record = replace(
            STEP,
            key=Key(TERM, number),
            parent=Key(TERM, number - 1),
            step=number - 1,
            cursor=cursor,
        )
        batch = PositionRange(start, cursor.position)
        part = replace(RESULT.contributions[0], positions=covers, late=number % 2)
        result = replace(RESULT, epoch=0, batch=batch, contributions=(part,), change_scale=0.5)
        writing.save(effects.SaveRecord(record, result))

    first, second, third = (PositionRange(at, at + 4) for at in (0, 4, 8))
    with Writing(path) as writing:
        writing.save(effects.SaveRecord(replace(INITIAL, key=Key(TERM, 1))))
        step(2, Cursor(0, 8, (second,)), 0, first)
        step(3, Cursor(0, 12, (third,)), 8, second)

        with JournalReader(path) as reader:
            assert reader.ledger_faults() == []
            assert [entry.record.cursor.owed for entry in reader.chain()] == [
                (), (second,), (third,),
            ]  # fmt: skip
            results = [entry.result for entry in reader.chain() if entry.result is not None]
            assert [each.contributions[0].late for each in results] == [0, 1]

        step(4, Cursor(0, 12, ()), 12, second)

    with JournalReader(path) as reader:
        assert [(each.kind, each.positions) for each in reader.ledger_faults()] == [
            ("overlap", second),
            ("gap", third),
        ]


def test_a_journal_from_before_steps_could_overflow_is_read_and_goes_on(path: Path) -> None:
    with Writing(path) as writing:
        writing.save(effects.SaveRecord(INITIAL), effects.SaveRecord(STEP, RESULT))
    with sqlite3.connect(path) as database:
        database.execute("ALTER TABLE records DROP COLUMN overflow")
        database.execute("ALTER TABLE records DROP COLUMN quorum")
    database.close()

    with JournalReader(path) as reader:
        before = [result.overflow for result in reader.results()]
    later = replace(STEP, key=Key(TERM + 1, 1), parent=STEP.key, step=STEP.step + 1)
    with Writing(path, TERM + 1) as writing:
        writing.save(effects.SaveRecord(later, replace(RESULT, overflow=True)))

    with JournalReader(path) as reader:
        assert (before, [each.overflow for each in reader.results()]) == ([False], [False, True])


def test_the_pace_of_a_record_that_is_refused_is_not_kept(path: Path) -> None:
    with Writing(path) as writing:
        writing.save(effects.SaveRecord(INITIAL, pacing=b"one"))
        reports = writing.save(effects.SaveRecord(INITIAL, pacing=b"two"))

    assert isinstance(reports[-1], events.JournalFailed)
    assert reopened(path).pacing == b"one"


def test_a_journal_from_before_there_was_a_pace_opens_and_takes_one(path: Path) -> None:
    with Writing(path) as writing:
        writing.save(effects.SaveRecord(INITIAL))
    with sqlite3.connect(path) as database:
        database.execute("DROP TABLE pacing")
    database.close()

    older = reopened(path)
    with Writing(path, TERM + 1) as writing:
        writing.save(effects.SaveRecord(replace(STEP, key=Key(TERM + 1, 1)), RESULT, pacing=b"x"))

    assert (older.head, older.pacing) == (INITIAL, b"")
    assert reopened(path).pacing == b"x"


def test_every_write_is_timed_and_a_records_has_its_step(path: Path) -> None:
    writes: list[tuple[bool, int | None]] = []
    with Writing(path) as writing:
        writing.journal.wrote = lambda seconds, step: writes.append((seconds > 0, step))
        writing.save(effects.SaveRecord(INITIAL), effects.SaveRecord(STEP, RESULT))
        writing.save(effects.SaveTerm(TERM + 7))

    assert writes == [(True, 0), (True, 1), (True, None)]


class _Held:
    """A journal whose thread is held after its first write, so that more waits for it."""

    def __init__(self, writing: Writing) -> None:
        self.commits: list[str] = []
        self._entered, self._go_on = threading.Event(), threading.Event()
        writing.journal._store._database.set_trace_callback(self.commits.append)
        writing.journal.wrote = self._hold
        writing.journal.save(effects.SaveHalt(HALT))
        assert self._entered.wait(30)

    def _hold(self, seconds: float, step: int | None) -> None:
        self._entered.set()
        self._go_on.wait(30)

    def release(self) -> None:
        self._go_on.set()

    @property
    def count(self) -> int:
        return self.commits.count("COMMIT")


GONE = effects.SaveDeparture(2, events.LeaveReason.FAILED, "", 1, b"")


def test_what_waits_together_is_one_transaction(path: Path) -> None:
    with Writing(path) as writing:
        held = _Held(writing)
        for number in range(3):
            scalars = (Scalar("val/loss", number, 1.0),)
            writing.journal.save(effects.SaveScalars(2, scalars, stream=5, sequence=number))
        writing.journal.save(GONE)
        writing.journal.save(effects.SaveRecord(INITIAL))
        held.release()
        reports = [writing.reports.get(timeout=30) for _ in range(4)]

        assert held.count == 2  # That of the first effect, and one more.

    assert reports == [
        *(events.ScalarsSaved(5, number) for number in range(3)),
        events.RecordSaved(INITIAL.key),
    ]
    assert reopened(path).head == INITIAL


def test_what_can_not_be_written_takes_nothing_that_waits_with_it_along(path: Path) -> None:
    with Writing(path) as writing:
        writing.save(effects.SaveRecord(INITIAL), effects.SaveRecord(STEP, RESULT))
        held = _Held(writing)
        writing.journal.save(GONE)
        writing.journal.save(effects.SaveRecord(INITIAL))  # It is older than the last one.
        writing.journal.save(effects.SaveScalars(2, (Scalar("loss", 1, 1.0),), stream=5))
        held.release()
        reports = [writing.reports.get(timeout=30) for _ in range(2)]

    assert isinstance(reports[0], events.JournalFailed)
    assert reports[1] == events.ScalarsSaved(5, 0)
    with JournalReader(path) as reader:
        assert [gone.reason for gone in reader.departures()] == ["FAILED"]
        assert [entry.record for entry in reader.entries()] == [INITIAL, STEP]


def test_what_a_verified_step_has_shown_is_kept_with_its_record(path: Path) -> None:
    leaf = Attestation(node=Node(0, 1), digest=b"d" * 16, samples=b"s" * 8)
    proved = Proved(
        weights=b"w" * 32,
        prefixes=b"p" * 8,
        # After an inquest an owner has attested its grain once more.
        attested=((0, leaf), (2, leaf), (0, replace(leaf, components=b"c" * 32))),
        averages=b"a" * 16,
        grains=1,
        drawn=True,
    )
    convicts = effects.SaveVerdict(step=2, key=Key(TERM, 5), worker=2, text="wrong", evidence="[]")
    nobody = replace(convicts, worker=None)
    with Writing(path) as writing:
        writing.save(effects.SaveRecord(INITIAL), effects.SaveRecord(STEP, RESULT, proved=proved))
        writing.journal.save(convicts)
        writing.journal.save(nobody)

    expected = VerifiedTotals(steps=1, grains=1, differences=1, convicted=[2])
    assert reopened(path).verified == expected
    with JournalReader(path) as reader:
        assert reader.verified() == expected
        assert [(each.step, each.worker) for each in reader.verdicts()] == [(2, 2), (2, None)]
    with closing(sqlite3.connect(path)) as database:
        digest, samples = leaf.digest.hex(), leaf.samples.hex()
        assert database.execute("SELECT * FROM attested").fetchall() == [
            (2, 0, 1, 0, digest, samples, b"c" * 32),
            (2, 0, 1, 2, digest, samples, None),
        ]
        weights = database.execute("SELECT step, sha256, record FROM weights").fetchall()
        assert weights == [(0, (b"w" * 32).hex(), 1)]


def test_a_journal_from_before_parameters_were_kept_is_read_and_gets_the_columns(
    path: Path,
) -> None:
    proved = Proved(weights=b"w" * 32, prefixes=b"p" * 8)
    with Writing(path) as writing:
        writing.save(effects.SaveRecord(INITIAL), effects.SaveRecord(STEP, RESULT, proved=proved))
    with closing(sqlite3.connect(path)) as database:
        database.execute("ALTER TABLE weights DROP COLUMN prefixes")
        database.execute("ALTER TABLE attested DROP COLUMN components")

    with AuditBook(path) as book:
        assert book.weights()[0].prefixes == b""
        assert book.attested(STEP.key) is None
    reopened(path)
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT prefixes FROM weights").fetchall() == [(None,)]
        assert database.execute("SELECT components FROM attested").fetchall() == []


def test_the_key_of_verification_is_made_once(path: Path) -> None:
    for term, new in ((TERM, b"first"), (TERM + 1, b"second")):
        journal = Journal.open(path, "7f3a")
        journal.begin_term(term)
        assert journal.verify_key(new) == b"first"
        journal.close()
