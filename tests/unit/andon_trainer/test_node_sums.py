"""Sums of grains by node have the bits of the tree, whoever adds them and in whatever order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from andon.protocol.grains import Node, cover, fold, leaf_factor, root_divisor
from andon.protocol.records import PositionRange
from andon_trainer.averaging.node_sums import NodeSums, divided, leaves_of


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_sums_of_any_workers_and_their_processes_make_the_root_that_numpy_makes(
    data: st.DataObject,
) -> None:
    count = data.draw(st.integers(1, 40), label="grains")
    owners = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    processes = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    order = data.draw(st.permutations(range(count)))
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))
    gradients = generator.standard_normal((count, 3), np.float32) * 10.0 ** generator.integers(
        -20, 20, (count, 1)
    ).astype(np.float32)
    weights = [float(each) for each in generator.integers(1, 9, count)]
    hosts = [[NodeSums(count) for _ in range(3)] for _ in range(4)]

    for grain in order:
        leaf = leaves_of(
            [torch.tensor(gradients[grain])], float(leaf_factor(weights[grain], 8, count))
        )
        hosts[owners[grain]][processes[grain]].add(grain, leaf)
    workers = [host[0] for host in hosts]
    for leader, *others in hosts:
        handed = [(node, each[node]) for each in others for node in each.nodes]
        for node, parts in data.draw(st.permutations(handed)):
            leader.add_node(node, parts)

    for owner, worker in enumerate(workers):
        owned = [PositionRange(g, g + 1) for g in range(count) if owners[g] == owner]
        assert tuple(worker.nodes) == cover(owned, count)
    sums = {node: _of(each, node) for each in workers for node in each.nodes}
    root = Node(0, count)
    mean = fold(sums, root, np.add) / root_divisor(sum(weights), 8, count)
    leaves = {
        Node(g, g + 1): gradients[g] * leaf_factor(weights[g], 8, count) for g in range(count)
    }
    expected = fold(leaves, root, np.add) / root_divisor(sum(weights), 8, count)
    assert mean.tobytes() == expected.tobytes()


def _of(worker: NodeSums, node: Node) -> npt.NDArray[np.float32]:
    (value,) = worker[node]
    assert value is not None
    found: npt.NDArray[np.float32] = value.numpy()
    return found


def test_a_mean_is_divided_as_numpy_divides() -> None:
    root = np.random.default_rng(0).standard_normal(1000, np.float32)

    mean = divided(torch.tensor(root), 37.0, 8, 5)

    assert mean.numpy().tobytes() == (root / root_divisor(37.0, 8, 5)).tobytes()


def test_an_absent_leaf_leaves_the_other_side_as_it_is() -> None:
    sums = NodeSums(3)
    for grain, leaf in enumerate((None, torch.tensor([-0.0, -0.0]), None)):
        sums.add(grain, leaves_of([leaf], 1.0))

    (value,) = sums[Node(0, 3)]

    assert value is not None
    # The first element says that there is a gradient; the second has kept its sign.
    assert torch.signbit(value).tolist() == [False, True]


def test_a_scaled_leaf_is_rounded_without_its_scale_first() -> None:
    gradient = torch.tensor([1 / 3], dtype=torch.float16)

    (leaf,) = leaves_of([gradient], 5 / 8, torch.tensor(1 / 1000.0))

    expected = (np.float32(gradient.item()) * np.float32(1 / 1000.0)) * np.float32(5 / 8)
    assert leaf is not None
    assert leaf.item() == float(expected)
