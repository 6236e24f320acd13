"""Running statistics: rank 0's, bit for bit, once the step that they came with is committed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from andon_trainer.averaging.broadcast import RunningStatistics
from andon_trainer.core.calls import Bytes
from unit.andon_trainer.ring_bench import layout_of
from unit.andon_trainer.seat import Seat


def net(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    made = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=None).double()])
    made.register_buffer("table", torch.full((2,), float(rank)))
    for layer, dtype in zip(made, (torch.float32, torch.float64), strict=True):
        layer(torch.randn(5, 4, 2, 2, dtype=dtype))
    return made


@pytest.mark.parametrize("committed", [True, False])
def test_every_worker_takes_over_rank_0s_of_a_committed_step_and_leaves_other_buffers_alone(
    *, committed: bool
) -> None:
    first, second = net(0), net(1)
    before = {name: buffer.clone() for name, buffer in second.named_buffers()}
    layout, wire = layout_of([3]), dict[int, Bytes]()
    seats = Seat(layout, 0), Seat(layout, 1)
    both = [RunningStatistics([each]) for each in (first, second)]
    for seat, statistics in zip(seats, both, strict=True):
        seat.wire = wire
        assert statistics.exchange(seat.averaging)
    assert all(torch.equal(buffer, before[name]) for name, buffer in second.named_buffers())

    for statistics in both:
        if not committed:
            statistics.drop()
        statistics.load_arrived()

    for name, buffer in second.named_buffers():
        ours = committed and name != "table"
        assert torch.equal(buffer, first.get_buffer(name) if ours else before[name])


@pytest.mark.parametrize(
    "module",
    [nn.Linear(2, 2), nn.LayerNorm(2), nn.BatchNorm1d(2, track_running_stats=False)],
    ids=["linear", "layer norm", "untracked"],
)
def test_a_model_that_keeps_no_statistics_exchanges_none(module: nn.Module) -> None:
    assert not RunningStatistics([module])
