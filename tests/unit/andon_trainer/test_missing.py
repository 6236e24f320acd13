"""Parameters that nobody has a gradient of: told by minus zeros, and left alone as PyTorch does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from andon_trainer.averaging.missing import MISSING, MissingGradients
from andon_trainer.averaging.tap import GradientTap
from andon_trainer.model.layout import plan_model
from unit.andon_trainer.step_bench import BATCH, StepBench

CPU = torch.device("cpu")


def test_a_mean_is_minus_zero_exactly_if_every_contribution_is() -> None:
    shares = [torch.tensor(share, dtype=torch.float32) for share in (0.3, 0.3, 0.4)]

    def mean(*parts: float) -> torch.Tensor:
        terms = [share * torch.tensor(part) for share, part in zip(shares, parts, strict=True)]
        return terms[0] + terms[1] + terms[2]

    assert mean(MISSING, MISSING, MISSING).signbit()
    assert not mean(MISSING, 0.0, MISSING).signbit()
    assert not mean(MISSING, MISSING, 1e-30).signbit()


def test_a_gradient_of_minus_zeros_is_told_from_none() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plan = plan_model([model])
    tap, absence, sent = GradientTap(plan, CPU), MissingGradients(plan), {}

    tap.arm(lambda block, flat: sent.update({block: flat.clone()}), None)
    (model[1](torch.ones(1, 2)).sum() * MISSING).backward()
    tap.finish()

    found = {
        plan.names[block][index]
        for block, flat in sent.items()
        for index in absence.find(block, flat)
    }
    assert found == {"0.weight", "0.bias"}
    assert all(not flat.any() for flat in sent.values())


def test_an_average_that_nobody_gave_to_takes_a_gradient_away() -> None:
    model = nn.Linear(2, 1)
    plan = plan_model([model])
    tap = GradientTap(plan, CPU)
    model.weight.grad = torch.ones(1, 2)

    tap.write_back(0, torch.tensor([MISSING, MISSING, 2.0]))

    assert model.weight.grad is None
    assert model.bias.grad is not None
    assert model.bias.grad.tolist() == [2.0]


@pytest.mark.parametrize("ends", [["commit"], ["void late", "commit"]])
def test_adamw_leaves_an_unused_parameter_alone(ends: list[str]) -> None:
    bench = StepBench()
    for attempt, end in enumerate(ends):
        bench.assign((0, BATCH // 2 * (attempt + 1)), end=end, attempt=attempt)

    bench.run()

    assert bench.unused.grad is None
    assert all(
        part.grad is not None for part in bench.model.parameters() if part is not bench.unused
    )
