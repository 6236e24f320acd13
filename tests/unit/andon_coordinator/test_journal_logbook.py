"""The logbook: scalars and run events are read back, also from journals that lack the tables."""

from __future__ import annotations

import itertools
import math
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from andon.protocol.halts import HaltAnswer
from andon.protocol.records import Cursor, Key, Record, RecordKind
from andon.protocol.scalars import Scalar
from andon_coordinator.core import effects, events
from andon_coordinator.core.run_events import RunEvent, RunEventKind
from andon_coordinator.core.settings import JournalledCheckpoint
from andon_coordinator.transport import journal as journal_module
from andon_coordinator.transport.journal import Journal
from andon_coordinator.transport.reader import JournalReader, LoggedScalar
from unit.andon_coordinator.journal_bench import (
    HALT,
    INITIAL,
    RESULT,
    STEP,
    TERM,
    Writing,
    reopened,
)


def event(number: int, text: str = "", kind: RunEventKind = RunEventKind.JOINED) -> RunEvent:
    return RunEvent(id=number, kind=kind, worker=None, step=0, text=text, at_unix_s=100.0)


def logged(worker: int, *scalars: Scalar, sequence: int = 1) -> effects.SaveScalars:
    return effects.SaveScalars(worker, scalars, stream=7, sequence=sequence)


def scalars(path: Path) -> list[LoggedScalar]:
    with JournalReader(path) as reader:
        return reader.scalars()


def forget_tables(path: Path) -> None:
    """Makes it a journal of a program that had no logbook."""
    database = sqlite3.connect(path)
    database.execute("DROP TABLE scalars")
    database.execute("DROP TABLE run_events")
    database.commit()
    database.close()


def test_scalars_are_read_back_by_name_step_and_worker(path: Path) -> None:
    with Writing(path) as writing:
        writing.journal.save(logged(1, Scalar("val", 2, 0.5), Scalar("lr", 2, 0.1)))
        writing.journal.save(logged(0, Scalar("val", 2, 0.25)))
        writing.journal.save(logged(0, Scalar("val", 1, math.inf)))

    assert scalars(path) == [
        LoggedScalar("lr", 2, 1, 0.1, 100.0),
        LoggedScalar("val", 1, 0, math.inf, 100.0),
        LoggedScalar("val", 2, 0, 0.25, 100.0),
        LoggedScalar("val", 2, 1, 0.5, 100.0),
    ]
    with JournalReader(path) as reader:
        assert reader.scalar_names() == ["lr", "val"]
        assert reader.scalars("lr") == [LoggedScalar("lr", 2, 1, 0.1, 100.0)]
        assert reader.scalar_curve("val") == [(1, math.inf), (2, 0.375)]
    assert reopened(path).scalar_names == {"lr", "val"}


def test_what_is_sent_again_replaces_what_is_there(path: Path) -> None:
    with Writing(path) as writing:
        for value in (0.5, 0.5, 0.75):
            writing.journal.save(logged(1, Scalar("val", 2, value)))

    assert scalars(path) == [LoggedScalar("val", 2, 1, 0.75, 100.0)]


def test_nan_is_kept_and_makes_the_mean_nan(path: Path) -> None:
    with Writing(path) as writing:
        writing.journal.save(logged(0, Scalar("val", 2, math.nan)))
        writing.journal.save(logged(1, Scalar("val", 2, 1.0)))

    assert [math.isnan(each.value) for each in scalars(path)] == [True, False]
    with JournalReader(path) as reader:
        ((step, mean),) = reader.scalar_curve("val")
    assert step == 2
    assert math.isnan(mean)


def test_a_roll_back_takes_the_scalars_and_checkpoints_of_the_steps_that_it_undoes(
    path: Path,
) -> None:
    second = replace(STEP, key=Key(TERM, 5), parent=STEP.key, step=2)
    mark = Record(Key(TERM, 6), STEP.key, RecordKind.MARK, 1, Cursor(0, 8), ())
    again = replace(second, key=Key(TERM, 7), parent=mark.key)
    one, two = (
        effects.SaveRunEvent(
            replace(event(step, f"/{step}", RunEventKind.CHECKPOINT), worker=2, step=step)
        )
        for step in (1, 2)
    )
    came = effects.SaveRunEvent(
        replace(event(0, "again, on a (CPU)", RunEventKind.JOINED), worker=2, step=1)
    )
    with Writing(path) as writing:
        writing.save(effects.SaveRecord(INITIAL), effects.SaveRecord(STEP, RESULT))
        writing.journal.save(came)
        writing.journal.save(one)
        writing.save(effects.SaveRecord(second, RESULT))
        writing.journal.save(two)
        writing.journal.save(logged(0, Scalar("val", 1, 1.0), Scalar("val", 2, 2.0)))
        writing.save(effects.SaveRecord(mark, rolls_back=True), effects.SaveRecord(again, RESULT))

    assert [(each.step, each.value) for each in scalars(path)] == [(1, 1.0)]
    written = events.Checkpoint(1, "/1", STEP.key)
    assert reopened(path).checkpoints == (JournalledCheckpoint(2, "on a (CPU)", written),)


def test_a_heartbeat_is_reported_once_its_scalars_can_be_read(path: Path) -> None:
    seen: list[tuple[events.Event, list[float]]] = []
    journal = Journal.open(path, "7f3a", clock=lambda: 100.0)
    journal.begin_term(TERM)
    # On the journal's thread, while its report is made.
    journal.start(
        lambda report: seen.append((report, [each.value for each in scalars(path)])),
        lambda why: None,
    )
    journal.save(logged(0, Scalar("val", 2, 0.5), sequence=3))
    journal.save(logged(0, Scalar("val", 3, 0.25), sequence=4))
    journal.close()

    # Both may be one transaction; then the first finds the second's, too.
    assert [report for report, _ in seen] == [events.ScalarsSaved(7, n) for n in (3, 4)]
    assert seen[0][1][:1] == [0.5]
    assert seen[1][1] == [0.5, 0.25]


