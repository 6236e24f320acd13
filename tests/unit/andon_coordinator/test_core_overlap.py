"""Overlapped windows: what is dealt ahead where the transcripts do not go."""

from __future__ import annotations

from dataclasses import replace

from andon.protocol.halts import HaltAnswer
from andon.protocol.records import PositionRange
from andon.protocol.run_settings import Policy, RunPlan
from andon.protocol.schedules import Schedule
from andon_coordinator.core import effects as do
from andon_coordinator.core import events as on
from andon_coordinator.core.pacing_state import saved_of
from andon_coordinator.core.settings import LineSettings, PacingSettings
from scenarios.line_bench import Bench

POLICY = Policy(local_steps=1, overlap=True)


def started(plan: RunPlan, policy: Policy = POLICY, *, balanced: bool = False) -> tuple[Bench, int]:
    """A line of one worker, in sync at step 0, and its stream."""
    pacing = PacingSettings(schedule=Schedule.LOCAL, balanced=balanced)
    bench = Bench(LineSettings(run_id="7f3a", policy=policy, pacing=pacing), plan)
    stream = bench.join("w0", bench.request(0, 0))[0]
    bench.send(on.RecordSaved(bench.journal.save_record()))
    return bench, stream


def assigned(bench: Bench, stream: int) -> do.Assignment:
    effects = bench.send(on.WorkRequested(stream, bench.peers[stream].head))
    (assign,) = [each for each in effects if isinstance(each, do.Assign)]
    return assign.assignment


def test_without_overlap_nothing_is_dealt_ahead() -> None:
    bench, stream = started(RunPlan(global_batch=4, dataset_size=64), Policy(local_steps=1))

    assert assigned(bench, stream).ahead_batch is None


def test_of_a_stream_of_unknown_length_nothing_is_dealt_ahead() -> None:
    bench, stream = started(RunPlan(global_batch=4))

    assert assigned(bench, stream).ahead_batch is None


def test_the_last_window_of_an_epoch_is_dealt_ahead_though_it_is_short() -> None:
    bench, stream = started(RunPlan(global_batch=4, dataset_size=6))

    assert assigned(bench, stream).ahead_batch == PositionRange(4, 6)


def test_a_record_that_the_journal_refuses_leaves_both_windows_where_they_were() -> None:
    bench, stream = started(RunPlan(global_batch=4, dataset_size=64))
    before = assigned(bench, stream)
    bench.send(on.WorkerReady(stream, bench.ready(stream)))
    bench.journal.pending_records.clear()
    bench.send(on.JournalFailed("disk full"))

    effects = bench.send(on.HaltCleared(1, HaltAnswer.RETRY))

    (assign,) = [each for each in effects if isinstance(each, do.Assign)]
    assert assign.assignment.positions == before.positions
    assert assign.assignment.ahead == before.ahead
    assert assign.assignment.key > before.key


def test_a_round_whose_batch_is_not_computed_yet_shows_a_workers_true_speed() -> None:
    bench, stream = started(RunPlan(global_batch=4, dataset_size=64), balanced=True)
    assigned(bench, stream)
    timings = on.StepTimings(busy_s=8.0, micro_batches=2, computed=8)
    report = replace(bench.ready(stream), timings=timings)

    effects = bench.send(on.WorkerReady(stream, report))

    (save,) = [each for each in effects if isinstance(each, do.SaveRecord)]
    saved = saved_of(save.pacing)
    assert saved is not None
    assert [share.throughput for share in saved.shares] == [1.0]
