"""The objective: a loss that is no mean over samples is noticed, once, and others are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from andon_trainer.steps.loop_checks import LossCheck

SAMPLES = 4
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

PADDED = torch.tensor([1, 2, -100, 0])


def loss_of(make: Loss) -> torch.Tensor:
    torch.manual_seed(0)
    return make(torch.randn(SAMPLES, 5, requires_grad=True), torch.tensor([1, 2, 3, 0]))


SUMS: dict[str, Loss] = {
    "cross entropy": lambda x, t: F.cross_entropy(x, t, reduction="sum"),
    "squared error": lambda x, t: F.mse_loss(x, torch.zeros_like(x), reduction="sum"),
    "of each sample's": lambda x, t: F.cross_entropy(x, t, reduction="none").sum(),
    "of all elements": lambda x, t: (x**2).sum(),
    "scaled up": lambda x, t: F.cross_entropy(x, t, reduction="sum") * torch.tensor(65536.0),
    "with another term": lambda x, t: F.cross_entropy(x, t, reduction="sum") + x.mean(),
}
PARTLY: dict[str, Loss] = {
    "padding": lambda x, t: F.cross_entropy(x, PADDED),
    "padded sequences": lambda x, t: F.cross_entropy(x[None].mT, PADDED[None]),
    "class weights": lambda x, t: F.cross_entropy(x, t, weight=torch.arange(5) / 3),
    "padding, and more": lambda x, t: F.cross_entropy(x, PADDED) * 0.5 + x.mean(),
}
MEANS: dict[str, Loss] = {
    "cross entropy": F.cross_entropy,
    "squared error": lambda x, t: F.mse_loss(x, torch.zeros_like(x)),
    "a divided sum": lambda x, t: F.cross_entropy(x, t, reduction="sum") / len(x),
    "a multiplied sum": lambda x, t: F.cross_entropy(x, t, reduction="sum") * (1 / len(x)),
    "two losses added": lambda x, t: torch.stack([x.mean(), F.cross_entropy(x, t)]).sum(),
    "scaled up": lambda x, t: F.cross_entropy(x, t) * torch.tensor(65536.0),
    "no graph": lambda x, t: x.detach().sum(),
}


@pytest.mark.parametrize("make", SUMS.values(), ids=SUMS)
def test_a_sum_over_the_batch_is_noticed(make: Loss, caplog: pytest.LogCaptureFixture) -> None:
    LossCheck().look(loss_of(make), SAMPLES)

    assert "the loss is a sum over the batch" in caplog.text


@pytest.mark.parametrize("make", PARTLY.values(), ids=PARTLY)
def test_a_mean_over_a_part_of_the_targets_is_noticed(
    make: Loss, caplog: pytest.LogCaptureFixture
) -> None:
    LossCheck().look(loss_of(make), SAMPLES)

    assert "line.backward was given no weight" in caplog.text


@pytest.mark.parametrize("make", MEANS.values(), ids=MEANS)
def test_a_mean_over_samples_is_not(make: Loss, caplog: pytest.LogCaptureFixture) -> None:
    LossCheck().look(loss_of(make), SAMPLES)

    assert caplog.text == ""


def test_a_batch_of_one_is_its_own_mean(caplog: pytest.LogCaptureFixture) -> None:
    LossCheck().look(torch.ones(1, 3, requires_grad=True).sum(), 1)

    assert caplog.text == ""


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    objective = LossCheck()

    for make in (SUMS["cross entropy"], SUMS["squared error"], PARTLY["padding"]):
        objective.look(loss_of(make), SAMPLES)

    assert len(caplog.messages) == 1
