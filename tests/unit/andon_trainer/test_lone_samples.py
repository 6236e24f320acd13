"""Lone samples: BatchNorm takes a share of one sample, and nothing else changes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon_trainer import Line
from andon_trainer.model.lone_samples import LoneSamples
from unit.andon_trainer.local_bench import LocalBench
from unit.andon_trainer.step_bench import StepBench

SAMPLES = 9


def normalised(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), *middle, nn.Linear(6, 2))


class Picture(nn.Module):
    """A BatchNorm2d on maps of `side` by `side`."""

    def __init__(self, side: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pool = nn.AdaptiveAvgPool2d(side)
        self.conv = nn.Conv2d(1, 3, 1)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps: torch.Tensor = self.norm(self.conv(self.pool(x)))
        return maps.mean((2, 3))


def train(line: Line, model: nn.Module, *, size: int = 4, **options: Any) -> list[int]:
    """Trains for an epoch of 9 samples; the sizes of its batches."""
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, torch.arange(SAMPLES) % 2)
    loader: Any = DataLoader(data, size)
    model, optimizer, loader = line.prepare(model, optimizer, loader, **options)
    sizes = []
    for _ in line.epochs(1):
        for inputs, labels in loader:
            sizes.append(len(inputs))
            optimizer.zero_grad()
            line.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()
    return sizes


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_a_last_batch_of_one_sample_trains_through_a_batch_norm(
    line: Line, caplog: pytest.LogCaptureFixture, *, compiled: bool
) -> None:
    norm = nn.BatchNorm1d(6)
    model = normalised(norm)
    if compiled:
        model.compile(backend="eager")

    sizes = train(line, model)

    assert sizes == [4, 4, 1]
    assert int(norm.num_batches_tracked or 0) == 2
    assert norm.training
    assert not norm._forward_pre_hooks
    assert [record.message.partition(",")[0] for record in caplog.records] == [
        "a share of one sample: the BatchNorm '1'"
    ]


def test_a_lone_sample_is_normalised_by_the_running_statistics_and_has_their_gradient() -> None:
    model, twin = normalised(nn.BatchNorm1d(6)), normalised(nn.BatchNorm1d(6))
    for each in (model, twin):
        each(torch.randn(8, 4, generator=torch.Generator().manual_seed(2)))
    x = torch.ones(1, 4)

    with LoneSamples([model], wanted=False).allowed(1):
        model(x).sum().backward()
    twin.eval()
    twin(x).sum().backward()

    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad), name
    for ours_, theirs_ in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(ours_, theirs_)


@pytest.mark.parametrize(("side", "counted"), [(1, 0), (2, 1)])
def test_an_image_trains_as_ever_unless_its_map_is_one_pixel(side: int, counted: int) -> None:
    model = Picture(side)

    with LoneSamples([model], wanted=False).allowed(1):
        model(torch.randn(1, 1, 4, 4)).sum().backward()

    assert int(model.norm.num_batches_tracked or 0) == counted
    assert model.norm.weight.grad is not None


def test_a_layer_is_in_training_mode_again_after_its_forward_raised() -> None:
    norm = nn.BatchNorm1d(6)
    model = normalised(norm)

    lone = LoneSamples([model], wanted=False)
    with pytest.raises(RuntimeError, match="running_mean"), lone.allowed(1):
        norm(torch.ones(1, 5))

    assert norm.training


def test_a_layer_in_eval_mode_stays_in_it() -> None:
    norm = nn.BatchNorm1d(6)
    model = normalised(norm)
    norm.eval()

    with LoneSamples([model], wanted=False).allowed(1):
        model(torch.ones(1, 4))

    assert not norm.training


def test_a_layer_without_running_statistics_says_what_to_write() -> None:
    model = normalised(nn.BatchNorm1d(6, track_running_stats=False))

    lone = LoneSamples([model], wanted=False)
    with pytest.raises(ValueError, match=r"1 got one value .* drop_last=True"), lone.allowed(1):
        model(torch.ones(1, 4))


@pytest.mark.parametrize("options", [{"size": 1}, {"micro_batch_size": 1}])
def test_a_script_that_asks_for_single_samples_gets_torchs_own_error(
    line: Line, options: dict[str, int]
) -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        train(line, normalised(nn.BatchNorm1d(6)), **options)


def test_models_are_compiled_again_after_lone_samples_that_ended_in_any_order() -> None:
    torch.compiler.reset()
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled: Any = torch.compile(nn.Linear(4, 2), backend=backend)
    lone = LoneSamples([normalised(nn.BatchNorm1d(6))], wanted=False)
    first, second = ExitStack(), ExitStack()
    first.enter_context(lone.allowed(1))
    second.enter_context(lone.allowed(1))

    first.close()
    compiled(torch.ones(2, 4))
    assert not graphs

    second.close()
    compiled(torch.ones(2, 4))
    assert len(graphs) == 1


def test_a_lost_workers_last_position_is_computed_beside_the_kept_gradient() -> None:
    bench = StepBench(middle=nn.BatchNorm1d(5))
    bench.assign((0, 6), end="void", roster=(0,))
    bench.assign((0, 7), end="commit", attempt=1, roster=(0,))

    bench.run()

    assert [len(samples) for samples in bench.computed] == [6, 1]
    assert bench.member.reports[-1].samples == 7


def test_a_local_step_may_have_one_sample() -> None:
    norm = nn.BatchNorm1d(5)
    bench = LocalBench(middle=norm)
    bench.assign((0, 1), end="commit")

    bench.run()

    assert [len(samples) for samples in bench.computed] == [1]
    assert int(norm.num_batches_tracked or 0) == 0
