"""The momentum that a window of local steps begins with, as an example shares it."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW

sys.path.append(str(Path(__file__).parents[3]))

from examples.shared_momentum import SharedMomentum

sys.path.pop()


@pytest.mark.parametrize("computed_twice", [False, True])
def test_a_worker_goes_on_with_the_momentum_of_what_the_line_made_of_its_change(
    *, computed_twice: bool
) -> None:
    weights, frozen = nn.Parameter(torch.tensor([1.0, 1.0])), nn.Parameter(torch.ones(3))
    adam = AdamW([weights, frozen], lr=1e-2, weight_decay=0.0)
    momentum = SharedMomentum(adam)
    start, began = weights.detach().clone(), copy.deepcopy(adam.state_dict())

    momentum.share()  # Of a window in which this worker had nothing to compute.

    def step() -> None:
        weights.grad = torch.tensor([0.5, -2.0])
        adam.step()

    if computed_twice:  # The line doubts a window, and everything is what it was when that began.
        step()
        weights.data.copy_(start)
        adam.load_state_dict(began)
    for _ in range(3):
        step()
    own = adam.state[weights]["exp_avg"].clone()
    with torch.no_grad():  # Another worker stood still: the mean is half of this one's change.
        weights.copy_((weights + start) / 2)

    momentum.share()

    shared = adam.state[weights]["exp_avg"].clone()
    assert shared.tolist() == pytest.approx((own / 2).tolist(), rel=1e-4)
    momentum.share()  # Of another such window.
    assert torch.equal(adam.state[weights]["exp_avg"], shared)
