"""Nodes of a tree over real reducers: the fold's bits on every path, in areas and beyond them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from andon.protocol.capabilities import SAME_BITS
from andon.protocol.grains import Grains, Node, cover, fold, root_divisor
from andon.protocol.messages import TreeNode
from andon.protocol.records import PositionRange
from andon_trainer.core.calls import Call, Floats, NodePart
from andon_trainer.core.events import AveragesComplete
from integration.andon_trainer.star_workers import PATHS, SIZES, StarWorker, star

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

GRAINS = Grains(PositionRange(0, 33), 3)
OWNERS = (0, 1, 2, 2, 1, 1, 0, 0, 0, 2, 1)
"""Who has which of the 11 grains: shares as they are after losses."""


def nodes_of(rank: int) -> tuple[Node, ...]:
    owned = [PositionRange(g, g + 1) for g, owner in enumerate(OWNERS) if owner == rank]
    return cover(owned, GRAINS.count)


def sums_of(node: Node) -> list[Floats]:
    generator = np.random.default_rng(node.first)
    return [generator.standard_normal(size, dtype=np.float32) for size in SIZES]


def weight_of(node: Node) -> float:
    return 3.0 * len(node) - 0.5


def expected() -> bytes:
    everybody = [node for rank in range(3) for node in nodes_of(rank)]
    root = GRAINS.root
    total = fold({node: weight_of(node) for node in everybody}, root, float.__add__)
    divisor = root_divisor(total, GRAINS.micro_batch, GRAINS.count)
    parts = [
        fold({node: sums_of(node)[block] for node in everybody}, root, np.add) / divisor
        for block in range(len(SIZES))
    ]
    return b"".join(part.tobytes() for part in parts)


def give(worker: StarWorker, number: int) -> None:
    nodes = nodes_of(worker.rank)
    count, size = GRAINS.count, GRAINS.micro_batch
    parts = tuple(
        NodePart(TreeNode(node.first, len(node), count, size), weight_of(node)) for node in nodes
    )
    worker.begin(number, Call(name="step", blocks=range(len(SIZES)), nodes=parts))
    for block in range(len(SIZES)):
        worker.exchange.submit_nodes(block, [sums_of(node)[block] for node in nodes])


@pytest.mark.parametrize("reducers", [1, 2])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("areas", [1, 8])
def test_the_mean_has_the_bits_of_the_fold(
    tmp_path: Path, path: str, reducers: int, areas: int
) -> None:
    assert max(len(nodes_of(rank)) for rank in range(3)) == 3
    with star(path, tmp_path, reducers, 3) as (_, workers):
        for worker in workers:
            able = (*worker.opening.capabilities, SAME_BITS)
            worker.opening = replace(worker.opening, capabilities=able, contribution_areas=areas)

        # Twice: areas are written again.
        for number in (1, 2):
            for worker in (workers[2], workers[0], workers[1]):
                give(worker, number)
            outcomes = [worker.outcome(number) for worker in workers]

        assert all(isinstance(each, AveragesComplete) for each in outcomes), outcomes
        for worker in workers:
            found = b"".join(each.tobytes() for each in worker.exchange.averages)
            assert found == expected()
