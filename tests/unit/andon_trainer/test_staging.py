"""Staging: the CPU's path, and the CUDA path where there is a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from andon_trainer.averaging.staging import (
    CudaStaging,
    HostStaging,
    PinnedMemory,
    Staging,
    make_staging,
)
from andon_trainer.averaging.tap import GradientTap
from andon_trainer.core.calls import Bytes, Floats
from andon_trainer.model.layout import plan_model
from unit.andon_trainer.gpus import CUDA, needs_cuda

PATHS = ["cpu", pytest.param("cuda", marks=CUDA)]


def model_on(place: str, width: int = 8, layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(place)


def staging_of(model: nn.Module, place: str) -> Staging:
    return make_staging(plan_model([model]), torch.device(place))


@pytest.mark.parametrize("place", PATHS)
def test_gradients_arrive_scaled_in_host_memory(place: str) -> None:
    model = model_on(place, layers=1)
    staging = staging_of(model, place)
    gradient = torch.randn(8, 8, device=place)

    staging.note(0)
    staging.begin(0, [gradient, None], 1 / 3)
    flat = staging.collect(0)

    assert staging.ready(0)
    assert flat.device.type == "cpu"
    assert torch.equal(flat[:64], gradient.cpu().reshape(-1) * torch.tensor(1 / 3))
    assert not flat[64:].any()


@pytest.mark.parametrize("place", PATHS)
def test_a_block_staged_again_holds_the_later_gradients_in_the_same_buffer(place: str) -> None:
    model = model_on(place, layers=1)
    staging = staging_of(model, place)
    staging.begin(0, [torch.ones(8, 8, device=place), None], None)
    first = staging.collect(0)

    staging.begin(0, [torch.full((8, 8), 2.0, device=place), None], None)
    second = staging.collect(0)

    assert second.data_ptr() == first.data_ptr()
    assert second[:64].eq(2).all()


@pytest.mark.parametrize("place", PATHS)
def test_averages_are_put_into_gradients_of_any_type_and_format(place: str) -> None:
    model = nn.Conv2d(2, 3, 2, dtype=torch.bfloat16).to(place)
    staging = staging_of(model, place)
    weight = torch.empty_like(model.weight, memory_format=torch.channels_last)
    bias = torch.empty(3, dtype=torch.bfloat16, device=place)
    flat = torch.arange(27, dtype=torch.float32)

    staging.put(0, [weight.detach(), bias.detach()], flat)

    assert torch.equal(weight.float().cpu().reshape(-1), flat[:24])
    assert torch.equal(bias.float().cpu(), flat[24:])


@pytest.mark.parametrize("place", PATHS)
def test_what_was_delivered_is_delivered_again_though_p_grad_is_another(place: str) -> None:
    model = model_on(place)
    tap = GradientTap(plan_model([model]), torch.device(place))
    first: list[torch.Tensor] = []
    again: list[torch.Tensor] = []
    tap.arm(lambda _block, flat: first.append(flat.clone()), 1 / 3)
    model(torch.randn(4, 8, device=place)).square().mean().backward()
    tap.finish()
    tap.clear()
    model(torch.randn(4, 8, device=place)).square().mean().backward()

    tap.deliver_again(lambda _block, flat: again.append(flat.clone()))

    assert len(again) == 3
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize("place", PATHS)
def test_what_was_delivered_is_recalled_as_a_sum_that_backward_adds_to(place: str) -> None:
    model = model_on(place)
    plan = plan_model([model])
    tap = GradientTap(plan, torch.device(place))
    means: list[torch.Tensor] = []
    inputs = torch.randn(4, 8, device=place)
    tap.arm(lambda _block, flat: means.append(flat.clone()), None)
    model(inputs).square().mean().backward()
    tap.finish()
    tap.clear()

    tap.recall(3.0)
    recalled = [torch.cat([p.grad.reshape(-1) for p in block]).cpu() for block in plan.parameters]  # type: ignore[union-attr]  # recall made them
    tap.arm(lambda block, flat: means.append(flat.clone()), 1 / 4)
    model(inputs).square().mean().backward()
    tap.finish()

    assert all(torch.equal(got, mean * 3) for got, mean in zip(recalled, means[:3], strict=True))
    assert all(
        torch.allclose(new, old, rtol=1e-5, atol=1e-7)
        for new, old in zip(means[3:], means[:3], strict=True)
    )


def test_nothing_is_ready_before_it_is_begun() -> None:
    assert not HostStaging(plan_model([model_on("cpu")])).ready(0)


def test_a_model_in_host_memory_takes_the_cpus_path_whatever_the_device() -> None:
    plan = plan_model([model_on("cpu")])

    assert isinstance(make_staging(plan, torch.device("cuda")), HostStaging)


@needs_cuda
def test_a_model_on_one_gpu_takes_the_cuda_path_into_pinned_memory() -> None:
    model = model_on("cuda")
    staging = staging_of(model, "cuda")
    staging.begin(0, [torch.ones(8, 8, device="cuda"), None], None)

    assert isinstance(staging, CudaStaging)
    assert staging.collect(0).is_pinned()


@needs_cuda
def test_a_copy_waits_for_the_stream_that_made_the_gradient() -> None:
    model = model_on("cuda", width=512, layers=1)
    staging = staging_of(model, "cuda")
    slow = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types here
    with torch.cuda.stream(slow):
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]  # torch has no types here
        gradient = torch.ones(512, 512, device="cuda")
        staging.note(0)

    staging.begin(0, [gradient, None], None)

    assert staging.collect(0)[: 512 * 512].eq(1).all()


@needs_cuda
def test_many_steps_on_a_gpu_deliver_what_backward_made_and_take_averages_back() -> None:
    model = model_on("cuda", width=256, layers=6)
    plan = plan_model([model])
    tap = GradientTap(plan, torch.device("cuda"))

    received: list[torch.Tensor] = []
    order: list[int] = []

    def take(block: int, flat: torch.Tensor) -> None:
        order.append(block)
        received.append(flat.clone())

    for step in range(10):
        received.clear()
        order.clear()
        tap.clear()
        tap.arm(take, 0.5)
        model(torch.randn(64, 256, device="cuda")).square().mean().backward()
        tap.finish()
        assert order == list(range(6))
        for block, parameters in enumerate(plan.parameters):
            made = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
            assert torch.equal(received[block], made.cpu() * 0.5)
            tap.write_back(block, received[block] + step)
        for block, parameters in enumerate(plan.parameters):
            back = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
            assert torch.equal(back.cpu(), received[block] + step)


def lending(sizes: list[int]) -> tuple[Bytes, list[Floats]]:
    """Bytes as an exchange has it, and where each block lies in it."""
    memory = np.zeros(4 * sum(sizes), np.uint8)
    return memory, np.split(memory.view(np.float32), np.cumsum(sizes)[:-1])


@pytest.mark.parametrize("place", PATHS)
def test_gradients_are_laid_where_the_exchange_wants_them(place: str) -> None:
    model = model_on(place, layers=2)
    memory, vectors = lending([72, 72])
    plan = plan_model([model])
    staging = make_staging(plan, torch.device(place), lambda block: (vectors[block], memory))

    staging.begin(1, [torch.ones(8, 8, device=place), None], 0.5)
    flat = staging.collect(1)

    assert flat.data_ptr() == vectors[1].ctypes.data
    assert vectors[1].tolist() == [0.5] * 64 + [0.0] * 8


@pytest.mark.parametrize("place", PATHS)
def test_a_kept_gradient_survives_the_exchange_that_lent_its_memory(place: str) -> None:
    model = model_on(place, layers=1)
    lent: list[tuple[Floats, Bytes] | None] = []

    def lend(_block: int) -> tuple[Floats, Bytes] | None:
        return lent[-1]

    staging = make_staging(plan_model([model]), torch.device(place), lend)
    memory, (vector,) = lending([72])
    lent.append((vector, memory))
    staging.begin(0, [torch.ones(8, 8, device=place), None], None)
    staging.collect(0)
    lent[:] = [None]
    del memory, vector

    kept = staging.collect(0).clone()
    staging.begin(0, [torch.full((8, 8), 2.0, device=place), None], None)

    assert kept[:64].eq(1).all()
    assert staging.collect(0)[:64].eq(2).all()


class Driver:
    """What the CUDA driver is asked; it takes memory, or refuses."""

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802  # CUDA's name
        self.calls.append(("register", size))
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  # CUDA's name
        self.calls.append(("unregister", 0))
        return 0


def test_lent_memory_is_registered_once_and_let_go_when_another_is_lent() -> None:
    driver = Driver()
    synchronized: list[int] = []
    lock = PinnedMemory(driver, lambda: synchronized.append(len(driver.calls)))
    first, second = np.zeros(8, np.uint8), np.zeros(16, np.uint8)

    assert all([lock.register(first), lock.register(first), lock.register(second)])

    assert driver.calls == [("register", 8), ("unregister", 0), ("register", 16)]
    assert synchronized == [1], "no copy is on its way when the old memory goes"


def test_memory_that_the_driver_refuses_is_asked_about_once() -> None:
    driver = Driver(answer=801)
    lock = PinnedMemory(driver, lambda: None)
    memory = np.zeros(8, np.uint8)

    assert not lock.register(memory)
    assert not lock.register(memory)

    assert driver.calls == [("register", 8)]


def test_lent_memory_is_let_go_once_at_the_end_after_the_last_copy() -> None:
    # A second line of the process may map other memory at the same address.
    driver = Driver()
    synchronized: list[int] = []
    lock = PinnedMemory(driver, lambda: synchronized.append(len(driver.calls)))
    lock.register(np.zeros(8, np.uint8))

    lock.close()
    lock.close()

    assert driver.calls == [("register", 8), ("unregister", 0)]
    assert synchronized == [1]


def test_closing_a_tap_closes_its_staging() -> None:
    closed: list[bool] = []

    class Closed(HostStaging):
        def close(self) -> None:
            closed.append(True)

    model = model_on("cpu")
    plan = plan_model([model])
    GradientTap(plan, torch.device("cpu"), Closed(plan)).close()

    assert closed == [True]
