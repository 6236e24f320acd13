"""The gate: what it is closed to, and what it counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from andon_torch.gate import GateMode, GradientWatch, backward_pass, gate_mode
from andon_torch.tensors import bytes_of
from unit.andon_torch.torch_ranks import TorchRanks

NAN = torch.tensor([1.0, float("nan"), 3.0])


def in_backward(call: object) -> None:
    """Calls while autograd computes."""

    class Hooked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            assert backward_pass() is not None
            call()  # type: ignore[operator]
            return gradient

    Hooked.apply(torch.ones(1, requires_grad=True)).backward()  # type: ignore[no-untyped-call]


@pytest.fixture
def scaler() -> Iterator[torch.amp.GradScaler]:
    """A gradient scaler that is in use."""
    made = torch.amp.GradScaler("cpu")
    made.scale(torch.ones(()))
    yield made
    del made


def closed(mode: GateMode, tensor: Tensor, reduction: str) -> list[bool]:
    """Whether the gate is closed outside of backward passes, and inside."""
    watch = GradientWatch(mode)
    found = [watch.gate_for([tensor], reduction) is not None]
    in_backward(lambda: found.append(watch.gate_for([tensor], reduction) is not None))
    return found


def test_by_default_it_is_closed_to_sums_and_means_in_backward() -> None:
    for reduction in ("sum", "avg"):
        assert closed(GateMode.BACKWARD, torch.ones(1), reduction) == [False, True]
        assert closed(GateMode.BACKWARD, torch.ones(1).half(), reduction) == [False, True]
    assert closed(GateMode.BACKWARD, torch.ones(1), "max") == [False, False]
    assert closed(GateMode.BACKWARD, torch.ones(1).int(), "sum") == [False, False]


def test_it_can_be_closed_to_all_floats_or_open() -> None:
    assert closed(GateMode.ALL, torch.ones(1), "max") == [True, True]
    assert closed(GateMode.ALL, torch.ones(1).int(), "max") == [False, False]
    assert closed(GateMode.OFF, torch.ones(1), "sum") == [False, False]


def test_the_mode_is_a_word() -> None:
    assert gate_mode({}) is GateMode.BACKWARD
    assert gate_mode({"ANDON_GATE": "all"}) is GateMode.ALL
    with pytest.raises(ValueError, match="ANDON_GATE is 'of', and must be one of"):
        gate_mode({"ANDON_GATE": "of"})


def test_a_backward_pass_that_exchanges_is_a_step() -> None:
    watch = GradientWatch(GateMode.OFF)

    def exchange() -> None:
        watch.gate_for([torch.ones(1)], "sum")
        watch.gate_for([torch.ones(1)], "sum")

    exchange()
    in_backward(exchange)
    in_backward(exchange)
    in_backward(lambda: None)

    assert watch.steps == 2


def test_a_bad_value_is_found_and_described() -> None:
    ranks = TorchRanks(2, GateMode.ALL)

    ranks.all_call(lambda group: group.allreduce([NAN.clone() if group.rank() else torch.ones(3)]))

    (found,) = ranks.ranks.found
    assert (found.value, found.element, found.parameter) == ("nan", (1,), "")


def test_an_element_of_a_list_is_counted_through_the_list() -> None:
    watch = GradientWatch(GateMode.ALL)
    gate = watch.gate_for([torch.ones(2), torch.tensor([1.0, -float("inf")])], "sum")
    assert gate is not None

    found = gate.explain(0, 3)

    assert (found.value, found.element) == ("-inf", (1,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_bad_values_of_all_types_are_found(dtype: torch.dtype) -> None:
    gate = GradientWatch(GateMode.ALL).gate_for([NAN.to(dtype)], "sum")
    assert gate is not None

    view = bytes_of(NAN.to(dtype))

    assert gate.first_bad(view) == 1
    assert gate.explain(0, 1).value == "nan"


def test_overflows_under_a_scaler_are_counted_once_a_step(scaler: torch.amp.GradScaler) -> None:
    ranks = TorchRanks(1)

    def exchange() -> None:
        for _ in range(2):
            ranks.groups[0].allreduce([NAN.clone()]).wait()

    in_backward(exchange)
    in_backward(exchange)

    assert ranks.watch.overflows == 2
    assert ranks.ranks.found == []


def test_a_scaler_that_is_off_expects_nothing() -> None:
    off = torch.amp.GradScaler("cpu", enabled=False)
    ranks = TorchRanks(1)

    in_backward(lambda: ranks.groups[0].allreduce([NAN.clone()]).wait())

    assert not off.is_enabled()
    assert len(ranks.ranks.found) == 1


def test_a_masked_maximum_may_be_infinite() -> None:
    ranks, masked = TorchRanks(1), torch.full((2,), -float("inf"))
    opts: Any = torch.distributed.distributed_c10d.AllreduceOptions()
    opts.reduceOp = ReduceOp.MAX

    in_backward(lambda: ranks.groups[0].allreduce([masked], opts).wait())

    assert ranks.ranks.found == []
