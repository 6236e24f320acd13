"""The momentum that a window of local steps begins with, as an example shares it."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

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

    momentum.share(0)  # Of a window in which this worker had nothing to compute.

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

    momentum.share(3)

    shared = adam.state[weights]["exp_avg"].clone()
    assert shared.tolist() == pytest.approx((own / 2).tolist(), rel=1e-4)
    momentum.share(0)  # Of another window without a part of its own.
    assert torch.equal(adam.state[weights]["exp_avg"], shared)


def test_steps_that_were_made_ahead_of_a_window_are_no_part_of_it() -> None:
    weights = nn.Parameter(torch.tensor([1.0, 1.0]))
    adam = AdamW([weights], lr=1e-2, weight_decay=0.0)
    momentum = SharedMomentum(adam)

    def step() -> torch.Tensor:
        weights.grad = torch.tensor([0.5, -2.0])
        adam.step()
        return weights.detach().clone()

    def share(steps: int, change: float) -> Any:
        with torch.no_grad():
            own, first = weights.clone(), momentum._last[0][0].weights
            weights.copy_(first - change)  # The line's, while the worker's own are ahead.
            momentum.share(steps)
            weights.copy_(own)
        return adam.state[weights]["exp_avg"].clone()

    step()  # The only one: a newcomer, who had no part in the window that is committed now.
    own = adam.state[weights]["exp_avg"].clone()
    assert torch.equal(share(0, 0.04), own)
    for _ in range(4):
        step()  # The fourth is ahead again.
    shared = share(4, 0.04)

    # Four steps of 1e-2 moved it by 0.04, so Adam's m / sqrt(v) was 1.
    size = (adam.state[weights]["exp_avg_sq"] / (1 - 0.999**5)).sqrt() + 1e-8
    assert shared.tolist() == pytest.approx((size * (1 - 0.9**5)).tolist(), rel=1e-4)
    assert len(momentum._rates) == 1


def test_a_part_of_the_model_goes_on_with_the_momentum_of_all_steps_since_its_exchange() -> None:
    first, second = (nn.Parameter(torch.tensor([1.0, 1.0])) for _ in range(2))
    adam = AdamW([first, second], lr=1e-2, weight_decay=0.0)
    momentum = SharedMomentum(adam)
    head = [each.detach().clone() for each in (first, second)]

    def window(number: int, steps: int = 2) -> None:
        for _ in range(steps):
            for weights in (first, second):
                weights.grad = torch.tensor([0.5, -2.0])
            adam.step()
        # Two workers made the same steps, and a third stood still.
        own = [each.detach().clone() for each in (first, second)]
        head[number] = head[number] + 2 / 3 * (own[number] - head[number])
        with torch.no_grad():
            for weights, line_s in zip((first, second), head, strict=True):
                weights.copy_(line_s)
            momentum.share(steps)
            for each, (weights, mine) in enumerate(zip((first, second), own, strict=True)):
                weights.copy_(head[each] if each == number else mine)

    def part_of(own: torch.Tensor, weights: nn.Parameter) -> Any:
        return (adam.state[weights]["exp_avg"] / own).tolist()

    window(0)
    own = adam.state[second]["exp_avg"].clone()
    assert part_of(own, first) == pytest.approx([2 / 3, 2 / 3], rel=1e-4)

    window(1)

    own *= (1 - 0.9**4) / (1 - 0.9**2)  # All gradients are alike.
    assert part_of(own, second) == pytest.approx([2 / 3, 2 / 3], rel=1e-4)
    momentum.share(0)  # The line went on without this worker, and moved nothing yet.
    kept = adam.state[first]["exp_avg"].clone()
    with torch.no_grad():
        first.sub_(1.0)
    momentum.share(0)
    assert torch.equal(adam.state[first]["exp_avg"], kept)


def test_a_state_from_elsewhere_is_no_change_of_the_line() -> None:
    weights = nn.Parameter(torch.tensor([1.0, 1.0]))
    adam = AdamW([weights], lr=1e-2, weight_decay=0.0)
    momentum = SharedMomentum(adam)

    def step() -> None:
        weights.grad = torch.tensor([0.5, -2.0])
        adam.step()

    step()
    arrived = copy.deepcopy(adam.state_dict())
    arrived["state"][0]["step"] += 100
    adam.load_state_dict(arrived)
    with torch.no_grad():
        weights.add_(5.0)
    step()
    own = adam.state[weights]["exp_avg"].clone()

    momentum.share(1)

    assert torch.equal(adam.state[weights]["exp_avg"], own)
    step()
    momentum.share(1)
    assert not torch.equal(adam.state[weights]["exp_avg"], own * 0.9)
