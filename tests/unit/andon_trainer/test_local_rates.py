"""Learning rates on a line of local steps: schedulers count as in one process, on all workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, SequentialLR
from torch.utils.data import DataLoader

from andon.protocol.records import PositionRange
from andon_trainer.data.feed import Shard
from andon_trainer.data.stream_feeder import StreamFeeder
from andon_trainer.schedules.stepper import StepperGate
from andon_trainer.script.gates import gate_scheduler
from unit.andon_trainer.local_bench import LocalBench
from unit.andon_trainer.step_bench import ranges
from unit.andon_trainer.streams import Counting

FIRST, SECOND, THIRD = (PositionRange(start, start + 24) for start in (0, 24, 48))
"""Windows of two batches of 12. A local step takes 4 positions of the 8 of an even share."""


def counting(bench: LocalBench, made: int = 0) -> LambdaLR:
    """A prepared scheduler, whose rate says how often it was stepped."""
    scheduler = LambdaLR(bench.optimizer, lambda steps: 1.0 + steps)
    scheduler.last_epoch = made
    gated(bench, scheduler)
    return scheduler


def gated(bench: LocalBench, scheduler: LRScheduler) -> None:
    gate = StepperGate()
    gate.stepper = bench.stepper
    gate_scheduler(scheduler, gate)
    bench.replica.register("scheduler.0", scheduler)


def counts(bench: LocalBench, scheduler: LRScheduler) -> list[int]:
    """How often the scheduler was stepped, after each loop body that steps it."""
    seen = []
    for _body in bench.bodies():
        scheduler.step()
        seen.append(scheduler.last_epoch)
    return seen


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((0, 16), (48, 64), [1, 2, 3, 4, 5, 6, 7, 8]),
        ((0, 24), (48, 72), [0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8]),
        ((0, 8), (48, 56), [2, 4, 6, 8]),
        ((0, 4), (48, 52), [1, 2]),
    ],
    ids=["even", "fast", "slow", "slow as can be"],
)
def test_a_scheduler_counts_batches_of_the_plan_whatever_a_worker_computes_of_them(
    first: tuple[int, int], second: tuple[int, int], expected: list[int]
) -> None:
    bench = LocalBench()
    scheduler = counting(bench)
    for share, start in ((first, 0), (second, 48)):
        bench.assign(share, end="commit", batch=PositionRange(start, start + 48))

    # With one local step for a window of four batches, a step may well be meant for each window.
    assert counts(bench, scheduler) == expected


def test_a_window_that_is_computed_again_counts_once() -> None:
    bench = LocalBench()
    scheduler = counting(bench)
    bench.assign((0, 12), end="void", batch=FIRST)
    bench.assign((0, 12), end="commit", batch=FIRST, attempt=1)
    seen = []

    for body in bench.bodies():
        scheduler.step()
        seen.append(scheduler.last_epoch)
        if body == 2:
            bench.member.drop_computed("state moves to another worker")

    assert seen == [0, 1, 2, 0, 1, 2]


def test_a_scheduler_follows_windows_that_others_made() -> None:
    bench = LocalBench()
    scheduler = counting(bench)
    bench.assign((0, 8), end="commit", batch=FIRST)
    bench.assign((48, 56), end="commit", batch=THIRD)

    assert counts(bench, scheduler) == [1, 2, 5, 6]


def test_steps_that_the_script_made_before_stay() -> None:
    bench = LocalBench()
    scheduler = counting(bench, made=100)
    bench.assign((24, 36), end="commit", batch=SECOND)

    assert counts(bench, scheduler) == [100, 101, 102]


def test_a_scheduler_that_is_stepped_now_and_then_is_the_scripts_own() -> None:
    bench = LocalBench()
    scheduler = counting(bench)
    for share, batch in (((0, 12), FIRST), ((24, 36), SECOND)):
        bench.assign(share, end="commit", batch=batch)

    for _body in bench.bodies():
        if bench.stepper.committed:
            scheduler.step()

    assert scheduler.last_epoch == 2


def test_a_scheduler_of_several_counts_as_one() -> None:
    bench = LocalBench()
    parts: list[LRScheduler] = [
        LambdaLR(bench.optimizer, lambda steps: 1.0 + steps) for _ in range(2)
    ]
    scheduler = SequentialLR(bench.optimizer, parts, milestones=[3])
    gated(bench, scheduler)
    bench.assign((0, 8), end="commit", batch=PositionRange(0, 48))

    assert counts(bench, scheduler) == [2, 4]
    assert bench.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 2)


def test_what_is_computed_ahead_is_of_the_next_window() -> None:
    bench = LocalBench(overlap=True, ahead_steps=1)
    scheduler = counting(bench)
    for due, ahead, batch, later in (
        ((0, 12), (24, 36), FIRST, SECOND),
        ((24, 36), (48, 60), SECOND, THIRD),
    ):
        bench.assign(due, end="commit", batch=batch, ahead=ranges(ahead), ahead_batch=later)

    # Three local steps of two batches, and one ahead each time: it counts from where it was.
    assert counts(bench, scheduler) == [0, 1, 2, 2, 3, 4, 4]


def test_where_nobody_knows_how_many_batches_an_epoch_has_a_scheduler_counts_local_steps() -> None:
    loader: Any = DataLoader(
        Counting(96), 12, collate_fn=lambda items: Shard(torch.tensor(items), 0, 0)
    )
    bench = LocalBench(feed=StreamFeeder(loader, 0, None))
    scheduler = counting(bench)
    bench.assign((0, 12), end="commit", batch=FIRST)

    assert counts(bench, scheduler) == [1, 2, 3]


def test_a_rate_may_be_set_at_each_commit_also_of_a_window_without_positions() -> None:
    bench = LocalBench()
    for positions in ((0, 8), (), (8, 16)):
        bench.assign(*[positions] if positions else [], end="commit")
    rates = []

    for _body in bench.bodies():
        rates.append(bench.optimizer.param_groups[0]["lr"])
        if bench.stepper.committed:
            bench.optimizer.param_groups[0]["lr"] /= 2

    assert rates == [0.05, 0.05, 0.025, 0.0125, 0.0125]
