"""A step's loss is added along the tree, in float64, whoever has computed its grains."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from andon.protocol.grains import Grains, fold
from andon.protocol.records import PositionRange
from andon.protocol.shards import merged
from andon_trainer.averaging.readings import PendingNumbers
from andon_trainer.schedules.grain_losses import GrainLosses


def read(loss: float) -> PendingNumbers:
    return PendingNumbers(torch.tensor([loss], dtype=torch.float64))


def tree_sum(values: Any) -> Any:
    """The sum of float64 values along the tree, without the protocol's functions."""
    if len(values) == 1:
        return values[0]
    left = 1 << ((len(values) - 1).bit_length() - 1)
    return tree_sum(values[:left]) + tree_sum(values[left:])


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_loss_is_the_trees_for_any_batch_shares_and_order(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 60), label="positions")
    grains = Grains(PositionRange(40, 40 + size), data.draw(st.integers(1, 7), label="grain"))
    draw = np.random.default_rng(data.draw(st.integers(0, 99), label="seed"))
    owners = draw.integers(0, 3, grains.count)
    weights = draw.integers(0, 9, grains.count).astype(float)
    losses = draw.standard_normal(grains.count) * 10.0 ** draw.integers(-9, 9, grains.count)
    shares = [
        merged(grains.positions(grain) for grain in range(grains.count) if owners[grain] == worker)
        for worker in range(3)
    ]
    lost = data.draw(st.integers(0, 2), label="lost")

    # The first attempt of all; then the others have what worker `lost` had, too.
    computed = [GrainLosses(grains, share) for share in shares]
    for grain in draw.permutation(grains.count):
        computed[owners[grain]].add(int(grain), weights[grain], read(losses[grain]))
    known = {number: each.known for number, each in enumerate(computed)}
    heir = (lost + 1) % 3
    again = GrainLosses(grains, merged((*shares[heir], *shares[lost])), known[heir])
    for grain in again.missing:
        again.add(grain, weights[grain], read(losses[grain]))
    rest = computed[(lost + 2) % 3]

    for parts in (computed, [again, rest]):
        nodes = [node for each in parts for node in each.nodes]
        for name, values in (("weight", weights), ("loss_sum", weights * losses)):
            by_node = {each.node: getattr(each, name) for each in nodes}
            assert fold(by_node, grains.root, operator.add) == tree_sum(values)
