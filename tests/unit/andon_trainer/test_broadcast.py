"""Running statistics: rank 0's, bit for bit, once the step that they came with is committed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from andon_trainer.averaging.broadcast import HEAD_BYTES, RunningStatistics
from andon_trainer.core.calls import Call


def net(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    made = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=None).double()])
    made.register_buffer("table", torch.full((2,), float(rank)))
    for layer, dtype in zip(made, (torch.float32, torch.float64), strict=True):
        layer(torch.randn(5, 4, 2, 2, dtype=dtype))
    return made


def arrive(source: Call, there: Call) -> None:
    assert source.data is not None
    assert there.data is not None
    assert bytes(there.data[:HEAD_BYTES]) == bytes(source.data[:HEAD_BYTES])
    there.data[:] = source.data


def test_every_worker_takes_over_rank_0s_and_leaves_other_buffers_alone() -> None:
    first, second = net(0), net(1)
    ours, theirs = RunningStatistics([first]), RunningStatistics([second])
    before = {name: buffer.clone() for name, buffer in second.named_buffers()}
    source, there = ours.call(source=True, sequence=1), theirs.call(source=False, sequence=1)
    arrive(source, there)
    assert all(torch.equal(buffer, before[name]) for name, buffer in second.named_buffers())

    ours.load_arrived()
    theirs.load_arrived()

    for name, buffer in second.named_buffers():
        assert torch.equal(buffer, before[name] if name == "table" else first.get_buffer(name))


def test_what_came_with_a_void_step_is_not_taken_over() -> None:
    first, second = net(0), net(1)
    theirs = RunningStatistics([second])
    before = {name: buffer.clone() for name, buffer in second.named_buffers()}
    arrive(
        RunningStatistics([first]).call(source=True, sequence=1),
        theirs.call(source=False, sequence=1),
    )

    theirs.drop()
    theirs.load_arrived()

    assert all(torch.equal(buffer, before[name]) for name, buffer in second.named_buffers())


@pytest.mark.parametrize(
    "module",
    [nn.Linear(2, 2), nn.LayerNorm(2), nn.BatchNorm1d(2, track_running_stats=False)],
    ids=["linear", "layer norm", "untracked"],
)
def test_a_model_that_keeps_no_statistics_exchanges_none(module: nn.Module) -> None:
    assert not RunningStatistics([module])
