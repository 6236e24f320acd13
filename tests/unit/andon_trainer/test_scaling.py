"""A prepared GradScaler does to a step on the line what it does to one in plain PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from andon.protocol.order import Order
from andon_trainer import Line, LineHalted
from unit.andon_trainer.solo import BATCH, SAMPLES, data, model

Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]
Trajectory = tuple[list[float], list[torch.Tensor]]
"""The scale after each step, and the last weights."""


class Planted(nn.Module):
    """A model whose first weight's gradient is infinite in the forwards of some samples."""

    def __init__(self, net: nn.Module, rows: Sequence[int]) -> None:
        super().__init__()
        self.net = net
        self.rows = set(rows)

    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        if self.rows & set(numbers.tolist()):
            # 0 in forward, and an infinity in backward.
            weight = next(self.net.parameters())
            out = out + _Spoiled.apply(weight)  # type: ignore[no-untyped-call]  # torch's own
        return out


class _Spoiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> torch.Tensor:
        (weight,) = ctx.saved_tensors
        return torch.full_like(weight, torch.inf)


def sgd(net: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)]


def fused(net: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)]


def one_each(net: nn.Module) -> list[torch.optim.Optimizer]:
    first, second = list(net.parameters())[:2], list(net.parameters())[2:]
    return [torch.optim.SGD(first, lr=0.1), torch.optim.AdamW(second, lr=0.01)]


def scaler_of() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)


def prepared(line: Line, net: nn.Module | None = None) -> tuple[Any, Any, Any, Any]:
    """A script's model, optimizer, scaler and loader on a line."""
    net = net or model()
    return line.prepare(net, sgd(net)[0], scaler_of(), DataLoader(data(), BATCH))  # type: ignore[no-any-return]  # prepare gives back what it takes


def body(
    optimizers: list[torch.optim.Optimizer], scaler: Any, net: nn.Module, *, clip: bool
) -> None:
    """What stands after backward."""
    if clip:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


def plain(rows: Sequence[int], make: Optimizers, *, clip: bool, epochs: int = 2) -> Trajectory:
    net = Planted(model(), rows)
    optimizers, scaler, scales = make(net), scaler_of(), []
    x, y, numbers = data().tensors
    for epoch in range(epochs):
        order = Order(3, epoch, SAMPLES)
        for start in range(0, SAMPLES, BATCH):
            taken = torch.from_numpy(order.indices(start, min(start + BATCH, SAMPLES)))
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = F.mse_loss(net(x[taken], numbers[taken]), y[taken])
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch's own
            body(optimizers, scaler, net, clip=clip)
            scales.append(scaler.get_scale())
    return scales, [part.detach() for part in net.parameters()]


@pytest.fixture
def line() -> Iterator[Line]:
    with Line(seed=3) as opened:
        yield opened


def on_a_line(
    line: Line,
    rows: Sequence[int],
    make: Optimizers,
    *,
    clip: bool,
    micro: int | None = None,
    scaled: bool = False,
) -> tuple[Trajectory, list[bool]]:
    net: Any = Planted(model(), rows)
    optimizers, scaler, scales, overflowed = make(net), scaler_of(), [], []
    loader: Any = DataLoader(data(), BATCH, shuffle=True)
    net, scaler, loader, *optimizers = line.prepare(
        net, scaler, loader, *optimizers, micro_batch_size=micro
    )
    for _epoch in line.epochs(2):
        for x, y, numbers in loader:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = F.mse_loss(net(x, numbers), y)
            line.backward(scaler.scale(loss) if scaled else loss)
            body(optimizers, scaler, net, clip=clip)
            if line.committed:
                scales.append(scaler.get_scale())
                overflowed.append(line.overflowed)
    return (scales, [part.detach() for part in net.parameters()]), overflowed


def same(ours: Trajectory, theirs: Trajectory, *, exactly: bool = True) -> None:
    assert ours[0] == theirs[0]
    for mine, expected in zip(ours[1], theirs[1], strict=True):
        assert torch.equal(mine, expected) if exactly else torch.allclose(mine, expected, atol=1e-6)


ROWS = (5, 17)
"""Samples whose batches overflow; each is in one batch of each of the two epochs."""


