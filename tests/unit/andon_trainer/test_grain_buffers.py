"""Buffers of grains: each starts from the head's, and their statistics are added along the tree."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from andon.protocol.grains import Grains
from andon.protocol.records import PositionRange
from andon_trainer.averaging.grain_buffers import GrainBuffers

GRAINS = Grains(PositionRange(0, 10), 4)


def step(layer: nn.Module, *weights: float) -> GrainBuffers:
    buffers = GrainBuffers([layer])
    buffers.begin(GRAINS)
    for grain, weight in enumerate(weights):
        buffers.next_grain()
        draw = torch.Generator().manual_seed(grain)
        layer(torch.randn(len(GRAINS.positions(grain)), 3, generator=draw))
        buffers.take(grain, weight)
    return buffers


def test_the_commit_sets_the_mean_of_the_values_that_grains_made() -> None:
    layer = nn.BatchNorm1d(3)
    alone = []
    for grain in range(3):
        other = nn.BatchNorm1d(3)
        draw = torch.Generator().manual_seed(grain)
        other(torch.randn(len(GRAINS.positions(grain)), 3, generator=draw))
        alone.append(other.running_mean)

    step(layer, 4.0, 4.0, 2.0).committed()

    a, b, c = alone
    assert a is not None
    assert b is not None
    assert c is not None
    assert layer.running_mean is not None
    assert torch.equal(layer.running_mean, ((a + b) + c * 0.5) / 2.5)
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("weights", [(4.0, 4.0, 2.0), (0.0, 0.0, 0.0)])
def test_statistics_that_no_grain_counts_for_keep_their_bits(weights: tuple[float, ...]) -> None:
    layer = nn.BatchNorm1d(3)
    layer.running_mean = torch.tensor([0.1, 1 / 3, 7.7])
    if weights[0]:
        layer.eval()  # It does not move them: three times a number over three is another one.
    before = layer.running_mean.clone()

    step(layer, *weights).committed()

    assert torch.equal(layer.running_mean, before)
    assert layer.num_batches_tracked == 0


def test_a_void_step_leaves_no_trace() -> None:
    layer = nn.BatchNorm1d(3)

    step(layer, 4.0, 4.0).put_away()

    assert layer.running_mean is not None
    assert layer.running_mean.tolist() == [0, 0, 0]
    assert layer.num_batches_tracked == 0


def test_a_buffer_that_forward_changes_is_refused_by_name() -> None:
    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> None:
            self.last = x[0]

    buffers = step(Queue(), 4.0)

    with pytest.raises(RuntimeError, match=r"buffer last, .*same_bits"):
        buffers.check()
