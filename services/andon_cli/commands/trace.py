"""Traces: the parts of several workers on one clock, in one file that trace viewers open.

Theory of operation. Every worker writes times of its own monotonic clock, and now and then what the
coordinator's clock showed (`andon.host.trace`). The offset between the two is taken from the
answers that came back fastest, one for each half minute, and in between from a straight line: so a
clock that drifts is followed. Workers of one kernel share the monotonic clock, so their samples are
put together, and between them there is no error at all.

The merged file is in Chrome's trace event format, in its JSON form: spans (`X`), instants (`i`),
counters (`C`) and names (`M`). A worker is a process there, and what it does at once are threads.
Merged files are merged again, since each says where its time begins.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from andon.host.errors import CommandError
from andon.host.private_files import open_private
from andon.host.trace import (
    ClockSample,
    EventKind,
    TraceDamaged,
    TraceEvent,
    TracePart,
    Track,
    is_part,
    parts_folder,
    read_part,
)

__all__ = ["ClockMap", "Trace", "TraceUnreadable", "merge_parts", "merge_run", "read_traces"]

_WINDOW_US = 30_000_000
"""The best sample of so long a time counts."""
_USELESS_US = 1_000_000
"""An error beyond which a sample does not count."""
_FIRST_PROCESS = 1000
"""A worker's process id in the trace is its id, and this: trace viewers keep 0 for themselves."""
_STRANGERS = 100_000
"""Likewise of processes that never joined."""
_TRACKS = {
    Track.SCRIPT: "script",
    Track.COPIES: "copies",
    Track.EXCHANGE: "exchange",
    Track.FILES: "files",
}
_CALLS = "calls"


class TraceUnreadable(CommandError):
    """A file is no trace, or can't be read."""


@dataclass(frozen=True, slots=True)
class ClockMap:
    """From a monotonic clock to the coordinator's time."""

    anchors: tuple[ClockSample, ...]
    """The samples that count, by their time; at least one."""
    known: bool
    """False: the coordinator was never asked, so this is the host's own time."""

    @classmethod
    def of(cls, parts: Sequence[TracePart]) -> ClockMap:
        """The map for parts with the same clock."""
        samples = [sample for part in parts for sample in part.samples]
        if samples:
            return cls(tuple(_anchors(samples)), known=True)
        first = min((part.header for part in parts), key=lambda header: header.at_us)
        return cls((ClockSample(first.at_us, first.unix_us, 0),), known=False)

    @property
    def error_us(self) -> int:
        """How far it may be off."""
        return max(anchor.error_us for anchor in self.anchors)

    def unix_us(self, at_us: int) -> int:
        """The coordinator's time at a moment of the monotonic clock; never goes backwards."""
        after = bisect_right(self.anchors, at_us, key=lambda anchor: anchor.at_us)
        last = self.anchors[max(0, after - 1)]
        offset = last.unix_us - last.at_us
        if 0 < after < len(self.anchors):
            follows = self.anchors[after]
            drift = follows.unix_us - follows.at_us - offset
            offset += drift * (at_us - last.at_us) // (follows.at_us - last.at_us)
        return at_us + offset


def _anchors(samples: Sequence[ClockSample]) -> list[ClockSample]:
    """The best sample of each window, none close to another."""
    best: dict[int, ClockSample] = {}
    # An answer that took seconds says little, unless there is no other.
    least = min(sample.error_us for sample in samples)
    for sample in samples:
        if sample.error_us > max(least, _USELESS_US):
            continue
        window = sample.at_us // _WINDOW_US
        if window not in best or sample.error_us < best[window].error_us:
            best[window] = sample
    anchors: list[ClockSample] = []
    for window in sorted(best):
        anchor = best[window]
        # Between two that are close their errors would look like a drift, even a backward one.
        if anchors and anchor.at_us - anchors[-1].at_us < _WINDOW_US // 2:
            if anchor.error_us >= anchors[-1].error_us:
                continue
            anchors.pop()
        anchors.append(anchor)
    return anchors


