"""The settings of a fit: what contradicts itself is refused, with what to write."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from andon_trainer import Fit
from andon_trainer.fit.callbacks import Evaluation
from andon_trainer.fit.course import BestEvaluation


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "exactly one of steps= and epochs="),
        ({"steps": 3, "epochs": 1}, "exactly one of steps= and epochs="),
        ({"epochs": 0}, "epochs must be at least 1, not 0"),
        ({"batch_size": 0, "epochs": 1}, "batch_size must be at least 1"),
        ({"epochs": 1, "precision": "fp16"}, "precision is one of float32, bfloat16, float16"),
        ({"epochs": 1, "warmup_steps": 2, "warmup_ratio": 0.1}, "not both"),
        ({"epochs": 1, "warmup_ratio": 1.5}, "warmup_ratio from 0 to 1"),
        ({"epochs": 1, "scheduler_interval": "batch"}, "scheduler_interval is step or epoch"),
        ({"epochs": 1, "evaluate_every": "steps"}, 'a number of steps or "epoch"'),
        ({"epochs": 1, "patience": 3}, 'say when to evaluate, evaluate_every="epoch"'),
        ({"epochs": 1, "keep_best": "loss"}, 'say when to evaluate, evaluate_every="epoch"'),
        ({"epochs": 1, "lr_scaling": "square"}, "lr_scaling is one of none, linear, sqrt"),
        ({"epochs": 1, "lr_scaling": "sqrt"}, "lr_scaling and base_batch_size go together"),
        ({"epochs": 1, "base_batch_size": 8}, "lr_scaling and base_batch_size go together"),
        ({"epochs": 1, "mode": "max"}, "mode is of keep_best or patience"),
        ({"epochs": 1, "evaluate_every": 1, "patience": 2, "mode": "best"}, "mode is min or max"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Fit(**settings)


@pytest.mark.parametrize(
    ("by", "mode", "best"),
    [
        ("loss", None, "min"),
        ("word_error", None, "min"),
        ("accuracy", None, "max"),
        ("perplexity", "min", "min"),
    ],
)
def test_the_best_is_the_least_loss_or_error_and_else_the_greatest(
    by: str, mode: Any, best: str
) -> None:
    assert Fit(epochs=1, evaluate_every=1, keep_best=by, mode=mode).best_is == best


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)],
)
def test_a_precision_is_what_a_forward_computes_in(precision: Any, dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(2, 2)

    with Fit(epochs=1, precision=precision).autocast(torch.device("cpu")):
        found = layer(torch.zeros(1, 2))

    assert found.dtype is dtype


@pytest.mark.parametrize(
    ("mode", "values", "best"),
    [
        ("min", [float("nan"), 2.0, float("nan"), 1.0, 1.0], 3),
        ("max", [float("nan"), 2.0, 3.0, 3.0], 2),
    ],
)
def test_a_value_that_is_no_number_is_never_the_best(
    mode: Any, values: list[float], best: int
) -> None:
    found = BestEvaluation(Fit(epochs=1, evaluate_every=1, patience=2, mode=mode))

    for step, value in enumerate(values):
        found.take(Evaluation(step, value))

    assert found.evaluation is not None
    assert found.evaluation.step == best


def test_the_best_goes_on_from_its_state() -> None:
    fit = Fit(epochs=1, evaluate_every=1, patience=2)
    first, second = BestEvaluation(fit), BestEvaluation(fit)
    first.take(Evaluation(0, 1.0, {"accuracy": 0.5}))

    second.load_state_dict(first.state_dict())
    second.take(Evaluation(3, 1.0))

    assert second.evaluation == Evaluation(0, 1.0, {"accuracy": 0.5})


def test_a_metric_that_is_not_there_is_named_beside_those_that_are() -> None:
    best = BestEvaluation(Fit(epochs=1, evaluate_every=1, keep_best="f1"))

    with pytest.raises(ValueError, match="no f1: keep_best is one of loss, accuracy"):
        best.take(Evaluation(1, 0.5, {"accuracy": 1.0}))
