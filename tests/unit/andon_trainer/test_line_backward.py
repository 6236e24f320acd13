"""A script alone: what `line.backward` and `optimizer.step` do with losses and gradients."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from andon.protocol.order import Order
from andon_trainer import Line, LineHalted
from unit.andon_trainer.solo import BATCH, SAMPLES, data, model, plain_losses, prepared


def test_a_loop_of_five_changed_lines_trains_as_plain_pytorch_does(line: Line) -> None:
    net, optimizer, loader = prepared(line)
    losses = []

    for _epoch in line.epochs(2):
        for x, y, _ in loader:
            optimizer.zero_grad()
            line.backward(F.mse_loss(net(x), y))
            optimizer.step()
            losses.append(line.loss)

    expected, expected_net = plain_losses(2)
    assert losses == expected
    assert line.complete
    assert line.step == 6
    for ours, theirs in zip(net.parameters(), expected_net.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_what_the_model_got_right_is_counted_over_micro_batches(line: Line) -> None:
    net, optimizer, loader = prepared(line, micro=3)
    accuracies: list[float | None] = []
    assert line.accuracy is None

    for _epoch in line.epochs(1):
        for x, y, _ in loader:
            optimizer.zero_grad()
            line.backward(F.mse_loss(net(x), y), correct=torch.tensor(len(x) - 1))
            optimizer.step()
            if line.committed:
                accuracies.append(line.accuracy)

    assert accuracies == [5 / 8, 5 / 8, 4 / 6], "one wrong in each micro-batch of 3, 3 and 2"


def test_a_step_of_which_a_micro_batch_was_not_counted_has_no_accuracy(line: Line) -> None:
    net, optimizer, loader = prepared(line, micro=3)

    for body, (x, y, _) in enumerate(islice(loader, 3)):
        line.backward(F.mse_loss(net(x), y), correct=None if body == 1 else 1)
        optimizer.step()

    assert (line.step, line.accuracy) == (1, None)


@pytest.mark.parametrize("correct", [-1, BATCH + 1])
def test_more_right_samples_than_there_are_are_refused(line: Line, correct: int) -> None:
    net, _optimizer, loader = prepared(line)
    x, y, _ = next(iter(loader))

    with pytest.raises(ValueError, match=f"this batch has {BATCH}: not {correct}"):
        line.backward(F.mse_loss(net(x), y), correct=correct)


def test_a_loss_that_a_scaler_not_prepared_has_scaled_is_warned_of_once(
    line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    net, optimizer, loader = prepared(line)
    scale = torch.tensor(1024.0)

    for x, y, _ in islice(loader, 2):
        optimizer.zero_grad()
        line.backward(F.mse_loss(net(x), y) * scale)
        optimizer.step()

    (record,) = caplog.records
    assert "multiplied by 1024" in record.getMessage()
    assert "line.prepare(model, optimizer, scaler, loader)" in record.getMessage()


def test_a_scaler_given_to_backward_is_refused_with_where_it_belongs(line: Line) -> None:
    net, _optimizer, loader = prepared(line)
    x, y, _ = next(iter(loader))

    with pytest.raises(TypeError, match=r"line\.prepare\(model, optimizer, scaler, loader\)"):
        line.backward(F.mse_loss(net(x), y), scaler=torch.amp.GradScaler("cpu"))


def test_micro_batches_make_the_same_step_and_move_weights_once(line: Line) -> None:
    net, optimizer, loader = prepared(line, micro=3)
    bodies, moves = 0, 0

    for _epoch in line.epochs(2):
        for x, y, _ in loader:
            bodies += 1
            optimizer.zero_grad()
            line.backward(F.mse_loss(net(x), y))
            nn.utils.clip_grad_norm_(net.parameters(), 1e9)
            before = line.step
            optimizer.step()
            moves += line.step - before

    _, expected = plain_losses(2)
    assert (bodies, moves) == (2 * (3 + 3 + 2), 6)
    for ours, theirs in zip(net.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_clipping_in_every_loop_body_sees_the_complete_gradient_only(line: Line) -> None:
    net, optimizer, loader = prepared(line, micro=3)
    norms = []

    for _epoch in line.epochs(1):
        for x, y, _ in loader:
            optimizer.zero_grad()
            line.backward(F.mse_loss(net(x), y))
            norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.01)))
            optimizer.step()

    assert [norm > 0 for norm in norms] == [False, False, True] * 2 + [False, True]


def test_weights_follow_the_given_weight(line: Line) -> None:
    net, _optimizer, loader = prepared(line, micro=4)
    x, y, _ = data().tensors
    order = Order(3, 0, SAMPLES)
    first = torch.from_numpy(order.indices(0, 4))
    second = torch.from_numpy(order.indices(4, 8))
    twin = model()
    halves = F.mse_loss(twin(x[first]), y[first]), F.mse_loss(twin(x[second]), y[second])
    (0.25 * halves[0] + 0.75 * halves[1]).backward()  # type: ignore[no-untyped-call]  # torch's own

    batches = iter(loader)
    for weight in (1.0, 3.0):
        x_part, y_part, _ = next(batches)
        line.backward(F.mse_loss(net(x_part), y_part), weight=weight)

    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


def test_f_dp_003_a_nan_gradient_halts_before_the_weights_move(line: Line) -> None:
    net, optimizer, loader = prepared(line)
    weight = net.get_parameter("2.weight")
    before = [parameter.detach().clone() for parameter in net.parameters()]

    def plant(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[0, 4] = float("nan")
        return gradient

    weight.register_hook(plant)  # type: ignore[no-untyped-call]  # torch's own
    x, y, _ = next(iter(loader))
    with pytest.raises(LineHalted) as caught:
        line.backward(F.mse_loss(net(x), y))

    optimizer.step()
    halt = caught.value
    assert (halt.reason, halt.worker, halt.step) == ("non_finite_gradient", 0, 1)
    assert (halt.parameter, halt.element, halt.value) == ("2.weight", (0, 4), "nan")
    assert line.step == 0
    for now, then in zip(net.parameters(), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("without", [{0}, {1}, {3}, {0, 1, 3}, {0, 1, 2, 3}])
def test_a_nan_loss_of_weight_0_halts_nobody_and_adds_nothing(
    line: Line, without: set[int]
) -> None:
    net, optimizer, loader = prepared(line, micro=2)
    twin = model()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    weight = 2.0 * len({0, 1, 2, 3} - without)

    for number, (x, y, _) in enumerate(islice(loader, 4)):
        optimizer.zero_grad()
        counted = y[:0] if number in without else y  # the mean over no target is NaN
        line.backward(F.mse_loss(net(x)[: len(counted)], counted), weight=len(counted))
        if len(counted):
            (F.mse_loss(twin(x), y) * 2 / weight).backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()

    assert line.step == 1
    for ours, theirs, start in zip(net.parameters(), twin.parameters(), before, strict=True):
        moved = torch.zeros_like(start) if theirs.grad is None else 0.1 * theirs.grad
        assert torch.allclose(start - ours, moved, rtol=1e-4, atol=1e-7)


def test_a_loss_that_is_a_sum_is_warned_of_once_and_one_with_a_weight_never(
    line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    net, optimizer, loader = prepared(line)

    for step, (x, y, _) in enumerate(loader):
        loss = F.mse_loss(net(x), y, reduction="sum")
        line.backward(loss, weight=1.0 if step == 0 else None)
        assert len(caplog.messages) == min(step, 1)
        optimizer.step()


def test_a_model_that_was_moved_after_prepare_is_an_error_that_says_what_to_leave_out(
    line: Line,
) -> None:
    net, _optimizer, loader = prepared(line)

    net.to("meta")

    with pytest.raises(RuntimeError, match=r"leave model\.cuda\(\) and model\.to"):
        next(iter(loader))


class Wrapped(nn.parallel.DistributedDataParallel):
    """As a script makes one, without the process group that it takes."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


