"""The momentum that a window of local steps begins with, in the benchmark of convergence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from shared_momentum import SharedMomentum

sys.path.pop()  # benchmarks/gpu.py would hide tests/gpu


def test_a_worker_goes_on_with_the_momentum_of_what_the_line_made_of_its_change() -> None:
    weights = nn.Parameter(torch.tensor([1.0, 1.0]))
    adam = AdamW([weights], lr=1e-2, weight_decay=0.0)
    momentum = SharedMomentum(adam)
    start = weights.detach().clone()
    for _ in range(3):
        weights.grad = torch.tensor([0.5, -2.0])
        momentum.stepping()
        adam.step()
    own = adam.state[weights]["exp_avg"].clone()
    with torch.no_grad():  # Another worker stood still: the mean is half of this one's change.
        weights.copy_((weights + start) / 2)

    momentum.committed()

    assert adam.state[weights]["exp_avg"].tolist() == pytest.approx((own / 2).tolist(), rel=1e-4)
