"""The weighted mean: exact to the bit in every tile, and which values it refuses.

What it makes of each kind of number is in `conformance/averages.json` and `faults.json`, and tested
with them (`test_conformance_averages`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from andon.protocol.encoding import Encoding, decode, encode
from andon.protocol.messages import BlockFaultKind, BlockGradient, TreeNode
from andon.protocol.records import Key
from andon_reducer.core.mean import (
    TILE_ELEMENTS,
    Mean,
    MeanDefect,
    weighted_mean,
)

Floats = npt.NDArray[np.float32]


pytestmark = pytest.mark.usefixtures("arithmetic")  # Each with the C module and without it.


STRIPPED = [Encoding.INT8_BLOCK, Encoding.INT4_BLOCK]
NARROW = [Encoding.FLOAT16, Encoding.BFLOAT16, *STRIPPED]
ENCODINGS = [Encoding.FLOAT32, *NARROW]


def vectors(ranks: int, size: int, seed: int = 7, scale: float = 1.0) -> list[Floats]:
    random = np.random.default_rng(seed)
    return [(random.standard_normal(size) * scale).astype(np.float32) for _ in range(ranks)]


def contribution(
    rank: int,
    weight: float,
    payload: memoryview,
    count: int,
    encoding: Encoding = Encoding.FLOAT32,
) -> BlockGradient:
    return BlockGradient(
        key=Key(1, 1),
        rank=rank,
        world_size=rank + 1,
        block=0,
        offset=0,
        count=count,
        weight=weight,
        payload=payload,
        encoding=encoding,
    )


def contributions(
    numbers: Sequence[Floats], weights: Sequence[float], encoding: Encoding = Encoding.FLOAT32
) -> list[BlockGradient]:
    return [
        contribution(rank, weight, encode(vector, encoding), vector.size, encoding)
        for rank, (vector, weight) in enumerate(zip(numbers, weights, strict=True))
    ]


def averaged(
    parts: Sequence[BlockGradient],
    encoding: Encoding = Encoding.FLOAT32,
    answer: Encoding | None = None,
) -> Floats:
    mean = weighted_mean(parts, encoding, answer or encoding)
    assert isinstance(mean, Mean), mean
    return decode(mean.payload, answer or encoding, parts[0].count)


def defect(
    numbers: Sequence[Floats], weights: Sequence[float], answer: Encoding = Encoding.FLOAT32
) -> MeanDefect:
    found = weighted_mean(contributions(numbers, weights), Encoding.FLOAT32, answer)
    assert isinstance(found, MeanDefect)
    return found


def scalar_mean(numbers: Sequence[Floats], weights: Sequence[float]) -> list[np.float32]:
    """The definition, one number at a time."""
    total = 0.0
    for weight in weights:
        total += weight
    shares = [np.float32(weight / total) for weight in weights]
    means = []
    for elements in zip(*numbers, strict=True):
        acc = shares[0] * elements[0]
        for share, element in zip(shares[1:], elements[1:], strict=True):
            acc = np.float32(acc + np.float32(share * element))
        means.append(acc)
    return means


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_c_ddp_001_the_mean_equals_its_definition_bit_for_bit(
    ranks: int, encoding: Encoding
) -> None:
    weights = [0.1 + 3 * rank for rank in range(ranks)]
    parts = contributions(vectors(ranks, 257), weights, encoding)

    mean = averaged(parts, encoding, Encoding.FLOAT32)

    decoded = [decode(part.payload, encoding, part.count) for part in parts]
    expected = np.array(scalar_mean(decoded, weights), np.float32)
    assert mean.tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", [1, TILE_ELEMENTS - 1, TILE_ELEMENTS, 2 * TILE_ELEMENTS + 3])
def test_c_ddp_001_the_mean_does_not_depend_on_tiles(size: int) -> None:
    numbers = vectors(3, size)
    one, two, three = numbers
    weights = [1.0, 2.0, 4.0]

    mean = averaged(contributions(numbers, weights))

    share = [np.float32(weight / 7) for weight in weights]
    expected = (share[0] * one + share[1] * two) + share[2] * three
    assert mean.tobytes() == expected.tobytes()


def by_nodes(numbers: Sequence[Floats], weights: Sequence[float]) -> list[BlockGradient]:
    """One node for each grain of a batch, of one rank each; the last rank has the first grain."""
    count = len(numbers)
    return [
        replace(part, rank=count - 1 - part.rank, node=TreeNode(part.rank, 1, count, 4))
        for part in contributions(numbers, weights)
    ]


@pytest.mark.parametrize("size", [1, TILE_ELEMENTS, 2 * TILE_ELEMENTS + 3])
def test_a_mean_along_the_tree_does_not_depend_on_tiles(size: int) -> None:
    grains, weights = vectors(7, size), [4.0, 4.0, 3.0, 4.0, 4.0, 4.0, 1.0]
    one, two, three, four, five, six, seven = grains
    root = ((one + two) + (three + four)) + ((five + six) + seven)

    mean = averaged(by_nodes(grains, weights))

    assert mean.tobytes() == (root / np.float32(24.0 / 4)).tobytes()
    into = np.empty(size, np.float32)
    found = weighted_mean(
        by_nodes(grains, weights), Encoding.FLOAT32, Encoding.FLOAT32, into.view(np.uint8).data
    )
    assert isinstance(found, Mean)
    assert into.tobytes() == mean.tobytes()


def test_a_mean_along_the_tree_may_be_asked_for_in_16_bits() -> None:
    grains = vectors(3, 9)
    root = (grains[0] + grains[1]) + grains[2]

    mean = averaged(by_nodes(grains, [4.0] * 3), Encoding.FLOAT32, Encoding.BFLOAT16)

    expected = decode(encode(root / np.float32(3), Encoding.BFLOAT16), Encoding.BFLOAT16, 9)
    assert mean.tobytes() == expected.tobytes()


@pytest.mark.parametrize("at", [0, TILE_ELEMENTS + 1])
@pytest.mark.parametrize("weight", [4.0, 0.0])
def test_f_dp_003_of_nodes_that_are_not_finite_the_lowest_rank_is_named(
    at: int, weight: float
) -> None:
    grains = vectors(3, TILE_ELEMENTS + 2)
    grains[0][at] = grains[1][at] = np.nan

    found = weighted_mean(by_nodes(grains, [weight] * 3), Encoding.FLOAT32, Encoding.FLOAT32)

    assert isinstance(found, MeanDefect)
    assert (found.kind, found.rank, found.element) == (BlockFaultKind.NON_FINITE, 1, at)


@pytest.mark.parametrize("weight", [1e300, 1e-300])
def test_weights_that_float32_does_not_hold_are_inconsistent(weight: float) -> None:
    found = weighted_mean(by_nodes(vectors(2, 3), [weight] * 2), Encoding.FLOAT32, Encoding.FLOAT32)

    assert isinstance(found, MeanDefect)
    assert (found.kind, found.rank) == (BlockFaultKind.INCONSISTENT, None)


def test_one_contributor_alone_may_ask_for_float32() -> None:
    part = contributions([np.array([0.5, -2.0], np.float32)], [3.0], Encoding.FLOAT16)

    assert averaged(part, Encoding.FLOAT16, Encoding.FLOAT32).tolist() == [0.5, -2.0]


@pytest.mark.parametrize("encoding", NARROW)
def test_c_ddp_001_a_narrow_answer_is_the_mean_rounded_to_nearest_even(encoding: Encoding) -> None:
    parts = contributions(vectors(3, TILE_ELEMENTS + 1001), [1.0, 2.0, 3.0], encoding)

    narrow = averaged(parts, encoding)

    wide = averaged(parts, encoding, Encoding.FLOAT32)
    assert narrow.tobytes() == decode(encode(wide, encoding), encoding, wide.size).tobytes()


def test_weights_whose_sum_is_infinite_are_inconsistent() -> None:
    found = defect(vectors(2, 4), [1e308, 1e308])

    assert (found.kind, found.rank) == (BlockFaultKind.INCONSISTENT, None)


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (3, 0), (3, 1), (3, 2)])
def test_f_dp_003_a_number_that_is_not_finite_is_found_in_any_tile(ranks: int, rank: int) -> None:
    numbers = vectors(ranks, 2 * TILE_ELEMENTS)

    for element in (0, TILE_ELEMENTS - 1, TILE_ELEMENTS + 17):
        right = numbers[rank][element]
        for value in (np.nan, np.inf, -np.inf):
            numbers[rank][element] = value

            found = defect(numbers, [1.0, 2.0, 3.0][:ranks])

            assert (found.kind, found.rank) == (BlockFaultKind.NON_FINITE, rank)
            assert (found.element, found.value) == (element, str(value))
        numbers[rank][element] = right


def test_a_mean_of_listed_elements_is_that_of_all_with_zeros_for_the_others() -> None:
    numbers = [
        decode(encode(each, Encoding.TOPK, kept=4), Encoding.TOPK, each.size)
        for each in vectors(3, TILE_ELEMENTS + 300)
    ]
    weights, topk = [1.0, 2.0, 5.0], Encoding.TOPK

    dense = averaged(contributions(numbers, weights))

    listed = averaged(contributions(numbers, weights, topk), topk)
    assert 4 / 256 < np.count_nonzero(listed) / listed.size <= 12 / 256
    np.testing.assert_array_equal(listed, decode(encode(dense, topk), topk, dense.size))
    wide = averaged(contributions(numbers, weights, topk), topk, Encoding.FLOAT32)
    assert wide.tobytes() == dense.tobytes()


@pytest.mark.parametrize("encoding", STRIPPED)
@pytest.mark.parametrize("ranks", [1, 3])
def test_f_dp_003_a_number_that_is_not_finite_is_found_beside_others_of_its_strip(
    encoding: Encoding, ranks: int
) -> None:
    numbers = vectors(ranks, TILE_ELEMENTS + 300)
    numbers[-1][[TILE_ELEMENTS + 133, TILE_ELEMENTS + 140]] = -np.inf

    found = weighted_mean(contributions(numbers, [1.0] * ranks, encoding), encoding, encoding)

    assert isinstance(found, MeanDefect)
    assert (found.kind, found.rank) == (BlockFaultKind.NON_FINITE, ranks - 1)
    assert (found.element, found.value) == (TILE_ELEMENTS + 133, "nan")


@pytest.mark.parametrize(
    ("encoding", "value"), [(Encoding.FLOAT16, -70000.0), *((each, 2.0**121) for each in STRIPPED)]
)
def test_a_mean_beyond_its_encoding_is_an_overflow(encoding: Encoding, value: float) -> None:
    numbers = [np.zeros(TILE_ELEMENTS + 9, np.float32) for _ in range(2)]
    for vector in numbers:
        vector[TILE_ELEMENTS + 4] = value

    found = defect(numbers, [1.0, 1.0], encoding)

    assert (found.kind, found.rank) == (BlockFaultKind.ENCODING_OVERFLOW, None)
    assert (found.element, float(found.value)) == (TILE_ELEMENTS + 4, value)


def test_numpy_warns_of_nothing() -> None:
    numbers = vectors(2, 10)
    numbers[0][1], numbers[1][2], numbers[0][3] = np.nan, np.inf, 1e-45

    with warnings.catch_warnings(), np.errstate(all="warn"):
        warnings.simplefilter("error")
        weighted_mean(contributions(numbers, [1.0, 1e-320]), Encoding.FLOAT32, Encoding.FLOAT16)


def test_a_payload_need_not_be_aligned() -> None:
    numbers = vectors(2, 33)
    shifted = [
        contribution(rank, 1.0, memoryview(b"x" + vector.tobytes())[1:], 33)
        for rank, vector in enumerate(numbers)
    ]

    mean = averaged(shifted)

    assert mean.tobytes() == averaged(contributions(numbers, [1.0, 1.0])).tobytes()


@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000])
@pytest.mark.parametrize("shift", [0, 4, 64])
def test_the_mean_is_written_where_it_is_asked_for(size: int, shift: int) -> None:
    numbers = vectors(3, size)
    room = np.full(size * 4 + 128, 7, np.uint8)
    start = -room.ctypes.data % 64 + shift
    into = room[start : start + size * 4].data
    parts = contributions(numbers, [1.0, 2.0, 3.0])

    mean = weighted_mean(parts, Encoding.FLOAT32, Encoding.FLOAT32, into)

    assert isinstance(mean, Mean)
    assert bytes(into) == bytes(mean.payload) == averaged(parts).tobytes()
    assert set(room[:start]) | set(room[start + size * 4 :]) == {7}, "and nowhere else"