@pytest.mark.parametrize(
    ("objects", "said"),
    [
        (lambda: [nn.Sequential(Wrapped(model()))], r"leave Wrapped\(\.\.\.\) out"),
        (
            lambda: [model(), DataLoader(data(), BATCH), DataLoader(data(), BATCH)],
            r"iterate line\.split\(loader\) where you evaluate",
        ),
        (lambda: [model(), data()], "DataLoader, not TensorDataset$"),
    ],
    ids=["DDP inside", "two loaders", "a dataset"],
)
def test_what_prepare_does_not_take_is_refused_with_what_to_write(
    line: Line, objects: Callable[[], list[Any]], said: str
) -> None:
    with pytest.raises(TypeError, match=said):
        line.prepare(*objects())


def test_f_dp_003_a_nan_loss_halts(line: Line) -> None:
    net, _optimizer, loader = prepared(line)
    x, y, _ = next(iter(loader))

    with pytest.raises(LineHalted, match="loss") as caught:
        line.backward(F.mse_loss(net(x), y) * float("inf"))

    assert caught.value.reason == "non_finite_loss"
    assert caught.value.value == "inf"


def test_a_second_loss_of_a_batch_is_told_to_be_added_up(line: Line) -> None:
    net, _optimizer, loader = prepared(line)
    x, y, _ = next(iter(loader))
    line.backward(F.mse_loss(net(x), y))

    with pytest.raises(RuntimeError, match=r"go backward together, line\.backward\(loss \+ other"):
        line.backward(net(x).abs().mean())


def test_a_graph_that_is_retained_serves_the_script_again(line: Line) -> None:
    net, optimizer, loader = prepared(line)
    x, y, _ = next(iter(loader))
    x.requires_grad_()
    loss = F.mse_loss(net(x), y)

    line.backward(loss, retain_graph=True)
    (again,) = torch.autograd.grad(loss, x)
    optimizer.step()

    assert x.grad is not None
    assert torch.equal(again, x.grad)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("micro", [None, 3])
def test_gradients_of_inputs_get_a_graph_and_means_get_none(line: Line, micro: int | None) -> None:
    net, optimizer, loader = prepared(line, micro=micro)
    graphs = []

    for _epoch in line.epochs(1):
        for x, y, _ in loader:
            optimizer.zero_grad()
            x.requires_grad_()
            line.backward(F.mse_loss(net(x), y), create_graph=True)
            assert x.grad is not None
            graphs.append(x.grad.grad_fn is not None)
            assert not any(
                part.grad is not None and part.grad.requires_grad for part in net.parameters()
            )
            optimizer.step()

    _losses, twin = plain_losses(1)
    assert all(graphs)
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