@pytest.mark.parametrize("scaled", [False, True], ids=["as it is", "scaled by the script"])
@pytest.mark.parametrize("clip", [False, True], ids=["step", "unscale, clip, step"])
@pytest.mark.parametrize("make", [sgd, fused], ids=["sgd", "fused"])
def test_f_dp_005_steps_that_overflow_are_skipped_as_in_plain_pytorch(
    line: Line, make: Optimizers, *, clip: bool, scaled: bool
) -> None:
    expected = plain(ROWS, make, clip=clip)

    ours, overflowed = on_a_line(line, ROWS, make, clip=clip, scaled=scaled)

    same(ours, expected)
    assert 2 <= sum(overflowed) <= 4
    assert len(overflowed) == len(expected[0])


def test_f_dp_005_micro_batches_with_a_scaler_make_the_same_steps(line: Line) -> None:
    expected = plain(ROWS, sgd, clip=True)

    ours, overflowed = on_a_line(line, ROWS, sgd, clip=True, micro=3)

    same(ours, expected, exactly=False)
    assert any(overflowed)


def test_all_optimizers_skip_a_step_that_overflowed_in_the_gradients_of_one(line: Line) -> None:
    # In plain PyTorch the second one would step: here no weight moves, on any worker.
    net: Any = Planted(model(), range(SAMPLES))
    optimizers: Any = one_each(net)
    loader: Any = DataLoader(data(), BATCH)
    net, scaler, loader, *optimizers = line.prepare(net, scaler_of(), loader, *optimizers)
    before = [part.detach().clone() for part in net.parameters()]
    x, y, numbers = next(iter(loader))

    line.backward(F.mse_loss(net(x, numbers), y))
    body(optimizers, scaler, net, clip=False)

    assert (line.committed, line.overflowed, line.step) == (True, True, 1)
    assert scaler.get_scale() == 512.0
    for part, old in zip(net.parameters(), before, strict=True):
        assert torch.equal(part, old)


@pytest.mark.parametrize("scaled", [True, False], ids=["", "without a scaler"])
def test_several_optimizers_and_their_schedulers_step_as_in_plain_pytorch(
    line: Line, *, scaled: bool
) -> None:
    net: Any = Planted(model(), ())
    optimizers: Any = one_each(net)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in optimizers]
    scaler, loader = scaler_of(), DataLoader(data(), BATCH)
    given: list[Any] = [net, *[scaler] * scaled, *optimizers, *schedulers, loader]
    *_, prepared = line.prepare(*given, micro_batch_size=2)

    for x, y, numbers in prepared:
        line.backward(F.mse_loss(net(x, numbers), y))
        if scaled:
            body(optimizers, scaler, net, clip=True)
        for stepping in schedulers if scaled else (*optimizers, *schedulers):
            stepping.step()

    assert line.step == 3
    assert [each.param_groups[0]["lr"] for each in optimizers] == [0.1 / 8, 0.01 / 8]


def test_the_reported_loss_is_the_one_before_scaling(line: Line) -> None:
    net, optimizer, scaler, loader = prepared(line)
    pairs = []

    for x, y, _ in loader:
        one, other = F.mse_loss(net(x), y), net(x).square().mean()
        scaled = scaler.scale(one) / 2 + scaler.scale([other])[0]
        line.backward(scaled)
        body([optimizer], scaler, net, clip=False)
        pairs.append((line.loss, (one / 2 + other).item()))

    assert all(reported == pytest.approx(real, rel=1e-6) for reported, real in pairs)


def test_a_loss_of_thousands_of_terms_is_recognised(line: Line) -> None:
    net, optimizer, scaler, loader = prepared(line)
    x, y, _ = next(iter(loader))
    one = F.mse_loss(net(x), y)

    line.backward(sum((scaler.scale(one / 4096) for _ in range(4096)), torch.zeros(())))
    body([optimizer], scaler, net, clip=False)

    assert line.loss == pytest.approx(one.item(), rel=1e-4)


