"""A host of several processes is one worker: one share, one gradient, one weight, one fate."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn

from andon.protocol.halts import HaltEvidence, HaltReason
from andon.protocol.order import Order
from andon.protocol.records import Cursor, Key
from andon_trainer.core.events import Assigned, TransferAsked
from andon_trainer.errors import HostLost, JoinRefused, LineHalted, RunOver
from andon_trainer.hosts.calls import Failure
from andon_trainer.model.layout import plan_model
from andon_trainer.termination import Terminated
from unit.andon_trainer.host_bench import HostBench, Process
from unit.andon_trainer.step_bench import BATCH

HALTED = LineHalted(HaltEvidence(id=1, reason=HaltReason.OPERATOR, step=2))


def samples(*positions: int) -> list[int]:
    order = Order(0, 0, 4 * BATCH)
    return [int(order[each]) for each in positions]


def assert_sent(bench: HostBench, number: int, expected: Sequence[int]) -> None:
    sent = bench.sent[number]
    for block, mean in bench.mean(expected).items():
        torch.testing.assert_close(sent[block], mean, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("micro", [None, 2], ids=["whole", "in micro-batches"])
@pytest.mark.parametrize("size", [2, 3])
def test_f_dp_005_a_host_sends_the_mean_over_all_its_samples_whoever_computed_them(
    size: int, micro: int | None
) -> None:
    bench = HostBench(size, micro=micro)
    bench.assign((0, 7))

    assert bench.run() == [None] * size

    computed = chain(*(chain(*each.computed) for each in bench.processes))
    assert list(computed) == samples(*range(7))
    assert len({len(each.computed) for each in bench.processes}) == 1, "as many loop bodies"
    assert bench.seat.exchange.weights == [7.0]
    assert_sent(bench, 0, samples(*range(7)))
    (report,) = bench.seat.reports
    assert (report.samples, report.weight, report.correct) == (7, 7.0, 7)
    assert report.timings.computed == 7
    expected = bench.model(bench.inputs[samples(*range(7))]).square().mean().item()
    assert report.loss_sum / report.weight == pytest.approx(expected, rel=1e-6)


def test_f_dp_001_every_process_gets_the_same_bits_and_no_gradient_that_nobody_has() -> None:
    bench = HostBench(3)
    bench.assign((0, 8))

    bench.run()

    leader, *others = ([p.grad for p in each.model.parameters()] for each in bench.processes)
    for other in others:
        for mine, theirs in zip(leader, other, strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or theirs is None or torch.equal(mine, theirs)
    assert leader[0] is None, "the parameter that no sample used"


def test_weights_of_a_processes_own_count_as_they_do_between_workers() -> None:
    bench = HostBench()
    bench.assign((0, 4))
    bench.processes[0].weight, bench.processes[1].weight = 3.0, 1.0

    bench.run()

    first, second = bench.mean(samples(0, 1)), bench.mean(samples(2, 3))
    assert bench.seat.exchange.weights == [4.0]
    for block, sent in bench.sent[0].items():
        torch.testing.assert_close(sent, 0.75 * first[block] + 0.25 * second[block])


def test_a_process_without_samples_borrows_some_and_contributes_nothing() -> None:
    bench = HostBench(3)
    bench.assign((4, 5))

    assert bench.run() == [None] * 3

    assert bench.processes[0].computed == [samples(4)]
    assert all(len(each.computed) == 1 for each in bench.processes), "hooks and graph as ever"
    assert bench.seat.exchange.weights == [1.0]
    assert_sent(bench, 0, samples(4))


def test_a_borrowed_sample_with_a_bad_loss_harms_nobody() -> None:
    bench = HostBench()
    bench.assign((4, 5))
    bench.processes[1].spoil = lambda _body, loss: loss * float("nan")

    assert bench.run() == [None, None]

    assert_sent(bench, 0, samples(4))


def test_a_host_without_samples_abstains_as_a_whole() -> None:
    bench = HostBench()
    bench.assign()

    assert bench.run() == [None, None]

    assert bench.sent == [{}]
    assert bench.seat.exchange.weights == [0.0]


def test_a_void_round_is_sent_again_as_it_was_and_no_process_computes_twice() -> None:
    bench = HostBench()
    bench.assign((0, 5), end="void late")
    bench.assign((0, 5), attempt=1)

    assert bench.run() == [None, None]

    first, second = bench.seat.exchange.rounds
    assert first == second
    assert [len(each.computed) for each in bench.processes] == [2, 2]
    assert bench.seat.reports[-1].weight == 5.0


@pytest.mark.parametrize("more", [6, 8], ids=["for process 0 alone", "for all"])
def test_f_dp_005_a_lost_hosts_positions_are_added_to_what_the_host_kept(more: int) -> None:
    bench = HostBench()
    bench.assign((0, 5), end="void")
    bench.assign((0, more), attempt=1)

    assert bench.run() == [None, None]

    assert bench.seat.exchange.weights == [5.0, float(more)]
    assert_sent(bench, 1, samples(*range(more)))
    again = list(chain(*bench.processes[0].computed[1:]))
    assert again == samples(*range(5, 5 + -(-(more - 5) // 2)))
    assert bench.seat.reports[-1].correct == more


class Together(nn.Module):
    """Waits for the host's other process in forward and in backward, as SyncBatchNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier: threading.Barrier | None = threading.Barrier(2, timeout=20)

    def __deepcopy__(self, _memo: object) -> Together:
        return self  # Both processes meet here.

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def meet(*_gradient: torch.Tensor) -> None:
            if self.barrier is not None:
                self.barrier.wait()

        meet()
        met = x.clone()
        met.register_hook(meet)  # type: ignore[no-untyped-call]  # torch's own
        return met


