"""Steps over a batch sampler's batches: who computes what of them, and what is reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from andon.protocol.records import PositionRange
from andon_trainer.data.feed import Shard
from andon_trainer.data.feeder import LoaderFeeder
from unit.andon_trainer.local_bench import LocalBench
from unit.andon_trainer.step_bench import BATCH, StepBench

BATCHES = [list(range(BATCH)), [12, 13, 14], [15]]
"""Of the second batch the samples are at positions 12, 16 and 20; of the last one at 24."""


def as_shard(items: list[Any]) -> Shard:
    return Shard(torch.tensor([int(item) for (item,) in items]), 0, 0)


def feeder_of(micro: int | None = None) -> LoaderFeeder:
    data = TensorDataset(torch.arange(16))
    loader: Any = DataLoader(data, batch_sampler=BATCHES, collate_fn=as_shard)
    return LoaderFeeder(loader, 0, micro)


def batch(start: int) -> dict[str, Any]:
    return {"batch": PositionRange(start, start + BATCH)}


@pytest.mark.parametrize(
    ("positions", "samples"),
    [((0, 6), list(range(6))), ((12, 18), [12, 13]), ((18, 24), [14]), ((24, 30), [15])],
)
def test_a_rank_computes_and_reports_its_part_of_the_samples(
    positions: tuple[int, int], samples: list[int]
) -> None:
    bench = StepBench(feed=feeder_of())
    bench.assign(positions, end="commit", **batch(positions[0] // BATCH * BATCH))

    bench.run()

    assert bench.computed == [samples]
    (report,) = bench.member.reports
    assert (report.samples, report.weight) == (len(samples), float(len(samples)))


def test_a_rank_whose_positions_hold_nothing_abstains_on_borrowed_samples() -> None:
    bench = StepBench(feed=feeder_of())
    bench.assign((30, 36), end="commit", **batch(24))

    bench.run()

    assert bench.computed == [[15]]
    (report,) = bench.member.reports
    assert (report.samples, report.weight) == (0, 0.0)
    assert bench.member.exchange.weights == [0.0]


def test_a_lost_workers_positions_without_samples_need_nothing_but_the_kept_gradient() -> None:
    bench = StepBench(feed=feeder_of())
    bench.assign((24, 30), end="void", **batch(24))
    bench.assign((24, 36), end="commit", attempt=1, **batch(24))

    bench.run()

    assert bench.computed == [[15], [15]]  # The second one is borrowed.
    assert bench.sent[1] == bench.sent[0]
    (report,) = bench.member.reports
    assert (report.samples, report.weight) == (1, 1.0)


def test_a_lost_workers_samples_are_added_to_the_kept_gradient() -> None:
    bench = StepBench(feed=feeder_of())
    bench.assign((12, 18), end="void", **batch(12))
    bench.assign((12, 24), end="commit", attempt=1, **batch(12))

    bench.run()

    assert bench.computed == [[12, 13], [14]]
    (report,) = bench.member.reports
    assert (report.samples, report.weight) == (3, 3.0)


def test_micro_batches_count_samples() -> None:
    bench = StepBench(feed=feeder_of(micro=2))
    bench.assign((12, 24), end="commit", **batch(12))

    bench.run()

    assert bench.computed == [[12, 13], [14]]


def test_local_steps_are_made_of_the_parts_that_hold_samples() -> None:
    bench = LocalBench(feed=feeder_of())
    bench.assign((18, 36), end="commit", roster=(0, 1), batch=PositionRange(0, 36))

    bench.run()

    assert bench.computed == [[14], [15]]
    (report,) = bench.member.reports
    assert (report.samples, report.weight) == (2, 2.0)


def test_a_window_without_samples_is_a_borrowed_one() -> None:
    bench = LocalBench(feed=feeder_of())
    bench.assign((30, 36), end="commit", roster=(0, 1), batch=PositionRange(24, 36))

    bench.run()

    assert (bench.computed, bench.borrowed) == ([], [[15]])
    (report,) = bench.member.reports
    assert (report.samples, report.weight) == (0, 0.0)
