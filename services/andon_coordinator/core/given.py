"""What processes attested of a step, and where in the model their results differ.

A report has hashes, and two hashes do not say which elements differ. But a worker that has verified
a node, and gets the owner's sum of it, has both (`andon_trainer.averaging.mean_checks`), and says
where. `first_seen` finds what was said of two results. Nobody is judged by it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from andon.protocol.arithmetic import Arithmetic
from andon.protocol.attestations import Attestation, ElementApart, NodeApart
from andon.protocol.grains import Node

__all__ = ["Dispute", "Given", "Seen", "disputes_of", "first_seen", "leaves_first"]

Dispute = tuple[Node, bytes, bytes]
"""A node, and two results of it."""


@dataclass(slots=True)
class Given:
    """What one process attested to of one step, in all of its attempts."""

    worker: int
    incarnation: int
    arithmetic: Arithmetic
    source: int | None = None
    """The worker that it got its weights from, if nobody else compared them since."""
    digests: dict[Node, list[bytes]] = field(default_factory=dict)
    """Different ones of each node, in the order in which they came."""
    samples: dict[Node, list[bytes]] = field(default_factory=dict)
    components: dict[bytes, bytes] = field(default_factory=dict)
    """The hashes of the components, by their digest."""
    apart: list[NodeApart] = field(default_factory=list)
    """Nodes of which it has seen two results."""

    def add(self, attested: Iterable[Attestation], apart: Iterable[NodeApart] = ()) -> None:
        """Takes one more report."""
        self.apart += apart
        for each in attested:
            _note(self.digests, each.node, each.digest)
            if each.samples:
                _note(self.samples, each.node, each.samples)
            if each.components:
                self.components[each.digest] = each.components

    @property
    def wavers(self) -> bool:
        """Whether it gave two digests of one node."""
        return any(len(given) > 1 for given in self.digests.values())


def _note(known: dict[Node, list[bytes]], node: Node, value: bytes) -> None:
    given = known.setdefault(node, [])
    if value not in given:
        given.append(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The first element in which two results of a node differ, as somebody has seen it."""

    node: Node
    element: ElementApart
    values: tuple[float, float]
    """There: of the first result, and of the second; of a conviction the wrong one is first."""
    workers: tuple[tuple[int, ...], tuple[int, ...]]
    """Who gave each."""


def leaves_first(node: Node) -> tuple[int, Node]:
    """Sorts nodes: the smaller one tells more of where something is wrong."""
    return len(node), node


def disputes_of(accused: Given, others: Sequence[Given]) -> Iterator[Dispute]:
    """The nodes of which a worker gave something else than one of these; single grains first."""
    for node in sorted(accused.digests, key=leaves_first):
        for digest in accused.digests[node]:
            given = (each for other in others for each in other.digests.get(node, ()))
            yield from ((node, digest, each) for each in dict.fromkeys(given) if each != digest)


def first_seen(members: Collection[Given], disputes: Iterable[Dispute], node: Node) -> Seen | None:
    """A dispute of which somebody has seen both results.

    Of several the one that tells most of `node`: it has a grain of that, and few others.
    """
    known: dict[Dispute, tuple[ElementApart, bool]] = {}
    for given in members:
        for each in given.apart:
            known.setdefault((each.node, each.own, each.other), (each.element, True))
            known.setdefault((each.node, each.other, each.own), (each.element, False))
    found = [each for each in disputes if each in known]
    if not found:
        return None
    dispute = min(found, key=lambda it: (not _meet(it[0], node), leaves_first(it[0])))
    element, first_is_own = known[dispute]
    values = (element.expected, element.came)
    where, *digests = dispute
    one, other = (
        tuple(sorted(it.worker for it in members if digest in it.digests.get(where, ())))
        for digest in digests
    )
    return Seen(
        node=where,
        element=element,
        values=values if first_is_own else values[::-1],
        workers=(one, tuple(it for it in other if it not in one) or other),
    )


def _meet(one: Node, other: Node) -> bool:
    return one.first < other.stop and other.first < one.stop
