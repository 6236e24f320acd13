"""The timeline: what is recorded is in the part, and what can't be written stops no worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from andon.host.trace import EventKind, TracePart, Track, read_part
from andon_trainer import Line, timeline
from andon_trainer.averaging.compute_clock import ComputeClock, HostStopwatch
from andon_trainer.averaging.staging import HostStaging, TracedStaging
from andon_trainer.core import effects
from andon_trainer.core.events import LearningAsked
from andon_trainer.timeline import Timeline
from unit.andon_trainer.solo import BATCH, SAMPLES, prepared
from unit.andon_trainer.step_bench import StepBench


def part_of(trace: Path) -> TracePart:
    (path,) = trace.with_name(f"{trace.name}.parts").iterdir()
    return read_part(path)


def recorded(trace: Path, act: Callable[[Timeline], None], **more: Any) -> TracePart:
    """What `act` leaves in the part."""
    line = Timeline(trace, run_id="7f3a", **more)
    act(line)
    line.close()
    line.close()
    return part_of(trace)


def spans(part: TracePart, track: Track = Track.SCRIPT) -> list[str]:
    return [
        each.name for each in part.events if each.kind is EventKind.SPAN and each.track is track
    ]


def test_a_step_and_what_is_in_it_are_recorded_as_they_end(tmp_path: Path) -> None:
    def act(line: Timeline) -> None:
        line.joined(3)
        line.step_began(7, 2)
        began = time.perf_counter()
        line.span("data", began)
        line.step_over("committed")
        line.step_over("void")

    part = recorded(tmp_path / "t.json", act)

    data, step = (each for each in part.events if each.kind is EventKind.SPAN)
    assert part.worker == 3
    assert part.header.run_id == "7f3a"
    assert (step.name, step.args) == (
        "step 7",
        {"attempt": 2, "outcome": "committed", "step": 7},
    )
    assert (data.name, data.args) == ("data", {"step": 7})
    assert step.at_us <= data.at_us
    assert data.at_us + data.us <= step.at_us + step.us


def test_an_answer_tells_the_coordinators_time_give_or_take_half_its_round_trip(
    tmp_path: Path,
) -> None:
    def act(line: Timeline) -> None:
        line.heartbeat_sent(1)
        line.heartbeat_sent(2)
        line.heartbeat_answered(2, 1_750_000_000.5)
        line.heartbeat_answered(1, 1_750_000_000.5)  # late: a newer answer was here before
        line.heartbeat_sent(3)
        line.heartbeat_answered(3, 0.0)  # from an older coordinator

    part = recorded(tmp_path / "t.json", act)

    (sample,) = part.samples
    assert sample.unix_us == 1_750_000_000_500_000
    assert 0 < sample.error_us < sample.at_us - part.header.at_us + sample.error_us


def test_cpu_memory_and_what_the_device_has_are_sampled(tmp_path: Path) -> None:
    part = recorded(
        tmp_path / "t.json",
        lambda _line: None,
        counters=lambda: {"gpu": {"percent": 87.0}},
        notes=("no fan speed",),
    )

    found = {each.name: each.args for each in part.events if each.kind is EventKind.COUNTER}
    assert found.keys() == {"cpu", "memory", "gpu"}
    assert found["gpu"] == {"percent": 87.0}
    assert found["memory"]["rss_mib"] > 1
    assert part.header.notes == ("no fan speed",)


def test_counters_that_fail_end_the_counters_and_not_the_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> dict[str, dict[str, float]]:
        raise RuntimeError("the driver is gone")

    part = recorded(tmp_path / "t.json", lambda line: line.joined(0), counters=broken)

    assert part.worker == 0
    assert "no more counters of the device: the driver is gone" in caplog.text


def test_events_that_nobody_writes_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "_MOST_WAITING", 0)

    part = recorded(tmp_path / "t.json", lambda line: line.joined(0))

    (dropped,) = part.events
    assert dropped.name == "events dropped"
    assert dropped.args["events"] >= 2


def test_a_folder_that_can_t_be_written_to_is_refused_with_the_variable(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()

    with pytest.raises(ValueError, match=r"t\.json\.parts \(Not a directory\): set ANDON_TRACE"):
        Timeline(blocked / "t.json", run_id="")


def test_micro_batches_data_and_copies_of_a_step_are_recorded(tmp_path: Path) -> None:
    def act(line: Timeline) -> None:
        bench = StepBench(micro=2)
        bench.member.timeline = line
        bench.averager.clock = ComputeClock(HostStopwatch(), line)
        tap = bench.averager._tap
        assert isinstance(tap._staging, HostStaging)
        tap._staging = TracedStaging(tap._staging, line)
        bench.assign((0, 4), end="void late")
        bench.assign((0, 4), end="commit", attempt=1)
        bench.run()

    part = recorded(tmp_path / "t.json", act)

    assert spans(part) == ["data", "compute", "data", "compute", "data", "compute"]
    samples = [each.args["samples"] for each in part.events if each.name == "compute"]
    assert samples == [2, 2, 0], "the last runs on borrowed samples"
    copies = spans(part, Track.COPIES)
    assert set(copies) == {"to host", "write back"}
    assert copies.count("write back") == 2 * copies.count("to host")


def test_a_script_alone_leaves_its_part_too(tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    line = Line(seed=3, device="cpu", trace=str(trace))
    net, optimizer, loader = prepared(line)

    for x, y, _ in loader:
        line.backward((net(x) - y).square().mean())
        optimizer.step()
    line.close()

    names = spans(part_of(trace))
    steps = -(-SAMPLES // BATCH)
    assert [names.count(each) for each in ("data", "compute", "step 1")] == [steps, steps, 1]


def test_without_a_trace_nothing_is_written_and_no_thread_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = Line(seed=3, device="cpu")
    prepared(line)

    assert line._session.worker._timeline is None
    line.close()
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_learns_is_marked_from_when_to_when(tmp_path: Path) -> None:
    def act(line: Timeline) -> None:
        for each in (effects.Listen(LearningAsked()), effects.StopListening()):
            timeline.record_effect(line, each)

    part = recorded(tmp_path / "t.json", act)

    marks = [each.name for each in part.events if each.kind is EventKind.INSTANT]
    assert marks == ["learns", "caught up"]
