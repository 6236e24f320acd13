"""Conformance vectors that other languages are held to: means, digests, shares, the generator."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

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
