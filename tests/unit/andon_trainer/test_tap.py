"""The gradient tap: order, values, unused parameters, errors, and averages back in place."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from andon_trainer.averaging.staging import HostStaging
from andon_trainer.averaging.tap import GradientTap
from andon_trainer.model.layout import ModelPlan, plan_model

CPU = torch.device("cpu")


class Received:
    """Collects what is delivered: a copy of each block, in order."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.flats: list[torch.Tensor] = []

    def __call__(self, block: int, flat: torch.Tensor) -> None:
        assert flat.dtype == torch.float32
        assert flat.is_contiguous()
        self.blocks.append(block)
        self.flats.append(flat.clone())


class SlowStaging(HostStaging):
    """Copies that are done only when the test says so, as a device's are."""

    def __init__(self, plan: ModelPlan) -> None:
        super().__init__(plan)
        self.done: set[int] = set()

    def ready(self, block: int) -> bool:
        return block in self.done


def linear(model: nn.Sequential, index: int) -> nn.Linear:
    layer = model[index]
    assert isinstance(layer, nn.Linear)
    return layer


def backward(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature


def on_gradient(tensor: torch.Tensor, call: Callable[[torch.Tensor], None]) -> None:
    tensor.register_hook(call)  # type: ignore[no-untyped-call]  # torch's own signature


def gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def stack(layers: int = 3, width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def absent(flat: torch.Tensor) -> bool:
    """Whether every element is -0.0."""
    return not flat.any() and bool(flat.signbit().all())


def flat_gradients(plan: ModelPlan) -> list[torch.Tensor]:
    return [
        torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).float().reshape(-1) for p in block]
        )
        for block in plan.parameters
    ]


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointing without reentry"])
def test_blocks_are_delivered_in_order_with_the_gradients_of_plain_backward(
    *, checkpointed: bool
) -> None:
    model, inputs = stack(), torch.randn(5, 4)
    plan = plan_model([model])
    model(inputs).square().mean().backward()
    expected = flat_gradients(plan)
    model.zero_grad()
    tap, received = GradientTap(plan, CPU), Received()

    tap.arm(received, None)
    out = checkpoint(model, inputs, use_reentrant=False) if checkpointed else model(inputs)
    out.square().mean().backward()
    tap.finish()

    assert received.blocks == [0, 1, 2]
    assert all(torch.equal(got, want) for got, want in zip(received.flats, expected, strict=True))


def test_the_last_layer_is_delivered_before_backward_reaches_the_first() -> None:
    model = stack()
    tap, received = GradientTap(plan_model([model]), CPU), Received()
    seen_by_first: list[int] = []
    on_gradient(linear(model, 0).weight, lambda _: seen_by_first.extend(received.blocks))

    tap.arm(received, None)
    model(torch.randn(2, 4)).sum().backward()
    tap.finish()

    assert seen_by_first == [0, 1]


def test_unused_parameters_are_minus_zeros_and_hold_back_what_comes_after() -> None:
    model = stack()
    plan = plan_model([model])
    tap, received = GradientTap(plan, CPU), Received()

    tap.arm(received, None)
    (model[0](torch.randn(2, 4)) + linear(model, 2).bias).sum().backward()
    before_finish = list(received.blocks)
    tap.finish()

    assert before_finish == []
    assert received.blocks == [0, 1, 2]
    assert absent(received.flats[0][:16])
    assert received.flats[0][16:].ne(0).all()
    assert absent(received.flats[1])
    assert received.flats[2].any()


def test_gradients_of_earlier_micro_batches_are_in_the_sum_even_if_the_last_adds_none() -> None:
    model = stack(2)
    tap, received = GradientTap(plan_model([model]), CPU), Received()
    backward(linear(model, 1).bias.sum())

    tap.arm(received, None)
    backward(linear(model, 0).bias.sum())
    tap.finish()

    assert torch.equal(received.flats[0][16:], torch.ones(4))
    assert torch.equal(received.flats[1][16:], torch.ones(4))