def test_f_dp_003_a_loss_that_is_not_finite_voids_the_round_for_all_processes() -> None:
    together = Together()
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), together, nn.Linear(5, 1))
    bench = HostBench(micro=1, model=model)
    bench.assign((0, 4), end="commit")
    bench.assign((0, 4), attempt=1)
    bench.processes[1].spoil = lambda body, loss: loss * float("inf") if body == 0 else loss
    assert bench.run() == [None, None]

    together.barrier = None
    assert bench.seat.reported_losses == ["inf"]
    assert_sent(bench, -1, samples(0, 1, 2, 3))


def test_a_batch_that_is_left_out_is_refused_where_the_other_processes_would_wait_for_it() -> None:
    # It is never called: torch has it on GPUs only.
    bench = HostBench(micro=1)
    for process in bench.processes:
        assert process.processes is not None
        process.processes.waits_in_model = True
    bench.assign((0, 4))
    bench.processes[1].weight = 0.0
    bench.processes[1].spoil = lambda body, loss: loss * float("nan")

    ends = bench.run()

    assert "SyncBatchNorm" in str(ends[1])
    assert isinstance(ends[0], HostLost)


@pytest.mark.parametrize("rank", [0, 1])
def test_any_process_may_stop_the_run(rank: int) -> None:
    bench = HostBench()
    bench.assign((0, 4))
    bench.processes[rank].stepper.stop_wanted = "enough"

    bench.run()

    assert bench.seat.reports[0].stop_reason == "enough"