@dataclass(frozen=True, slots=True)
class Trace:
    """A merged trace."""

    origin_us: int
    """Where its time begins: microseconds since 1970 by the coordinator's clock."""
    events: list[dict[str, Any]]
    """In the trace event format, sorted; names first."""
    run_id: str = ""
    clocks: dict[str, str] = field(default_factory=dict)
    """How exact each host's times are, in words."""
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Reads a merged trace.

        Raises:
            TraceUnreadable: it is none that andon wrote.
        """
        try:
            fields = json.loads(path.read_text("utf-8"))
            about = fields["otherData"]
            events = fields["traceEvents"]
            if not all(map(_is_event, events)):
                raise ValueError("an event is none")
            return cls(
                int(about["andon_origin_us"]),
                list(events),
                str(about["run"]),
                {str(host): str(text) for host, text in about["clocks"].items()},
                tuple(map(str, about["notes"])),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise TraceUnreadable(
                f"{path} is no trace of andon: give a file that `andon run --trace FILE` wrote, or "
                "a folder FILE.parts"
            ) from None

    def write(self, path: Path) -> None:
        """Writes it completely, or not at all."""
        about = {
            "andon_origin_us": str(self.origin_us),  # as text: a number may lose digits
            "run": self.run_id,
            "clocks": self.clocks,
            "notes": list(self.notes),
        }
        draft = path.with_name(f".{path.name}.draft")
        with open(draft, "w", encoding="utf-8", opener=open_private) as file:
            file.write('{"displayTimeUnit":"ms","otherData":' + json.dumps(about))
            file.write(',"traceEvents":[\n')
            file.write(",\n".join(json.dumps(each, separators=(",", ":")) for each in self.events))
            file.write("\n]}\n")
        draft.replace(path)


def merge_parts(parts: Sequence[TracePart]) -> Trace:
    """The parts of a run as one trace; empty if there are none."""
    by_clock: dict[tuple[str, str, int], list[TracePart]] = {}
    for part in parts:
        header = part.header
        # An unknown clock is nobody else's.
        own = (header.host, header.process) if not header.clock else ("", 0)
        by_clock.setdefault((header.clock, *own), []).append(part)
    placed: list[tuple[TracePart, ClockMap]] = []
    clocks: dict[str, str] = {}
    for members in by_clock.values():
        clock = ClockMap.of(members)
        placed += [(part, clock) for part in members]
        exact = f"within {clock.error_us / 1000:.1f} ms of the coordinator's clock"
        host = members[0].header.host
        clocks[host] = (
            exact if clock.known else "the host's own clock: the coordinator's is unknown"
        )
    moments = [clock.unix_us(event.at_us) for part, clock in placed for event in part.events]
    origin_us = min(moments, default=0)
    events = [
        each
        for number, (part, clock) in enumerate(placed)
        for each in _events_of(part, clock, origin_us, number)
    ]
    return Trace(
        origin_us,
        _in_order(events),
        next((part.header.run_id for part in parts if part.header.run_id), ""),
        clocks,
        tuple(dict.fromkeys(note for part in parts for note in part.header.notes)),
    )


def read_traces(paths: Iterable[Path]) -> Trace:
    """One trace of several files: merged traces, parts, and folders of parts.

    Raises:
        TraceUnreadable: a file is neither, or can't be read.
    """
    merged: list[Trace] = []
    parts: list[TracePart] = []
    for path in paths:
        try:
            if path.is_dir():
                parts += [read_part(each) for each in sorted(path.glob("*.jsonl"))]
            elif is_part(path):
                parts.append(read_part(path))
            else:
                merged.append(Trace.read(path))
        except TraceDamaged as error:
            raise TraceUnreadable(str(error)) from None
        except OSError as error:
            raise TraceUnreadable(f"{path} can't be read: {error.strerror}") from None
    if parts:
        merged.append(merge_parts(parts))
    return _together([each for each in merged if each.events])


def merge_run(trace: Path, run_id: str) -> int:
    """Merges the parts that a run's workers left beside `trace`; returns how many there were.

    The parts are removed then. Those of other runs stay.

    Raises:
        TraceUnreadable: a part, or the trace, can't be read or written.
    """
    folder = parts_folder(trace)
    found: list[tuple[Path, TracePart]] = []
    for path in sorted(folder.glob("*.jsonl")):
        try:
            part = read_part(path)
        except TraceDamaged:
            continue  # A worker was killed before it had written its first line.
        except OSError as error:
            raise TraceUnreadable(f"{path} can't be read: {error.strerror}") from None
        if part.header.run_id == run_id:
            found.append((path, part))
    if not found:
        return 0
    try:
        merge_parts([part for _, part in found]).write(trace)
        for path, _ in found:
            path.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()
    except OSError as error:
        raise TraceUnreadable(
            f"the trace {trace} can't be written ({error.strerror}): its parts are in {folder}, "
            f"andon trace {folder} --out OTHER merges them"
        ) from None
    return len(found)


def _together(traces: Sequence[Trace]) -> Trace:
    if len(traces) == 1:
        return traces[0]
    origin_us = min((trace.origin_us for trace in traces), default=0)
    events: list[dict[str, Any]] = []
    for trace in traces:
        later = trace.origin_us - origin_us
        events += [
            each if each["ph"] == "M" else {**each, "ts": each["ts"] + later}
            for each in trace.events
        ]
    return Trace(
        origin_us,
        _in_order(events),
        next((trace.run_id for trace in traces if trace.run_id), ""),
        {host: text for trace in traces for host, text in trace.clocks.items()},
        tuple(dict.fromkeys(note for trace in traces for note in trace.notes)),
    )


def _in_order(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Names first, each once; then by time, and a span before those inside it."""
    names: dict[tuple[Any, ...], dict[str, Any]] = {}
    rest = []
    for each in events:
        if each["ph"] == "M":
            names[each["pid"], each["tid"], each["name"]] = each
        else:
            rest.append(each)
    rest.sort(key=lambda each: (each["ts"], -each.get("dur", 0), each["pid"], each["tid"]))
    return [*(names[key] for key in sorted(names)), *rest]