def test_scalars_that_can_not_be_written_are_given_up_and_do_not_halt_the_line(path: Path) -> None:
    with Writing(path) as writing:
        with sqlite3.connect(path) as other:
            other.execute("ALTER TABLE scalars RENAME TO elsewhere")
        other.close()
        given_up, saved = writing.save(
            logged(0, Scalar("val", 0, 1.0), sequence=3), effects.SaveRecord(INITIAL)
        )

    assert given_up == events.ScalarsSaved(7, 3)
    assert saved == events.RecordSaved(INITIAL.key)


def test_scalars_that_the_journal_does_not_keep_up_with_are_lost(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_module, "_MOST_WAITING", 3)
    journal = Journal.open(path, "7f3a", clock=lambda: 100.0)
    journal.begin_term(TERM)
    for step in range(5):  # Its thread does not run yet.
        journal.save(logged(0, Scalar("val", step, 1.0)))
    reports: list[events.Event] = []
    journal.start(reports.append, lambda why: None)
    journal.save(logged(0, Scalar("val", 5, 1.0), sequence=9))  # There may be room by now.
    journal.close()

    assert [each.step for each in scalars(path)][:3] == [0, 1, 2]
    assert events.ScalarsSaved(7, 9) in reports  # Answered in any case.
    assert [each.getMessage() for each in caplog.records] == [
        "scalars_lost worker=0 why='the journal does not keep up'"
    ]


def test_run_events_are_read_back_and_ids_go_on(path: Path) -> None:
    told = [event(1, "began", RunEventKind.STARTED), event(2, "on alpha")]
    with Writing(path) as writing:
        for each in told:
            writing.journal.save(effects.SaveRunEvent(each))

    with JournalReader(path) as reader:
        assert reader.run_events() == told
    journal = Journal.open(path, "7f3a")
    journal.close()
    assert journal.next_event_id == 3


def test_a_notice_is_that_of_the_last_process_in_a_slot(path: Path) -> None:
    notice, joined = RunEventKind.NOTICE, RunEventKind.JOINED
    told = [
        replace(event(number, text, kind), worker=worker)
        for number, (worker, kind, text) in enumerate(
            [
                (0, notice, "SIGTERM"),
                (1, notice, "SIGTERM"),
                (2, joined, "on alpha"),
                (0, joined, "again, on alpha"),
                (1, joined, "on beta"),
            ],
            start=1,
        )
    ]

    with Writing(path) as writing:
        for each in told:
            writing.journal.save(effects.SaveRunEvent(each))

    with JournalReader(path) as reader:
        assert reader.notices() == {0: "SIGTERM"}


def test_a_journal_without_a_logbook_tells_of_halts_answers_and_departures(path: Path) -> None:
    moments = itertools.count(100.0)
    with Writing(path, clock=lambda: next(moments)) as writing:
        writing.journal.save(effects.SaveDeparture(2, None, "silent", 1, b""))
        writing.journal.save(effects.SaveHalt(HALT))
        writing.journal.save(effects.SaveAnswer(HALT.id, HaltAnswer.SKIP, None, "ann"))
        left = effects.SaveDeparture(1, events.LeaveReason.COMPLETE, "", 3, b"")
        writing.journal.save(left)
    forget_tables(path)

    with JournalReader(path) as reader:
        told = [
            (each.id, each.kind.value, each.worker, each.step, each.text)
            for each in reader.run_events()
        ]
        assert reader.scalars() == []
        assert reader.scalar_names() == []
        assert reader.scalar_curve("val") == []

    assert told == [
        (-4, "lost", 2, 1, "lost: silent"),
        (-3, "halted", 2, 2, f"{HALT.reason.label}: worker 2 sent nan"),
        (-2, "answered", None, 2, "skip by ann"),
        (-1, "left", 1, 3, "complete"),
    ]


def test_a_journal_that_got_its_logbook_later_tells_everything_once(path: Path) -> None:
    with Writing(path) as writing:
        writing.journal.save(effects.SaveHalt(HALT))
        writing.save(effects.SaveRecord(INITIAL))
    forget_tables(path)
    started = event(1, "goes on", RunEventKind.STARTED)
    halted = event(2, "again", RunEventKind.HALTED)
    with Writing(path, TERM + 1) as writing:
        writing.journal.save(effects.SaveRunEvent(started))
        writing.journal.save(effects.SaveDeparture(2, None, "silent", 1, b""))
        writing.journal.save(effects.SaveRunEvent(halted))

    with JournalReader(path) as reader:
        told = reader.run_events()

    assert [each.id for each in told] == [-1, 1, 2]
    assert told[0].kind is RunEventKind.HALTED


def test_the_lines_arithmetic_and_each_workers_last_one_outlive_the_coordinator(
    path: Path,
) -> None:
    one, other = (("threads", "1"),), (("threads", "2"), ("torch", "2"))
    with Writing(path) as writing:
        for worker, items in ((0, one), (1, other), (0, other)):
            writing.journal.save(effects.SaveArithmetic(worker, "alpha", items, 0))

    history = reopened(path)
    assert history.arithmetic == one
    assert history.arithmetics == {0: other, 1: other}
    with JournalReader(path) as reader:
        assert [each.items for each in reader.arithmetics()] == [one, other, other]
