"""Learning rates by name: their curves, their warm-up, and when they move."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from andon_trainer import Fit
from andon_trainer.fit.schedules import LearningRates, make_scheduler, scale_learning_rates

LOADER = range(5)  # as long as a loader of five steps


def rates(scheduler: Any, fit: Fit, calls: list[str]) -> list[float]:
    """The learning rates that steps are made with."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    run = LearningRates(optimizer, make_scheduler(scheduler, optimizer, fit, LOADER), fit)
    seen = []
    for call in calls:
        if call == "step":
            optimizer.step()
            run.after_step(counts=True)
            seen.append(run.of_last_step)
        elif call == "epoch":
            run.after_epoch()
        else:
            run.after_evaluation(1.0)
    return seen


@pytest.mark.parametrize(
    ("name", "settings", "wanted"),
    [
        ("constant", {"steps": 4, "warmup_steps": 2}, [0, 0.5, 1, 1]),
        ("linear", {"steps": 6, "warmup_steps": 2}, [0, 0.5, 1, 0.75, 0.5, 0.25]),
        ("linear", {"epochs": 1}, [1, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", {"steps": 4}, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
        ("cosine", {"epochs": 2, "warmup_ratio": 0.2}, [0, 0.5, 1]),
    ],
)
def test_the_curves_are_those_that_people_know(
    name: str, settings: dict[str, Any], wanted: list[float]
) -> None:
    found = rates(name, Fit(**settings), ["step"] * len(wanted))

    assert found == pytest.approx(wanted)


def test_a_curve_by_epochs_stays_within_an_epoch() -> None:
    fit = Fit(steps=10, scheduler_interval="epoch")

    found = rates("linear", fit, ["step", "step", "epoch", "step", "step"])

    assert found == pytest.approx([1, 1, 0.5, 0.5])


def test_a_factory_by_epochs_steps_at_their_ends() -> None:
    fit = Fit(epochs=3, scheduler_interval="epoch")

    found = rates(lambda it: StepLR(it, 1, 0.5), fit, ["step", "epoch", "step", "epoch", "step"])

    assert found == [1, 0.5, 0.25]


def test_a_plateau_follows_evaluations_and_nothing_else() -> None:
    fit = Fit(epochs=3, evaluate_every="epoch")
    calls = ["step", "epoch", "evaluate", "step", "epoch", "evaluate", "step"]

    found = rates(lambda it: ReduceLROnPlateau(it, factor=0.5, patience=0), fit, calls)

    assert found == [1, 1, 0.5]


def test_a_plateau_without_evaluations_is_refused() -> None:
    with pytest.raises(ValueError, match="ReduceLROnPlateau follows the evaluation's loss"):
        rates(ReduceLROnPlateau, Fit(epochs=1), [])


def test_a_run_without_a_scheduler_keeps_its_rate() -> None:
    assert rates(None, Fit(epochs=1), ["step", "epoch", "evaluate", "step"]) == [1, 1]


@pytest.mark.parametrize(
    ("scaling", "base", "factor"),
    [("linear", 8, 4.0), ("sqrt", 8, 2.0), ("linear", 64, 0.5), ("none", None, 1.0)],
)
def test_learning_rates_follow_the_batch_as_they_are_asked_to(
    scaling: Any, base: int | None, factor: float, caplog: pytest.LogCaptureFixture
) -> None:
    weights = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.01)]
    optimizer = torch.optim.SGD(weights)
    fit = Fit(epochs=1, batch_size=32, lr_scaling=scaling, base_batch_size=base)

    with caplog.at_level(logging.INFO):
        scale_learning_rates(optimizer, fit, LOADER)

    assert [each["lr"] for each in optimizer.param_groups] == pytest.approx(
        [0.1 * factor, 0.01 * factor]
    )
    told = f"{0.1 * factor:.4g}, {0.01 * factor:.4g}"
    assert [each.getMessage().endswith(told) for each in caplog.records] == [True] * bool(base)