@pytest.mark.parametrize(("grain", "at"), [(0, 0), (2, 2)], ids=["", "grains"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_fails_in_backward_ends_the_others_of_its_host(
    rank: int, grain: int, at: int
) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_context: Any, *_gradients: Any) -> Any:
            raise ArithmeticError("the script's own")

    bench = HostBench(grain=grain)
    bench.assign((0, 12))
    bench.processes[rank].spoil = lambda body, loss: Wrong.apply(loss) if body == at else loss  # type: ignore[no-untyped-call]  # torch's own

    ends = bench.run()

    assert isinstance(ends[rank], ArithmeticError)
    assert isinstance(ends[1 - rank], HostLost)


def test_processes_that_make_different_calls_are_told_so_and_do_not_wait() -> None:
    bench = HostBench()
    bench.assign((0, 4))
    follower = bench.processes[1]
    follower.spoil = lambda _body, loss: loss * follower.member.scalar_all_reduce(1.0, 1.0)[0]

    ends = bench.run()

    for end in ends:
        assert isinstance(end, RuntimeError)
        assert "process 1 calls line.mean" in str(end)


@pytest.mark.parametrize(
    ("grain", "waits"),
    [(0, 1), (2, 2), (2, 3)],
    ids=["", "before sums of grains are sent", "after it"],
)
def test_a_halt_of_the_line_is_raised_in_every_process(grain: int, waits: int) -> None:
    bench = HostBench(3, grain=grain)
    bench.assign((0, 12))
    left = [waits]

    def halt() -> None:
        left[0] -= 1
        if not left[0]:
            raise HALTED

    bench.seat.waited = halt

    ends = bench.run()

    for end in ends:
        assert isinstance(end, LineHalted)
        assert end.evidence == HALTED.evidence


@pytest.mark.parametrize(
    "error",
    [
        HALTED,
        RunOver("the run is over: steps", "alpha:7070", 7),
        JoinRefused("slot", "no room", "workers", "2", "1"),
        JoinRefused("complete", "run 7f3a is over after step 9"),
        Terminated(),
        HostLost("another process of this host failed, and so its host: OSError: full"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_of_the_leader_is_the_same_in_the_others(error: BaseException) -> None:
    if isinstance(error, HostLost):
        told = Failure.of(OSError("full")).error()
    else:
        told = Failure.of(error).error()

    assert type(told) is type(error)
    assert str(told) == str(error)
    assert vars(told) == vars(error)


def test_a_mean_is_over_all_processes_and_exact_if_all_are_equal() -> None:
    bench = HostBench(3)
    number = 2.0**40 - 1

    def mean(value: Callable[[int], float]) -> list[tuple[float, float, int]]:
        def ask(process: Process) -> tuple[float, float, int]:
            rank = process.group.rank
            return process.member.scalar_all_reduce(value(rank), rank + 1.0)

        with ThreadPoolExecutor(3) as threads:
            return list(threads.map(ask, bench.processes))

    three = mean(float)
    assert three[0] == three[1] == three[2]
    assert three[0][0] == pytest.approx(8 / 6)
    assert three[0][1:] == (6.0, 1)
    assert mean(lambda _rank: number) == [(number, 6.0, 1)] * 3


def test_followers_hold_the_state_that_their_leader_got_from_the_line() -> None:
    bench = HostBench()
    first: Assigned = bench.assign((0, 4))
    leader, follower = bench.processes
    state = TransferAsked(transfer_id=7, head=Key(1, 9), sends=False, step=3, cursor=Cursor(0, 0))
    bench.seat.transfers[first.key] = state
    bench.seat.waited = lambda: leader.model.get_parameter("0.weight").data.fill_(0.5)

    assert bench.run() == [None, None]

    assert follower.member.position.installed_from == state
    assert torch.equal(follower.model.get_parameter("0.weight"), torch.full((5, 3), 0.5))


@pytest.mark.parametrize("behind", [True, False])
def test_all_processes_catch_up_if_the_line_went_on_without_their_host(behind: bool) -> None:
    bench = HostBench()
    first: Assigned = bench.assign((0, 4))
    state = TransferAsked(transfer_id=7, head=Key(1, 9), sends=False, step=3, cursor=Cursor(2, 0))
    bench.seat.transfers[first.key] = state
    bench.seat.behind = behind

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda process: process.member.catch_up(), bench.processes))

    at = [process.member.position.installed_from for process in bench.processes]
    assert at == ([state, state] if behind else [None, None])


def test_running_statistics_are_the_leaders_after_each_commit() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    bench = HostBench(model=model)
    bench.assign((0, 8), roster=(0,))

    assert bench.run() == [None, None]

    mine, theirs = (dict(each.model.named_buffers()) for each in bench.processes)
    assert mine["1.running_mean"].abs().sum() > 0
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_process_with_other_weights_than_its_leader_ends_the_host() -> None:
    bench = HostBench()
    bench.seat.stand(digest_every=1)
    bench.assign((0, 4))
    bench.assign((4, 8))
    other = bench.processes[1]

    def spoil(_body: int, loss: torch.Tensor) -> torch.Tensor:
        other.model.get_parameter("0.weight").data.add_(1e-3)
        return loss

    other.spoil = spoil

    ends = bench.run()

    assert all(isinstance(end, RuntimeError) for end in ends)
    assert "process 1 of this host holds other weights than process 0" in str(ends[0])


def test_a_scaled_loss_gives_the_same_mean_and_a_scaled_gradient_in_every_process() -> None:
    bench = HostBench(loss_scale=1024.0)
    bench.assign((0, 5))

    assert bench.run() == [None, None]

    assert_sent(bench, 0, samples(*range(5)))
    expected = bench.mean(samples(*range(5)))
    for process in bench.processes:
        for block, parameters in enumerate(plan_model([process.model]).parameters):
            flat = [p.grad.flatten() for p in parameters if p.grad is not None]
            scaled = expected[block][-sum(map(len, flat)) :] * 1024
            torch.testing.assert_close(torch.cat(flat), scaled, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_overflow_in_one_process_is_the_hosts_and_none_of_them_moves(rank: int) -> None:
    bench = HostBench(loss_scale=2.0**20)
    bench.assign((0, 4))
    planted = torch.full((5, 3), float("inf"))
    weight = bench.processes[rank].model.get_parameter("0.weight")
    weight.register_hook(lambda gradient: gradient + planted)  # type: ignore[no-untyped-call]  # torch's own

    assert bench.run() == [None, None]

    assert bench.seat.reports[0].overflow
    assert [each.stepper.overflowed for each in bench.processes] == [True, True]
    assert bench.seat.exchange.weights == [4.0]
