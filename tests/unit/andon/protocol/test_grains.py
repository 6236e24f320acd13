"""Grains and their tree: the same bits, whoever computed which grain."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.protocol.grains import (
    Grains,
    Node,
    children,
    cover,
    fold,
    is_node,
    leaf_factor,
    root_divisor,
)
from andon.protocol.records import PositionRange
from andon.protocol.shards import Ranges, Split, merged, reassign
from unit.andon.strategies import BOUNDED


def leaves(count: int) -> list[Node]:
    return [Node(grain, grain + 1) for grain in range(count)]


def tree(node: Node) -> Iterator[Node]:
    yield node
    for child in children(node) or ():
        yield from tree(child)


Floats = npt.NDArray[np.float32]


def add(left: Floats, right: Floats) -> Floats:
    total: Floats = left + right
    return total


@BOUNDED
@given(st.integers(2, 3000))
def test_a_node_is_divided_after_the_greatest_power_of_two_below_its_size(count: int) -> None:
    pair = children(Node(5, 5 + count))

    assert pair is not None
    left, right = pair
    assert (left.first, left.stop, right.stop) == (5, right.first, 5 + count)
    assert len(left) & (len(left) - 1) == 0
    assert len(left) < count <= 2 * len(left)


@BOUNDED
@given(st.integers(1, 70), st.integers(1, 5), st.randoms(use_true_random=False))
def test_the_root_has_the_same_bits_for_any_shares(
    count: int, workers: int, draw: random.Random
) -> None:
    draws = np.random.default_rng(draw.getrandbits(32))
    values = dict(
        zip(leaves(count), draws.standard_normal((count, 3)).astype(np.float32), strict=True)
    )
    root = Node(0, count)
    expected = fold(values, root, add)
    owners = [draw.randrange(workers) for _ in range(count)]
    nodes = {}
    for worker in range(workers):
        own = [PositionRange(i, i + 1) for i, owner in enumerate(owners) if owner == worker]
        for node in cover(own, count):
            nodes[node] = fold(
                {leaf: values[leaf] for leaf in leaves(count)[node.first : node.stop]}, node, add
            )

    result = fold(nodes, root, add)

    assert result.tobytes() == expected.tobytes()


@BOUNDED
@given(st.integers(1, 200), st.integers(0, 199), st.integers(1, 200))
def test_a_cover_has_the_maximal_nodes_and_nothing_else(count: int, start: int, size: int) -> None:
    run = PositionRange(min(start, count - 1), min(start + size, count))

    nodes = cover([run], count)

    assert [grain for node in nodes for grain in range(node.first, node.stop)] == list(
        range(run.start, run.stop)
    )
    inside = [
        node for node in tree(Node(0, count)) if run.start <= node.first and node.stop <= run.stop
    ]
    assert set(nodes) == {
        node
        for node in inside
        if not any(
            len(node) < len(other) and other.first <= node.first and node.stop <= other.stop
            for other in inside
        )
    }


@BOUNDED
@given(st.integers(1, 40))
def test_a_tree_has_its_nodes_and_no_others(count: int) -> None:
    nodes = set(tree(Node(0, count)))

    for first in range(count):
        for stop in range(first + 1, count + 2):
            assert is_node(Node(first, stop), count) == (Node(first, stop) in nodes)


def test_equal_shares_of_a_power_of_two_are_one_node_each() -> None:
    grains = Grains(PositionRange(0, 64), 4)

    dealt = grains.deal([()] * 4, Split())

    assert [cover(share, grains.count) for share in dealt] == [
        (Node(0, 4),), (Node(4, 8),), (Node(8, 12),), (Node(12, 16),)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("targets", "count", "sizes"),
    [
        ((1, 1, 1), 7, [2, 2, 3]),
        ((1, 1, 1), 8, [3, 3, 2]),
        ((1, 1, 1), 16, [4, 6, 6]),
        ((1, 1, 1), 64, [20, 22, 22]),
        ((5, 3), 13, [8, 5]),
    ],
)
def test_runs_are_cut_where_they_have_fewer_nodes_and_nobody_has_longer_to_compute(
    targets: tuple[int, ...], count: int, sizes: list[int]
) -> None:
    dealt = Grains(PositionRange(0, count), 1).deal([()] * len(targets), Split(targets))

    assert [len(run) for (run,) in dealt] == sizes


@BOUNDED
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 200))
def test_aligned_runs_have_no_more_nodes_and_no_slower_rank(targets: list[int], more: int) -> None:
    count, split = len(targets) + more, Split(tuple(targets))
    batch, nobody = PositionRange(0, count), [()] * len(targets)

    def cost(shares: Sequence[Ranges]) -> tuple[int, Fraction]:
        sizes = [sum(map(len, share)) for share in shares]
        nodes = sum(len(cover(share, count)) for share in shares)
        return nodes, max(map(Fraction, sizes, targets))

    aligned, plain = Grains(batch, 1).deal(nobody, split), reassign(batch, nobody, split)

    (nodes, slowest), (nodes_before, slowest_before) = cost(aligned), cost(plain)
    assert nodes <= nodes_before
    assert slowest <= slowest_before
    assert all(aligned)
    assert merged(run for share in aligned for run in share) == (batch,)


def test_what_a_survivor_has_summed_stays_a_node_after_a_loss() -> None:
    grains = Grains(PositionRange(0, 64), 4)
    first = grains.deal([()] * 4, Split())

    again = grains.deal([first[0], first[2], first[3]], Split())

    for before, after in zip((first[0], first[2], first[3]), again, strict=True):
        (summed,) = cover(before, grains.count)
        assert any(
            node.first <= summed.first and summed.stop <= node.stop
            for node in cover(after, grains.count)
        )


@BOUNDED
@given(st.integers(0, 1000), st.integers(1, 300), st.integers(1, 40), st.integers(1, 6))
def test_shares_are_whole_grains_and_the_whole_batch(
    start: int, size: int, micro_batch: int, workers: int
) -> None:
    grains = Grains(PositionRange(start, start + size), micro_batch)

    dealt = grains.deal([()] * workers, Split())

    positions = [
        position
        for share in dealt
        for part in grains.ranges(share)
        for position in range(part.start, part.stop)
    ]
    assert sorted(positions) == list(range(start, start + size))
    assert all(grains.of(grains.ranges(share)) == share for share in dealt)


def test_a_run_that_cuts_a_grain_is_refused() -> None:
    grains = Grains(PositionRange(10, 30), 8)

    assert grains.of([PositionRange(26, 30)]) == (PositionRange(2, 3),)
    for start, stop in ((10, 17), (12, 18), (2, 18), (26, 29), (26, 34)):
        with pytest.raises(ValueError, match="not whole grains"):
            grains.of([PositionRange(start, stop)])


def test_nodes_that_overlap_or_are_missing_have_no_root() -> None:
    one = np.ones(1, np.float32)

    with pytest.raises(ValueError, match="partition"):
        fold({Node(0, 2): one}, Node(0, 4), add)
    with pytest.raises(ValueError, match="missing"):
        fold({Node(0, 2): one, Node(1, 3): one}, Node(0, 4), add)


def test_a_full_grain_is_added_as_it_is_and_one_grain_is_its_own_mean() -> None:
    gradient = np.float32(0.1)

    mean = leaf_factor(3.0, 8, 1) * gradient / root_divisor(3.0, 8, 1)

    assert leaf_factor(8.0, 8, 2) == 1.0
    assert leaf_factor(3.0, 8, 2) == root_divisor(3.0, 8, 2) == 0.375
    assert mean.tobytes() == gradient.tobytes()


def test_an_absent_gradient_leaves_every_bit() -> None:
    absent = np.float32(-0.0)

    for value in (0.0, -0.0, 1e-45, -3.5, np.inf):
        kept = np.float32(value) + absent
        assert kept.tobytes() == np.float32(value).tobytes()