def test_the_scaler_returns_what_the_optimizer_does(line: Line) -> None:
    class Telling(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            return 7

    net: Any = model()
    loader: Any = DataLoader(data(), BATCH)
    optimizer: Any = Telling(net.parameters(), lr=0.1)
    net, optimizer, scaler, loader = line.prepare(net, optimizer, scaler_of(), loader)
    x, y, _ = next(iter(loader))
    line.backward(F.mse_loss(net(x), y))

    assert scaler.step(optimizer) == 7


def test_a_loss_of_which_a_part_is_scaled_is_refused_before_anything_happened(line: Line) -> None:
    net, optimizer, scaler, loader = prepared(line)
    x, y, _ = next(iter(loader))
    loss = F.mse_loss(net(x), y)

    with pytest.raises(ValueError, match="another is not: add the losses up first"):
        line.backward(scaler.scale(loss) + net(x).square().mean())

    line.backward(loss)
    body([optimizer], scaler, net, clip=False)
    assert line.step == 1


@pytest.mark.parametrize("clip", [True, False])
def test_overflows_in_a_row_halt_the_line_with_evidence_beyond_the_most_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture, *, clip: bool
) -> None:
    caplog.set_level(logging.WARNING)
    with Line(seed=3, max_overflows=2) as line, pytest.raises(LineHalted) as halted:
        on_a_line(line, range(SAMPLES), sgd, clip=clip)

    assert (halted.value.reason, halted.value.step) == ("non_finite_gradient", 3)
    assert "inf" in halted.value.value
    assert "2 steps in a row overflowed" in caplog.text


def test_an_overflow_at_a_scale_below_1_halts_the_line(line: Line) -> None:
    net: Any = Planted(model(), range(SAMPLES))
    scaler = torch.amp.GradScaler("cpu", init_scale=0.5)
    loader: Any = DataLoader(data(), BATCH)
    net, _optimizer, _scaler, loader = line.prepare(net, sgd(net)[0], scaler, loader)
    x, y, numbers = next(iter(loader))

    with pytest.raises(LineHalted, match="sent inf"):
        line.backward(F.mse_loss(net(x, numbers), y))


def test_a_loss_that_is_not_finite_halts_with_a_scaler_too(line: Line) -> None:
    net, _optimizer, _scaler, loader = prepared(line)
    x, y, _ = next(iter(loader))

    with pytest.raises(LineHalted, match="a loss of nan"):
        line.backward(F.mse_loss(net(x), y) * torch.nan)


def test_a_scaler_that_is_switched_off_changes_nothing(line: Line) -> None:
    net: Any = model()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    loader: Any = DataLoader(data(), BATCH, shuffle=True)
    net, optimizer, given, loader = line.prepare(net, sgd(net)[0], scaler, loader)

    for _epoch in line.epochs(1):
        for x, y, _ in loader:
            optimizer.zero_grad()
            line.backward(scaler.scale(F.mse_loss(net(x), y)))
            body([optimizer], scaler, net, clip=False)

    assert given is scaler
    assert line.step == 3


def scaled_step(line: Line) -> tuple[Any, Any, Any]:
    """A script in the middle of its first loop body, after backward."""
    net, optimizer, scaler, loader = prepared(line)
    batches = iter(loader)
    x, y, _ = next(batches)
    line.backward(F.mse_loss(net(x), y))
    return optimizer, scaler, batches


def test_a_step_past_the_scaler_is_refused_before_its_commit(line: Line) -> None:
    optimizer, scaler, _batches = scaled_step(line)

    with pytest.raises(RuntimeError, match=r"call scaler\.step\(optimizer\)"):
        optimizer.step()

    assert line.step == 0
    scaler.step(optimizer)
    assert line.step == 1


def test_a_closure_is_refused_before_the_commit(line: Line) -> None:
    optimizer, scaler, _batches = scaled_step(line)

    with pytest.raises(ValueError, match="a closure would evaluate the loss again"):
        scaler.step(optimizer, lambda: 0.0)

    assert line.step == 0


def test_a_body_that_unscales_and_does_not_step_is_refused(line: Line) -> None:
    optimizer, scaler, batches = scaled_step(line)
    scaler.unscale_(optimizer)

    with pytest.raises(RuntimeError, match=r"without scaler\.step\(optimizer\)"):
        next(batches)


def test_a_body_without_update_is_refused(line: Line) -> None:
    optimizer, scaler, batches = scaled_step(line)
    scaler.step(optimizer)

    with pytest.raises(RuntimeError, match=r"without scaler\.update\(\)"):
        next(batches)


