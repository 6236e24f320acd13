"""Pacing: windows, their split and their micro-batches, and what is kept of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.protocol.limits import BATCH_LIMIT, MAX_WORKERS
from andon.protocol.run_settings import Policy, RunPlan
from andon.protocol.schedules import Schedule
from andon.protocol.shards import Split
from andon_coordinator.core.balance import SavedShare
from andon_coordinator.core.cadence import SavedPace
from andon_coordinator.core.events import (
    JoinRequest,
    RecordSaved,
    StepTimings,
    WorkerReady,
    WorkRequested,
)
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.pacing import Pacing, StepWindow, reading_of
from andon_coordinator.core.pacing_state import MOST_BYTES, SavedPacing, bytes_of, saved_of
from andon_coordinator.core.readings import PacedProcess
from andon_coordinator.core.settings import LearningRateScaling, LineSettings, PacingSettings
from scenarios.line_bench import LAYOUT, Bench
from unit.andon.strategies import BOUNDED

PLAN = RunPlan(global_batch=12, dataset_size=600)
CADENCE = PacingSettings(schedule=Schedule.CADENCE)
BALANCED = PacingSettings(balanced=True)
PROCESS = PacedProcess(3, 2**64 - 1, "0a1b2c")
SAVED = SavedPacing(
    schedule=Schedule.CADENCE,
    note="worker 0 has A, worker 1 has B",
    anchor=4,
    anchor_process=PROCESS,
    reports=7,
    paces=(SavedPace(PROCESS, 4, (0.25, 0.125)),),
    paced_roster=1,
    shares=(SavedShare(PROCESS, 12.5, 5000),),
)


def members(number: int, **fields: Any) -> list[LineMember]:
    return [
        LineMember(
            worker=worker,
            request=JoinRequest(
                run_id="7f3a", incarnation=worker + 1, layout=LAYOUT, plan=PLAN, **fields
            ),
            stream=worker,
            head=None,
            held=None,
            step=0,
            heard_at=0.0,
        )
        for worker in range(number)
    ]


def train(pacing: Pacing, roster: list[LineMember], speeds: list[float], steps: int) -> None:
    for _ in range(steps):
        window = pacing.window(roster, PLAN)
        parts = window.split([each.worker for each in roster]).targets_of(len(roster))
        readings = []
        for member, speed, part in zip(roster, speeds, parts, strict=True):
            computed = max(1, window.size * part // sum(parts))
            timings = StepTimings(busy_s=computed / speed)
            readings.append(reading_of(member, computed, timings))
        pacing.committed(pacing.learn(readings, wait_s=0.0, unit=window.unit, loss=1.0), 0.0)


def test_every_step_takes_the_global_batch_in_equal_shares() -> None:
    pacing = Pacing(PacingSettings(interleaved=True), Policy())

    window = pacing.window(members(3), PLAN)

    assert window == StepWindow(size=12, interleaved=True)
    assert window.split([0, 1, 2]) == Split((), interleaved=True)
    assert window.micro_batches([()]) == ()


def test_a_global_batch_that_does_not_divide_is_never_cut_short() -> None:
    window = Pacing(CADENCE, Policy()).window(members(5), PLAN)

    assert (window.size, window.unit) == (15, 3)


def test_a_window_is_no_longer_than_an_epoch_if_the_epoch_has_a_batch() -> None:
    pacing, roster = Pacing(CADENCE, Policy()), members(2)
    train(pacing, roster, [60.0, 1.0], 3)

    window = pacing.window(roster, replace(PLAN, dataset_size=62))

    assert window.size == 60


def test_local_steps_take_so_many_batches_at_once() -> None:
    settings = PacingSettings(schedule=Schedule.LOCAL)

    window = Pacing(settings, Policy(local_steps=8)).window(members(3), PLAN)

    assert (window.size, window.unit) == (96, 4)


def test_no_window_exceeds_what_a_step_may_have() -> None:
    plan = RunPlan(global_batch=BATCH_LIMIT - 1)
    local = Pacing(PacingSettings(schedule=Schedule.LOCAL), Policy(local_steps=2**32 - 1))

    assert local.window(members(2), plan).size < BATCH_LIMIT
    assert Pacing(CADENCE, Policy()).window(members(2), plan).size < BATCH_LIMIT


def test_a_worker_that_comes_later_gets_a_usual_target() -> None:
    window = StepWindow(size=24, unit=4, targets={0: 3, 1: 2, 2: 1})

    assert window.split([0, 2, 7]).targets == (3, 1, 2)


def test_the_learning_rate_follows_the_window_and_never_falls() -> None:
    ratios = (0.5, 1.0, 4.0)

    def scales(scaling: LearningRateScaling) -> list[float]:
        window = StepWindow(size=12, scaling=scaling)
        return [window.learning_rate_scale(int(12 * ratio), 12) for ratio in ratios]

    assert scales(LearningRateScaling.NONE) == [1.0, 1.0, 1.0]
    assert scales(LearningRateScaling.LINEAR) == [1.0, 1.0, 4.0]
    assert scales(LearningRateScaling.SQRT) == [1.0, 1.0, 2.0]


def test_a_speed_hint_sets_the_first_shares() -> None:
    roster = [members(1, speed_hint=3.0)[0], members(2)[1]]

    assert Pacing(BALANCED, Policy()).window(roster, PLAN).targets == {0: 7500, 1: 2500}
    assert Pacing(CADENCE, Policy()).window(roster, PLAN).targets == {0: 3, 1: 1}


@pytest.mark.parametrize("settings", [BALANCED, CADENCE])
def test_another_coordinator_goes_on_where_the_last_one_was(settings: PacingSettings) -> None:
    pacing, roster = Pacing(settings, Policy()), members(3)
    train(pacing, roster, [3.0, 2.0, 1.0], 12)

    again = Pacing(settings, Policy(), pacing.kept)

    assert again.window(roster, PLAN) == pacing.window(roster, PLAN)
    assert again.window(roster, PLAN).targets


def test_workers_bytes_are_taken_only_by_a_line_that_knows_nothing() -> None:
    known, unknown = Pacing(CADENCE, Policy(), bytes_of(SAVED)), Pacing(CADENCE, Policy())
    other = bytes_of(replace(SAVED, anchor=9))

    known.adopt(other)
    unknown.adopt(other)

    assert known.kept == bytes_of(SAVED)
    assert unknown.kept == other


def test_nothing_is_kept_of_a_line_of_equal_steps() -> None:
    pacing, roster = Pacing(PacingSettings(), Policy()), members(2)

    train(pacing, roster, [3.0, 1.0], 3)

    assert pacing.saved() == pacing.kept == b""


def test_kept_bytes_are_read_back_as_they_were() -> None:
    assert saved_of(bytes_of(SAVED)) == SAVED
    assert saved_of(bytes_of(SavedPacing())) == SavedPacing()


def test_a_large_line_keeps_its_decisions_and_not_its_readings() -> None:
    paces = tuple(
        SavedPace(PacedProcess(worker, 2**63 + worker, "0a1b2c3d4e5f"), 3, (0.123456,) * 5)
        for worker in range(MAX_WORKERS)
    )

    kept = bytes_of(replace(SAVED, paces=paces, anchor_process=None, paced_roster=MAX_WORKERS))

    assert len(kept) <= MOST_BYTES
    assert saved_of(kept) == SavedPacing(
        schedule=SAVED.schedule, note=SAVED.note, anchor=4, reports=7
    )


PLACES = [
    ("v", 2),
    ("schedule", "sometimes"),
    ("note", 7),
    ("anchor", 0),
    ("anchor", True),
    ("anchor", 1.5),
    ("anchor_process", 1),
    ("anchor_process", -1),
    ("reports", -1),
    ("roster", 2),
    ("paces", {}),
    ("paces", [[0, 1, "m", 0, []]]),
    ("paces", [[MAX_WORKERS, 1, "m", 1, []]]),
    ("paces", [[0, 2**64, "m", 1, []]]),
    ("paces", [[0, 1, "m" * 99, 1, []]]),
    ("paces", [[0, 1, "m", 1, [math.nan]]]),
    ("paces", [[0, 1, "m", 1, [-1.0]]]),
    ("paces", [[0, 1, "m", 1, []]] * 2),
    ("paces", [[0, 1]]),
    ("shares", [[0, 1, "m", math.inf, None]]),
    ("shares", [[0, 1, "m", None, 2**32]]),
]


@pytest.mark.parametrize(("name", "value"), PLACES)
def test_bytes_that_nobody_wrote_give_nothing(name: str, value: object) -> None:
    state = json.loads(bytes_of(SAVED))
    state["anchor_process"] = None if name != "anchor_process" else 0

    state[name] = value

    assert saved_of(json.dumps(state).encode()) is None


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b"1" * 5000, b" " * 2**19]
)
def test_bytes_that_are_no_state_give_nothing(data: bytes) -> None:
    assert saved_of(data) is None
    assert Pacing(CADENCE, Policy(), data).kept == b""


@BOUNDED
@given(st.integers(0, 400), st.binary(min_size=1, max_size=3))
def test_damaged_bytes_never_break_a_line(at: int, damage: bytes) -> None:
    whole = bytes_of(SAVED)
    at = at % len(whole)
    damaged = whole[:at] + damage + whole[at + len(damage) :]

    pacing, roster = Pacing(CADENCE, Policy(), damaged), members(4)
    train(pacing, roster, [1.0, 2.0, 3.0, 4.0], 3)

    assert min(pacing.window(roster, PLAN).targets.values()) >= 1


def test_a_round_whose_batch_is_not_computed_yet_shows_a_workers_true_speed() -> None:
    settings = LineSettings(
        run_id="7f3a",
        policy=Policy(local_steps=1, overlap=True),
        pacing=PacingSettings(schedule=Schedule.LOCAL, balanced=True),
    )
    bench = Bench(settings, RunPlan(global_batch=4, dataset_size=64))
    stream, _ = bench.join("w0", bench.request(0, 0))
    bench.send(RecordSaved(bench.journal.save_record()))
    bench.send(WorkRequested(stream, bench.peers[stream].head))
    timings = StepTimings(busy_s=8.0, micro_batches=2, computed=8)

    bench.send(WorkerReady(stream, replace(bench.ready(stream), timings=timings)))

    saved = saved_of(bench.journal.pending_records[0].pacing)
    assert saved is not None
    assert [share.throughput for share in saved.shares] == [1.0]
