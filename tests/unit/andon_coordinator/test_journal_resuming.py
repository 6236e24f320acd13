"""The store: what a coordinator finds in its journal when a run is resumed from a record."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from andon.protocol.records import Cursor, Key, PositionRange, Record, RecordKind
from andon.protocol.scalars import Scalar
from andon_coordinator.core.effects import (
    SaveEviction,
    SaveRecord,
    SaveRunEvent,
    SaveScalars,
)
from andon_coordinator.core.events import TimePassed, Undone
from andon_coordinator.core.machine_time import Price, RunCost
from andon_coordinator.core.run_events import RunEvent, RunEventKind
from andon_coordinator.transport.reader import JournalReader
from andon_coordinator.transport.store import JournalError, JournalStore
from scenarios import line_values

TERM = 2**32
JOINED = RunEvent(
    id=1, kind=RunEventKind.JOINED, worker=0, step=0, text="on alpha", at_unix_s=100.0
)


@pytest.fixture
def store(path: Path) -> Iterator[JournalStore]:
    """A journal of four steps of four positions each."""
    path.parent.mkdir(parents=True)
    store = JournalStore(path, "7f3a", sync="normal", clock=lambda: 100.0)
    store.begin_term(TERM)
    store.save_record(
        SaveRecord(Record(Key(TERM, 1), None, RecordKind.INITIAL, 0, Cursor(0, 0), (0,)))
    )
    for step in range(1, 5):
        save_step(store, Key(TERM, step + 1), Key(TERM, step), step)
    yield store
    store.close()


def save_step(store: JournalStore, key: Key, parent: Key, step: int) -> None:
    batch = PositionRange(4 * step - 4, 4 * step)
    part = line_values.contribution(positions=(batch,))
    result = line_values.result(
        batch=batch, contributions=(part,), stop_reason="steps" if step == 4 else ""
    )
    record = Record(key, parent, RecordKind.STEP, step, Cursor(0, 4 * step), (0,))
    store.save_record(SaveRecord(record, result))


def roll_back(store: JournalStore, term: int, to: Key, step: int) -> None:
    store.begin_term(term)
    mark = Record(Key(term, 1), to, RecordKind.MARK, step, Cursor(0, 4 * step), ())
    store.save_record(SaveRecord(mark, rolls_back=True))


def test_a_line_goes_on_from_the_record_that_was_chosen(store: JournalStore) -> None:
    history = store.past.history_at(Key(TERM, 3))

    assert history.roll_back
    assert history.head is not None
    assert (history.head.key, history.head.step) == (Key(TERM, 3), 2)
    assert history.result is not None
    assert history.result.batch == PositionRange(4, 8)
    assert history.abandoned == Key(TERM, 5)


def test_the_last_record_is_rolled_back_to_like_any_other(store: JournalStore) -> None:
    assert store.past.history_at(Key(TERM, 5)).roll_back


def test_a_record_that_only_workers_know_is_left_to_their_reports(store: JournalStore) -> None:
    history = store.past.history_at(Key(2 * TERM, 9))

    assert not history.roll_back
    assert history.head is not None
    assert history.head.step == 4


def test_an_empty_journal_leaves_the_head_to_the_workers(tmp_path: Path) -> None:
    store = JournalStore(tmp_path / "other.sqlite", "7f3a", sync="normal", clock=lambda: 1.0)

    history = store.past.history_at(Key(TERM, 3))
    store.close()

    assert (history.head, history.roll_back) == (None, False)


def test_a_record_of_another_history_is_refused(store: JournalStore) -> None:
    with pytest.raises(JournalError, match="the checkpoint is of another run"):
        store.past.history_at(Key(TERM - 1, 3))


def test_a_record_that_was_rolled_back_is_refused(store: JournalStore) -> None:
    roll_back(store, 2 * TERM, Key(TERM, 3), 2)

    with pytest.raises(JournalError, match="was rolled back when the run was resumed earlier"):
        store.past.history_at(Key(TERM, 4))


def test_f_dp_002_the_ledger_of_a_run_that_was_rolled_back_is_exact(
    store: JournalStore, path: Path
) -> None:
    roll_back(store, 2 * TERM, Key(TERM, 3), 2)
    save_step(store, Key(2 * TERM, 2), Key(2 * TERM, 1), 3)
    save_step(store, Key(2 * TERM, 3), Key(2 * TERM, 2), 4)

    with JournalReader(path) as journal:
        faults, keys = journal.ledger_faults(), list(journal.ancestry())
        chain = [entry.record.key for entry in journal.chain()]

    assert faults == []
    assert keys == chain[::-1]
    assert Key(TERM, 4) not in keys


def test_the_newest_of_several_heads_that_is_in_the_history_is_found(store: JournalStore) -> None:
    unknown = Key(TERM, 99)

    found = store.past.find_ancestor((unknown, Key(TERM, 4), Key(TERM, 2)))

    assert found is not None
    assert (found.key, found.step, found.cursor) == (Key(TERM, 4), 3, Cursor(0, 12))
    assert store.past.find_ancestor((unknown,)) is None


def test_a_head_that_was_rolled_back_is_not_found_and_an_older_one_is(store: JournalStore) -> None:
    roll_back(store, 2 * TERM, Key(TERM, 3), 2)

    assert store.past.find_ancestor((Key(TERM, 4),)) is None
    found = store.past.find_ancestor((Key(TERM, 4), Key(TERM, 2)))

    assert found is not None
    assert found.key == Key(TERM, 2)


def test_f_dp_002_the_ledger_is_exact_after_a_line_went_back_twice(
    store: JournalStore, path: Path
) -> None:
    roll_back(store, 2 * TERM, Key(TERM, 4), 3)
    save_step(store, Key(2 * TERM, 2), Key(2 * TERM, 1), 4)
    roll_back(store, 3 * TERM, Key(TERM, 3), 2)
    save_step(store, Key(3 * TERM, 2), Key(3 * TERM, 1), 3)

    with JournalReader(path) as journal:
        assert journal.ledger_faults() == []
        assert Key(2 * TERM, 2) not in set(journal.ancestry())
    assert store.past.history().abandoned == Key(2 * TERM, 2)


def test_a_roll_back_says_which_samples_and_tokens_count_no_more_and_the_next_meter_agrees(
    store: JournalStore,
) -> None:
    for worker, step in ((0, 1), (1, 1), (0, 3), (0, 4)):
        store.save_scalars(SaveScalars(worker, (Scalar("tokens", step, 10.0),)))
    mark = Record(Key(2 * TERM, 1), Key(TERM, 3), RecordKind.MARK, 2, Cursor(0, 8), ())

    undone = store.past.undone_by(mark)
    roll_back(store, 2 * TERM, Key(TERM, 3), 2)
    meter = store.past.meter()

    assert undone == Undone(2, 8, 20.0)
    meter.price = Price(3600.0)
    meter.receive(TimePassed(), [SaveRunEvent(JOINED)])
    assert meter.at(101.0) == RunCost(1.0, 3600.0, "", 1.0, 8.0, 20.0)


def test_who_follows_for_being_slow_is_remembered_until_a_person_resumes_the_run(
    store: JournalStore,
) -> None:
    for process, why in ((2**64 - 1, "slow"), (7, "slow"), (7, "")):
        store.save_eviction(SaveEviction(process, why, 3))

    remembered = store.past.history()
    roll_back(store, 2 * TERM, Key(TERM, 3), 2)

    assert (remembered.evicted, remembered.stand) == ({2**64 - 1: "slow"}, 3)
    assert store.past.history().evicted == {}


def test_what_was_rolled_back_is_remembered_by_the_next_coordinator(store: JournalStore) -> None:
    roll_back(store, 2 * TERM, Key(TERM, 3), 2)

    history = store.past.history()

    assert history.abandoned == Key(TERM, 5)
    assert not history.roll_back