def test_a_backward_that_is_not_armed_delivers_nothing() -> None:
    model = stack()
    tap, received = GradientTap(plan_model([model]), CPU), Received()
    tap.arm(received, None)
    tap.disarm()

    model(torch.randn(2, 4)).sum().backward()

    assert received.blocks == []
    with pytest.raises(RuntimeError, match="not armed"):
        tap.finish()


def test_arming_twice_is_refused() -> None:
    tap = GradientTap(plan_model([stack()]), CPU)
    tap.arm(Received(), None)

    with pytest.raises(RuntimeError, match="armed already"):
        tap.arm(Received(), None)


def test_an_error_of_deliver_surfaces_from_backward_and_ends_the_round() -> None:
    model = stack()
    tap = GradientTap(plan_model([model]), CPU)

    def refuse(block: int, flat: torch.Tensor) -> None:
        raise ConnectionError(f"block {block}")

    tap.arm(refuse, None)
    with pytest.raises(ConnectionError, match="block 0"):
        model(torch.randn(2, 4)).sum().backward()
    received = Received()
    tap.arm(received, None)
    model(torch.randn(2, 4)).sum().backward()
    tap.finish()

    assert received.blocks == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types_travel_as_float32_and_come_back_as_themselves(dtype: torch.dtype) -> None:
    model = stack(1).to(dtype)
    plan = plan_model([model])
    tap, received = GradientTap(plan, CPU), Received()
    tap.arm(received, None)
    model(torch.randn(2, 4, dtype=dtype)).sum().backward()
    tap.finish()

    tap.write_back(0, received.flats[0] * 2)

    back = gradient(linear(model, 0).weight)
    assert back.dtype == dtype
    assert torch.equal(back.float().reshape(-1), (received.flats[0][:16] * 2).to(dtype).float())


def test_write_back_keeps_storage_and_makes_what_is_missing() -> None:
    model = stack(1)
    plan = plan_model([model])
    tap = GradientTap(plan, CPU)
    backward(linear(model, 0).bias.sum())
    kept = gradient(linear(model, 0).bias)
    place = kept.data_ptr()

    tap.write_back(0, torch.arange(20, dtype=torch.float32))

    assert linear(model, 0).bias.grad is kept
    assert kept.data_ptr() == place
    assert kept.tolist() == [16, 17, 18, 19]
    assert torch.equal(gradient(linear(model, 0).weight), torch.arange(16.0).view(4, 4))


def test_write_back_refuses_a_vector_of_another_size() -> None:
    tap = GradientTap(plan_model([stack(1)]), CPU)

    with pytest.raises(ValueError, match="block 0 has 20 elements"):
        tap.write_back(0, torch.zeros(19))


def test_gradients_in_another_memory_format_are_sent_in_c_order() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 2, 2)
    model.weight.data = model.weight.data.to(memory_format=torch.channels_last)
    plan = plan_model([model])
    tap, received = GradientTap(plan, CPU), Received()

    tap.arm(received, None)
    model(torch.randn(1, 3, 4, 4).to(memory_format=torch.channels_last)).square().sum().backward()
    tap.finish()
    assert model.weight.grad is not None
    expected = model.weight.grad.clone()
    tap.write_back(0, received.flats[0])

    assert torch.equal(received.flats[0][:24].view(2, 3, 2, 2), expected)
    assert torch.equal(model.weight.grad, expected)


def test_c_embed_001_sparse_and_tied_embeddings_travel_like_every_block() -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(6, 3, sparse=True)
    plan = plan_model([embedding])
    tap, received = GradientTap(plan, CPU), Received()

    tap.arm(received, 0.5)
    embedding(torch.tensor([1, 1, 4])).sum().backward()
    tap.finish()
    tap.write_back(0, received.flats[0])

    dense = received.flats[0].view(6, 3)
    assert dense[:, 0].tolist() == [0, 1, 0, 0, 0.5, 0]
    assert embedding.weight.grad is not None
    assert torch.equal(embedding.weight.grad, dense)


def test_a_parameter_used_twice_is_delivered_with_its_whole_gradient() -> None:
    layer = nn.Linear(3, 3)
    plan = plan_model([layer])
    tap, received = GradientTap(plan, CPU), Received()

    tap.arm(received, None)
    layer(layer(torch.randn(2, 3))).sum().backward()
    tap.finish()

    assert torch.equal(received.flats[0], flat_gradients(plan)[0])