def _events_of(
    part: TracePart, clock: ClockMap, origin_us: int, number: int
) -> list[dict[str, Any]]:
    header, worker = part.header, part.worker
    process = _STRANGERS + number if worker is None else _FIRST_PROCESS + worker
    who = f"process {header.process}" if worker is None else f"{header.called} {worker}"
    events: list[dict[str, Any]] = [
        _name("process_name", process, 0, name=f"{who} on {header.host}"),
        _name("process_sort_index", process, 0, sort_index=process),
    ]
    for track, name in _TRACKS.items():
        events.append(_name("thread_name", process, int(track), name=name))
        events.append(_name("thread_sort_index", process, int(track), sort_index=int(track)))
    rows = _rows([each for each in part.events if each.track is Track.CALLS])
    for row in range(max(rows.values(), default=-1) + 1):
        thread = Track.CALLS + row
        name = f"{_CALLS} {row + 1}" if row else _CALLS
        events.append(_name("thread_name", process, thread, name=name))
        events.append(_name("thread_sort_index", process, thread, sort_index=thread))
    for each in part.events:
        event = _event(each, clock, origin_us, process)
        events.append({**event, "tid": event["tid"] + rows.get(id(each), 0)})
    return events


def _rows(calls: Sequence[TraceEvent]) -> dict[int, int]:
    """The row of each call, by its identity: viewers can't show two that overlap in one row."""
    rows: dict[int, int] = {}
    ends: list[int] = []
    for each in sorted(calls, key=lambda call: (call.at_us, call.us)):
        free = (row for row, end in enumerate(ends) if end <= each.at_us)
        row = next(free, len(ends))
        ends[row : row + 1] = [each.at_us + each.us]
        rows[id(each)] = row
    return rows


def _is_event(event: Any) -> bool:
    """Whether a value of JSON is an event of a trace that andon wrote."""
    if not isinstance(event, dict):
        return False
    length = event.get("dur", None if event.get("ph") == EventKind.SPAN else 0)
    numbers = (event.get("ts"), length, event.get("pid"), event.get("tid"))
    texts = (event.get("ph"), event.get("name"))
    return (
        all(isinstance(each, int) for each in numbers)
        and all(isinstance(each, str) for each in texts)
        and isinstance(event.get("args", {}), dict)
    )


def _name(kind: str, process: int, track: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "ts": 0, "args": args}


def _event(event: TraceEvent, clock: ClockMap, origin_us: int, process: int) -> dict[str, Any]:
    begins = clock.unix_us(event.at_us)
    fields: dict[str, Any] = {
        "ph": str(event.kind),
        "name": event.name,
        "cat": "andon",
        "pid": process,
        "tid": int(event.track),
        "ts": begins - origin_us,
    }
    if event.kind is EventKind.SPAN:
        # Both ends are moved, not the length: what nests must nest on the other clock, too.
        fields["dur"] = clock.unix_us(event.at_us + event.us) - begins
    elif event.kind is EventKind.INSTANT:
        fields["s"] = "p"
    if event.args:
        fields["args"] = dict(event.args)
    return fields
