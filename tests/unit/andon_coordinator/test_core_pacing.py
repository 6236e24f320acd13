"""Pacing: windows, their split and their micro-batches, and what is kept of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

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
    RecordSaved,
    StepTimings,
    WorkerReady,
    WorkRequested,
)
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.noise_scale import Contribution, SavedNoise
from andon_coordinator.core.pacing import PARTS, Pacing, StepWindow, WindowReport, reading_of
from andon_coordinator.core.pacing_state import MOST_BYTES, SavedPacing, bytes_of, saved_of
from andon_coordinator.core.readings import PacedProcess
from andon_coordinator.core.settings import LearningRateScaling, LineSettings, PacingSettings
from scenarios.line_bench import Bench
from unit.andon.strategies import BOUNDED
from unit.andon_coordinator.paced_line import PLAN, members

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
    noise=SavedNoise(steps=7, noise=40.0, signal=-0.5, noise_spread=9.0, signal_spread=0.25),
)


def train(pacing: Pacing, roster: list[LineMember], speeds: list[float], steps: int) -> None:
    for _ in range(steps):
        window = pacing.window(roster, PLAN)
        parts = window.split([each.worker for each in roster]).targets_of(len(roster))
        readings = []
        for member, speed, part in zip(roster, speeds, parts, strict=True):
            computed = max(1, window.size * part // sum(parts))
            timings = StepTimings(busy_s=computed / speed)
            readings.append(reading_of(member, computed, timings))
        report = WindowReport(readings=readings, loss=1.0)
        pacing.committed(pacing.learn(report, window, PLAN), 0.0)


def grow(
    pacing: Pacing, roster: list[LineMember], plan: RunPlan, steps: int, noise: float | None = None
) -> None:
    """Windows of equal workers whose exchanges take as long as their computing.

    Their gradients have a norm of 1, and this noise scale; None: no norm is reported.
    """
    for _ in range(steps):
        window = pacing.window(roster, plan)
        share = window.size // len(roster)
        readings = [reading_of(each, share, StepTimings(busy_s=share / 100)) for each in roster]
        report = WindowReport(readings=readings, wait_s=share / 100, loss=1.0)
        if noise is not None:
            own = Contribution(share, share, math.sqrt(1 + noise / share))
            mean = math.sqrt(1 + noise / share / len(roster))
            report = replace(report, contributions=[own] * len(roster), mean_norm=mean)
        pacing.committed(pacing.learn(report, window, plan), 0.0)


def test_every_step_takes_the_global_batch_in_equal_shares() -> None:
    pacing = Pacing(PacingSettings(interleaved=True), Policy())

    window = pacing.window(members(3), PLAN)

    assert window == StepWindow(size=12, interleaved=True)
    assert window.split([0, 1, 2]) == Split((), interleaved=True)
    assert window.micro_batches([()]) == ()


@pytest.mark.parametrize("speeds", [[1.0, 1.0], [3.0, 1.0], [1.4, 1.0], [60.0, 1.0]])
def test_a_window_that_does_not_grow_is_the_scripts_batch_however_unequal_workers_are(
    speeds: list[float],
) -> None:
    pacing, roster = Pacing(CADENCE, Policy()), members(2)

    train(pacing, roster, speeds, 3)

    window = pacing.window(roster, PLAN)
    assert (window.size, window.unit) == (12, 6)
    fast, slow = window.targets.values()
    assert fast / slow == pytest.approx(speeds[0], rel=0.1)


@pytest.mark.parametrize(("epoch", "size"), [(600, 192), (62, 62)])
def test_a_window_that_may_cost_anything_grows_up_to_16_batches_or_an_epoch(
    epoch: int, size: int
) -> None:
    pacing = Pacing(replace(CADENCE, growth_cost=1.0), Policy())
    plan, roster = replace(PLAN, dataset_size=epoch), members(2)

    grow(pacing, roster, plan, 12)

    assert pacing.window(roster, plan).size == size


@pytest.mark.parametrize(
    ("scaling", "noise", "size"),
    [
        (LearningRateScaling.SQRT, 100_000.0, 192),
        (LearningRateScaling.LINEAR, 228.0, 24),
        (LearningRateScaling.SQRT, 40.0, 14),
        (LearningRateScaling.SQRT, None, 12),
        (LearningRateScaling.NONE, 100_000.0, 12),
    ],
)
def test_windows_grow_as_far_as_the_noise_of_the_gradients_says_that_it_costs_little(
    scaling: LearningRateScaling, noise: float | None, size: int
) -> None:
    # 12 samples of 228 or more: a batch of 24 needs a twentieth more samples.
    pacing = Pacing(replace(CADENCE, learning_rate_scaling=scaling), Policy())
    roster = members(2)

    grow(pacing, roster, PLAN, 40, noise)

    assert pacing.window(roster, PLAN).size == size


def test_windows_shrink_when_the_noise_does_and_a_restart_remembers_it() -> None:
    settings = replace(CADENCE, learning_rate_scaling=LearningRateScaling.LINEAR)
    pacing, roster = Pacing(settings, Policy()), members(2)
    grow(pacing, roster, PLAN, 40, noise=1000.0)
    before = pacing.window(roster, PLAN).size

    grow(pacing, roster, PLAN, 100, noise=60.0)

    after = pacing.window(roster, PLAN)
    assert after.size < before / 2
    restarted = Pacing(settings, Policy(), pacing.kept)
    assert restarted.window(roster, PLAN) == after
    assert restarted.noise_scale == pytest.approx(pacing.noise_scale, rel=1e-4)


def test_changes_of_local_steps_have_no_noise_scale() -> None:
    settings = PacingSettings(schedule=Schedule.LOCAL)
    pacing = Pacing(settings, Policy(local_steps=2))

    grow(pacing, members(2), PLAN, 20, noise=1000.0)

    assert pacing.noise_scale is None


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
    assert Pacing(CADENCE, Policy()).window(roster, PLAN).targets == {0: 3 * PARTS, 1: PARTS}


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
        schedule=SAVED.schedule, note=SAVED.note, anchor=4, reports=7, noise=SAVED.noise
    )


def test_an_older_versions_anchor_is_not_taken_for_one_of_today() -> None:
    state = json.loads(bytes_of(SAVED))
    del state["noise"]

    older = saved_of(json.dumps({**state, "v": 1, "anchor": 512}).encode())

    assert older == replace(SAVED, anchor=1, noise=SavedNoise())
    assert Pacing(CADENCE, Policy(), bytes_of(older)).window(members(2), PLAN).size == 12


PLACES = [
    ("v", 3),
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
    ("noise", [7, 1.0, 1.0, 1.0]),
    ("noise", [7, 1.0, 1.0, 1.0, -1.0]),
    ("noise", [7, math.nan, 1.0, 1.0, 1.0]),
    ("noise", [-1, 1.0, 1.0, 1.0, 1.0]),
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
