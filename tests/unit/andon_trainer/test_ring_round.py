"""The ring's core: the mean, whatever the order of arrivals (contract C-RING-001)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from andon.protocol.encoding import Encoding
from andon.protocol.run_settings import Policy
from andon.protocol.sums import sum_in_order
from andon_trainer.core.calls import Call
from andon_trainer.core.events import AveragesComplete
from andon_trainer.core.values import rounded
from unit.andon_trainer.ring_bench import KEY, Floats, Ring, expected_means

FLOAT32 = Policy(chunk_elements=3)


def random_blocks(ranks: int, sizes: list[int], seed: int) -> list[list[Floats]]:
    draw = np.random.default_rng(seed)
    return [[draw.standard_normal(size, dtype=np.float32) for size in sizes] for _ in range(ranks)]


def reducers_mean(blocks: list[Floats], weights: list[float]) -> Floats:
    """In rank order: docs/protocol-data.md, section 5."""
    shares = [np.float32(weight / sum_in_order(weights)) for weight in weights]
    acc = shares[0] * blocks[0]
    for share, block in zip(shares[1:], blocks[1:], strict=True):
        acc = acc + share * block
    return acc


NARROW_OR_NOT = [
    Encoding.FLOAT32,
    Encoding.BFLOAT16,
    Encoding.FLOAT16,
    Encoding.INT8_BLOCK,
    Encoding.INT4_BLOCK,
]


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.5, 1e-3]), min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 40) | st.integers(300, 900), min_size=1, max_size=3),
    encoding=st.sampled_from(NARROW_OR_NOT),
    chunk=st.sampled_from([3, 200]),
    seed=st.integers(0, 2**32 - 1),
)
@example(weights=[1.0], sizes=[5], encoding=Encoding.FLOAT32, chunk=3, seed=0)
@example(weights=[1.0] * 6, sizes=[1, 2], encoding=Encoding.FLOAT32, chunk=3, seed=0)
@example(weights=[0.0, 0.0, 2.0, 0.0], sizes=[7], encoding=Encoding.BFLOAT16, chunk=3, seed=0)
@example(weights=[0.0, 0.0], sizes=[7], encoding=Encoding.FLOAT32, chunk=3, seed=0)
def test_c_ring_001_every_rank_gets_the_defined_mean_in_any_order_of_arrivals(
    weights: list[float], sizes: list[int], encoding: Encoding, chunk: int, seed: int
) -> None:
    policy = Policy(chunk_elements=chunk, encoding=encoding)
    blocks = random_blocks(len(weights), sizes, seed)
    ring = Ring(sizes, weights, policy)

    ring.run(blocks, seed)

    means = expected_means(blocks, weights, policy)
    complete = AveragesComplete(KEY, sum_in_order(weights), len(weights))
    for rank, round_ in enumerate(ring.rounds):
        assert ring.said[rank] == [complete]
        for mean, average in zip(means, round_.averages, strict=True):
            assert average.tobytes() == mean.tobytes()
        assert round_.waiting_bytes == 0


def test_c_ring_001_two_ranks_get_the_reducers_bits() -> None:
    blocks = random_blocks(2, [101], 3)
    ring = Ring([101], [3.0, 7.0], FLOAT32)

    ring.run(blocks, 1)

    expected = reducers_mean([blocks[0][0], blocks[1][0]], [3.0, 7.0])
    assert ring.rounds[0].averages[0].tobytes() == expected.tobytes()
    assert ring.rounds[1].averages[0].tobytes() == expected.tobytes()


def test_segment_0_is_summed_in_the_reducers_order() -> None:
    blocks = random_blocks(4, [40], 5)
    ring = Ring([40], [1.0, 2.0, 3.0, 4.0], Policy(chunk_elements=10))

    ring.run(blocks, 1)

    expected = reducers_mean([each[0] for each in blocks], [1.0, 2.0, 3.0, 4.0])
    assert ring.rounds[2].averages[0][:10].tobytes() == expected[:10].tobytes()


@pytest.mark.parametrize("encoding", NARROW_OR_NOT)
def test_one_contributor_gets_its_own_numbers_back_as_they_were_encoded(
    encoding: Encoding,
) -> None:
    blocks = random_blocks(3, [9], 2)
    blocks[1][0][0] = -0.0
    # As a segment each, since an encoding may have a scale for all numbers of one.
    sent = [rounded(blocks[1][0][at : at + 3], encoding) for at in (0, 3, 6)]
    ring = Ring([9], [0.0, 5.0, 0.0], Policy(chunk_elements=3, encoding=encoding))

    ring.run(blocks, 4)

    own = np.concatenate(sent).tobytes()
    assert [each.averages[0].tobytes() for each in ring.rounds] == [own] * 3


def test_averages_may_travel_wider_than_contributions() -> None:
    policy = Policy(chunk_elements=3, encoding=Encoding.BFLOAT16, answer_encoding=Encoding.FLOAT32)
    blocks = random_blocks(3, [20], 2)
    ring = Ring([20], [1.0, 2.0, 1.0], policy)

    ring.run(blocks, 4)

    (mean,) = expected_means(blocks, [1.0, 2.0, 1.0], policy)
    assert {each.averages[0].tobytes() for each in ring.rounds} == {mean.tobytes()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_link_carries_twice_its_share_of_the_model(ranks: int) -> None:
    elements = 6000 * ranks
    ring = Ring([elements], [1.0] * ranks, Policy(chunk_elements=2000))

    ring.run(random_blocks(ranks, [elements], 0), 0)

    payload = 2 * (ranks - 1) * 4 * elements // ranks
    for sent in ring.sent_bytes:
        assert payload <= sent < 1.02 * payload


@pytest.mark.parametrize("seed", range(5))
def test_a_barrier_is_over_when_all_have_come(seed: int) -> None:
    ring = Ring([4], [0.0] * 3, FLOAT32, [Call(name="barrier")] * 3)

    ring.run([], seed)

    assert ring.said == [[AveragesComplete(KEY, 0.0, 3)]] * 3


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rank_0s_bytes_come_to_all(ranks: int) -> None:
    bytes_of_0 = np.arange(10, dtype=np.uint8)
    data = [bytes_of_0.copy() if rank == 0 else np.zeros(10, np.uint8) for rank in range(ranks)]
    for each in data:
        each[:2] = 77  # what it is
    calls = [Call(name="broadcast", data=each, head_bytes=2) for each in data]
    ring = Ring([4], [1.0, *[0.0] * (ranks - 1)], FLOAT32, calls)

    ring.run([], ranks)

    assert all(each.tobytes() == data[0].tobytes() for each in data)
    assert ring.said == [[AveragesComplete(KEY, 1.0, ranks)]] * ranks


def test_what_comes_before_this_ranks_own_block_waits_for_it() -> None:
    blocks = random_blocks(2, [4], 0)
    ring = Ring([4], [1.0, 1.0], FLOAT32)
    for rank in range(2):
        ring.do(rank, ring.rounds[rank].begin())
    ring.deliver(0)
    ring.deliver(1)
    ring.do(0, ring.rounds[0].submit(0, blocks[0][0]))
    frame = ring.links[0][0]

    ring.deliver(0)

    assert ring.rounds[1].waiting_bytes == len(frame)
    ring.do(1, ring.rounds[1].submit(0, blocks[1][0]))
    assert ring.rounds[1].waiting_bytes == 0


def test_no_chunk_leaves_before_all_terms_are_here() -> None:
    blocks = random_blocks(3, [9], 0)
    ring = Ring([9], [1.0] * 3, FLOAT32)

    ring.do(0, ring.rounds[0].begin())
    ring.do(0, ring.rounds[0].submit(0, blocks[0][0]))

    assert len(ring.links[0]) == 1