def test_float16_weights_and_a_scaler_are_refused_when_they_are_prepared(line: Line) -> None:
    net = model().half()

    with pytest.raises(ValueError, match=r"0\.weight is float16.*torch\.autocast"):
        line.prepare(net, sgd(net)[0], scaler_of(), DataLoader(data(), BATCH))


def test_a_second_scaler_is_refused(line: Line) -> None:
    net = model()

    with pytest.raises(TypeError, match="takes one GradScaler"):
        line.prepare(net, sgd(net)[0], scaler_of(), scaler_of(), DataLoader(data(), BATCH))


def test_a_closed_line_leaves_the_scaler_as_it_was() -> None:
    scaler = scaler_of()
    before = dict(vars(scaler))
    net = model()
    with Line(seed=3) as line:
        line.prepare(net, sgd(net)[0], scaler, DataLoader(data(), BATCH))
        assert vars(scaler).keys() > before.keys()

    assert vars(scaler).keys() == before.keys()
    # And works without a line.
    optimizer = sgd(net)[0]
    x, y, _ = data().tensors
    scaler.scale(F.mse_loss(net(x), y)).backward()  # type: ignore[no-untyped-call]  # torch's own
    body([optimizer], scaler, net, clip=True)
    assert scaler.get_scale() == 1024.0


def test_scale_and_overflows_in_a_row_are_in_the_checkpoint(tmp_path: Path) -> None:
    with Line(seed=3, run_dir=tmp_path, checkpoint_every=1, max_overflows=3) as line:
        net, optimizer, scaler, loader = prepared(line, Planted(model(), range(SAMPLES)))
        for _, (x, y, numbers) in zip(range(3), loader, strict=False):
            line.backward(F.mse_loss(net(x, numbers), y))
            body([optimizer], scaler, net, clip=False)

    written = line.last_checkpoint
    assert written is not None
    with Line(seed=3, run_dir=tmp_path / "later", resume=written, max_overflows=3) as again:
        net, optimizer, scaler, loader = prepared(again, Planted(model(), range(SAMPLES)))
        assert (again.step, scaler.get_scale()) == (2, 256.0)
        x, y, numbers = next(batches := iter(loader))
        again.backward(F.mse_loss(net(x, numbers), y))
        body([optimizer], scaler, net, clip=False)
        assert again.step == 3
        # That was the third overflow in a row, and the last that is skipped.
        x, y, numbers = next(chain(batches, loader))
        with pytest.raises(LineHalted):
            again.backward(F.mse_loss(net(x, numbers), y))


def test_a_run_without_a_scaler_goes_on_with_one_that_is_switched_off(tmp_path: Path) -> None:
    written: list[Path | None] = []
    for scalers in ([], [torch.amp.GradScaler("cpu", enabled=False)]):
        resume = written[0] if written else None
        with Line(seed=3, run_dir=tmp_path, checkpoint_every=1, resume=resume) as line:
            net: Any = model()
            loader: Any = DataLoader(data(), BATCH)
            net, optimizer, loader, *_ = line.prepare(net, sgd(net)[0], loader, *scalers)
            assert line.step == len(written)
            for _, (x, y, _numbers) in zip(range(2), loader, strict=False):
                line.backward(F.mse_loss(net(x), y))
                optimizer.step()
        written.append(line.last_checkpoint)


def test_batches_that_are_accumulated_are_skipped_together_if_one_overflows(line: Line) -> None:
    net: Any = Planted(model(), (1,))
    loader: Any = DataLoader(data(), 4)
    net, optimizer, scaler, loader = line.prepare(net, sgd(net)[0], scaler_of(), loader)
    seen = []

    for x, y, numbers in loader:
        with line.accumulate(2):
            before = [part.detach().clone() for part in net.parameters()]
            optimizer.zero_grad()
            line.backward(F.mse_loss(net(x, numbers), y))
            body([optimizer], scaler, net, clip=True)
            moved = any(
                not torch.equal(part, old)
                for part, old in zip(net.parameters(), before, strict=True)
            )
            seen.append((line.committed, line.overflowed, moved, scaler.get_scale()))

    assert seen[:4] == [
        (False, False, False, 1024.0),
        (True, True, False, 512.0),
        (False, False, False, 512.0),
        (True, False, True, 512.0),
    ]
