"""The objective: a loss that is no mean over samples is noticed, once, and others are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from andon_trainer.script.loss_check import LossCheck

SAMPLES = 4
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

WEIGHTS = [nn.Parameter(torch.ones(8, 5)), nn.Parameter(torch.ones(SAMPLES, 5))]
FILTERS = nn.Parameter(torch.ones(2, 4, 3))
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
    "times a half": lambda x, t: 0.5 * F.mse_loss(x, torch.zeros_like(x), reduction="sum"),
    "of a VAE": lambda x, t: 0.5 * F.mse_loss(x, x * 0, reduction="sum") - 2 * x.exp().sum(),
    "over named dimensions": lambda x, t: (x**2).sum(1).sum(0),
    "of a layer without a bias": lambda x, t: (x @ WEIGHTS[0].T).square().sum(),
    "of a layer over chosen rows": lambda x, t: (
        (WEIGHTS[0][t] @ WEIGHTS[1].T).square().sum() + 0 * x.sum()
    ),
    "in another dtype": lambda x, t: F.cross_entropy(x, t, reduction="sum").double().mean(),
    "of unequal samples": lambda x, t: (x[:, 0] * torch.tensor([1.0, 2, 0, 1])).sum(),
}
IN_PART: dict[str, Loss] = {
    "with another term": lambda x, t: F.cross_entropy(x, t, reduction="sum") + x.mean(),
    "in a stack": lambda x, t: torch.stack([x.mean(), (x**2).sum(), F.cross_entropy(x, t)]).sum(),
    "less another term": lambda x, t: F.cross_entropy(x, t) - (x**2).sum(),
}
PARTLY: dict[str, Loss] = {
    "padding": lambda x, t: F.cross_entropy(x, PADDED),
    "padded sequences": lambda x, t: F.cross_entropy(x[None].mT, PADDED[None]),
    "class weights": lambda x, t: F.cross_entropy(x, t, weight=torch.arange(5) / 3),
    "class weights and smoothed labels": lambda x, t: F.cross_entropy(
        x, t, weight=torch.arange(5) / 3, label_smoothing=0.1
    ),
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
    "smoothed labels": lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
    "probabilities": lambda x, t: F.cross_entropy(x, x.detach().softmax(1), torch.arange(5) / 3),
    "divergence": lambda x, t: F.kl_div(x, x.detach().softmax(1), reduction="batchmean"),
    "a large part": lambda x, t: F.cross_entropy(x, t) + 100 * (x**2).sum() / len(x),
    "as many losses as samples": lambda x, t: torch.stack([x[at].mean() for at in t]).sum(),
    "a norm of weights": lambda x, t: x.mean() + sum((each**2).sum() for each in WEIGHTS),
    "orthogonal weights": lambda x, t: (
        x.mean() + 0.5 * ((WEIGHTS[0] @ WEIGHTS[0].T - torch.eye(8)) ** 2).sum()
    ),
    "orthogonal filters": lambda x, t: (
        x.mean() + torch.einsum("gij,gkj->gik", FILTERS, FILTERS).square().sum()
    ),
    "weights far from zero": lambda x, t: x.mean() + torch.cat(tuple(WEIGHTS)).abs().sum(),
    "weights of samples": lambda x, t: ((x**2).mean(1) * torch.full((4,), 0.25)).sum(),
    "a norm": lambda x, t: x.norm(),
    "logits": lambda x, t: F.binary_cross_entropy_with_logits(
        x, x.detach().sigmoid(), pos_weight=torch.tensor(2.0)
    ),
}


def masked(counts: int, by: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A loss of all samples of which so many count."""
    values = torch.randn(SAMPLES, 5, requires_grad=True)
    return by((values**2).mean(1), torch.arange(SAMPLES) < counts)


