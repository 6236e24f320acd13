"""Attestations of a worker that computes right, or wrong where a test says so.

A digest is a hash of the parent, the node and what is wrong in it. So two workers that are right
agree, and two that are wrong in the same way do as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from andon.protocol.attestations import (
    DIGEST_BYTES,
    SAMPLE_BYTES,
    Attestation,
    ElementApart,
    MeanCheck,
    NodeApart,
)
from andon.protocol.grains import Grains, Node, cover
from andon.protocol.records import PositionRange
from andon.protocol.rounds import RankTerms

__all__ = ["attested", "mean_checked", "nodes_apart"]

_WRONG_COMPONENT = 2


def attested(
    terms: RankTerms,
    grain: int,
    *,
    components: int = 4,
    wrong: Mapping[str, str] | None = None,
    odd_samples: Iterable[int] = (),
) -> tuple[Attestation, ...]:
    """What a worker attests that was assigned this; nothing if nobody asked.

    Args:
        terms: its assignment.
        grain: positions of a grain.
        components: of the layout; the third one is where results go wrong.
        wrong: what it computes wrong, a grain as `3` or a sum as `0+2`; another value is another
            error.
        odd_samples: grains for which it was given other samples.
    """
    if not terms.attests:
        return ()
    grains, wrong, odd = Grains(terms.batch, grain), dict(wrong or {}), set(odd_samples)
    own = grains.of(terms.positions)
    beside = [PositionRange(at, at + 1) for at in terms.verifies]
    found = []
    for part in (own, beside):
        leaves = [Node(at, at + 1) for each in part for at in range(each.start, each.stop)]
        sums = [node for node in cover(part, grains.count) if len(node) > 1]
        for node in (*leaves, *sums):
            marks = _marks(node, wrong)
            itemised = terms.itemised and len(node) == 1 and node.first in terms.verifies
            found.append(
                Attestation(
                    node=node,
                    digest=_hash(terms.parent, node, marks),
                    samples=_samples(node, node.first in odd) if len(node) == 1 else b"",
                    components=b"".join(
                        _hash(node, index, marks if index == _WRONG_COMPONENT else "")
                        for index in range(components if itemised else 0)
                    ),
                )
            )
    return tuple(found)


def mean_checked(
    terms: RankTerms, *, wrong: Mapping[str, str] | None = None, odd: str = ""
) -> MeanCheck | None:
    """What a worker finds of the mean; None if nobody asked.

    Args:
        terms: its assignment.
        wrong: as in `attested`, what others have sent to it.
        odd: `mean`: what came is another mean, in block 0, or with `mean:3` in block 3; `sums`: it
            got other sums.
    """
    if not terms.sums:
        return None
    nodes = [each.node for each in terms.sums if each.relayed]
    relayed = tuple(_hash(terms.parent, node, _marks(node, wrong or {})) for node in nodes)
    relayed = (bytes(DIGEST_BYTES),) * len(nodes) if odd == "sums" else relayed
    kind, _, block = odd.partition(":")
    expected, came = b"e" * DIGEST_BYTES, (b"x" if kind == "mean" else b"e") * DIGEST_BYTES
    apart = ElementApart(int(block or 0), 1, 1.5, 1.25) if kind == "mean" else None
    return MeanCheck(expected=expected, came=came, relayed=relayed, apart=apart)


def nodes_apart(
    terms: RankTerms, given: Iterable[Attestation], check: MeanCheck | None, written: bytes = b""
) -> tuple[NodeApart, ...]:
    """The nodes of which a worker has heard something else than it has made.

    `written`: the digest of its averages; empty: they are what came.
    """
    if check is None:
        return ()
    came = zip((each.node for each in terms.sums if each.relayed), check.relayed, strict=True)
    own = {each.node: each.digest for each in given}
    element = ElementApart(_WRONG_COMPONENT, 5, 0.5, 0.25)
    heard = tuple(
        NodeApart(node=node, own=own[node], other=other, element=element)
        for node, other in came
        if own.get(node, other) != other
    )
    if not written:
        return heard
    root = Node(0, terms.sums[-1].node.stop)
    return *heard, NodeApart(node=root, own=written, other=bytes(DIGEST_BYTES), element=element)


def _marks(node: Node, wrong: Mapping[str, str]) -> list[str]:
    """What is wrong in a node: in each of its grains, and in their sum."""
    marks = [wrong.get(str(at), "") for at in range(node.first, node.stop)]
    return [*marks, wrong.get(f"{node.first}+{len(node)}", "") if len(node) > 1 else ""]


def _hash(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()[:DIGEST_BYTES]


def _samples(node: Node, odd: bool) -> bytes:
    return _hash(node, odd)[:SAMPLE_BYTES]
