"""What is done to a journal from outside: a disk that is full, files that are taken away."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from andon.protocol.halts import HaltAnswer, HaltEvidence, HaltReason
from andon.protocol.records import Cursor, Key, Record, RecordKind
from andon_coordinator.core import effects, events
from andon_coordinator.transport.journal import Journal, JournalError
from andon_coordinator.transport.reader import JournalReader
from unit.andon_coordinator.journal_bench import (
    HALT,
    INITIAL,
    RESULT,
    STEP,
    TERM,
    Writing,
    reopened,
)

LONG = "x" * 20_000
"""More than there is room for in pages that the database has already."""
ANSWER = effects.SaveAnswer(HALT.id, HaltAnswer.RETRY, None, LONG)
GONE = effects.SaveDeparture(2, events.LeaveReason.FAILED, LONG, 1, b"")


def fill_disk(writing: Writing, *, full: bool) -> None:
    """Lets the database grow no further, or again."""
    database = writing.journal._store._database
    pages = database.execute("PRAGMA page_count").fetchone()[0] if full else 2**30
    database.execute(f"PRAGMA max_page_count = {pages}")


def test_a_record_that_fails_on_a_full_disk_reports_the_full_disk(path: Path) -> None:
    with Writing(path) as writing:
        fill_disk(writing, full=True)
        [failed] = writing.save(effects.SaveRecord(INITIAL, note=LONG))
        fill_disk(writing, full=False)
        [saved] = writing.save(effects.SaveRecord(INITIAL))

    assert failed == events.JournalFailed("database or disk is full")
    assert saved == events.RecordSaved(INITIAL.key)


def test_facts_from_while_the_disk_was_full_are_written_before_the_next_record(
    path: Path,
) -> None:
    with Writing(path) as writing:
        writing.save(effects.SaveRecord(INITIAL))
        writing.journal.save(effects.SaveHalt(HALT))
        fill_disk(writing, full=True)
        writing.journal.save(ANSWER)
        for _ in range(3):
            writing.journal.save(GONE)
        failed, term = writing.save(effects.SaveRecord(STEP, RESULT), effects.SaveTerm(TERM))
        fill_disk(writing, full=False)
        [saved] = writing.save(effects.SaveRecord(STEP, RESULT))

    assert (failed, saved) == (
        events.JournalFailed("database or disk is full"), events.RecordSaved(STEP.key),
    )  # fmt: skip
    assert isinstance(term, events.JournalFailed)
    with JournalReader(path) as reader:
        [halt] = reader.halts()
        assert (halt.answer, halt.operator, halt.is_open) == (HaltAnswer.RETRY, LONG, False)
        assert [gone.reason for gone in reader.departures()] == ["FAILED"]
        assert reader.run_end().departed == {}, "it went before the step, so that it may be back"


def test_the_halt_for_a_failing_journal_is_written_only_with_what_follows_it(
    path: Path,
) -> None:
    halt = effects.SaveHalt(HaltEvidence(id=1, reason=HaltReason.JOURNAL, step=1, message=LONG))
    with Writing(path) as writing:
        fill_disk(writing, full=True)
        writing.journal.save(halt)
        writing.save(effects.SaveRecord(INITIAL, note=LONG))
    assert reopened(path).halt is None

    with Writing(path, TERM + 1) as writing:
        fill_disk(writing, full=True)
        writing.journal.save(halt)
        writing.save(effects.SaveRecord(INITIAL, note=LONG))
        fill_disk(writing, full=False)
        writing.journal.save(effects.SaveAnswer(1, HaltAnswer.RETRY, None, "ann"))
    with JournalReader(path) as reader:
        assert [halt.answer for halt in reader.halts()] == [HaltAnswer.RETRY]
    assert reopened(path).next_halt_id == 2


def test_a_fact_that_can_never_be_written_does_not_block_the_others(path: Path) -> None:
    never, away = effects.SaveDeparture(0, None, "", 2**63, b""), path.with_name("away")
    with Writing(path) as writing:
        writing.journal.save(never)
        at_once = writing.reports.get(timeout=10)
        path.rename(away)
        writing.journal.save(never)
        [failed] = writing.save(effects.SaveRecord(INITIAL))
        away.rename(path)
        [saved] = writing.save(effects.SaveRecord(INITIAL))

    assert isinstance(at_once, events.JournalFailed)
    assert isinstance(failed, events.JournalFailed)
    assert saved == events.RecordSaved(INITIAL.key)


NEXT = replace(STEP, key=Key(TERM, 6), parent=STEP.key, step=2, cursor=Cursor(0, 8))


def deleted(path: Path) -> None:
    path.unlink()


def replaced(path: Path) -> None:
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    copy.replace(path)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def hidden(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)  # Looking at it fails, with no error that says that it is gone.


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (deleted, "deleted or moved"),
        (replaced, "put another file in the place of"),
        (emptied, "bytes off"),
        (hidden, "can't be looked at: Too many levels of symbolic links. Mend"),
    ],
)
@pytest.mark.parametrize("name", ["journal.sqlite", "journal.sqlite-wal"])
def test_a_journal_whose_files_are_moved_or_replaced_fails(
    path: Path, harm: Callable[[Path], None], said: str, name: str
) -> None:
    with Writing(path) as writing:
        writing.save(effects.SaveRecord(INITIAL))
        harm(path.with_name(name))
        [failed] = writing.save(effects.SaveRecord(STEP, RESULT))

    assert isinstance(failed, events.JournalFailed)
    assert said in failed.message
    assert name in failed.message


def moved(path: Path) -> Callable[[], object]:
    away = path.with_name("away")
    path.rename(away)
    return lambda: away.rename(path)


def without_its_folder(path: Path) -> Callable[[], object]:
    folder, away = path.parent, path.parent.with_name("away")
    folder.rename(away)
    folder.touch()  # Looking for the file is a NotADirectoryError now.

    def undo() -> None:
        folder.unlink()
        away.rename(folder)

    return undo


@pytest.mark.parametrize("take_away", [moved, without_its_folder])
@pytest.mark.parametrize(
    "moment", ["BEGIN", "INSERT INTO records", "INSERT INTO contributions", "COMMIT"]
)
def test_what_was_reported_as_failed_is_not_in_the_journal_when_its_file_comes_back(
    path: Path, moment: str, take_away: Callable[[Path], Callable[[], object]]
) -> None:
    undo: list[Callable[[], object]] = []
    gone = effects.SaveDeparture(2, events.LeaveReason.FAILED, "", 1, b"")
    with Writing(path) as writing:
        writing.save(effects.SaveRecord(INITIAL))
        database = writing.journal._store._database
        # The file is taken away while SQLite carries this statement out.
        database.set_trace_callback(
            lambda sql: (
                undo.append(take_away(path)) if sql.startswith(moment) and not undo else None
            )
        )
        reports = writing.save(effects.SaveRecord(STEP, RESULT))
        database.set_trace_callback(None)
        # The line's answer to a failure: the step is tried again, under a new key.
        again = replace(STEP, key=NEXT.key) if reports[0] != events.RecordSaved(STEP.key) else NEXT
        writing.journal.save(gone)
        reports += writing.save(effects.SaveRecord(again, RESULT))
        undo[0]()
        reports += writing.save(effects.SaveRecord(again, RESULT))

    saved = [each for each in reports if isinstance(each, events.RecordSaved)]
    with closing(Journal.open(path, "7f3a")) as journal:
        counts = journal.counts()
    assert (counts.steps, counts.departures) == (len(saved), {"FAILED": 1})
    assert reports[-1] == events.RecordSaved(again.key)
    assert isinstance(reports[-2], events.JournalFailed), "nothing is saved where nobody finds it"


def test_a_log_that_another_program_emptied_by_a_checkpoint_is_no_harm(path: Path) -> None:
    with Writing(path) as writing:
        writing.save(effects.SaveRecord(INITIAL))
        with closing(sqlite3.connect(path)) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        [saved] = writing.save(effects.SaveRecord(STEP, RESULT))

    assert saved == events.RecordSaved(STEP.key)


def test_a_missing_parent_is_reported_when_it_is_noticed_and_at_each_start(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Writing(path) as writing:
        writing.save(effects.SaveRecord(INITIAL), effects.SaveRecord(NEXT, RESULT))
    reopened(path)

    assert [record.getMessage() for record in caplog.records] == [
        f"journal_has_gap step=2 missing={STEP.key}",
        "journal_has_gaps gaps=1 last_at_step=2",
    ]
    with JournalReader(path) as reader:
        assert reader.gaps() == (1, 2)


def test_a_journal_without_gaps_says_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    back = Record(Key(TERM + 1, 1), INITIAL.key, RecordKind.MARK, 0, Cursor(0, 0), ())
    with Writing(path) as writing:
        writing.save(effects.SaveRecord(INITIAL), effects.SaveRecord(STEP, RESULT))
    with Writing(path, TERM + 1) as writing:
        writing.save(effects.SaveRecord(back))

    assert caplog.records == []


def test_a_journal_whose_records_are_out_of_order_is_refused(path: Path) -> None:
    with Writing(path) as writing:
        writing.save(effects.SaveRecord(INITIAL), effects.SaveRecord(STEP, RESULT))
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE records SET id = -id")

    with pytest.raises(JournalError, match="out of order at step 0"):
        Journal.open(path, "7f3a")
