"""Mistakes of scripts: each gets an error that names its cause, and what to write instead."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from andon_trainer import Line
from unit.andon_trainer.solo import BATCH, data, model, prepared

Batches = Callable[[Line, Any], Iterable[Any]]
Mistake = Callable[[Line, Batches], None]


def bare(_line: Line, loader: Any) -> Iterable[Any]:
    return loader  # type: ignore[no-any-return]  # a loader


def in_epochs(line: Line, loader: Any) -> Iterable[Any]:
    for _ in line.epochs(1):
        yield from loader


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one, as papers have it: weights are pulled back to slow ones."""

    def __init__(self, inner: torch.optim.Optimizer, *, saves: bool = False) -> None:
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, {}
        parameters = inner.param_groups[0]["params"]
        self.slow = [part.detach().clone() for part in parameters]
        self._saves = saves
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's has two
        self.inner.step()
        self.steps += 1
        with torch.no_grad():
            for part, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                slow.lerp_(part, 0.5)
                part.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), **({"slow": self.slow} if self._saves else {})}


class Noam:
    """A wrapper that is no torch.optim.Optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def loop(line: Line, loader: Any, net: nn.Module, *steps: Callable[[], Any]) -> None:
    """A loop body as it should be, but for the steps."""
    for x, y, _ in loader:
        net.zero_grad()
        line.backward(F.mse_loss(net(x), y))
        for step in steps:
            step()


def by_hand(net: nn.Module) -> Callable[[], None]:
    def move() -> None:
        with torch.no_grad():
            for part in net.parameters():
                if part.grad is not None:
                    part -= 0.1 * part.grad  # type: ignore[misc]  # torch's own

    return move


def an_unprepared_scaler(line: Line, batches: Batches) -> None:
    net, optimizer, loader = prepared(line)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    x, y, _ = next(iter(batches(line, loader)))
    line.backward(scaler.scale(F.mse_loss(net(x), y)))
    scaler.step(optimizer)


def an_unprepared_scaler_of_a_loss_that_is_divided(line: Line, batches: Batches) -> None:
    net, _optimizer, loader = prepared(line)
    scaler = torch.amp.GradScaler("cpu")
    for x, y, _ in batches(line, loader):
        line.backward(net(x).square().mean() + scaler.scale(F.mse_loss(net(x), y)) / 2)


def another_loader(line: Line, batches: Batches) -> None:
    net, optimizer, _ = prepared(line)
    loop(line, batches(line, DataLoader(data(), BATCH)), net, optimizer.step)


def another_loader_and_torchs_backward(line: Line, batches: Batches) -> None:
    net, optimizer, _ = prepared(line)
    for x, y, _ in batches(line, DataLoader(data(), BATCH)):
        F.mse_loss(net(x), y).backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()


def weights_that_are_loaded_after_prepare(line: Line, batches: Batches) -> None:
    net, optimizer, loader = prepared(line)
    net.load_state_dict(model().state_dict())
    loop(line, batches(line, loader), net, optimizer.step)


def weights_that_are_initialised_after_prepare(line: Line, batches: Batches) -> None:
    net, optimizer, loader = prepared(line)
    net.get_parameter("0.weight").data.normal_()  # Torch does not count this write.
    loop(line, batches(line, loader), net, optimizer.step)


def an_sgd_of_its_own(line: Line, batches: Batches) -> None:
    net = model()
    net, loader = line.prepare(net, DataLoader(data(), BATCH))
    loop(line, batches(line, loader), net, by_hand(net))


def an_sgd_of_its_own_beside_a_prepared_one(line: Line, batches: Batches) -> None:
    net, _optimizer, loader = prepared(line)
    loop(line, batches(line, loader), net, by_hand(net))


def a_wrapper_of_which_the_inside_is_prepared(line: Line, batches: Batches) -> None:
    net, optimizer, loader = prepared(line, micro=4)
    loop(line, batches(line, loader), net, Lookahead(optimizer).step)


def a_step_that_is_skipped(line: Line, batches: Batches) -> None:
    net, _optimizer, loader = prepared(line)
    loop(line, batches(line, loader), net)


def a_wrapper_that_is_no_optimizer(line: Line, _batches: Batches) -> None:
    net = model()
    line.prepare(net, Noam(sgd(net)), DataLoader(data(), BATCH))


def no_loader(line: Line, batches: Batches) -> None:
    net = model()
    net, _optimizer = line.prepare(net, sgd(net))
    for x in batches(line, torch.ones(1, 1, 5)):
        line.backward(net(x).sum())


def no_loader_and_torchs_backward(line: Line, batches: Batches) -> None:
    net = model()
    net, optimizer = line.prepare(net, sgd(net))
    for x in batches(line, torch.ones(1, 1, 5)):
        net(x).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("batches", [bare, in_epochs])
@pytest.mark.parametrize(
    ("mistake", "cause", "remedy"),
    [
        (an_unprepared_scaler, "scaled by a GradScaler that was not prepared", "optimizer, scaler"),
        (an_unprepared_scaler_of_a_loss_that_is_divided, "scaled by a GradScaler", "r, scaler"),
        (
            another_loader,
            r"^line\.backward\(loss\) was called before any batch",
            "prepare returned",
        ),
        (another_loader_and_torchs_backward, r"^optimizer\.step\(\) .* before any", "returned"),
        (
            weights_that_are_loaded_after_prepare,
            r"^0\.weight was changed between line\.prepare and the first batch",
            r"before line\.prepare",
        ),
        (weights_that_are_initialised_after_prepare, r"^0\.weight was changed between", "initial"),
        (an_sgd_of_its_own, r"^0\.weight was changed by the loop body itself", r"optim\.SGD"),
        (an_sgd_of_its_own_beside_a_prepared_one, r"^0\.weight .* by the loop body", r"call its"),
        (a_wrapper_of_which_the_inside_is_prepared, "a wrapper around an opt", r"line\.committed"),
        (a_step_that_is_skipped, r"ended without optimizer\.step\(\)", "To leave a batch out"),
        (a_wrapper_that_is_no_optimizer, "not Noam", "the torch object that is inside"),
        (no_loader, r"given no DataLoader", r"line\.shards\(samples, batch_size\)"),
        (no_loader_and_torchs_backward, r"^0\.weight .* not joined the line yet", "the loader of"),
    ],
    ids=lambda each: each.__name__ if callable(each) else "",
)
def test_a_mistake_is_named_with_its_cause_and_what_works(
    line: Line, batches: Batches, mistake: Mistake, cause: str, remedy: str
) -> None:
    with pytest.raises((RuntimeError, TypeError), match=cause) as raised:
        mistake(line, batches)

    assert raised.match(remedy)


def test_a_batch_is_left_out_by_a_step_without_gradients(line: Line) -> None:
    net, optimizer, loader = prepared(line)
    before = [part.clone() for part in net.parameters()]

    loop(line, loader, net, optimizer.zero_grad, optimizer.step)

    assert line.step == 3
    assert all(map(torch.equal, net.parameters(), before))


@pytest.mark.parametrize("saves", [True, False])
def test_a_wrapped_optimizer_moves_on_commits_and_says_what_it_does_not_save(
    line: Line, caplog: pytest.LogCaptureFixture, *, saves: bool
) -> None:
    net = model()
    optimizer: Any = Lookahead(sgd(net), saves=saves)
    loader: Any = DataLoader(data(), BATCH)

    with caplog.at_level(logging.WARNING):
        net, optimizer, loader = line.prepare(net, optimizer, loader, micro_batch_size=3)
    loop(line, loader, net, optimizer.step)

    assert optimizer.steps == line.step == 3
    assert ["keeps tensors in `slow`" in each.getMessage() for each in caplog.records] == (
        [] if saves else [True]
    )


def test_weights_may_change_where_the_script_knows_that_all_workers_do(line: Line) -> None:
    net, optimizer, loader = prepared(line, micro=4)

    def clip() -> None:
        if line.committed:
            with torch.no_grad():
                net.get_parameter("0.weight").clamp_(-0.1, 0.1)

    loop(line, loader, net, optimizer.step, clip)

    assert line.step == 3
    assert net.get_parameter("0.weight").abs().max() <= 0.1


@pytest.mark.parametrize("inside", [True, False])
def test_a_wrapper_around_a_prepared_optimizer_is_told_of(
    line: Line, caplog: pytest.LogCaptureFixture, *, inside: bool
) -> None:
    net = model()
    optimizer: Any = sgd(net) if inside else Lookahead(sgd(net), saves=True)
    loader: Any = DataLoader(data(), BATCH)
    net, optimizer, loader = line.prepare(net, optimizer, loader)

    loop(line, loader, net, (Lookahead(optimizer) if inside else optimizer).step)

    told = ["Lookahead is around a prepared" in each.getMessage() for each in caplog.records]
    assert told == [True] * inside
