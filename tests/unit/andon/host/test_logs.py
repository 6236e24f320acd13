"""Log events as text and as JSON."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import pytest

from andon.host.logs import JsonLines, LogEvent


def record(message: object, *arguments: object, failed: bool = False) -> logging.LogRecord:
    failure = None
    if failed:
        try:
            raise ValueError("bad")
        except ValueError as error:
            failure = (ValueError, error, error.__traceback__)
    made = logging.LogRecord("andon.x", logging.INFO, "x.py", 1, message, arguments, failure)
    made.created = 1_700_000_000.25
    return made


def as_json(made: logging.LogRecord, **facts: object) -> dict[str, Any]:
    line = JsonLines(lambda: facts).format(made)
    assert "\n" not in line
    decoded: dict[str, Any] = json.loads(line)
    return decoded


def test_an_event_as_text_quotes_what_would_not_end_where_it_ends() -> None:
    event = LogEvent("worker_gone", worker=1, age_s=2.5, host="a.b:1", why="", text="two\nlines")

    assert str(event) == r"worker_gone worker=1 age_s=2.5 host=a.b:1 why='' text='two\nlines'"


def test_an_event_with_a_sentence_is_that_sentence_as_text() -> None:
    assert record(LogEvent("rejoining", "lost: joining again", why="lost")).getMessage() == (
        "lost: joining again"
    )


def test_an_event_as_json_has_its_fields_and_what_holds_for_the_process() -> None:
    entry = as_json(record(LogEvent("worker_joined", worker=1, step=7)), run="7f3a", step=6)

    assert entry == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "INFO",
        "logger": "andon.x",
        "event": "worker_joined",
        "run": "7f3a",
        "step": 7,
        "worker": 1,
    }


def test_any_other_message_is_text_without_an_event() -> None:
    entry = as_json(record("%d of %s", 3, "x"), worker=0)

    assert (entry["message"], entry["worker"], "event" in entry) == ("3 of x", 0, False)


def test_a_sentence_of_an_event_is_its_message() -> None:
    entry = as_json(record(LogEvent("rejoining", "joining again")))

    assert (entry["event"], entry["message"]) == ("rejoining", "joining again")


def test_a_traceback_is_one_field() -> None:
    entry = as_json(record(LogEvent("line_failed"), failed=True))

    assert entry["error"].startswith("Traceback (most recent call last):\n")
    assert entry["error"].endswith("ValueError: bad")


@pytest.mark.parametrize(
    ("value", "written"),
    [(math.nan, None), (2**53 + 1, str(2**53 + 1)), (7, 7), (True, True), (None, None),
     (ValueError("x"), "x"), ("\x1b\n\ud800", "\x1b\n\ud800")],
)  # fmt: skip
def test_every_value_can_be_read_by_programs(value: object, written: object) -> None:
    assert as_json(record(LogEvent("x", field=value)))["field"] == written


def test_an_event_can_not_hide_what_every_record_has() -> None:
    with pytest.raises(AssertionError, match="has a field that every record has"):
        LogEvent("x", level=1)
