"""A worker's own gradient: its norm is reported, and limited before it is sent."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from andon.protocol.order import Order
from andon.protocol.run_settings import Policy
from unit.andon_trainer.step_bench import StepBench

ORDER = Order(0, 0, 48)
LIMIT = 0.01


def samples(*bounds: tuple[int, int]) -> list[int]:
    return [int(index) for start, stop in bounds for index in ORDER.indices(start, stop)]


def whole(parts: dict[int, bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(parts.values())), dtype=torch.float32)


def mean_of(bench: StepBench, *bounds: tuple[int, int]) -> torch.Tensor:
    return torch.cat(bench.mean(samples(*bounds)))


def limited(gradient: torch.Tensor) -> torch.Tensor:
    norm = float(gradient.double().norm())
    assert norm > 2 * LIMIT, "a limit that changes nothing would test nothing"
    return (gradient.double() * (LIMIT / norm)).float()


def bench_with(policy: Policy, micro: int | None = None) -> StepBench:
    bench = StepBench(micro=micro)
    bench.member.policy = policy
    return bench


@pytest.mark.parametrize("micro", [None, 1])
def test_what_is_limited_is_the_mean_over_all_micro_batches(micro: int | None) -> None:
    bench = bench_with(Policy(max_grad_norm=LIMIT), micro)
    bench.assign((0, 4), end="commit")

    bench.run()

    expected = mean_of(bench, (0, 4))
    assert torch.allclose(whole(bench.sent[0]), limited(expected), rtol=1e-5, atol=1e-8)
    (report,) = bench.member.reports
    assert report.own_gradient_norm == pytest.approx(float(expected.norm()), rel=1e-5)
    assert report.block_norms == ()  # Nobody compares them: the limit alone asks for no norm.


def test_a_gradient_below_the_limit_is_sent_as_it_is() -> None:
    free, below = StepBench(), bench_with(Policy(max_grad_norm=1e6))
    for bench in (free, below):
        bench.assign((0, 4), end="commit")
        bench.run()

    assert below.sent == free.sent


def test_a_limited_gradient_is_sent_again_bit_for_bit() -> None:
    bench = bench_with(Policy(max_grad_norm=LIMIT))
    bench.assign((0, 4), end="void late")
    bench.assign((0, 4), end="commit", attempt=1)

    bench.run()

    assert bench.sent[0] == bench.sent[1]
    first, again = bench.member.reports
    assert again.own_gradient_norm == first.own_gradient_norm


def test_an_extended_share_is_limited_as_a_whole() -> None:
    bench = bench_with(Policy(max_grad_norm=LIMIT))
    bench.assign((0, 4), end="void")
    bench.assign((0, 8), end="commit", attempt=1)

    bench.run()

    expected = mean_of(bench, (0, 8))
    assert torch.allclose(whole(bench.sent[1]), limited(expected), rtol=1e-5, atol=1e-8)
    assert bench.member.reports[0].own_gradient_norm == pytest.approx(
        float(expected.norm()), rel=1e-5
    )


def test_the_norm_of_each_block_is_reported_where_the_line_compares_them() -> None:
    bench, older = (bench_with(Policy(own_gradient_norm=True)) for _ in range(2))
    older.member.stand(coordinator_can=frozenset())
    for each in (bench, older):
        each.assign((0, 4), end="commit")
        each.run()

    blocks = [float(block.double().norm()) for block in bench.mean(samples((0, 4)))]
    assert bench.member.reports[0].block_norms == pytest.approx(blocks, rel=1e-5)
    assert older.member.reports[0].block_norms == ()


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_value_that_is_not_finite_is_sent_to_the_gate_and_the_others_are_not_scaled(
    value: float,
) -> None:
    bench = bench_with(Policy(max_grad_norm=LIMIT))
    got: list[torch.Tensor] = []

    def plant(gradient: torch.Tensor) -> torch.Tensor:
        planted = gradient.clone()
        planted[0, 1] = value
        return planted

    submit = bench.member.exchange.submit

    def spy(block: int, flat: npt.NDArray[np.float32], *, keeps_loss: bool = False) -> None:
        got.append(torch.from_numpy(flat).clone())
        submit(block, flat)

    bench.member.exchange.submit = spy  # type: ignore[method-assign]  # of this bench
    weight = next(iter(bench.model.modules()))[0].weight  # type: ignore[index]  # a Sequential
    weight.register_hook(plant)
    bench.assign((0, 4), end="void")

    bench.run()

    assert bench.member.exchange.refused
    finite = torch.isfinite(got[0])
    assert int((~finite).sum()) == 1
    plain = mean_of(bench, (0, 4))
    assert torch.allclose(got[0][finite], plain[finite])


def test_a_norm_that_is_only_reported_changes_nothing() -> None:
    plain, told = StepBench(), bench_with(Policy(own_gradient_norm=True))
    for bench in (plain, told):
        bench.assign((0, 4), end="commit")
        bench.run()

    assert told.sent == plain.sent
    assert plain.member.reports[0].own_gradient_norm is None
    assert told.member.reports[0].own_gradient_norm == pytest.approx(
        float(mean_of(told, (0, 4)).norm()), rel=1e-5
    )


def test_a_rank_without_samples_has_no_norm() -> None:
    bench = bench_with(Policy(own_gradient_norm=True, max_grad_norm=LIMIT))
    bench.assign((0, 4), end="commit")
    bench.assign(end="commit", parent=None)

    bench.run()

    assert [each.own_gradient_norm is None for each in bench.member.reports] == [False, True]
