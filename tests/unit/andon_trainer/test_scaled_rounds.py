"""What a worker with a GradScaler sends: in void rounds, after an overflow, and to the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from andon.protocol.encoding import Encoding
from andon.protocol.run_settings import Policy
from andon_trainer.model.layout import plan_model
from andon_trainer.schedules.stepper import StepperGate
from andon_trainer.script.gates import Audit, gate_optimizer
from unit.andon_trainer.step_bench import MAX_OVERFLOWS, StepBench

SCALE = 4096.0


class ScaledBench(StepBench):
    """A script with an optimizer and a scaler."""

    def __init__(self, micro: int | None = None, scale: float = SCALE) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)
        super().__init__(micro=micro, scaler=self.scaler)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.overflows_in: set[int] = set()
        """The loop bodies whose gradients are infinite."""
        gate = StepperGate()
        gate.stepper = self.stepper
        audit = Audit([self.model], [self.optimizer])
        audit.open(plan_model([self.model]))
        audit.close()  # It would look at the optimizers of other tests, too.
        gate_optimizer(self.optimizer, gate, audit, self.scaling)
        assert self.scaling is not None
        self.scaling.open(gate)
        for part in self.model.parameters():
            part.register_hook(self._spoil)  # type: ignore[no-untyped-call]  # torch's own
        self._body = 0

    def _spoil(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.inf if self._body in self.overflows_in else gradient

    def bodies(self) -> Iterator[int]:
        for body, shard in enumerate(self.stepper.batches(lambda: None)):
            self._body = body
            self.computed.append(shard.indices.tolist())
            self.optimizer.zero_grad()
            loss = self.model(self.inputs[shard.indices]).square().mean()
            self.stepper.backward(loss, None)
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            yield self._body

    @property
    def weights(self) -> list[torch.Tensor]:
        return [part.detach().clone() for part in self.model.parameters()]


def values(sent: dict[int, bytes]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.concatenate([np.frombuffer(each, np.float32) for _, each in sorted(sent.items())])


def unchanged(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("micro", [None, 2])
def test_gradients_travel_without_the_scale(micro: int | None) -> None:
    bench, plain = ScaledBench(micro), StepBench(micro=micro)
    for each in (bench, plain):
        each.assign((0, 4), end="commit")

    for each in (bench, plain):
        each.run()

    # A power of two: not a bit differs.
    assert bench.sent == plain.sent


def test_an_overflow_is_sent_as_zeros_and_moves_no_weight_and_halves_the_scale() -> None:
    bench = ScaledBench()
    before = bench.weights
    bench.overflows_in = {0}
    bench.assign((0, 4), end="commit")
    bench.assign((4, 8), end="commit")
    kept = []

    for _body in bench.bodies():
        kept.append(bench.weights)

    assert not values(bench.sent[0]).any()
    assert [each.overflow for each in bench.member.reports] == [True, False]
    assert unchanged(before, kept[0])
    assert not unchanged(before, kept[1])
    assert bench.scaler.get_scale() == SCALE / 2


def test_another_workers_overflow_moves_no_weight_here_and_halves_this_scale_too() -> None:
    bench = ScaledBench()
    before = bench.weights
    bench.assign((0, 4), end="commit overflow")

    bench.run()

    assert values(bench.sent[0]).any()
    assert not bench.member.reports[0].overflow
    assert unchanged(before, bench.weights)
    assert bench.scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("end", ["void", "void late"])
def test_a_void_round_loses_nobody_and_leaves_scale_and_weights_alone(end: str) -> None:
    bench = ScaledBench()
    before = bench.weights
    bench.assign((0, 4), end=end)
    bench.assign((0, 4), end="commit", attempt=1)
    scales, moved = [], []

    for _body in bench.bodies():
        scales.append(bench.scaler.get_scale())
        moved.append(not unchanged(before, bench.weights))

    assert scales == [SCALE, SCALE]
    assert moved == [False, True]
    assert bench.sent[0] == bench.sent[1]


def test_a_kept_gradient_that_overflowed_is_overflowed_when_it_is_sent_again() -> None:
    bench = ScaledBench()
    bench.overflows_in = {0}
    bench.assign((0, 4), end="void late")
    bench.assign((0, 4), end="void late", attempt=1)
    bench.assign((0, 8), end="commit", attempt=2)

    bench.run()

    assert [each.overflow for each in bench.member.reports] == [True, True, True]
    assert bench.scaler.get_scale() == SCALE / 2


def test_a_kept_gradient_is_completed_in_the_scale_of_the_rest() -> None:
    scaled, plain = ScaledBench(), StepBench()
    for bench in (scaled, plain):
        bench.assign((0, 4), end="void late")
        bench.assign((0, 8), end="commit", attempt=1)
        bench.run()

    assert scaled.computed == plain.computed
    assert scaled.sent == plain.sent


def test_a_later_micro_batch_that_overflows_spoils_the_step() -> None:
    bench = ScaledBench(micro=2)
    before = bench.weights
    bench.overflows_in = {0}
    bench.assign((0, 6), end="commit")
    scales = []

    for _body in bench.bodies():
        scales.append(bench.scaler.get_scale())

    assert scales == [SCALE, SCALE, SCALE / 2]
    assert bench.member.reports[0].overflow
    assert unchanged(before, bench.weights)


def test_a_coordinator_that_would_tell_nobody_of_an_overflow_gets_the_value_that_is_one() -> None:
    bench = ScaledBench()
    bench.member.stand(coordinator_can=frozenset())
    bench.overflows_in = {0}
    bench.assign((0, 4), end="commit")

    bench.run()

    assert bench.member.exchange.refused  # The exchange found it, and the halt follows.
    assert bench.member.reports == []


def test_beyond_the_most_overflows_the_value_is_not_zeroed() -> None:
    bench = ScaledBench()
    bench.overflows_in = set(range(10))
    for step in range(MAX_OVERFLOWS + 1):
        bench.assign((4 * step, 4 * step + 4), end="commit")

    bench.run()

    assert len(bench.member.reports) == MAX_OVERFLOWS
    assert bench.member.exchange.refused  # The exchange found it, and the halt follows.
    assert bench.scaler.get_scale() == SCALE / 2**MAX_OVERFLOWS


def test_a_good_step_begins_the_count_of_overflows_anew() -> None:
    bench = ScaledBench()
    bench.overflows_in = {0, 1, 3, 4}
    for step in range(5):
        bench.assign((4 * step, 4 * step + 4), end="commit")

    bench.run()

    assert [each.overflow for each in bench.member.reports] == [True, True, False, True, True]


def test_norms_are_those_of_the_gradients_without_the_scale() -> None:
    scaled, plain = ScaledBench(), StepBench()
    for bench in (scaled, plain):
        bench.member.policy = Policy(gradient_norm=True, own_gradient_norm=True, max_grad_norm=0.01)
        bench.assign((0, 4), end="commit")
        bench.run()

    assert scaled.sent == plain.sent
    ours, theirs = scaled.member.reports[0], plain.member.reports[0]
    assert (ours.gradient_norm, ours.own_gradient_norm) == (
        theirs.gradient_norm,
        theirs.own_gradient_norm,
    )


def test_the_own_norm_of_a_step_that_overflowed_is_finite() -> None:
    bench = ScaledBench()
    bench.member.policy = Policy(own_gradient_norm=True, max_grad_norm=0.01)
    bench.overflows_in = {0}
    bench.assign((0, 4), end="commit")

    bench.run()

    assert bench.member.reports[0].own_gradient_norm == 0.0
    assert bench.member.reports[0].overflow


def test_what_the_encoding_can_not_hold_is_no_overflow_of_the_scale() -> None:
    bench = ScaledBench()
    bench.member.policy = Policy(encoding=Encoding.FLOAT16)
    bias = list(bench.model.parameters())[-1]
    bench.member.waited = lambda: bias.data.fill_(1e6)
    bench.assign((0, 4), end="commit")

    bench.run()

    assert not bench.member.reports[0].overflow
    assert values(bench.sent[0]).max() > 65504.0


def test_a_step_in_which_nobody_has_a_weight_leaves_scale_and_weights_alone() -> None:
    bench = ScaledBench()
    before = bench.weights
    bench.assign(end="commit")

    bench.run()

    assert bench.member.position.step == 1
    assert bench.scaler.get_scale() == SCALE
    assert unchanged(before, bench.weights)
