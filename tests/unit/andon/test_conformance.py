"""Conformance vectors that other languages are held to: means, trees, digests, shares, order."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from andon.protocol.grains import Node, children, cover, fold, leaf_factor
from andon.protocol.order import splitmix64
from andon.protocol.records import PositionRange
from andon.protocol.shards import Split, deal, reassign
from unit.andon.golden import by_name, golden


@pytest.mark.parametrize("vector", golden("mean", "means"), ids=by_name)
def test_means_are_those_of_the_definition(vector: dict[str, Any]) -> None:
    total = 0.0
    for weight in vector["weights"]:
        total += weight

    mean = np.zeros(0, np.float32)
    for weight, contribution in zip(vector["weights"], vector["contributions"], strict=True):
        if weight:
            coefficient = np.float32(weight / total)
            term = coefficient * np.frombuffer(bytes.fromhex(contribution), "<f4")
            mean = mean + term if mean.size else term

    assert total == vector["total_weight"]
    assert mean.dtype == np.float32
    assert mean.tobytes().hex() == vector["mean"]


@pytest.mark.parametrize("vector", golden("weights"), ids=by_name)
def test_digests_of_weights_are_those_of_the_definition(vector: dict[str, Any]) -> None:
    digest = hashlib.sha256()

    for tensor in vector["tensors"]:
        shape = ",".join(map(str, tensor["shape"]))
        digest.update(f"{tensor['name']}\0{tensor['dtype']}\0{shape}\0".encode())
        digest.update(bytes.fromhex(tensor["bytes"]))

    assert digest.hexdigest() == vector["sha256"]


@pytest.mark.parametrize("vector", golden("order", "splitmix64"), ids=lambda v: v["state"])
def test_splitmix64_gives_the_conformance_vectors(vector: dict[str, str]) -> None:
    assert str(splitmix64(int(vector["state"]))) == vector["output"]


@pytest.mark.parametrize("vector", golden("shares"), ids=by_name)
def test_shares_are_those_of_the_definition(vector: dict[str, Any]) -> None:
    batch = PositionRange(*vector["batch"])
    split = Split(tuple(vector["targets"]), vector["interleaved"])
    kept = [[PositionRange(*part) for part in share] for share in vector["kept"]]

    shares = reassign(batch, kept, split)

    assert [[[part.start, part.stop] for part in share] for share in shares] == vector["shares"]
    if not any(kept):
        assert shares == deal(batch, split, len(kept))


@pytest.mark.parametrize("vector", golden("tree", "trees"), ids=lambda v: str(v["grains"]))
def test_trees_have_the_nodes_of_the_definition(vector: dict[str, Any]) -> None:
    def below(node: Node) -> list[Node]:
        pair = children(node)
        return [node] if pair is None else [node, *below(pair[0]), *below(pair[1])]

    nodes = below(Node(0, vector["grains"]))

    assert [[node.first, node.stop] for node in nodes] == vector["nodes"]


@pytest.mark.parametrize("vector", golden("tree", "covers"), ids=by_name)
def test_covers_are_those_of_the_definition(vector: dict[str, Any]) -> None:
    nodes = cover([PositionRange(*run) for run in vector["runs"]], vector["grains"])

    assert [[node.first, node.stop] for node in nodes] == vector["nodes"]


@pytest.mark.parametrize("vector", golden("tree", "means"), ids=by_name)
def test_sums_of_nodes_are_those_of_the_definition(vector: dict[str, Any]) -> None:
    size, count = vector["grain"], len(vector["grains"])
    leaves, weights = {}, {}
    for grain, leaf in enumerate(vector["grains"]):
        node, weight = Node(grain, grain + 1), leaf["weight"]
        gradient = np.frombuffer(bytes.fromhex(leaf["gradient"]), "<f4")
        weights[node] = weight
        leaves[node] = np.full(vector["element_count"], -0.0, np.float32)
        if weight:
            leaves[node] = leaf_factor(weight, size, count) * gradient

    for contribution in (each for rank in vector["ranks"] for each in rank):
        node = Node(*contribution["node"])
        own = [leaf for leaf in leaves if node.first <= leaf.first < node.stop]
        total = fold({leaf: leaves[leaf] for leaf in own}, node, np.add)
        assert total.astype("<f4").tobytes().hex() == contribution["payload"]
        weight = fold({leaf: weights[leaf] for leaf in own}, node, float.__add__)
        assert weight == contribution["weight"]
