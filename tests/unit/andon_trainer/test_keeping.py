"""What a void step leaves behind: sent again, added to, or dropped."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch

from andon.protocol.halts import HaltEvidence, HaltReason
from andon.protocol.order import Order
from andon.protocol.records import Key
from andon.protocol.shards import Ranges
from andon_trainer.core.keeping import doubted
from unit.andon_trainer.step_bench import StepBench, ranges

ORDER = Order(0, 0, 48)


def samples(*bounds: tuple[int, int]) -> list[int]:
    return [int(index) for start, stop in bounds for index in ORDER.indices(start, stop)]


def assert_mean_of(bench: StepBench, sent: dict[int, bytes], indices: list[int]) -> None:
    for block, expected in enumerate(bench.mean(indices)):
        got = torch.frombuffer(bytearray(sent[block]), dtype=torch.float32)
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("end", ["void", "void late"])
@pytest.mark.parametrize("micro", [None, 1])
def test_f_dp_006_an_unchanged_share_is_sent_again_bit_for_bit(end: str, micro: int | None) -> None:
    bench = StepBench(micro=micro)
    bench.assign((0, 4), end=end)
    bench.assign((0, 4), end="void", attempt=1)
    bench.assign((0, 4), end="commit", attempt=2)

    bench.run()

    assert bench.sent[0]
    assert bench.sent[0] == bench.sent[1] == bench.sent[2]
    assert bench.member.exchange.weights == [4.0, 4.0, 4.0]
    assert_mean_of(bench, bench.sent[0], samples((0, 4)))


def test_f_dp_006_an_unchanged_share_runs_the_loop_body_on_borrowed_samples() -> None:
    bench = StepBench()
    bench.assign((4, 8), end="void late")
    bench.assign((4, 8), end="commit", attempt=1)

    bench.run()

    assert bench.computed == [samples((4, 8)), samples((0, 2))]
    assert bench.stepper.committed
    first, again = bench.member.reports
    assert (again.samples, again.weight) == (4, 4.0)
    assert again.loss_sum == first.loss_sum > 0, "not the borrowed samples'"
    assert again.correct == first.correct == 4


def test_f_dp_006_an_extended_share_computes_the_missing_positions_alone() -> None:
    bench = StepBench()
    bench.assign((0, 4), end="void")
    bench.assign((0, 6), end="commit", attempt=1)

    bench.run()

    assert bench.computed == [samples((0, 4)), samples((4, 6))]
    assert_mean_of(bench, bench.sent[1], samples((0, 6)))
    (report,) = bench.member.reports
    assert (report.samples, report.weight, report.correct) == (6, 6.0, 6)


def test_an_extended_share_is_kept_whole_for_the_try_after_it() -> None:
    bench = StepBench(micro=2)
    bench.assign((4, 8), end="void")
    bench.assign((2, 8), end="void", attempt=1)
    bench.assign((2, 8), (10, 12), end="commit", attempt=2)

    bench.run()

    pieces = [(4, 6), (6, 8), (2, 4), (10, 12)]
    assert bench.computed == [samples(piece) for piece in pieces]
    assert_mean_of(bench, bench.sent[2], samples((2, 8), (10, 12)))


@pytest.mark.parametrize("attempt", [1, 0])  # 0: another coordinator counts anew
def test_missing_positions_come_in_micro_batches_that_are_no_larger_than_before(
    attempt: int,
) -> None:
    bench = StepBench()
    bench.assign((0, 4), end="void")
    bench.assign((0, 12), end="commit", attempt=attempt)

    bench.run()

    assert [len(each) for each in bench.computed] == [4, 4, 4]


def test_a_newcomer_to_a_step_that_is_tried_again_computes_in_pieces_of_an_even_share() -> None:
    bench = StepBench()
    bench.assign((0, 12), end="commit", attempt=1)

    bench.run()

    assert [len(each) for each in bench.computed] == [4, 4, 4]


@pytest.mark.parametrize("again", [ranges((0, 3)), ranges((2, 8)), ranges((8, 12))])
def test_a_share_that_lacks_a_kept_position_is_computed_whole(again: Ranges) -> None:
    bench = StepBench()
    bench.assign((0, 4), end="void")
    bench.assign(*[(part.start, part.stop) for part in again], end="commit", attempt=1)

    bench.run()

    bounds = [(part.start, part.stop) for part in again]
    assert sorted(chain.from_iterable(bench.computed[1:])) == sorted(samples(*bounds))
    assert_mean_of(bench, bench.sent[1], samples(*bounds))


def test_c_commit_001_a_gradient_of_older_weights_is_never_sent_again() -> None:
    bench = StepBench()
    bench.assign((0, 4), end="void")
    bench.assign((0, 4), end="commit", attempt=1, parent=Key(1, 77))

    bench.run()

    assert bench.computed == [samples((0, 4)), samples((0, 4))]


def test_after_a_commit_nothing_is_kept() -> None:
    bench = StepBench()
    bench.assign((0, 4), end="commit")
    bench.assign((0, 4), end="commit", parent=Key(1, 0))

    bench.run()

    assert bench.computed == [samples((0, 4)), samples((0, 4))]


def test_what_was_doubted_is_computed_anew() -> None:
    bench = StepBench()
    bench.assign((0, 4), end="void")
    bench.assign((0, 4), end="commit", attempt=1)

    for _body in bench.bodies():
        bench.member.stand(doubts=bench.member.position.doubts + 1)

    assert bench.computed == [samples((0, 4)), samples((0, 4))]


def test_f_dp_003_a_nan_gradient_is_computed_anew_and_not_sent_again() -> None:
    bench = StepBench()
    bench.assign((0, 4), end="void")
    bench.assign((0, 4), end="commit", attempt=1)
    bench.spoil = lambda body, loss: loss if body else _nan_in_backward(loss)

    bench.run()

    assert bench.sent[0] == {}
    assert bench.computed == [samples((0, 4)), samples((0, 4))]
    assert_mean_of(bench, bench.sent[1], samples((0, 4)))


def test_f_dp_003_a_nan_loss_drops_what_was_kept_of_the_share() -> None:
    bench = StepBench()
    bench.assign((0, 4), end="void")
    bench.assign((0, 6), end="commit", attempt=1)
    bench.assign((0, 6), end="commit", attempt=2)
    bench.spoil = lambda body, loss: loss * float("nan") if body == 1 else loss

    bench.run()

    assert sorted(chain.from_iterable(bench.computed[2:])) == sorted(samples((0, 6)))
    assert_mean_of(bench, bench.sent[-1], samples((0, 6)))


def test_an_exception_in_backward_keeps_nothing() -> None:
    bench = StepBench()
    bench.assign((0, 4), end="void")
    bench.assign((0, 6), end="void", attempt=1)
    bench.assign((0, 6), end="commit", attempt=2)
    bench.spoil = lambda body, loss: _raising(loss) if body == 1 else loss

    with pytest.raises(RuntimeError, match="a bad kernel"):
        bench.run()
    bench.member.ends.pop(0)
    bench.spoil = lambda body, loss: loss
    bench.run()

    assert sorted(chain.from_iterable(bench.computed[2:])) == sorted(samples((0, 6)))


def test_a_rank_without_samples_abstains_from_every_try() -> None:
    bench = StepBench()
    bench.assign(end="void")
    bench.assign(end="commit", attempt=1)

    bench.run()

    assert bench.sent == [{}, {}]
    assert bench.member.exchange.weights == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_another_type_are_kept_as_what_was_sent(dtype: torch.dtype) -> None:
    bench = StepBench(dtype=dtype)
    bench.assign((0, 4), end="void")
    bench.assign((0, 4), end="void", attempt=1)
    bench.assign((0, 6), end="commit", attempt=2)

    bench.run()

    assert bench.sent[0] == bench.sent[1]
    back = {part.grad.dtype for part in bench.model.parameters() if part.grad is not None}
    assert back == {dtype}
    for block, expected in enumerate(bench.mean(samples((0, 6)))):
        got = torch.frombuffer(bytearray(bench.sent[2][block]), dtype=torch.float32)
        assert torch.allclose(got, expected, rtol=0.05, atol=0.01)


def halt(reason: HaltReason, worker: int | None = None) -> HaltEvidence:
    return HaltEvidence(id=1, reason=reason, step=1, worker=worker)


def test_a_halt_that_says_nothing_of_numbers_doubts_nobody() -> None:
    kept = {reason for reason in HaltReason if not doubted(halt(reason), 0)}

    assert kept == {
        HaltReason.OPERATOR,
        HaltReason.REPEATED_FAILURE,
        HaltReason.JOURNAL,
        HaltReason.STATE_LOST,
        HaltReason.TOO_FEW_WORKERS,
    }


@pytest.mark.parametrize("reason", [HaltReason.NON_FINITE_GRADIENT, HaltReason.NON_FINITE_LOSS])
def test_a_bad_value_of_one_worker_doubts_that_worker_alone(reason: HaltReason) -> None:
    assert [doubted(halt(reason, worker=1), each) for each in (0, 1)] == [False, True]


def test_a_claim_of_one_worker_about_another_doubts_everybody() -> None:
    claim = replace(halt(HaltReason.NON_FINITE_GRADIENT, worker=1), reported_by=0)

    assert [doubted(claim, each) for each in (0, 1, 2)] == [True, True, True]


@pytest.mark.parametrize(
    "reason",
    [
        HaltReason.NON_FINITE_AVERAGE,
        HaltReason.ENCODING_OVERFLOW,
        HaltReason.REPLICA_DIVERGENCE,
        HaltReason.LOSS_SPIKE,
        HaltReason.GRADIENT_NORM_SPIKE,
        HaltReason.PROTOCOL_VIOLATION,
    ],
)
def test_a_defect_of_the_whole_doubts_everybody(reason: HaltReason) -> None:
    assert [doubted(halt(reason, worker=1), each) for each in (0, 1)] == [True, True]


def _nan_in_backward(loss: torch.Tensor) -> torch.Tensor:
    """The loss, whose gradient is NaN."""
    return _Bad.apply(loss, "nan")  # type: ignore[no-any-return,no-untyped-call]  # torch's own


def _raising(loss: torch.Tensor) -> torch.Tensor:
    return _Bad.apply(loss, "raise")  # type: ignore[no-any-return,no-untyped-call]  # torch's own


class _Bad(torch.autograd.Function):
    """Is as it should be forward, and goes wrong backward."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, how: str) -> torch.Tensor:
        ctx.how = how
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.how == "raise":
            raise RuntimeError("a bad kernel")
        return gradients[0] * float("nan"), None
