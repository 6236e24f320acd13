"""The trimmed mean: NumPy's to the bit, whatever is contributed and in which order it arrives."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from andon.protocol.encoding import Encoding, decode, encode
from andon.protocol.messages import AveragedBlock, BlockFaultKind, BlockGradient, Operation
from andon.protocol.records import Key
from andon.protocol.sums import sum_in_order
from andon_reducer.core.effects import Reduce
from andon_reducer.core.events import GradientArrived, ReduceStreamOpened
from andon_reducer.core.jobs import reduce_chunk
from andon_reducer.core.mean import Mean, MeanDefect, trimmed_mean, weighted_mean
from andon_reducer.core.rounds import Rounds

Floats = npt.NDArray[np.float32]


pytestmark = pytest.mark.usefixtures("arithmetic")  # Each with the C module and without it.


def gradients(
    numbers: Floats, weights: list[float], encoding: Encoding = Encoding.FLOAT32
) -> list[BlockGradient]:
    return [
        BlockGradient(
            key=Key(1, 1),
            rank=rank,
            world_size=len(weights),
            operation=Operation.TRIMMED_MEAN,
            block=0,
            offset=0,
            count=row.size,
            weight=weight,
            payload=encode(row, encoding),
            encoding=encoding,
        )
        for rank, (row, weight) in enumerate(zip(numbers, weights, strict=True))
    ]


def by_numpy(numbers: Floats, weights: list[float]) -> Floats:
    """The definition, by a stable sort of each element's contributions."""
    count, cut = len(weights), len(weights) // 5
    order = np.argsort(numbers, axis=0, kind="stable")
    kept = np.sort(order[cut : count - cut], axis=0)
    shares = np.array(weights) / sum_in_order(weights)
    total, weight = np.full(numbers.shape[1], -0.0), np.zeros(numbers.shape[1])
    for ranks in kept:
        chosen = np.take_along_axis(numbers, ranks[None], axis=0)[0].astype(np.float64)
        total += shares[ranks] * chosen
        weight += shares[ranks]
    return (total / weight).astype(np.float32)


def reduced(arrivals: list[BlockGradient]) -> AveragedBlock:
    """What a reducer answers, whose streams bring these contributions in this order."""
    rounds = Rounds(window_bytes=2**30, max_payload_bytes=2**30)
    effects = []
    for part in arrivals:
        rounds.receive(ReduceStreamOpened(part.rank, "7f3a", part.rank), 0.0)
        effects += rounds.receive(GradientArrived(part.rank, part), 0.0)
    (effect,) = effects
    assert isinstance(effect, Reduce)
    answer = reduce_chunk(effect.job)
    assert isinstance(answer, AveragedBlock), answer
    return answer


@pytest.mark.parametrize("encoding", [Encoding.FLOAT32, Encoding.FLOAT16, Encoding.BFLOAT16])
@pytest.mark.parametrize("count", [5, 6, 9, 10, 17])
def test_c_ddp_001_a_trimmed_mean_is_numpy_s_in_any_order_of_arrival(
    count: int, encoding: Encoding
) -> None:
    draw = np.random.default_rng(count)
    for size, ties in itertools.product((1, 3, 700, 2**14 + 5), (False, True)):
        numbers = draw.standard_normal((count, size)) * 10.0 ** draw.integers(-4, 4, (count, size))
        if ties:
            numbers = np.copysign(draw.integers(0, 3, (count, size)), draw.standard_normal(size))
        weights = (
            draw.choice([16.0, 15.0, 0.25, 1e-3], count).tolist() if size % 2 else [8.0] * count
        )
        parts = gradients(numbers.astype(np.float32), weights, encoding)
        sent = np.array([decode(part.payload, encoding, size) for part in parts])

        answers = {
            bytes(reduced([parts[at] for at in draw.permutation(count)]).payload) for _ in "ab"
        }

        assert answers == {bytes(encode(by_numpy(sent, weights), encoding))}


def test_one_far_off_of_five_moves_nothing() -> None:
    numbers = np.full((5, 40), 0.1, np.float32)
    numbers[2] = 3e38

    answer = reduced(gradients(numbers, [1.0, 2.0, 3.0, 4.0, 5.0]))

    assert decode(answer.payload, Encoding.FLOAT32, 40).tolist() == numbers[0].tolist()


def test_fewer_than_five_contributions_have_the_weighted_mean() -> None:
    parts = gradients(
        np.random.default_rng(4).standard_normal((4, 9)).astype(np.float32), [1.0] * 4
    )

    mean = trimmed_mean(parts, Encoding.FLOAT32, Encoding.FLOAT32)

    plain = weighted_mean(parts, Encoding.FLOAT32, Encoding.FLOAT32)
    assert isinstance(mean, Mean)
    assert isinstance(plain, Mean)
    assert bytes(mean.payload) == bytes(plain.payload)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 2**14 + 1, 2**16 + 2])
def test_f_dp_003_a_value_that_is_not_finite_is_found_where_it_would_be_left_out(
    at: int, value: float
) -> None:
    numbers = np.random.default_rng(5).standard_normal((6, 2**16 + 3)).astype(np.float32)
    numbers[4, at] = numbers[1, -1] = value
    into = memoryview(bytearray(numbers[0].nbytes))

    found = trimmed_mean(gradients(numbers, [1.0] * 6), Encoding.FLOAT32, Encoding.FLOAT32, into)

    assert isinstance(found, MeanDefect)
    rank = 1 if at == 2**16 + 2 else 4
    assert (found.kind, found.rank, found.element) == (BlockFaultKind.NON_FINITE, rank, at)


def test_finite_numbers_whose_sum_is_not_have_a_trimmed_mean() -> None:
    greatest = np.finfo(np.float32).max
    numbers = np.full((5, 3), greatest, np.float32)

    answer = reduced(gradients(numbers, [1.0] * 5))

    assert decode(answer.payload, Encoding.FLOAT32, 3).tolist() == [float(greatest)] * 3


@pytest.mark.parametrize("weights", [[1e308] * 5, [1e-300, *[1e300] * 4]])
def test_weights_that_float64_can_t_weigh_are_inconsistent(weights: list[float]) -> None:
    parts = gradients(np.ones((5, 2), np.float32), weights)

    found = trimmed_mean(parts, Encoding.FLOAT32, Encoding.FLOAT32)

    assert isinstance(found, MeanDefect)
    assert (found.kind, found.rank) == (BlockFaultKind.INCONSISTENT, None)
