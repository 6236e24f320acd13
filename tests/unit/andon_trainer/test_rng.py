"""Random generators: taken over exactly, and told apart by where they began."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from andon_trainer.state import rng
from andon_trainer.state.trees import join_tree, pack_tensors, split_tree, unpack_tensors
from unit.andon_trainer.gpus import needs_cuda

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    states = rng.capture(CPU)
    yield
    rng.restore(states, CPU)


def draw() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(), np.random.standard_normal(), torch.randn(()).item()


def through_files(states: dict[str, Any]) -> dict[str, Any]:
    """The states as a checkpoint gives them back."""
    skeleton, tensors = split_tree(states)
    text, data = json.dumps(skeleton), pack_tensors(tensors)
    tree: dict[str, Any] = join_tree(json.loads(text), unpack_tensors(data))
    return tree


def test_generators_go_on_exactly_also_between_two_numbers_of_a_pair() -> None:
    draw()  # gauss and standard_normal make two at a time: the other one is state too
    states = through_files(rng.capture(CPU))
    expected = [draw() for _ in range(3)]

    rng.restore(states, CPU)

    assert [draw() for _ in range(3)] == expected


def test_only_the_generators_named_are_set() -> None:
    states = rng.capture(CPU)
    expected = random.random(), torch.rand(()).item()
    before = rng.digests(rng.capture(CPU))["numpy"]

    rng.restore({name: states[name] for name in ("python", "torch")}, CPU)

    assert (random.random(), torch.rand(()).item()) == expected
    assert rng.digests(rng.capture(CPU))["numpy"] == before


def test_generators_that_were_seeded_alike_have_one_digest() -> None:
    random.seed(3)
    torch.manual_seed(3)
    first = rng.digests(rng.capture(CPU))
    random.seed(3)
    torch.manual_seed(4)

    second = rng.digests(rng.capture(CPU))

    assert first["python"] == second["python"]
    assert first["torch"] != second["torch"]


@needs_cuda
def test_the_generator_of_the_cuda_device_goes_on_exactly() -> None:
    device = torch.device("cuda", 0)
    states = through_files(rng.capture(device))
    expected = torch.randn(8, device=device)

    rng.restore(states, device)

    assert torch.equal(torch.randn(8, device=device), expected)
