"""Wrapped and compiled models: they train, under the names of the original."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_model
from torch import nn
from torch._dynamo import compiled_autograd
from torch.utils.data import DataLoader

from andon_trainer import Line
from andon_trainer.averaging.tap import GradientTap
from andon_trainer.model.layout import plan_model
from andon_trainer.model.wrappers import unwrapped
from andon_trainer.state.weights import named_state, weights_digest
from unit.andon_trainer.solo import BATCH, data, model, plain_losses

Make = Callable[[nn.Module], nn.Module]


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


class Wrapper(nn.Module):
    """What a script may have around its model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x)


class Stack(nn.Module):
    """Equal layers, of which the layout makes a block each, and others."""

    def __init__(self, of_layer: Make = lambda layer: layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = of_layer(nn.Embedding(9, 4))
        self.positions = nn.Parameter(torch.zeros(4))
        layers = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.layers = nn.ModuleList(of_layer(layer) for layer in layers)
        self.plain = nn.ModuleList(of_layer(nn.Linear(4, 4)) for _ in range(2))
        self.norm = of_layer(nn.LayerNorm(4))
        self.head = of_layer(nn.Linear(4, 9))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embedding(x) + self.positions
        for layer in (*self.layers, *self.plain):
            x = layer(x)
        return self.head(self.norm(x))


def train(line: Line, net: nn.Module, call: Make = lambda net: net) -> list[float]:
    """Two epochs, as `plain_losses` has them; the losses."""
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loader: Any = DataLoader(data(), BATCH, shuffle=True)
    net, optimizer, loader = line.prepare(net, optimizer, loader)
    forward, losses = call(net), []
    for _ in line.epochs(2):
        for x, y, _ in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(forward(x), y)
            line.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("make", [compiled, in_place, Wrapper, lambda net: compiled(Wrapper(net))])
def test_a_wrapped_model_comes_back_as_itself_and_trains_as_its_original(
    make: Make, line: Line
) -> None:
    net = model()
    given = make(net)

    losses = train(line, given)

    expected, twin = plain_losses(2)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert weights_digest([unwrapped(given)]) == weights_digest([net])
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_model_may_be_compiled_after_it_was_prepared(line: Line) -> None:
    assert train(line, model(), compiled) == pytest.approx(plain_losses(2)[0], rel=1e-5)


@pytest.mark.parametrize("make", [compiled, Wrapper, lambda net: Wrapper(compiled(net))])
def test_the_layout_and_the_digest_are_those_of_the_original(make: Make) -> None:
    net = Stack()
    given = unwrapped(make(net))

    assert given is net
    assert plan_model([given]).layout == plan_model([Stack()]).layout
    assert weights_digest([given]) == weights_digest([Stack()])


def test_compiled_layers_change_no_name_and_no_block() -> None:
    net, twin = Stack(compiled), Stack()

    assert plan_model([net]).layout == plan_model([twin]).layout
    assert [name for name, _ in named_state([net])] == list(twin.state_dict())
    assert weights_digest([net]) == weights_digest([twin])


def test_a_checkpoint_of_a_compiled_model_loads_into_the_plain_one(tmp_path: Path) -> None:
    line = Line(seed=3, device="cpu", run_dir=str(tmp_path), checkpoint_every=6)
    net = model()
    train(line, compiled(net))
    line.close()

    twin = model()
    load_model(twin, str(tmp_path / "checkpoints" / "step-00000006" / "model.safetensors"))

    assert weights_digest([twin]) == weights_digest([net])


def test_an_average_of_weights_is_no_wrapper() -> None:
    average = torch.optim.swa_utils.AveragedModel(model())

    assert unwrapped(average) is average


def test_a_joined_model_is_known_by_its_wrapper_and_by_itself(line: Line) -> None:
    net = model()
    given = compiled(net)
    line.join(given)

    net(torch.ones(2, 5)).sum().backward()
    line.all_reduce_gradients(given)
    line.sync_params(given)
    line.all_reduce_gradients(net)

    assert line.should_commit()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # By torch, of its own.
@pytest.mark.parametrize("compiles_backward", [False, True])
def test_the_tap_delivers_what_a_compiled_backward_makes(compiles_backward: bool) -> None:
    net, twin = model(), model()
    plan = plan_model([net])
    tap, flats = GradientTap(plan, torch.device("cpu")), list[torch.Tensor]()
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    forward = torch.compile(net, backend="aot_eager")

    loss = forward(x).square().mean()
    tap.arm(lambda _block, flat: flats.append(flat.clone()), None, loss)
    backend = torch.compile(backend="eager")
    with compiled_autograd._enable(backend) if compiles_backward else nullcontext():
        loss.backward()
    tap.finish()

    twin(x).square().mean().backward()
    for flat, parameters in zip(flats, plan_model([twin]).parameters, strict=True):
        wanted = torch.cat([part.grad.reshape(-1) for part in parameters if part.grad is not None])
        assert torch.allclose(flat, wanted, rtol=1e-5, atol=1e-7)