@pytest.mark.parametrize("tied", ["called twice", "outside too"])
def test_reentrant_checkpointing_delivers_the_whole_gradient_of_a_tied_layer(tied: str) -> None:
    layer, last = nn.Linear(3, 3), nn.Linear(3, 3)
    plan = plan_model([nn.ModuleList([layer, nn.Sequential(last)])])
    tap, received = GradientTap(plan, CPU), Received()
    inputs = torch.randn(2, 3, requires_grad=True)

    for _ in range(2):
        tap.clear()
        hidden = checkpoint(layer, inputs, use_reentrant=True)
        if tied == "called twice":
            hidden = checkpoint(layer, last(hidden), use_reentrant=True)
        else:
            hidden = last(hidden) @ layer.weight
        tap.arm(received, None, hidden.sum())
        hidden.sum().backward()
        assert len(received.blocks) % len(plan.parameters) == 0
        tap.finish()

    blocks = len(plan.parameters)
    assert received.blocks == [*range(blocks), *range(blocks)]
    for got, want in zip(received.flats[blocks:], flat_gradients(plan), strict=True):
        assert torch.equal(got, want)


def test_checkpointing_that_the_first_loss_did_not_show_is_an_error() -> None:
    layer = nn.Linear(3, 3)
    tap, received = GradientTap(plan_model([layer]), CPU), Received()
    inputs = torch.randn(2, 3, requires_grad=True)

    loss = layer(inputs).sum()
    tap.arm(received, None, loss)
    backward(loss)
    tap.finish()
    tap.clear()
    hidden = checkpoint(layer, checkpoint(layer, inputs, use_reentrant=True), use_reentrant=True)
    tap.arm(received, None, hidden.sum())
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        backward(hidden.sum())


def test_a_copy_that_is_not_done_holds_its_block_and_later_hooks_deliver_it() -> None:
    model = stack()
    plan = plan_model([model])
    staging, received = SlowStaging(plan), Received()
    tap = GradientTap(plan, CPU, staging)
    seen: list[list[int]] = []

    def finish_the_first_copy(_: torch.Tensor) -> None:
        seen.append(list(received.blocks))
        staging.done.add(0)

    on_gradient(linear(model, 1).weight, finish_the_first_copy)
    on_gradient(linear(model, 0).weight, lambda _: seen.append(list(received.blocks)))

    tap.arm(received, None)
    model(torch.randn(2, 4)).sum().backward()
    during = list(received.blocks)
    tap.finish()

    assert seen == [[], [0]]
    assert during == [0]
    assert received.blocks == [0, 1, 2]


def test_hooks_on_other_threads_deliver_in_order() -> None:
    # Autograd calls the hooks of each CUDA device on a thread of its own.
    model = stack(4)
    tap, received = GradientTap(plan_model([model]), CPU), Received()
    threads = [
        threading.Thread(target=lambda layer=layer: layer(torch.ones(1, 4)).sum().backward())
        for layer in model
    ]

    tap.arm(received, None)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tap.finish()

    assert received.blocks == [0, 1, 2, 3]


def test_closing_takes_the_hooks_off() -> None:
    model = stack()
    tap, received = GradientTap(plan_model([model]), CPU), Received()
    tap.close()
    tap.arm(received, None)

    model(torch.randn(2, 4)).sum().backward()

    assert received.blocks == []


def test_clearing_sets_every_gradient_to_none() -> None:
    model = stack()
    tap = GradientTap(plan_model([model]), CPU)
    model(torch.randn(2, 4)).sum().backward()

    tap.clear()

    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_that_a_factor_makes_too_small_are_not_taken_for_missing() -> None:
    model, got = stack(1), Received()
    tap = GradientTap(plan_model([model]), CPU)
    tap.arm(got, None)
    backward(model(torch.ones(1, 4)).sum() * -1e-38)
    tap.finish()

    tap.rescale(1e-30)
    tap.deliver_again(got)
    tap.write_back(0, got.flats[-1])

    assert not absent(got.flats[-1])
    assert gradient(linear(model, 0).weight).count_nonzero() == 0
