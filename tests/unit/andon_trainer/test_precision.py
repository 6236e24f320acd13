"""Models and losses of other types than float32 train as in plain PyTorch, or say why not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon.protocol.order import Order
from andon_trainer import Line, LineHalted
from unit.andon_trainer.local_bench import LocalBench
from unit.andon_trainer.solo import BATCH, SAMPLES, data, model

TOKENS = 50_000
"""The weight of one sample: sums of products with it do not fit into float16."""


@pytest.fixture
def line() -> Iterator[Line]:
    with Line(seed=3) as opened:
        yield opened


def mixed() -> nn.Module:
    """Layers in three types, as where a normalization stays in float32."""
    net = model()
    net[0].bfloat16()  # type: ignore[index]  # a Sequential
    net[2].double()  # type: ignore[index]
    return Casting(net)


class Casting(nn.Module):
    """Casts to each layer's type."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.net[0](x.bfloat16()))
        out: torch.Tensor = self.net[2](hidden.double())
        return out


def autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def trained(
    line: Line | None,
    net: nn.Module,
    cast: torch.dtype | None,
    *,
    micro: int | None = None,
    weight: int | None = None,
) -> list[torch.Tensor]:
    """The weights after an epoch; with None by plain PyTorch."""
    given: Any = net
    optimizer = torch.optim.SGD(given.parameters(), lr=0.05)
    dtype = next(given.parameters()).dtype if cast is None else torch.float32

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with autocast(cast):
            out = given(x.to(dtype))
            return F.mse_loss(out, y.to(out.dtype))

    if line is None:
        x, y, _ = data().tensors
        order = Order(3, 0, SAMPLES)
        for start in range(0, SAMPLES, BATCH):
            rows = torch.from_numpy(order.indices(start, min(start + BATCH, SAMPLES)))
            optimizer.zero_grad()
            loss_of(x[rows], y[rows]).backward()  # type: ignore[no-untyped-call]  # torch's own
            optimizer.step()
    else:
        loader: Any = DataLoader(data(), BATCH, shuffle=True)
        given, optimizer, loader = line.prepare(given, optimizer, loader, micro_batch_size=micro)
        for x, y, _ in loader:
            optimizer.zero_grad()
            line.backward(loss_of(x, y), weight=None if weight is None else weight * len(x))
            optimizer.step()
    return [part.detach() for part in given.parameters()]


MODELS = {
    "autocast bfloat16": (model, torch.bfloat16),
    "autocast float16": (model, torch.float16),
    "bfloat16": (lambda: model().bfloat16(), None),
    "float16": (lambda: model().half(), None),
    "float64": (lambda: model().double(), None),
    "mixed": (mixed, None),
}


@pytest.mark.parametrize("name", MODELS)
def test_f_dp_005_a_model_of_another_type_trains_as_in_plain_pytorch(line: Line, name: str) -> None:
    make, cast = MODELS[name]
    expected = trained(None, make(), cast)

    ours = trained(line, make(), cast)

    for mine, other in zip(ours, expected, strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)


@pytest.mark.parametrize("weight", [None, TOKENS], ids=["samples", "tokens"])
def test_micro_batches_of_float16_add_up_without_overflowing(
    line: Line, weight: int | None
) -> None:
    expected = trained(None, model().half(), None)

    ours = trained(line, model().half(), None, micro=1, weight=weight)

    for mine, other in zip(ours, expected, strict=True):
        assert torch.allclose(mine, other, atol=2e-3)


@pytest.mark.parametrize("weights", [(1, 50_000, 3), (0, 0, 60_000), (60_000, 0, 1e-9), (1, 1, 1)])
def test_uneven_weights_make_the_weighted_mean_in_float16(
    line: Line, weights: tuple[float, ...]
) -> None:
    net: Any = nn.Linear(1, 1, bias=False).half()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    x = torch.tensor([[1.0], [2.0], [4.0]]).half()
    loader: Any = DataLoader(TensorDataset(x, torch.arange(3)), 3)
    net, optimizer, loader = line.prepare(net, optimizer, loader, micro_batch_size=1)
    start = float(net.weight.detach())

    for value, index in loader:
        line.backward(net(value).sum(), weight=weights[int(index)])
        optimizer.step()

    mean = sum(w * float(v) for w, v in zip(weights, x.flatten(), strict=True)) / sum(weights)
    assert float(net.weight.detach()) == pytest.approx(start - mean, abs=5e-3)


def test_a_float16_gradient_that_overflows_halts_and_names_the_parameter(line: Line) -> None:
    net: Any = model().half()
    loader: Any = DataLoader(data(), BATCH)
    net, _optimizer, loader = line.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
    x, y, _ = next(iter(loader))

    with pytest.raises(LineHalted) as halted:
        line.backward(F.mse_loss(net(x.half()), y.half()).float() * 1e6)

    assert halted.value.reason == "non_finite_gradient"
    assert halted.value.parameter.startswith("0.")


@pytest.mark.parametrize("fused", [False, True])
def test_a_local_step_that_overflows_is_skipped_by_this_workers_scaler_alone(
    monkeypatch: pytest.MonkeyPatch, *, fused: bool
) -> None:
    # Torch's fused SGD makes the momentum of a step that it then skips of memory that nobody has
    # written, which may hold anything.
    monkeypatch.setattr(torch, "empty_like", lambda like, **_: torch.full_like(like, torch.nan))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    bench = LocalBench(scaler=scaler, fused=fused)
    bench.assign((0, 8), end="commit")
    start = bench.weights
    bodies: list[int] = []
    for part in bench.model.parameters():
        part.register_hook(lambda gradient: gradient * (torch.inf if not bodies else 1.0))  # type: ignore[no-untyped-call]

    for body in bench.bodies():
        bodies.append(body)
        if body == 0:
            assert all(torch.equal(a, b) for a, b in zip(start, bench.weights, strict=True))

    assert len(bodies) == 2
    assert bench.member.position.step == 1
    assert not bench.member.reports[0].overflow
    assert scaler.get_scale() == 512.0
    assert all(torch.isfinite(part).all() for part in bench.weights)
    assert not all(torch.equal(a, b) for a, b in zip(start, bench.weights, strict=True))


def test_a_round_without_local_steps_leaves_the_scaler_alone() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    bench = LocalBench(scaler=scaler)
    bench.assign(end="commit")

    bench.run()

    assert bench.member.position.step == 1
    assert scaler.get_scale() == 1024.0
