"""A line's scale of the learning rate: for the length of one step, and nobody else sees it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from andon_trainer.script.gates import Audit, StepIdentity, gate_optimizer, gate_scheduler


class Committing:
    """A keeper that commits each step, with the scale that the test sets."""

    committed = True
    plan_steps = None

    def __init__(self, scale: float) -> None:
        self.learning_rate_scale = scale
        self.steps = 0

    @property
    def identity(self) -> StepIdentity:
        return StepIdentity(self.steps, 0, 2)

    @property
    def moves(self) -> int:
        return self.steps

    def try_commit(self) -> bool:
        self.steps += 1
        return True

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Nobody asks."""


def gate(optimizer: torch.optim.Optimizer, keeper: Committing) -> torch.optim.Optimizer:
    gate_optimizer(optimizer, keeper, Audit([], []))
    return optimizer


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
def test_a_step_is_made_with_the_scaled_rate_and_the_rate_is_the_scripts_again(
    *, tensor: bool
) -> None:
    part = nn.Parameter(torch.ones(2))
    rate: Any = torch.tensor(0.1) if tensor else 0.1
    optimizer = torch.optim.SGD([part], lr=rate)
    before = optimizer.param_groups[0]["lr"]
    keeper = Committing(3.0)
    gate(optimizer, keeper)

    def averaged(_optimizer: Any, _arguments: Any, _named: Any) -> None:
        part.grad = torch.ones(2)

    optimizer.register_step_pre_hook(averaged)

    optimizer.step()

    assert part.tolist() == pytest.approx([0.7, 0.7])
    after = optimizer.param_groups[0]["lr"]
    assert after is before
    assert torch.equal(torch.as_tensor(after), torch.as_tensor(0.1))


def test_groups_that_share_a_rate_are_scaled_once_and_groups_without_one_are_left_alone() -> None:
    parts = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    shared = torch.tensor(0.1)
    optimizer = torch.optim.SGD([{"params": [part], "lr": shared} for part in parts], lr=shared)
    for group in optimizer.param_groups:
        group["lr"] = shared
    seen: list[Any] = []

    def look(_optimizer: Any, _arguments: Any, _named: Any) -> None:
        seen.extend(group.get("lr") for group in optimizer.param_groups)
        seen[:2] = [rate.item() for rate in seen[:2]]
        optimizer.param_groups[2]["lr"] = torch.tensor(0.1)

    del optimizer.param_groups[2]["lr"]
    optimizer.register_step_pre_hook(look)
    gate(optimizer, Committing(2.0)).step()

    assert seen == [pytest.approx(0.2), pytest.approx(0.2), None]
    assert torch.equal(shared, torch.tensor(0.1))


def test_a_step_that_raises_leaves_the_rates_as_they_were() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

    def fail(_optimizer: Any, _arguments: Any, _named: Any) -> None:
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.4)
        raise ValueError("the script's own")

    optimizer.register_step_pre_hook(fail)
    gate(optimizer, Committing(4.0))

    with pytest.raises(ValueError, match="the script's own"):
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_scheduler_goes_on_from_the_scripts_rate() -> None:
    keeper = Committing(8.0)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = ExponentialLR(optimizer, 0.5)
    gate(optimizer, keeper)
    gate_scheduler(scheduler, keeper)

    for expected in (0.5, 0.25, 0.125):
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == expected


def test_the_log_says_once_that_rates_are_scaled(caplog: pytest.LogCaptureFixture) -> None:
    keeper = Committing(1.0)
    optimizer = gate(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), keeper)

    with caplog.at_level(logging.INFO, logger="andon_trainer.script.gates"):
        for scale in (1.0, 2.0, 3.0, 1.0):
            keeper.learning_rate_scale = scale
            optimizer.step()

    assert [each.getMessage() for each in caplog.records] == [
        "the line scales learning rates by the samples of a step: this step of SGD is made with 2 "
        "times the script's rate"
    ]
