"""The state: digest, bytes, and trees without pickle."""

from __future__ import annotations

import hashlib
import json
import struct

import pytest
import torch
from safetensors.torch import save
from torch import nn

from andon_trainer.state.trees import join_tree, pack_tensors, split_tree, unpack_tensors
from andon_trainer.state.weights import (
    check_tensors,
    named_state,
    weights_digest,
    write_tensors,
)


class Mixed(nn.Module):
    """Every kind of tensor that a state may hold."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(3, 2, generator=generator))
        self.short = nn.Parameter(torch.randn(4, generator=generator).bfloat16())
        self.frozen = nn.Parameter(torch.randn((), generator=generator), requires_grad=False)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.table
        self.norm = nn.BatchNorm1d(2)
        self.norm.register_buffer("running_mean", torch.full((2,), float(seed)))
        self.register_buffer("mask", torch.tensor([seed % 2 == 0, True]))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.turned: torch.Tensor
        self.register_buffer("turned", torch.randn(2, 3, generator=generator).t())
        self.register_buffer("phase", torch.zeros(1, dtype=torch.complex64))
        self.register_buffer("cache", torch.ones(9), persistent=False)


def packed(module: nn.Module) -> bytes:
    return pack_tensors(dict(named_state([module])))


def test_a_packed_file_is_the_librarys_byte_by_byte() -> None:
    dtypes = (
        *(torch.int64, torch.float64, torch.complex64, torch.float32, torch.int32, torch.bfloat16),
        *(torch.float16, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8),
        *(torch.uint8, torch.bool),
    )
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{place}/ä{index}": torch.randn(shape, generator=generator).to(dtype)
        for index, dtype in enumerate(dtypes)
        for place, shape in (("b", (3, 2)), ("a", ()), ("empty", (0, 4)))
    }

    assert pack_tensors(tensors) == save(tensors)


def install(module: nn.Module, data: bytes) -> None:
    tensors = unpack_tensors(data)
    check_tensors([module], tensors)
    write_tensors([module], tensors)


def same(first: nn.Module, second: nn.Module) -> bool:
    ours, theirs = dict(named_state([first])), dict(named_state([second]))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_the_digest_is_the_documented_text() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor([[1.0, 2.0]]))
    model.register_buffer("count", torch.tensor(7))
    model.bias = nn.Parameter(torch.tensor(3.0, dtype=torch.float64), requires_grad=False)
    text = b"weight\0float32\0001,2\0" + struct.pack("<2f", 1, 2)
    text += b"bias\0float64\0\0" + hashlib.sha256(struct.pack("<d", 3)).digest()

    digest = weights_digest([model])

    assert digest == hashlib.sha256(text).digest()


def test_names_are_those_of_state_dict_in_its_order_and_tied_ones_come_once() -> None:
    model = Mixed()

    names = [name for name, _ in named_state([model])]

    assert names == [name for name in model.state_dict() if name != "head.weight"]


def test_several_modules_have_numbered_names() -> None:
    names = [name for name, _ in named_state([nn.Linear(1, 1), nn.Linear(1, 1)])]

    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize("name", ["table", "short", "frozen", "norm.weight"])
def test_f_dp_001_the_digest_sees_every_bit_of_every_parameter(name: str) -> None:
    model = Mixed()
    before = weights_digest([model])
    flat = dict(named_state([model]))[name].detach().reshape(-1)

    with torch.no_grad():
        flat.view(torch.uint8)[0] ^= 1

    assert weights_digest([model]) != before


def test_running_statistics_of_a_worker_are_not_its_weights() -> None:
    model = Mixed()
    before = weights_digest([model])

    model.norm(torch.randn(5, 2))

    assert weights_digest([model]) == before


def test_the_digest_does_not_depend_on_memory_layout() -> None:
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    second.load_state_dict(first.state_dict())
    second.weight = nn.Parameter(first.weight.detach().t().contiguous().t())

    assert weights_digest([first]) == weights_digest([second])


def test_an_installed_state_is_the_packed_one_bit_for_bit() -> None:
    source, target = Mixed(seed=1), Mixed(seed=2)
    table = target.table

    install(target, packed(source))

    assert same(source, target)
    assert weights_digest([source]) == weights_digest([target])
    assert target.head.weight is target.table is table


def test_tensors_of_one_storage_are_packed_apart() -> None:
    def model(value: float) -> nn.Module:
        shared, module = torch.full((6,), value), nn.Module()
        module.register_buffer("front", shared[:3])
        module.register_buffer("back", shared[3:])
        module.register_buffer("whole", shared.view(2, 3))
        return module

    source, target = model(1), model(2)

    install(target, packed(source))

    assert same(source, target)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (nn.Linear(2, 3), r"weight is float32\[3, 3\] here and float32\[3, 2\] there"),
        (nn.Linear(3, 3, bias=False), r"bias is missing here and float32\[3\] there"),
        (nn.Linear(3, 3, dtype=torch.float64), r"weight is float64\[3, 3\] here"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_name(other: nn.Module, words: str) -> None:
    data = packed(nn.Linear(2, 3) if "3, 2" in words else nn.Linear(3, 3))
    target = nn.Linear(3, 3) if "3, 2" in words else other
    before = weights_digest([target])

    with pytest.raises(ValueError, match=words):
        install(target, data)

    assert weights_digest([target]) == before


def test_a_state_whose_last_tensor_differs_changes_nothing() -> None:
    source = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    target = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    before = weights_digest([target])

    with pytest.raises(ValueError, match=r"1\.bias"):
        install(target, packed(source))

    assert weights_digest([target]) == before


@pytest.mark.parametrize("keep", [0, 4, 20, -1])
def test_a_truncated_state_is_refused(keep: int) -> None:
    data = packed(Mixed())[:keep]

    with pytest.raises(ValueError, match="not a state in the safetensors format"):
        install(Mixed(), data)


def test_a_tree_comes_back_from_json_and_tensors() -> None:
    tensor = torch.arange(3)
    tree = {
        "state": {0: {"step": torch.tensor(2.0), "exp_avg": tensor}},
        "groups": [{"betas": (0.9, 0.999), "lr": 1e-3, "fused": None, "params": [0]}],
        "best": float("inf"),
        "state.0": {"exp_avg": tensor + 1},
    }

    skeleton, tensors = split_tree(tree)
    back = join_tree(json.loads(json.dumps(skeleton)), tensors)

    assert back["groups"] == tree["groups"]
    assert back["best"] == float("inf")
    assert back["state"][0]["exp_avg"] is tensor
    assert torch.equal(back["state.0"]["exp_avg"], tensor + 1)


def test_what_only_pickle_could_keep_is_refused_by_its_place() -> None:
    with pytest.raises(TypeError, match=r"groups\.0\.fn is a function"):
        split_tree({"groups": [{"fn": same}]})


@pytest.mark.parametrize("skeleton", [{"tensor": "gone"}, {"other": 1}, {"dict": 3}, {}])
def test_a_damaged_tree_is_refused(skeleton: object) -> None:
    with pytest.raises(ValueError, match="damaged"):
        join_tree(skeleton, {})


def test_a_sparse_buffer_is_refused_by_name() -> None:
    model = nn.Module()
    model.register_buffer("links", torch.eye(2).to_sparse())

    with pytest.raises(ValueError, match="links is sparse"):
        packed(model)
