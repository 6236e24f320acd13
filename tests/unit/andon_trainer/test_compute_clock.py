"""The compute clock: what of an attempt counts as busy, on the host and on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from andon.protocol.records import Cursor
from andon_trainer.averaging.compute_clock import (
    Busy,
    ComputeClock,
    CudaStopwatch,
    HostStopwatch,
    make_clock,
)
from unit.andon_trainer.gpus import needs_cuda
from unit.andon_trainer.step_bench import BATCH, StepBench


class FakeStream:
    """A stream: `work` is queued on it, and done when somebody waits for it."""

    def __init__(self) -> None:
        self.queued_ms = self.done_ms = 0.0

    def work(self, seconds: float) -> None:
        self.queued_ms += 1000 * seconds


class FakeEvent:
    """An event of a `FakeStream`, which refuses to be read before it has happened."""

    def __init__(self) -> None:
        self.stream = FakeStream()
        self.at_ms = 0.0

    def record(self, stream: FakeStream, /) -> None:
        self.stream, self.at_ms = stream, stream.queued_ms

    def synchronize(self) -> None:
        self.stream.done_ms = max(self.stream.done_ms, self.at_ms)

    def elapsed_time(self, end: FakeEvent, /) -> float:
        assert self.stream.done_ms >= self.at_ms
        assert end.stream.done_ms >= end.at_ms
        return end.at_ms - self.at_ms


class FakeGpu:
    """A clock on a stream; `made` counts its events."""

    def __init__(self) -> None:
        self.stream = FakeStream()
        self.made = 0
        self.clock = ComputeClock(CudaStopwatch(self.event, lambda: self.stream))

    def event(self) -> FakeEvent:
        self.made += 1
        return FakeEvent()


@pytest.mark.parametrize("own", [False, True], ids=["one stream", "one for each loop body"])
def test_on_a_gpu_busy_is_what_the_stream_took_between_hand_over_and_end_of_backward(
    *, own: bool
) -> None:
    gpu = FakeGpu()
    gpu.stream.work(7.0)  # the optimizer of the step before
    gpu.clock.begin()

    for seconds in (0.5, 0.25):
        gpu.clock.take(4)
        gpu.stream.work(seconds)
        gpu.clock.done()
        gpu.stream.work(3.0)  # a copy
        if own:
            gpu.stream = FakeStream()

    assert gpu.clock.read() == Busy(0.75, 2, 8)


def test_nothing_waits_for_the_gpu_before_the_clock_is_read_and_then_for_nothing_later() -> None:
    gpu = FakeGpu()
    gpu.clock.begin()

    gpu.clock.take(4)
    gpu.stream.work(0.5)
    gpu.clock.done()
    gpu.stream.work(3.0)
    before = gpu.stream.done_ms
    gpu.clock.read()

    assert (before, gpu.stream.done_ms) == (0.0, 500.0)


def test_events_are_used_again_in_the_next_attempt() -> None:
    gpu = FakeGpu()

    for _attempt in range(3):
        gpu.clock.begin()
        gpu.clock.take(4)
        gpu.stream.work(0.5)
        gpu.clock.done()

    assert (gpu.clock.read().seconds, gpu.made) == (0.5, 2)


class Time:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.s = 0.0

    def now(self) -> float:
        return self.s

    def passes(self, seconds: float) -> None:
        self.s += seconds


@pytest.fixture(params=["host", "gpu"])
def clocked(request: pytest.FixtureRequest) -> Iterator[tuple[ComputeClock, Callable[..., None]]]:
    if request.param == "host":
        hand = Time()
        yield ComputeClock(HostStopwatch(hand.now)), hand.passes
    else:
        gpu = FakeGpu()
        yield gpu.clock, gpu.stream.work


def test_the_clock_stands_while_a_round_is_opened(clocked: Any) -> None:
    clock, passes = clocked
    clock.begin()

    clock.take(4)
    passes(1.0)
    clock.pause()
    passes(100.0)
    clock.resume()
    passes(2.0)
    clock.done()

    assert clock.read() == Busy(3.0, 1, 4)


def test_an_attempt_that_was_left_in_the_middle_leaves_nothing_to_the_next(clocked: Any) -> None:
    clock, passes = clocked
    clock.begin()
    clock.take(4)
    passes(1.0)
    clock.done()
    clock.take(4)
    passes(1.0)

    clock.begin()
    passes(10.0)
    clock.take(2)
    passes(0.5)
    clock.done()

    assert clock.read() == Busy(0.5, 1, 2)


def test_no_micro_batch_no_time(clocked: Any) -> None:
    clock, passes = clocked
    clock.begin()

    passes(1.0)
    clock.pause()
    clock.resume()
    clock.done()

    assert clock.read() == Busy()


class Timed:
    """A stepper's bench whose loop bodies take the given seconds, and each wait a thousand."""

    def __init__(self, *seconds: float, micro: int | None = None) -> None:
        hand = Time()
        self.bench = StepBench(micro=micro)
        self.bench.averager.clock = ComputeClock(HostStopwatch(hand.now))
        self.bench.member.waited = lambda: hand.passes(1000.0)
        rest = iter(seconds)

        def body(_number: int, loss: torch.Tensor) -> torch.Tensor:
            hand.passes(next(rest))
            return loss

        self.bench.spoil = body

    def run(self) -> list[Busy]:
        """Runs the loop; what each step reported."""
        self.bench.run()
        timings = [report.timings for report in self.bench.member.reports]
        return [Busy(each.busy_s, each.micro_batches, each.computed) for each in timings]


