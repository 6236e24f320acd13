"""What would move one worker's weights apart is refused by name, alone too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon_trainer import Line


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line(seed=3, device="cpu")
    yield line
    line.close()


def batches() -> Any:
    torch.manual_seed(0)
    x = torch.randn(8, 5)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def on_gradient(part: nn.Parameter, call: Callable[[Any], None]) -> None:
    part.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]  # torch's own


def backward(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([part for module in modules for part in module.parameters()], lr=0.1)


def test_a_parameter_outside_the_prepared_models_is_refused(line: Line) -> None:
    model, head = net(), nn.Linear(1, 3)

    with pytest.raises(ValueError, match=r"parameter 4 of group 0 of the SGD, of shape \(3, 1\)"):
        line.prepare(model, sgd(model, head), batches())


def test_a_head_and_a_lone_parameter_train_once_they_are_prepared(line: Line) -> None:
    model, head, scale = net(), nn.Linear(1, 1), nn.Parameter(torch.ones(()))
    scales = nn.ParameterList([scale])
    optimizer = sgd(model, head, scales)
    *_, loader = line.prepare(model, head, scales, optimizer, batches())

    for x, y in loader:
        line.backward(F.mse_loss(scale * head(model(x)), y))
        optimizer.step()

    assert line.step == 2
    assert scale.item() != 1.0


def test_a_frozen_stranger_is_no_matter(line: Line) -> None:
    model, teacher = net(), net().requires_grad_(False)

    line.prepare(model, sgd(model, teacher), batches())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (torch.optim.LBFGS, "LBFGS evaluates the loss several times .* AdamW"),
        (torch.optim.SparseAdam, "SparseAdam needs sparse gradients.* use Adam"),
    ],
)
def test_an_optimizer_that_averages_can_not_serve_is_refused(
    line: Line, kind: Any, words: str
) -> None:
    model = net()

    with pytest.raises(ValueError, match=words):
        line.prepare(model, kind(model.parameters()), batches())


def test_a_parameter_that_is_unfrozen_later_is_refused_at_the_step(line: Line) -> None:
    model = net()
    model.get_parameter("0.weight").requires_grad_(False)
    model, optimizer, loader = line.prepare(model, sgd(model), batches())

    batch = next(iter(loader))
    model.requires_grad_()

    line.backward(loss_of(model, batch))

    with pytest.raises(RuntimeError, match=r"^0\.weight has a gradient that nobody averaged"):
        optimizer.step()


def test_a_parameter_that_is_frozen_after_prepare_waits_and_then_trains(line: Line) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, loader = line.prepare(model, optimizer, batches())
    weight = model.get_parameter("0.weight").requires_grad_(False)
    seen = [weight.detach().clone()]

    for batch in loader:
        optimizer.zero_grad()
        line.backward(loss_of(model, batch))
        optimizer.step()
        seen.append(weight.detach().clone())
        weight.requires_grad_()

    assert torch.equal(seen[1], seen[0])
    assert not torch.equal(seen[2], seen[1])


def test_a_parameter_that_joins_the_optimizer_later_is_refused_at_the_step(line: Line) -> None:
    model, extra = net(), nn.Parameter(torch.ones(1))
    model, optimizer, loader = line.prepare(model, sgd(model), batches())
    optimizer.add_param_group({"params": [extra]})
    batch = next(iter(loader))

    line.backward(loss_of(model, batch) * extra.sum())

    with pytest.raises(RuntimeError, match=r"^parameter 0 of group 1 has a gradient that nobody"):
        optimizer.step()


def test_a_backward_after_the_mean_is_refused_at_the_step(line: Line) -> None:
    model, optimizer, loader = line.prepare(model := net(), sgd(model), batches())
    batch = next(iter(loader))
    before = [part.detach().clone() for part in model.parameters()]

    line.backward(loss_of(model, batch))
    backward(1e-3 * model.get_parameter("2.weight").square().sum())

    with pytest.raises(RuntimeError, match=r"2\.weight got a gradient after the mean"):
        optimizer.step()
    assert line.step == 0
    assert all(map(torch.equal, model.parameters(), before))


def test_a_second_optimizer_must_not_move_what_came_after_the_commit(line: Line) -> None:
    model = net()
    first, second = (sgd(layer) for layer in model.children() if list(layer.parameters()))
    *_, loader = line.prepare(model, first, second, batches())
    batch = next(iter(loader))
    line.backward(loss_of(model, batch))
    first.step()

    backward(loss_of(model, batch))

    with pytest.raises(RuntimeError, match="got a gradient after the mean"):
        second.step()


def test_a_backward_of_the_step_before_counts_as_in_pytorch(line: Line) -> None:
    model, optimizer, loader = line.prepare(model := net(), sgd(model), batches())
    plain = sgd(twin := net())

    for batch in loader:
        backward(loss_of(model, batch))
        line.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    for batch in batches():
        backward(2 * loss_of(twin, batch))
        plain.step()
        plain.zero_grad()

    assert all(map(torch.allclose, model.parameters(), twin.parameters()))


def test_a_backward_between_two_micro_batches_is_refused(line: Line) -> None:
    model, _, loader = line.prepare(model := net(), sgd(model), batches(), micro_batch_size=2)
    pieces = iter(loader)

    line.backward(loss_of(model, next(pieces)))
    batch = next(pieces)
    backward(loss_of(model, batch))

    with pytest.raises(RuntimeError, match="between two micro-batches"):
        line.backward(loss_of(model, batch))


def test_an_unprepared_optimizer_is_refused_at_its_step(line: Line) -> None:
    model = net()
    stranger = sgd(model)
    _, loader = line.prepare(model, batches())
    batch = next(iter(loader))
    line.backward(loss_of(model, batch))

    with pytest.raises(RuntimeError, match=r"this SGD was not prepared and moves 0\.weight"):
        stranger.step()


def test_an_optimizer_inside_backward_is_refused(line: Line) -> None:
    model = net()
    inside = {part: torch.optim.SGD([part], lr=0.1) for part in model.parameters()}
    for part in model.parameters():
        on_gradient(part, lambda part: inside[part].step())
    _, loader = line.prepare(model, batches())
    batch = next(iter(loader))

    with pytest.raises(RuntimeError, match="this SGD was not prepared"):
        line.backward(loss_of(model, batch))


def test_a_prepared_optimizer_inside_backward_is_refused(line: Line) -> None:
    model = net()
    model, optimizer, loader = line.prepare(model, sgd(model), batches())
    on_gradient(model.get_parameter("0.weight"), lambda _part: optimizer.step())
    batch = next(iter(loader))

    with pytest.raises(RuntimeError, match="inside backward"):
        line.backward(loss_of(model, batch))


def test_an_optimizer_of_something_else_steps_when_it_likes(line: Line) -> None:
    model, other = net(), net()
    free = sgd(other)
    line.prepare(model, sgd(model), batches())

    backward(other(torch.ones(1, 5)).sum())
    free.step()


def test_an_optimizer_that_wraps_another_moves_it_on_commits(line: Line) -> None:
    class Wrapper(torch.optim.Optimizer):
        """As Lookahead does: the base has the same parameters, and is not prepared itself."""

        def __init__(self, base: torch.optim.Optimizer) -> None:
            super().__init__(base.param_groups, {})
            self.base = base

        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded there
            self.base.step()

    model = net()
    wrapper = Wrapper(sgd(model))
    *_, loader = line.prepare(model, wrapper, batches())
    before = [part.detach().clone() for part in model.parameters()]

    for batch in loader:
        line.backward(loss_of(model, batch))
        wrapper.step()

    assert line.step == 2
    assert not any(map(torch.equal, model.parameters(), before))


def test_a_step_past_the_gate_is_refused(line: Line) -> None:
    model, optimizer, loader = line.prepare(model := net(), sgd(model), batches())
    batch = next(iter(loader))
    line.backward(loss_of(model, batch))

    with pytest.raises(RuntimeError, match="past the optimizer's own step"):
        torch.optim.SGD.step(optimizer)
