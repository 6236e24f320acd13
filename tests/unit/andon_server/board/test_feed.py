"""The feed: durable steps in order, for readers that the writer never waits for."""

from __future__ import annotations

from dataclasses import replace

from andon.protocol.records import Cursor, Key, Record, RecordKind
from andon.protocol.scalars import Scalar
from andon_coordinator.core import effects, events
from andon_coordinator.core.run_events import RunEvent, RunEventKind
from andon_server.board.feed import BoardFeed
from andon_server.board.view import LineFacts
from unit.andon_server.board.boards import commit, line_of


def test_a_step_is_a_point_once_it_is_durable() -> None:
    feed = BoardFeed(wall=lambda: 1000.0)

    commit(feed, 1)

    [item] = feed.since(0) or []
    assert (item.number, item.kind) == (1, "point")
    assert item.value == [1, 1.5, 0.5, 4, 0.75, 2.0, 1000.0]


def test_a_snapshot_has_what_does_not_change_and_the_present_paths() -> None:
    paths = ["gRPC"]
    facts = LineFacts(host="alpha", script="train.py", encoding="int8", keeps_output=True)
    feed = BoardFeed(facts=facts, paths=lambda: paths)

    feed.show(line_of())
    paths[0] = "shared memory"

    assert feed.now is not None
    view = feed.now.view()
    assert (view["host"], view["script"], view["encoding"]) == ("alpha", "train.py", "int8")
    assert (view["paths"], view["keeps_output"]) == (["gRPC"], True)


def test_a_record_that_the_journal_lost_is_no_point() -> None:
    feed = BoardFeed()
    record = Record(Key(1, 1), None, RecordKind.MARK, 1, Cursor(0, 4), ())

    feed.observe(events.TimePassed(), [effects.SaveRecord(record)], 0.0)
    feed.observe(events.RecordSaved(Key(1, 1)), [], 0.0)
    feed.observe(events.JournalFailed("disk full"), [], 0.0)
    feed.observe(events.RecordSaved(Key(1, 2)), [], 0.0)

    assert (feed.newest, feed.since(0)) == (0, [])


def test_a_reader_gets_what_came_after_what_it_saw() -> None:
    feed = BoardFeed()
    for step in (1, 2, 3):
        commit(feed, step)

    assert [item.value[0] for item in feed.since(1) or []] == [2, 3]
    assert feed.since(3) == []


def test_a_reader_that_is_too_far_behind_is_told_so() -> None:
    feed = BoardFeed(kept=8)
    for step in range(1, 11):
        commit(feed, step)

    assert feed.since(0) is None
    assert feed.since(1) is None
    assert [item.value[0] for item in feed.since(2) or []] == list(range(3, 11))


def test_the_time_to_go_follows_the_median_pace_so_a_halt_does_not_count() -> None:
    feed = BoardFeed()
    for step, at in ((1, 0.0), (2, 2.0), (3, 4.0), (4, 900.0), (5, 902.0)):
        commit(feed, step, at=at)

    feed.tick(replace(line_of(), step=5, total_steps=10))

    assert feed.now is not None
    assert feed.now.view()["eta_s"] == 10.0


def test_each_snapshot_has_a_number_of_its_own() -> None:
    feed = BoardFeed()
    assert feed.now is None

    feed.tick(line_of())
    first = feed.now
    feed.tick(line_of())

    assert first is not None
    assert feed.now is not None
    assert feed.now.number == first.number + 1


def test_what_scripts_log_and_what_happens_are_items_too() -> None:
    feed = BoardFeed()
    event = RunEvent(
        id=3, kind=RunEventKind.LOST, worker=1, step=7, text="<b>gone</b>", at_unix_s=5.0
    )

    feed.observe(
        events.TimePassed(),
        [
            effects.SaveScalars(1, (Scalar("val", 7, 0.5), Scalar("lr", 7, 0.1))),
            effects.SaveRunEvent(event),
        ],
        0.0,
    )

    assert [(item.kind, item.value) for item in feed.since(0) or []] == [
        ("scalar", ["val", 7, 1, 0.5]),
        ("scalar", ["lr", 7, 1, 0.1]),
        (
            "event",
            {"id": 3, "kind": "lost", "worker": 1, "step": 7, "text": "<b>gone</b>",
             "at_unix_s": 5.0},
        ),
    ]  # fmt: skip
