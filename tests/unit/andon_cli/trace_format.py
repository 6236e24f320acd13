"""The trace event format: what a viewer takes for granted of a file."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

__all__ = ["assert_valid", "events_in", "spans_of"]

_NEEDED = {
    "X": {"name", "cat", "ph", "pid", "tid", "ts", "dur"},
    "i": {"name", "cat", "ph", "pid", "tid", "ts", "s"},
    "C": {"name", "cat", "ph", "pid", "tid", "ts", "args"},
    "M": {"name", "ph", "pid", "tid", "ts", "args"},
}


def assert_valid(path: Path) -> list[dict[str, Any]]:
    """Returns the events of a valid file."""
    content = json.loads(path.read_text())
    events: list[dict[str, Any]] = content["traceEvents"]
    assert content["displayTimeUnit"] in ("ms", "ns")
    for each in events:
        assert _NEEDED[each["ph"]] <= each.keys() <= _NEEDED[each["ph"]] | {"args"}
        for number in ("ts", "pid", "tid", "dur"):
            assert isinstance(each.get(number, 0), int), each
            assert each.get(number, 0) >= 0, each
        if each["ph"] == "C":
            assert all(isinstance(value, int | float) for value in each["args"].values())
    real = [each for each in events if each["ph"] != "M"]
    assert [each["ts"] for each in real] == sorted(each["ts"] for each in real)
    named = {(each["pid"], each["tid"]) for each in events if each["name"] == "thread_name"}
    assert {(each["pid"], each["tid"]) for each in real} <= named
    _assert_spans_nest(real)
    return events


def events_in(events: list[dict[str, Any]], kind: str, process: int) -> list[dict[str, Any]]:
    """Those of one kind and one process."""
    return [each for each in events if each["ph"] == kind and each["pid"] == process]


def spans_of(events: list[dict[str, Any]], process: int, track: int) -> list[str]:
    """The names of a track's spans, in order."""
    return [each["name"] for each in events_in(events, "X", process) if each["tid"] == track]


def _assert_spans_nest(events: list[dict[str, Any]]) -> None:
    """On each track two spans are apart, or one is inside the other."""
    tracks = defaultdict(list)
    for each in events:
        if each["ph"] == "X":
            tracks[each["pid"], each["tid"]].append(each)
    for spans in tracks.values():
        ends: list[tuple[int, str]] = []
        for each in spans:
            while ends and ends[-1][0] <= each["ts"]:
                ends.pop()
            end = each["ts"] + each["dur"]
            assert not ends or end <= ends[-1][0], f"{each} reaches beyond {ends[-1]}"
            ends.append((end, each["name"]))
