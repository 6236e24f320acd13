"""Schedulers and learning rates: they move with commits, and with nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    ExponentialLR,
    LRScheduler,
    SequentialLR,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from andon_trainer import Line
from andon_trainer.script.gates import StepIdentity, gate_scheduler

STEPS = 4
Body = Callable[[torch.Tensor], None]


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line(device="cpu")
    yield line
    line.close()


def sgd() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def batches() -> Any:
    return DataLoader(TensorDataset(torch.ones(8 * STEPS, 3)), 8)


def rate(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


def train(line: Line, model: nn.Module, loader: Any, body: Body) -> None:
    for _epoch in line.epochs(1):
        for (x,) in loader:
            body(F.mse_loss(model(x), torch.zeros(len(x), 1)) * 0)


def sequential(optimizer: torch.optim.Optimizer) -> LRScheduler:
    warm, cool = ConstantLR(optimizer, 0.5, 2), ExponentialLR(optimizer, 0.9)
    return SequentialLR(optimizer, [warm, cool], [2])


def chained(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return ChainedScheduler([ConstantLR(optimizer, 0.5, 2), ExponentialLR(optimizer, 0.9)])


@pytest.mark.parametrize("make", [sequential, chained])
def test_a_scheduler_made_of_others_moves_as_in_pytorch(
    line: Line, make: Callable[[torch.optim.Optimizer], LRScheduler]
) -> None:
    _, plain = sgd()
    twin = make(plain)
    expected = []
    for _ in range(STEPS):
        plain.step()
        twin.step()
        expected.append(rate(plain))
    model, optimizer = sgd()
    model, optimizer, scheduler, loader = line.prepare(
        model, optimizer, make(optimizer), batches(), micro_batch_size=4
    )
    seen: list[float] = []

    def body(loss: torch.Tensor) -> None:
        line.backward(loss)
        optimizer.step()
        scheduler.step()
        if line.committed:
            seen.append(rate(optimizer))

    train(line, model, loader, body)

    assert seen == expected


def test_a_scheduler_made_after_prepare_is_refused_at_its_first_step(line: Line) -> None:
    model, optimizer = sgd()
    model, optimizer, loader = line.prepare(model, optimizer, batches())
    scheduler = ExponentialLR(optimizer, 0.9)

    def body(loss: torch.Tensor) -> None:
        line.backward(loss)
        optimizer.step()
        scheduler.step()

    with pytest.raises(RuntimeError, match=r"was not prepared: make it before line\.prepare"):
        train(line, model, loader, body)


def test_a_rate_that_moves_with_each_micro_batch_is_refused_before_the_commit(line: Line) -> None:
    model, optimizer = sgd()
    model, optimizer, loader = line.prepare(model, optimizer, batches(), micro_batch_size=4)

    def body(loss: torch.Tensor) -> None:
        line.backward(loss)
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9

    with pytest.raises(RuntimeError, match=r"from \[1\.0\] to \[0\.9\] .* line\.step"):
        train(line, model, loader, body)
    assert line.step == 0


@pytest.mark.parametrize("before", [True, False], ids=["before backward", "after backward"])
def test_a_rate_that_follows_the_steps_is_right(line: Line, before: bool) -> None:
    model, optimizer = sgd()
    model, optimizer, loader = line.prepare(model, optimizer, batches(), micro_batch_size=4)

    def follow() -> None:
        optimizer.param_groups[0]["lr"] = 1.0 / (1 + line.step)

    def body(loss: torch.Tensor) -> None:
        if before:
            follow()
        line.backward(loss)
        if not before:
            follow()
        optimizer.step()

    train(line, model, loader, body)

    assert line.step == STEPS


def ema_of(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))  # type: ignore[no-untyped-call]  # torch's own


@pytest.mark.parametrize("known", ["registered", "prepared"])
def test_an_ema_that_moves_with_each_micro_batch_is_refused(line: Line, known: str) -> None:
    model, optimizer = sgd()
    ema = ema_of(model)
    if known == "registered":
        line.register("ema", ema)
    others = [ema] if known == "prepared" else []
    model, *_, optimizer, loader = line.prepare(
        model, *others, optimizer, batches(), micro_batch_size=4
    )

    def body(loss: torch.Tensor) -> None:
        line.backward(loss)
        optimizer.step()
        ema.update_parameters(model)

    with pytest.raises(RuntimeError, match=r"module\.\w+ was changed .*if line\.committed"):
        train(line, model, loader, body)


class Skipping:
    """A keeper whose last step was skipped."""

    committed = False
    identity = StepIdentity(5, 0, 2)
    moves = 5
    learning_rate_scale = 1.0
    plan_steps: range | None = None

    def try_commit(self) -> bool:
        return False

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        raise AssertionError("no step was made")


def test_a_scheduler_that_steps_once_an_epoch_acts_though_the_last_batch_was_skipped() -> None:
    _, optimizer = sgd()
    scheduler, keeper = ExponentialLR(optimizer, 0.5), Skipping()
    gate_scheduler(scheduler, keeper)
    optimizer.step()

    scheduler.step()
    alone = rate(optimizer)
    keeper.moves = 8
    for _ in range(2):
        scheduler.step()

    assert alone == 1.0
    assert rate(optimizer) == 0.5