OVER_A_PART: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "divided": lambda values, mask: (values * mask).sum() / mask.sum(),
    "divided by a plain number": lambda values, mask: (values * mask).sum() / int(mask.sum()),
    "divided as means": lambda values, mask: (values * mask).mean() / (mask * 1.0).mean(),
    "selected": lambda values, mask: values[mask].mean(),
    "selected and halved": lambda values, mask: values[mask].mean() / 2,
    "clamped, with another term": lambda values, mask: (
        0.5 * ((values * mask).sum() / mask.sum().clamp(min=1.0)) + values.mean()
    ),
}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        *(pytest.param(SUMS[name], "the loss is a sum over the batch", id=name) for name in SUMS),
        *(pytest.param(IN_PART[name], "a part of the loss is a sum", id=name) for name in IN_PART),
        *(pytest.param(PARTLY[name], "was given no weight", id=name) for name in PARTLY),
    ],
)
def test_a_loss_that_is_no_mean_over_samples_is_noticed(
    make: Loss, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    LossCheck().look(loss_of(make), SAMPLES)

    assert told in caplog.text


@pytest.mark.parametrize("make", MEANS.values(), ids=MEANS)
def test_a_mean_over_samples_is_not(make: Loss, caplog: pytest.LogCaptureFixture) -> None:
    LossCheck().look(loss_of(make), SAMPLES)

    assert caplog.text == ""


@pytest.mark.parametrize("by", OVER_A_PART.values(), ids=OVER_A_PART)
def test_a_mean_over_what_counts_is_noticed_when_the_count_changes(
    by: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    check = LossCheck()

    check.look(masked(3, by), SAMPLES)
    check.look(masked(3, by), SAMPLES)
    assert caplog.text == ""
    check.look(masked(2, by), SAMPLES)

    assert "a mean over what counts in a batch: 3 in one and 2 in the next" in caplog.text
    assert "weight=..." in caplog.text


@pytest.mark.parametrize("divided", [False, True])
def test_a_small_factor_is_found_to_be_no_mean_s_by_a_batch_of_another_size(
    divided: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def loss(samples: int) -> torch.Tensor:
        total = (torch.randn(samples, 5, requires_grad=True) ** 2).sum()
        return total / 1000 if divided else 0.001 * total

    check = LossCheck()

    for _ in range(10):
        check.look(loss(8), 8)
    assert caplog.text == ""
    check.look(loss(6), 6)

    assert "the loss is a sum over the batch" in caplog.text


def test_a_sum_divided_by_a_small_number_is_noticed_once_that_has_stayed_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    check = LossCheck()

    for _ in range(10):
        check.look(loss_of(lambda x, t: (x**2).sum() / 3), SAMPLES)

    assert "the loss is a sum over the batch" in caplog.text


MASKED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "multiplied": lambda values, mask: (values * mask).sum() / mask.sum(),
    "by a plain number": lambda values, mask: (values * mask).sum() / int(mask.sum()),
    "chosen": lambda values, mask: torch.where(mask, values, 0.0).sum() / mask.sum(),
    "filled": lambda values, mask: values.masked_fill(~mask, 0.0).sum() / mask.sum(),
}


@pytest.mark.parametrize("by", MASKED.values(), ids=MASKED)
def test_a_mean_over_as_many_in_every_batch_is_not_taken_for_a_sum(
    by: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    check = LossCheck()

    for _ in range(10):
        check.look(masked(3, by), SAMPLES)

    assert "a mean over the 3 that count in 4 samples" in caplog.text
    assert "a sum over the batch" not in caplog.text


def test_a_mean_that_is_scaled_by_what_changes_counts_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    check = LossCheck()

    for scale in (0.301, 2.0, 0.75, 0.5):
        values = torch.randn(SAMPLES, 5, requires_grad=True)
        check.look(values.mean() / torch.tensor(scale), SAMPLES)

    assert caplog.text == ""


def test_means_of_batches_of_other_sizes_are_means(caplog: pytest.LogCaptureFixture) -> None:
    check, table = LossCheck(), nn.Parameter(torch.randn(8, 5))

    for samples in (*[8] * 10, 6, 4, 2, 1, 8):
        for columns in (5, 3):  # As many as the longest of the batch.
            x = torch.randn(samples, columns, requires_grad=True)
            loss = 1e-3 * (table**2).sum() + 3 * (x**2).sum() / x.numel() + x.mean()
            check.look(loss + 1e-4 * (x**2).sum() / samples, samples)

    assert caplog.text == ""


def test_after_many_losses_only_those_of_other_sizes_are_looked_at(
    caplog: pytest.LogCaptureFixture,
) -> None:
    check = LossCheck()

    for samples in (*[8] * 1001, 6):
        check.look(1e-3 * (torch.ones(samples, 5, requires_grad=True) ** 2).sum(), samples)

    assert "the loss is a sum over the batch" in caplog.text


def test_a_batch_of_one_is_its_own_mean(caplog: pytest.LogCaptureFixture) -> None:
    LossCheck().look(torch.ones(1, 3, requires_grad=True).sum(), 1)

    assert caplog.text == ""


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    objective = LossCheck()

    for make in (SUMS["cross entropy"], SUMS["squared error"], PARTLY["padding"]):
        objective.look(loss_of(make), SAMPLES)

    assert len(caplog.messages) == 1
