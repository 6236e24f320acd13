"""Traces of several workers: one clock, one file in the trace event format, one table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from andon.host.trace import (
    ClockSample,
    EventKind,
    PartHeader,
    PartWriter,
    TraceEvent,
    TracePart,
    Track,
    WorkerKnown,
)
from andon_cli.commands.trace import (
    ClockMap,
    Trace,
    TraceUnreadable,
    merge_parts,
    merge_run,
    read_traces,
)
from andon_cli.commands.trace_times import ranks_of, show_trace, times_of
from andon_cli.questions import TraceConfig, TraceSettings
from unit.andon_cli.trace_format import assert_valid, events_in, spans_of

BEGAN = 1_750_000_000_000_000


def header(host: str, *, clock: str = "", at_us: int = 0, process: int = 1) -> PartHeader:
    return PartHeader(
        run_id="7f3a", host=host, process=process, clock=clock, at_us=at_us, unix_us=BEGAN + at_us
    )


def span(name: str, begin: int, end: int, track: Track = Track.SCRIPT, **args: Any) -> TraceEvent:
    return TraceEvent(
        kind=EventKind.SPAN, name=name, track=track, at_us=begin, us=end - begin, args=args
    )


def part(
    worker: int, host: str, ahead_us: int, *events: TraceEvent, clock: str = "", error_us: int = 100
) -> TracePart:
    """A part of a worker whose clock shows `ahead_us` more than microseconds since the start."""
    shifted = [replace(each, at_us=each.at_us + ahead_us) for each in events]
    sample = ClockSample(ahead_us, BEGAN, error_us)
    head = header(host, clock=clock, at_us=ahead_us, process=worker)
    return TracePart(head, worker, [sample], shifted)


def placed(trace: Trace, name: str) -> list[tuple[int, int]]:
    return [(each["pid"], each["ts"]) for each in trace.events if each["name"] == name]


# ---------------------------------------------------------------------- clocks


def test_what_happened_at_once_on_two_hosts_is_at_once_in_the_trace() -> None:
    parts = [
        part(0, "alpha", 5_000_000, span("data", 10, 20)),
        part(1, "beta", 77, span("data", 10, 20)),
    ]

    trace = merge_parts(parts)

    assert placed(trace, "data") == [(1000, 0), (1001, 0)]
    assert trace.origin_us == BEGAN + 10
    assert trace.clocks == {
        "alpha": "within 0.1 ms of the coordinator's clock",
        "beta": "within 0.1 ms of the coordinator's clock",
    }


def test_the_answer_that_came_back_fastest_counts() -> None:
    samples = [
        ClockSample(0, BEGAN + 900, 1000),
        ClockSample(1_000_000, BEGAN + 1_000_000, 10),
        ClockSample(2_000_000, BEGAN + 2_000_400, 500),
    ]

    clock = ClockMap.of([TracePart(header("alpha"), 0, samples)])

    assert clock.unix_us(0) == BEGAN
    assert clock.unix_us(9_000_000) == BEGAN + 9_000_000
    assert (clock.error_us, clock.known) == (10, True)


def test_a_clock_that_drifts_is_followed() -> None:
    """It gains 60 us in a minute."""
    samples = [
        ClockSample(at, BEGAN + at - at // 1_000_000, 5) for at in (0, 30_000_000, 60_000_000)
    ]

    clock = ClockMap.of([TracePart(header("alpha"), 0, samples)])

    assert clock.unix_us(15_000_000) == BEGAN + 15_000_000 - 15
    assert clock.unix_us(45_000_000) == BEGAN + 45_000_000 - 45
    assert clock.unix_us(90_000_000) == BEGAN + 90_000_000 - 60


def test_two_bad_answers_at_the_edge_of_a_window_do_not_turn_time_back() -> None:
    samples = [
        ClockSample(29_999_999, BEGAN + 29_999_999 + 40_000, 50_000),
        ClockSample(30_000_001, BEGAN + 30_000_001 - 40_000, 45_000),
        ClockSample(60_000_002, BEGAN + 95_000_000, 30_000_000),
    ]

    clock = ClockMap.of([TracePart(header("alpha"), 0, samples)])

    moments = [clock.unix_us(at) for at in range(29_999_000, 30_001_000)]
    assert moments == sorted(moments)
    assert clock.error_us == 45_000


def test_workers_of_one_kernel_have_one_clock_whatever_each_was_told() -> None:
    parts = [
        part(0, "alpha", 0, span("data", 10, 20), clock="boot", error_us=900),
        part(1, "alpha", 0, span("data", 10, 20), clock="boot", error_us=100),
    ]
    parts[0].samples = [ClockSample(0, BEGAN + 700, 900)]

    trace = merge_parts(parts)

    assert placed(trace, "data") == [(1000, 0), (1001, 0)]
    assert trace.origin_us == BEGAN + 10


def test_without_an_answer_of_the_coordinator_the_hosts_own_time_counts_and_that_is_said() -> None:
    lonely = part(0, "alpha", 5_000_000, span("data", 10, 20))
    lonely.samples = []

    trace = merge_parts([lonely])

    assert trace.origin_us == BEGAN + 5_000_010
    assert trace.clocks == {"alpha": "the host's own clock: the coordinator's is unknown"}


# ---------------------------------------------------------------------- the file


def a_step(number: int, at: int, *, outcome: str = "committed") -> list[TraceEvent]:
    """A step of 100 us, as it is recorded: what ends first comes first."""
    return [
        span("data", at, at + 10, step=number),
        span("to host", at + 30, at + 40, Track.COPIES),
        span("compute", at + 10, at + 60, step=number),
        span("exchange", at + 40, at + 80, Track.EXCHANGE),
        span("wait for averages", at + 60, at + 80, step=number),
        span("wait for commit", at + 80, at + 100, step=number),
        span(f"step {number}", at, at + 100, attempt=0, outcome=outcome, step=number),
    ]


def a_run() -> list[TracePart]:
    counter = TraceEvent(
        kind=EventKind.COUNTER,
        name="memory",
        track=Track.SCRIPT,
        at_us=50,
        args={"rss_mib": 12.5},
    )
    halted = TraceEvent(
        kind=EventKind.INSTANT, name="halted", track=Track.SCRIPT, at_us=90, args={"why": "nan"}
    )
    start = [span("join", -900, -10), span("wait for work", -10, 0)]
    steps = [*start, *a_step(1, 0), counter, halted]
    steps += [*a_step(2, 200, outcome="void"), *a_step(2, 300)]
    return [part(0, "alpha", 5_000_000, *steps), part(1, "beta", 3, *a_step(1, 0), *a_step(2, 300))]


def test_a_merged_trace_is_valid_and_names_its_workers_and_tracks(tmp_path: Path) -> None:
    path = tmp_path / "t.json"

    merge_parts(a_run()).write(path)

    events = assert_valid(path)
    names = [each["args"]["name"] for each in events if each["name"] == "process_name"]
    assert names == ["worker 0 on alpha", "worker 1 on beta"]
    assert spans_of(events, 1001, Track.SCRIPT)[:3] == ["step 1", "data", "compute"]
    assert spans_of(events, 1001, Track.COPIES) == ["to host", "to host"]
    (halted,) = events_in(events, "i", 1000)
    assert (halted["name"], halted["s"], halted["args"]) == ("halted", "p", {"why": "nan"})
    (memory,) = events_in(events, "C", 1000)
    assert memory["args"] == {"rss_mib": 12.5}


def test_traces_of_two_hosts_make_one_with_each_event_where_it_was(tmp_path: Path) -> None:
    parts = a_run()
    for name, each in zip(("a.json", "b.json"), parts, strict=True):
        merge_parts([each]).write(tmp_path / name)

    together = read_traces([tmp_path / "b.json", tmp_path / "a.json"])

    at_once = merge_parts(parts)
    assert together.events == at_once.events
    assert together.origin_us == at_once.origin_us
    assert together.clocks.keys() == {"alpha", "beta"}


def write_part(folder: Path, process: int, run_id: str, *events: TraceEvent) -> Path:
    writer = PartWriter(folder, replace(header("alpha", process=process), run_id=run_id))
    writer.write([WorkerKnown(process), *events])
    writer.close()
    return writer.path


def test_a_run_merges_its_own_parts_and_leaves_those_of_others(tmp_path: Path) -> None:
    trace, folder = tmp_path / "t.json", tmp_path / "t.json.parts"
    write_part(folder, 0, "7f3a", *a_step(1, 0))
    killed = write_part(folder, 1, "7f3a", *a_step(1, 0))
    killed.write_bytes(killed.read_bytes()[:-20])
    other = write_part(folder, 2, "beef", *a_step(1, 0))
    empty = folder / "just-begun.jsonl"
    empty.touch()

    assert merge_run(trace, "7f3a") == 2

    events = assert_valid(trace)
    assert len(events_in(events, "X", 1000)) == 7
    assert len(events_in(events, "X", 1001)) == 6
    assert sorted(folder.iterdir()) == sorted([other, empty])
    assert merge_run(trace, "none") == 0


def test_the_folder_of_parts_goes_with_the_last_of_them(tmp_path: Path) -> None:
    write_part(tmp_path / "t.json.parts", 0, "7f3a", *a_step(1, 0))

    merge_run(tmp_path / "t.json", "7f3a")

    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", '{"otherData": {}, "traceEvents": []}', "[" * 50_000,
        '{"otherData": {"andon_origin_us": "0", "run": "", "clocks": {}, "notes": []}, '
        '"traceEvents": [{"ph": "X", "ts": "soon"}]}',
    ],
)  # fmt: skip
def test_a_file_that_is_no_trace_is_refused_with_what_to_give(tmp_path: Path, content: str) -> None:
    path = tmp_path / "odd.json"
    path.write_text(content)

    with pytest.raises(TraceUnreadable, match=r"odd\.json is no trace of andon: give a file"):
        read_traces([path])


@pytest.mark.parametrize(
    "line", ["5", "[]", '{"sync": ["a", "b", "c"]}', '{"worker": []}', '{"ph": "X", "ts": 1.5}']
)
def test_a_part_with_a_line_of_another_kind_is_refused_by_name(tmp_path: Path, line: str) -> None:
    write_part(tmp_path, 0, "7f3a", *a_step(1, 0))
    [part] = tmp_path.glob("*.jsonl")
    part.write_text(f"{part.read_text()}{line}\n")

    with pytest.raises(TraceUnreadable, match="is no part of a trace"):
        read_traces([part])


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TraceUnreadable, match=r"none\.json can't be read: No such file"):
        read_traces([tmp_path / "none.json"])


# ---------------------------------------------------------------------- where the time went


def test_the_shares_of_a_workers_time_add_up_to_one() -> None:
    first, second = times_of(merge_parts(a_run()))

    assert (first.worker, first.steps, first.void) == ("worker 0 on alpha", 2, 1)
    assert first.seconds == pytest.approx(400e-6)
    assert first.shares() == pytest.approx(
        {
            "compute": 150 / 400,
            "data": 30 / 400,
            "averages": 60 / 400,
            "commit": 60 / 400,
            "work": 0.0,
            "other": 100 / 400,
        }
    )
    assert (second.steps, second.void) == (2, 0)
    assert (second.longest_wait_s, second.longest_wait) == (20e-6, "averages, step 1")


def test_the_command_shows_a_table_and_writes_what_it_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "t.json", tmp_path / "out.json"
    merge_parts(a_run()).write(source)

    code = show_trace(TraceConfig(settings=TraceSettings(out=out), files=(source,)))

    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert lines[0] == "run 7f3a"
    assert lines[1].split() == [
        *("worker", "steps", "void", "time", "compute", "data", "averages", "commit", "work"),
        *("other", "longest", "wait"),
    ]
    assert lines[2].startswith("worker 0 on alpha  2      1     0.0s  37 %     8 %")
    assert lines[-1].startswith(f"wrote {out}: open it in https://ui.perfetto.dev")
    assert_valid(out)


def test_the_json_of_the_table_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "t.json"
    merge_parts(a_run()).write(source)

    show_trace(TraceConfig(settings=TraceSettings(format="json"), files=(source,)))

    told = json.loads(capsys.readouterr().out)
    assert told["run"] == "7f3a"
    assert [each["steps"] for each in told["workers"]] == [2, 2]
    assert told["workers"][0]["shares"]["compute"] == pytest.approx(0.375)


# ---------------------------------------------------------------------- ranks of sessions


def call(begin: int, end: int, **args: Any) -> TraceEvent:
    return span("all_reduce(sum)", begin, end, Track.CALLS, **args)


def ranks() -> list[TracePart]:
    """Rank 0 waits for rank 1; its second and third call overlap."""
    first = part(
        0,
        "alpha",
        0,
        call(0, 100, step=1, waited_for_ms={"1": 80}),
        span("wait for all_reduce(sum)", 20, 100, step=1),
        span("backward", 110, 300, step=2),
        call(120, 250, step=2, waited_for_ms={"1": 5, "2": 10.5}),
        call(200, 300, step=2),
        call(310, 400, step=2),
    )
    second = part(1, "alpha", 0)
    return [
        TracePart(replace(each.header, called="rank"), each.worker, each.samples, each.events)
        for each in (first, second)
    ]


def test_calls_that_overlap_are_in_rows_of_their_own(tmp_path: Path) -> None:
    merge_parts(ranks()).write(tmp_path / "t.json")

    events = assert_valid(tmp_path / "t.json")

    rows = {
        each["tid"]: each["args"]["name"]
        for each in events_in(events, "M", 1000)
        if each["name"] == "thread_name" and each["tid"] >= Track.CALLS
    }
    assert rows == {5: "calls", 6: "calls 2"}
    assert [len(spans_of(events, 1000, row)) for row in rows] == [3, 1]
    assert not spans_of(events, 1001, Track.CALLS)


def test_the_time_of_a_rank_says_for_which_rank_it_waited(tmp_path: Path) -> None:
    trace = merge_parts(ranks())

    first, second = ranks_of(trace)

    assert times_of(trace) == []
    assert (first.rank, first.steps, first.calls) == ("rank 0 on alpha", 1, 4)
    assert first.seconds == pytest.approx(400e-6)
    assert first.in_calls == pytest.approx(370 / 400)
    assert (first.backward, first.waits) == pytest.approx((190 / 400, 80 / 400))
    assert first.waited_for_ms == {"1": 85, "2": 10.5}
    assert first.longest_wait == "rank 1, all_reduce(sum), step 1"
    assert (second.calls, second.seconds, second.longest_wait) == (0, 0.0, "")


def test_the_command_shows_ranks_in_a_table_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "t.json"
    merge_parts(ranks()).write(source)

    show_trace(TraceConfig(settings=TraceSettings(), files=(source,)))
    show_trace(TraceConfig(settings=TraceSettings(format="json"), files=(source,)))

    *lines, told = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:4] == ["rank", "steps", "calls", "time"]
    assert lines[2].endswith("80 ms (rank 1, all_reduce(sum), step 1)")
    assert not any(line.startswith("worker") for line in lines)
    assert [each["calls"] for each in json.loads(told)["ranks"]] == [4, 0]
