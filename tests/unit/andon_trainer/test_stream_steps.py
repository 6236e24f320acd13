"""Steps of a stream whose length nobody knows: who has samples left, and what is reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from andon.protocol.records import Cursor, PositionRange
from andon_trainer.data.feed import Shard
from andon_trainer.data.stream_feeder import StreamFeeder
from unit.andon_trainer.local_bench import LocalBench
from unit.andon_trainer.step_bench import BATCH, StepBench
from unit.andon_trainer.streams import Counting


def as_shard(items: list[int]) -> Shard:
    return Shard(torch.tensor(items), 0, 0)


def feeder_of(size: int, micro: int | None = None) -> StreamFeeder:
    loader: Any = DataLoader(Counting(size), BATCH, collate_fn=as_shard)
    return StreamFeeder(loader, 0, micro)


def batch(start: int) -> dict[str, Any]:
    return {"batch": PositionRange(start, start + BATCH)}


def test_a_rank_reports_the_samples_that_it_really_had_and_the_end() -> None:
    bench = StepBench(feed=feeder_of(15))
    bench.assign((0, 6), end="commit", **batch(0))
    bench.assign((12, 18), end="commit", **batch(12))

    bench.run()

    assert bench.computed == [list(range(6)), [12, 13, 14]]
    assert [(each.samples, each.weight, each.end_of_data) for each in bench.member.reports] == [
        (6, 6.0, False),
        (3, 3.0, True),
    ]


def test_a_rank_beyond_the_end_abstains_on_borrowed_samples() -> None:
    bench = StepBench(feed=feeder_of(15))
    bench.assign((18, 24), end="commit", **batch(12))

    bench.run()

    assert bench.computed == [[0, 1]]
    (report,) = bench.member.reports
    assert (report.samples, report.weight, report.end_of_data) == (0, 0.0, True)
    assert bench.member.exchange.weights == [0.0]


def test_a_rank_with_the_batchs_last_position_sees_that_it_is_the_epochs_last() -> None:
    first, last = StepBench(feed=feeder_of(BATCH)), StepBench(feed=feeder_of(BATCH))
    first.assign((0, 6), end="commit", **batch(0))
    last.assign((6, 12), end="commit", **batch(0))

    first.run()
    last.run()

    assert [bench.member.reports[0].end_of_data for bench in (first, last)] == [False, True]
    assert [bench.member.reports[0].samples for bench in (first, last)] == [6, 6]


def test_a_batch_without_any_sample_is_no_step_its_epoch_is_left() -> None:
    bench = StepBench(feed=feeder_of(BATCH))
    bench.assign((12, 18), end="commit", **batch(12))

    bench.run()

    assert bench.computed == []
    assert bench.member.reports == []
    assert bench.member.position.cursor == Cursor(1, 0)


def test_the_micro_batch_before_the_end_is_the_last_one() -> None:
    bench = StepBench(feed=feeder_of(16, micro=2))
    bench.assign((12, 24), end="commit", **batch(12))

    bench.run()

    assert bench.computed == [[12, 13], [14, 15]]
    assert [each.samples for each in bench.member.reports] == [4]


def test_a_kept_gradient_is_reported_with_the_samples_that_it_has() -> None:
    bench = StepBench(feed=feeder_of(15))
    bench.assign((12, 18), end="void", **batch(12))
    bench.assign((12, 24), end="commit", attempt=1, **batch(12))

    bench.run()

    assert bench.computed == [[12, 13, 14], [12, 13]]  # the second ones are borrowed
    assert bench.sent[1] == bench.sent[0]
    (report,) = bench.member.reports
    assert (report.samples, report.weight, report.end_of_data) == (3, 3.0, True)


def test_a_lost_workers_samples_before_the_end_are_added() -> None:
    bench = StepBench(feed=feeder_of(15))
    bench.assign((14, 20), end="void", **batch(12))
    bench.assign((12, 20), end="commit", attempt=1, **batch(12))

    bench.run()

    assert bench.computed == [[14], [12, 13]]
    (report,) = bench.member.reports
    assert (report.samples, report.weight, report.end_of_data) == (3, 3.0, True)


def local_bench(size: int) -> LocalBench:
    return LocalBench(feed=feeder_of(size))


def test_local_steps_end_with_the_stream() -> None:
    bench = local_bench(20)
    bench.assign((0, 24), end="commit", roster=(0,), batch=PositionRange(0, 24))

    bench.run()

    assert bench.computed == [list(range(12)), list(range(12, 20))]
    (report,) = bench.member.reports
    assert (report.samples, report.weight, report.end_of_data) == (20, 20.0, True)


@pytest.mark.parametrize("size", [12, 8])
def test_local_steps_beyond_the_end_are_not_made(size: int) -> None:
    bench = local_bench(size)
    bench.assign((0, 24), end="commit", roster=(0,), batch=PositionRange(0, 24))

    bench.run()

    assert bench.computed == [list(range(size))]
    (report,) = bench.member.reports
    assert (report.samples, report.end_of_data) == (size, True)


def test_a_window_beyond_the_end_is_borrowed_if_others_have_samples_of_it() -> None:
    bench = local_bench(14)
    bench.assign((24, 36), end="commit", roster=(0,), batch=PositionRange(12, 36))

    bench.run()

    assert (bench.computed, bench.borrowed) == ([], [[0, 1]])
    (report,) = bench.member.reports
    assert (report.samples, report.weight, report.end_of_data) == (0, 0.0, True)


def test_a_window_of_which_nobody_has_a_sample_leaves_the_epoch() -> None:
    bench = local_bench(12)
    bench.assign((12, 36), end="commit", roster=(0,), batch=PositionRange(12, 36))

    bench.run()

    assert (bench.computed, bench.borrowed, bench.member.reports) == ([], [], [])
    assert bench.member.position.cursor == Cursor(1, 0)


def test_a_void_window_at_the_end_is_sent_again_and_not_computed_again() -> None:
    bench = local_bench(20)
    bench.assign((0, 24), end="void", roster=(0,), batch=PositionRange(0, 24))
    bench.assign((0, 24), end="commit", attempt=1, roster=(0,), batch=PositionRange(0, 24))

    bench.run()

    assert bench.computed == [list(range(12)), list(range(12, 20))]
    assert bench.sent[1] == bench.sent[0]
    (report,) = bench.member.reports
    assert (report.samples, report.weight, report.end_of_data) == (20, 20.0, True)