def test_busy_covers_all_micro_batches_not_the_last_backward_alone() -> None:
    timed = Timed(5.0, 1.0, 1.0, micro=2)
    timed.bench.assign((0, 6), end="commit")

    assert timed.run() == [Busy(7.0, 3, 6)]


def test_a_step_on_borrowed_samples_reports_that_nothing_was_computed() -> None:
    timed = Timed(5.0, 3.0)
    timed.bench.assign((0, 4), end="void late")
    timed.bench.assign((0, 4), end="commit", attempt=1)

    assert timed.run() == [Busy(5.0, 1, 4), Busy()]


def test_an_extended_share_reports_what_was_computed_anew() -> None:
    timed = Timed(5.0, 1.0)
    timed.bench.assign((0, 4), end="void")
    timed.bench.assign((0, 6), end="commit", attempt=1)

    assert timed.run() == [Busy(1.0, 1, 2)]


def test_a_micro_batch_without_a_target_counts_though_it_does_not_go_backward() -> None:
    timed = Timed(5.0, 1.0, micro=2)
    body, backward = timed.bench.spoil, timed.bench.stepper.backward
    timed.bench.spoil = lambda number, loss: body(number, loss) * (1.0 if number else torch.nan)
    timed.bench.stepper.backward = (  # type: ignore[method-assign]  # gives the mean its weight
        lambda loss, _weight, **more: backward(loss, 2.0 * float(loss.isfinite()), **more)
    )
    timed.bench.assign((0, 4), end="commit")

    assert timed.run() == [Busy(6.0, 2, 4)]


def test_a_script_that_raised_or_left_its_epoch_is_timed_anew_in_the_next_step() -> None:
    timed = Timed(5.0, 7.0, 1.0, 1.0, micro=2)
    timed.bench.assign((0, 4), end="commit")
    timed.bench.assign((4, 6), end="commit")
    next(timed.bench.bodies())
    timed.bench.stepper.leave_epoch()
    timed.bench.member.stand(cursor=Cursor(0, 4))
    timed.bench.member.ends.pop(0)

    assert timed.run() == [Busy(7.0, 1, 2)]


def test_compute_time_begins_with_the_assignment() -> None:
    bench = StepBench(micro=2)
    seen: list[int] = []
    bench.averager.clock = ComputeClock(HostStopwatch(lambda: float(len(seen))))

    def body(number: int, loss: torch.Tensor) -> torch.Tensor:
        seen.append(number)
        return loss

    bench.spoil = body
    bench.assign((0, BATCH), end="commit")

    bench.run()

    (report,) = bench.member.reports
    assert report.timings.busy_s == 6.0
    assert report.timings.compute_s > report.timings.data_s > 0


def test_a_cpu_has_the_hosts_clock() -> None:
    clock = make_clock(torch.device("cpu"))

    clock.begin()
    clock.take(1)
    clock.done()

    assert clock.read().micro_batches == 1


@needs_cuda
def test_on_a_real_gpu_queued_work_is_timed_though_the_host_did_not_wait() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    clock = make_clock(device)
    big = torch.randn(4096, 4096, device=device)
    torch.mm(big, big)
    torch.cuda.synchronize(device)
    clock.begin()

    began = time.perf_counter()
    clock.take(4)
    for _ in range(20):
        torch.mm(big, big)
    clock.done()
    queued = time.perf_counter()
    busy = clock.read()
    done = time.perf_counter()

    assert (done - queued) / 2 < busy.seconds < done - began
    assert (busy.micro_batches, busy.samples) == (1, 4)
