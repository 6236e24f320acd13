"""The order: a permutation, the same in every language, new in each epoch."""

from __future__ import annotations

import collections
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.protocol.order import Order, splitmix64
from unit.andon.golden import golden
from unit.andon.strategies import BOUNDED, u64
from unit.project.documents import protocol

ORDERS = golden("order", "orders")


def of_specification(seed: int, epoch: int, size: int, position: int) -> int:
    """The pseudo-code of docs/protocol-data.md, written down a second time."""
    bits = 2**64
    key = splitmix64((splitmix64(seed) + epoch) % bits)
    keys = [splitmix64((key + i * 0x9E3779B97F4A7C15) % bits) for i in range(8)]
    w = 1
    while 1 << 2 * w < size:
        w += 1
    x = position
    while True:
        left, right = divmod(x, 1 << w)
        for k in keys:
            left, right = right, left ^ splitmix64(right ^ k) % (1 << w)
        x = (left << w) + right
        if x < size:
            return x


def test_splitmix64_gives_the_published_sequence() -> None:
    state, drawn = 1234567, []

    for _ in range(5):
        drawn.append(splitmix64(state))
        state = (state + 0x9E3779B97F4A7C15) % 2**64

    assert drawn == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize("vector", ORDERS, ids=lambda v: f"n={v['size']}")
def test_order_gives_the_conformance_vectors(vector: dict[str, str | int | list[str]]) -> None:
    order = Order(int(str(vector["seed"])), int(str(vector["epoch"])), int(str(vector["size"])))
    positions, samples = vector["positions"], vector["samples"]
    assert isinstance(positions, list)

    drawn = [str(order[int(position)]) for position in positions]

    assert drawn == samples


def test_the_vectors_of_the_documentation_are_those_of_the_conformance_file() -> None:
    text = protocol()

    for vector in ORDERS:
        row = (
            rf"\| {vector['seed']} \| {vector['epoch']} \| {vector['size']} \| "
            rf"{', '.join(vector['positions'])} \| {', '.join(vector['samples'])} \|"
        )
        assert re.search(row, text), row


def test_order_is_a_permutation_for_every_size() -> None:
    for size in (*range(1, 40), 63, 64, 65, 255, 256, 257, 1000, 4097):
        order = Order(seed=3, epoch=1, size=size)

        assert sorted(order.indices(0, size).tolist()) == list(range(size)), size


@BOUNDED
@given(u64, u64, st.integers(1, 2**63), st.data())
def test_the_vectorised_form_equals_the_scalar_one_and_the_specification(
    seed: int, epoch: int, size: int, data: st.DataObject
) -> None:
    order = Order(seed, epoch, size)
    start = data.draw(st.integers(0, size))
    stop = min(size, start + 20)

    vector = order.indices(start, stop).tolist()

    assert vector == [order[position] for position in range(start, stop)]
    assert vector == [of_specification(seed, epoch, size, p) for p in range(start, stop)]


def test_indices_of_no_position_are_empty() -> None:
    indices = Order(1, 0, 10).indices(10, 10)

    assert indices.shape == (0,)
    assert indices.dtype == "int64"


@pytest.mark.parametrize("vary", ["seed", "epoch"])
def test_c_shard_001_each_epoch_and_each_seed_has_an_order_of_its_own(vary: str) -> None:
    orders = {
        tuple(Order(**{"seed": 7, "epoch": 0, "size": 100, vary: value}).indices(0, 100).tolist())
        for value in range(50)
    }

    assert len(orders) == 50


def test_a_position_keeps_its_sample_no_more_often_than_chance() -> None:
    size, epochs = 997, 200

    kept = sum(
        int((Order(1, epoch, size).indices(0, size) == range(size)).sum())
        for epoch in range(epochs)
    )

    # One a permutation on average, with a standard deviation of one.
    assert abs(kept - epochs) < 5 * epochs**0.5


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_order_of_a_few_samples_is_about_equally_likely(size: int) -> None:
    permutations = list(itertools.permutations(range(size)))
    orders = max(600, 20 * len(permutations))

    drawn = collections.Counter(
        tuple(Order(seed, 0, size).indices(0, size).tolist()) for seed in range(orders)
    )

    expected = orders / len(permutations)
    chi_squared = sum((drawn[each] - expected) ** 2 / expected for each in permutations)
    freedom = len(permutations) - 1
    assert chi_squared < freedom + 5 * (2 * freedom) ** 0.5


def test_neighbouring_samples_are_far_apart() -> None:
    size = 10_000
    indices = Order(11, 0, size).indices(0, size)

    steps = abs(indices[1:] - indices[:-1])

    # Two independent draws are a third of the size apart on average.
    assert 0.31 < steps.mean() / size < 0.36
    assert (steps == 1).sum() < 12


def test_an_impossible_order_is_refused() -> None:
    for seed, epoch, size in ((-1, 0, 1), (2**64, 0, 1), (0, -1, 1), (0, 0, 0), (0, 0, 2**63 + 1)):
        with pytest.raises(ValueError, match="not"):
            Order(seed, epoch, size)


def test_a_position_beyond_the_epoch_is_refused() -> None:
    order = Order(0, 0, 5)

    for position in (-1, 5):
        with pytest.raises(IndexError):
            order[position]
    for start, stop in ((-1, 2), (3, 2), (0, 6)):
        with pytest.raises(IndexError):
            order.indices(start, stop)


def test_an_order_has_a_length_and_can_be_iterated() -> None:
    order = Order(0, 0, 5)

    assert len(order) == 5
    assert sorted(order) == [0, 1, 2, 3, 4]
