"""What a start needs of a journal: found at once, however long the run was."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from andon.protocol.halts import HaltAnswer, HaltReason
from andon.protocol.limits import COUNT_LIMIT
from andon.protocol.records import Cursor, Key, Record, RecordKind, make_term
from andon_coordinator.core import effects, events
from andon_coordinator.core.detectors import WINDOW
from andon_coordinator.core.events import TimePassed
from andon_coordinator.core.line import LineCore
from andon_coordinator.core.settings import LineSettings
from andon_coordinator.transport import rows
from andon_coordinator.transport.files import open_to_read
from andon_coordinator.transport.journal import (
    Journal,
)
from andon_coordinator.transport.reader import JournalReader
from unit.andon_coordinator.journal_bench import (
    HALT,
    INITIAL,
    LAYOUT,
    PLAN,
    RESULT,
    STEP,
    TERM,
    Writing,
    long_run,
    reopened,
)


def test_counts_agree_with_what_was_written(path: Path) -> None:
    with Writing(path) as writing:
        writing.save(effects.SaveRecord(INITIAL), effects.SaveRecord(STEP, RESULT))
        writing.journal.save(effects.SaveHalt(HALT))
        writing.journal.save(effects.SaveAnswer(HALT.id, HaltAnswer.SKIP, None, "ada"))
        for worker in (0, 1):
            writing.journal.save(effects.SaveDeparture(worker, None, "gone", 1, b""))
        writing.journal.save(effects.SaveDeparture(2, None, "", 1, b"", dropped=True))

    with closing(Journal.open(path, "7f3a")) as journal:
        counted = journal.counts()
    assert (counted.steps, counted.samples) == (1, 4)
    assert counted.halts == {"NON_FINITE_GRADIENT": 1}
    assert counted.answers == {"SKIP": 1}
    assert counted.departures == {"LOST": 2, "DROPPED": 1}


def test_history_has_the_results_of_the_last_steps_for_the_detectors(path: Path) -> None:
    long_run(path, WINDOW + 3)

    recent = reopened(path).recent

    assert [result.loss for result in recent] == [float(step) for step in range(4, WINDOW + 4)]
    assert recent[-1].gradient_norm == WINDOW + 3
    assert recent[-1].contributions == ()


def roll_back(path: Path) -> Record:
    """Rolls a long run back to its first step."""
    back = Record(Key(TERM + 1, 1), Key(TERM, 11), RecordKind.MARK, 1, Cursor(0, 4), ())
    with Writing(path, TERM + 1) as writing:
        writing.save(effects.SaveRecord(back, rolls_back=True))
    return back


def test_history_of_the_last_steps_leaves_out_what_was_rolled_back(path: Path) -> None:
    long_run(path, 3)
    back = roll_back(path)

    assert [result.loss for result in reopened(path).recent] == [1.0]
    with closing(open_to_read(path)) as database:
        assert list(rows.ancestry(database)) == [back.key, Key(TERM, 11), INITIAL.key]


def test_a_roll_back_is_known_without_looking_for_it(path: Path) -> None:
    long_run(path, 3)
    with closing(open_to_read(path)) as database:
        assert (rows.abandoned(database), rows.rolled_back(database)) == (None, 0)

    roll_back(path)

    with closing(open_to_read(path)) as database:
        assert (rows.abandoned(database), rows.rolled_back(database)) == (Key(TERM, 13), 5)


def test_every_record_is_found_by_its_key_and_no_other(path: Path) -> None:
    long_run(path, 5)

    with closing(open_to_read(path)) as database:
        for key in (INITIAL.key, *(Key(TERM, 10 + step) for step in range(1, 6))):
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
                    "history": instructions(store._database, store.past.history),
                    "counts": instructions(store._database, store.past.counts),
                    "head": instructions(reader._database, lambda: next(reader.backwards())),
                    "steps": instructions(reader._database, reader.steps),
                    "began": instructions(reader._database, reader.began_at_unix_s),
                    "most": instructions(reader._database, reader.most_workers),
                }
            )
        journal.close()

    short, long = costs
    assert long == short


DROPPED = effects.SaveDeparture(
    *(2, None, "dropped by an operator", 1, b""),
    dropped=True,
    incarnation=2**64 - 1,
    credential="gamma",
)


@pytest.mark.parametrize(
    "since",
    ["nothing", "a step", "a departure", "a resumed run", "lost state", "a step, lost state"],
)
def test_a_slot_is_dropped_until_somebody_takes_it_or_the_run_is_resumed(
    path: Path, since: str
) -> None:
    with Writing(path) as writing:
        writing.save(effects.SaveRecord(INITIAL))
        writing.journal.save(DROPPED)
        if since.startswith("a step"):
            writing.save(effects.SaveRecord(STEP, RESULT))
        if since == "a departure":
            writing.journal.save(effects.SaveDeparture(2, None, "its connection broke", 1, b""))
    if since == "a resumed run" or since.endswith("lost state"):
        back = Record(Key(TERM + 1, 1), INITIAL.key, RecordKind.MARK, 0, Cursor(0, 0), ())
        by_itself = since != "a resumed run"
        with Writing(path, TERM + 1) as writing:
            writing.save(effects.SaveRecord(back, rolls_back=True, by_itself=by_itself))

    history = reopened(path)
    assert history.dropped == ({2} if since in ("nothing", "lost state") else frozenset())
    # Who had it stays barred, whoever has the slot now, until a person resumes the run.
    assert history.barred == ({2**64 - 1, "gamma"} if since != "a resumed run" else frozenset())
    # Whatever happened since, a token of before opens nothing.
    assert history.revoked == {2}


def test_departures_after_the_last_step_are_in_the_history(path: Path) -> None:
    with Writing(path) as writing:
        writing.journal.save(effects.SaveDeparture(2, None, "its stream ended", 0, b""))
        writing.save(effects.SaveRecord(INITIAL), effects.SaveRecord(STEP, RESULT))
        well = events.LeaveReason.COMPLETE
        left = ((0, well, 1), (0, None, 1), (2, None, 1), (3, well, 1), (4, well, 0))
        for worker, reason, step in left:
            writing.journal.save(effects.SaveDeparture(worker, reason, "", step, b""))
    history = reopened(path)

    assert history.last_roster == (0, 2)
    # A later process in a slot changes nothing. Of those that followed the line, who has made up
    # the last step has the run's weights.
    assert history.departed == {0: True, 2: False, 3: True, 4: False}


# What an older Andon wrote because a peer said so, before numbers of peers were bounded.


@pytest.mark.parametrize("counter", [2**32 - 2, 2**32 - 1])
def test_a_journal_with_the_greatest_possible_terms_still_starts(path: Path, counter: int) -> None:
    made_up = counter << 32 | 7
    with Writing(path, made_up) as writing:
        writing.save(effects.SaveRecord(replace(INITIAL, key=Key(made_up, 1))))

    for _ in range(3):
        journal = Journal.open(path, "7f3a")
        term = make_term(journal.history.greatest_term, 100.0, 5)
        journal.begin_term(term)
        LineCore(
            LineSettings(run_id="7f3a"), term=term, history=journal.history, random_bits=lambda: 5
        ).receive(TimePassed(), 0.0)
        journal.close()


def test_a_halt_with_the_greatest_possible_id_leaves_ids_for_the_next(path: Path) -> None:
    made_up = replace(HALT, id=2**64 - 1)
    with Writing(path) as writing:
        for halt in (HALT, made_up):
            writing.journal.save(effects.SaveHalt(halt))
    assert reopened(path).halt == made_up
    assert reopened(path).next_halt_id == HALT.id + 1 < COUNT_LIMIT

    after = replace(HALT, id=HALT.id + 1)
    with Writing(path, TERM + 1) as writing:
        writing.journal.save(effects.SaveAnswer(made_up.id, HaltAnswer.RETRY, None, "ann"))
        writing.journal.save(effects.SaveHalt(after))

    assert reopened(path).halt == after
    assert reopened(path).next_halt_id == after.id + 1


def test_a_cursor_beyond_the_data_set_is_read_as_the_next_epochs_first(path: Path) -> None:
    beyond = replace(INITIAL, cursor=Cursor(3, 10))
    with Writing(path) as writing:
        writing.journal.save(effects.SaveRun(PLAN, LAYOUT))
        writing.save(effects.SaveRecord(beyond))

    history = reopened(path)
    line = LineCore(
        LineSettings(run_id="7f3a"), term=TERM + 1, history=history, random_bits=lambda: 5
    )

    assert history.head == beyond
    assert line.status(0.0).cursor == Cursor(4, 0)


def test_a_journal_of_an_older_version_that_calls_the_initial_record_found_still_opens(
    path: Path,
) -> None:
    with Writing(path) as writing:
        writing.save(effects.SaveRecord(INITIAL))
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (3,)
        database.execute("UPDATE records SET kind = 'FOUND'")
        database.commit()

    history = reopened(path)

    assert history.head == INITIAL
    assert history.head.kind is RecordKind.INITIAL
    LineCore(LineSettings(run_id="7f3a"), term=TERM + 2**32, history=history, random_bits=int)
    with JournalReader(path) as reader:
        assert [entry.record for entry in reader.chain()] == [INITIAL]
