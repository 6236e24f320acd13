"""Which parameter an element of an exchanged tensor belongs to."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from andon_torch.parameters import Place, find_parameter

NAN = float("nan")


def model_with(**gradients: Tensor) -> nn.Module:
    """A model whose parameters have these gradients."""
    model = nn.Module()
    for name, gradient in gradients.items():
        parameter = nn.Parameter(torch.empty_like(gradient))
        parameter.grad = gradient
        model.register_parameter(name, parameter)
    return model


def test_a_gradient_that_is_a_view_of_the_bucket_is_known_by_its_memory() -> None:
    bucket = torch.zeros(10)
    model = model_with(a=bucket[:4].view(2, 2), b=bucket[4:].view(2, 3))
    bucket[8] = NAN

    assert find_parameter(bucket, 8) == Place("b", (1, 1))
    assert list(model.parameters())


def test_a_view_with_another_order_in_memory_is_indexed_as_the_script_does() -> None:
    bucket = torch.zeros(24)
    channels_last = bucket.view(1, 2, 3, 4).permute(0, 3, 1, 2)
    model = model_with(weight=channels_last)
    channels_last[0, 2, 1, 0] = NAN
    bad = int((~torch.isfinite(bucket)).nonzero()[0])

    assert find_parameter(bucket, bad) == Place("weight", (0, 2, 1, 0))
    assert list(model.parameters())


def test_a_copied_gradient_is_known_by_its_content_though_it_was_divided() -> None:
    one, two = torch.arange(1.0, 5.0), torch.arange(5.0, 11.0).view(2, 3)
    one[1], two[1, 0] = NAN, NAN
    model = model_with(one=one, two=two)
    bucket = torch.cat([two.reshape(-1), one]) / 4

    assert find_parameter(bucket, 3) == Place("two", (1, 0))
    assert find_parameter(bucket, 7) == Place("one", (1,))
    assert list(model.parameters())


def test_the_only_bad_gradient_is_named_whatever_became_of_it() -> None:
    bad = torch.ones(3)
    bad[2] = NAN
    model = model_with(good=torch.ones(3), bad=bad)

    assert find_parameter(torch.tensor([0.0, NAN]), 1) == Place("bad", (2,))
    assert list(model.parameters())


def test_names_are_those_of_the_whole_model() -> None:
    inner = model_with(weight=torch.tensor([NAN]))
    outer = nn.Module()
    outer.add_module("inner", inner)

    assert find_parameter(torch.tensor([NAN]), 0) == Place("inner.weight", (0,))


def test_what_is_no_gradient_is_not_named() -> None:
    assert find_parameter(torch.tensor([NAN]), 0) is None


@dataclass
class FSDPParamGroup:
    """The part of FSDP2's parameter group that is read."""

    fsdp_params: list[Any]
    _training_state: Any = field(default_factory=lambda: SimpleNamespace(name="POST_BACKWARD"))
    _post_reduce_event: Any = None


def shard(name: str, rows: int, columns: int) -> Any:
    return SimpleNamespace(
        sharded_param=nn.Parameter(torch.zeros(rows, columns)),
        padded_sharded_param_size=torch.Size((rows, columns)),
        mesh_info=SimpleNamespace(shard_mesh_size=2, shard_mesh_rank=1),
        fsdp_placement=SimpleNamespace(dim=0),
        _param_fqn=name,
    )


def test_an_element_of_a_shard_is_known_by_arithmetic() -> None:
    done = FSDPParamGroup([shard("other", 3, 2)], _post_reduce_event="recorded")
    group = FSDPParamGroup([shard("a", 1, 2), shard("b", 2, 2)])
    exchanged = torch.zeros(12)  # For each of two ranks one row of a, and two rows of b.

    assert find_parameter(exchanged, 1) == Place("a", (0, 1))
    assert find_parameter(exchanged, 6) == Place("a", (1, 0))
    assert find_parameter(exchanged, 11) == Place("b", (3, 1))
    # HSDP reduces this rank's shards once more.
    assert find_parameter(torch.zeros(6), 2) == Place("b", (2, 0))
    assert done.fsdp_params
    assert group.fsdp_params
