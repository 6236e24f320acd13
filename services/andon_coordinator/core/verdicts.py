"""Verdicts: who computed wrong, as far as that can be known.

Section 37 of docs/protocol-same-bits.md has the rules. Everything here is a pure function of what
workers attested: whether they agree, which grains an inquest computes again, and whom its results
convict. A worker that is right must never be convicted, so where anything is open, nobody is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from andon.protocol.arithmetic import Arithmetic
from andon.protocol.attestations import COMPONENT_BYTES, SAMPLE_BYTES
from andon.protocol.grains import Node, cover
from andon.protocol.records import PositionRange
from andon_coordinator.core.given import Given, Seen, disputes_of, first_seen, leaves_first

__all__ = [
    "Inquest",
    "Judgement",
    "compared",
    "different_averages",
    "different_nodes",
    "different_samples",
    "first_component",
    "judge",
    "open_inquest",
]

_MOST_ITEM_BYTES = 2**20
"""Hashes of components in one report; a quarter of what a message may have."""
_MOST_GRAINS = 64
"""Disputed grains that are computed again if they are not itemised."""


@dataclass(slots=True, kw_only=True)
class Inquest:
    """A step that two workers computed differently, and what is computed again of it."""

    nodes: dict[Arithmetic, tuple[Node, ...]]
    """The disputed nodes among the workers of each arithmetic."""
    grains: dict[Arithmetic, tuple[int, ...]]
    """Those that each worker of it computes again: the disputed ones and the control."""
    given: dict[int, Given]
    """What each process gave, by its incarnation; of the first round, and of each one since."""
    itemised: bool = True
    """Whether the hashes of all components fit a report, at least those of one disputed grain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What an inquest came to."""

    node: Node
    """The first one in which results differ."""
    convicted: tuple[Given, ...]
    """Who computed wrong; empty: nobody can say who did."""
    witnesses: tuple[int, ...] = ()
    """Whose results convict them."""
    sides: tuple[tuple[int, ...], ...] = ()
    """The workers of each result of the node, the first one's first."""
    differ: tuple[int, ...] = ()
    """All workers that gave a result which another one did not; or that wavered."""
    why: str = ""
    """Why nobody is convicted."""
    apart: int | None = None
    """The layout's first component that differs, counted over all blocks; None: unknown."""
    digest: bytes = b""
    """What the first of them gave."""
    seen: Seen | None = None
    """The first element that differs; None: nobody has seen it."""


# --------------------------------------------------------------------- what is compared


def _groups(given: Iterable[Given]) -> dict[Arithmetic, list[Given]]:
    """Those that can be compared: an arithmetic that says nothing equals nobody's."""
    groups: dict[Arithmetic, list[Given]] = defaultdict(list)
    for each in given:
        if each.arithmetic:
            groups[each.arithmetic].append(each)
    return groups


def different_nodes(given: Collection[Given]) -> dict[Arithmetic, tuple[Node, ...]]:
    """The nodes of which workers of one arithmetic gave different digests, in rising order."""
    return _different(given, lambda each: each.digests)


def different_samples(given: Collection[Given]) -> tuple[Node, tuple[int, ...], int | None] | None:
    """The first grain of which workers were given different samples.

    Returns:
        The grain, the workers, and which of its positions is the first that differs; None if
        samples of a whole grain are hashed together.
    """
    found = _different(given, lambda each: each.samples)
    if not found:
        return None
    arithmetic, (node, *_) = min(found.items(), key=lambda item: item[1][0])
    members = [each for each in _groups(given)[arithmetic] if node in each.samples]
    told = [hashes for each in members for hashes in each.samples[node]]
    one, other = next((a, b) for a in told for b in told if a != b)
    apart = (
        _first_apart(one, other, SAMPLE_BYTES) if len(one) == len(other) > SAMPLE_BYTES else None
    )
    return node, tuple(sorted(each.worker for each in members)), apart


def _different(
    given: Collection[Given], of: Callable[[Given], Mapping[Node, list[bytes]]]
) -> dict[Arithmetic, tuple[Node, ...]]:
    found = {}
    for arithmetic, members in _groups(given).items():
        nodes = _contested(map(of, members))
        if nodes:
            found[arithmetic] = tuple(sorted(nodes))
    return found


def _contested(given: Iterable[Mapping[Node, list[bytes]]]) -> set[Node]:
    """The nodes of which there are several values."""
    told: dict[Node, set[bytes]] = defaultdict(set)
    for each in given:
        for node, values in each.items():
            told[node].update(values)
    return {node for node, values in told.items() if len(values) > 1}


def different_averages(digests: Mapping[int, bytes]) -> tuple[tuple[int, ...], ...]:
    """The workers of each digest of the averages, the most common first; empty if all are one.

    Averages are received, whatever computes with them, so all workers are compared.
    """
    holders: dict[bytes, list[int]] = defaultdict(list)
    for worker, digest in digests.items():
        if digest:
            holders[digest].append(worker)
    if len(holders) < 2:
        return ()
    return tuple(sorted((tuple(each) for each in holders.values()), key=lambda each: -len(each)))


def compared(given: Collection[Given]) -> tuple[int, frozenset[int]]:
    """How many grains two workers of one arithmetic computed, and the workers of such grains."""
    count, workers = 0, set[int]()
    for members in _groups(given).values():
        owners: dict[Node, list[int]] = defaultdict(list)
        for each in members:
            for node in each.digests:
                owners[node].append(each.worker)
        shared = [each for node, each in owners.items() if len(node) == 1 and len(each) > 1]
        count += len(shared)
        workers.update(worker for each in shared for worker in each)
    return count, frozenset(workers)


def first_component(one: bytes, other: bytes) -> int | None:
    """The first component whose hashes differ; None if none is known to."""
    return _first_apart(one, other, COMPONENT_BYTES) if len(one) == len(other) else None


def _first_apart(one: bytes, other: bytes, size: int) -> int | None:
    starts = range(0, len(one), size)
    return next((at // size for at in starts if one[at : at + size] != other[at : at + size]), None)


# ----------------------------------------------------------------------------- the inquest


def open_inquest(given: Mapping[int, Given], *, count: int, components: int) -> Inquest:
    """What is to be computed again, since these reports differ in nodes.

    Args:
        given: what each process gave, by its incarnation.
        count: the batch's grains.
        components: the layout's, which bound how many grains fit a report.
    """
    nodes = different_nodes(given.values())
    # An owner attests each of them twice, the control as well.
    most = _MOST_ITEM_BYTES // (2 * COMPONENT_BYTES * max(1, components)) - 1
    itemised = most > 0
    most = most if itemised else _MOST_GRAINS
    chosen = {arithmetic: _chosen(each, most, count) for arithmetic, each in nodes.items()}
    everything = {
        grain for each in nodes.values() for node in each for grain in range(node.first, node.stop)
    }
    grains = {
        arithmetic: tuple(sorted({*each, *_control(sums, each, everything, count)}))
        for arithmetic, (each, sums) in chosen.items()
    }
    return Inquest(nodes=nodes, grains=grains, given=dict(given), itemised=itemised)


def _chosen(nodes: Iterable[Node], most: int, count: int) -> tuple[list[int], set[Node]]:
    """The disputed grains that are computed again, and the sums that are made of them.

    A sum proves something only if it is made again as it was, and whoever computes grains joins all
    that they can: of two disputed siblings only one is made. Where a grain is disputed by itself,
    its own digests tell more than the sums that it is in.
    """
    leaves = [node.first for node in nodes if len(node) == 1]
    grains, sums = leaves[:most], set[Node]()
    others = [(_has(node, leaves), len(node), node) for node in nodes if len(node) > 1]
    for told, _, node in sorted(others):
        more = [*grains, *(at for at in range(node.first, node.stop) if at not in grains)]
        wanted = sums if told else {*sums, node}
        if len(more) <= most and wanted <= set(_nodes_of(more, count)):
            grains, sums = more, wanted
    if not grains:  # Not even the smallest sum fits.
        node = min(others)[-1]
        grains = list(range(node.first, node.stop))[:most]
    return grains, sums


def _has(node: Node, grains: Iterable[int]) -> bool:
    return any(node.first <= grain < node.stop for grain in grains)


def _control(
    sums: Collection[Node], disputed: Sequence[int], everything: Collection[int], count: int
) -> list[int]:
    """A grain that nobody disputed, and with which these sums remain maximal."""
    for grain in range(count):
        if grain not in everything and set(sums) <= set(_nodes_of([*disputed, grain], count)):
            return [grain]
    return []


def _nodes_of(grains: Iterable[int], count: int) -> tuple[Node, ...]:
    return cover([PositionRange(grain, grain + 1) for grain in grains], count)


# ----------------------------------------------------------------------------- the verdict


def judge(inquest: Inquest) -> Judgement:
    """Whom the results of a complete inquest convict."""
    groups = _groups(inquest.given.values())
    judged = [
        _judge(groups[arithmetic], nodes, inquest.grains[arithmetic])
        for arithmetic, nodes in inquest.nodes.items()
    ]
    convicted = [each for each in judged if each.convicted]
    first, *others = convicted or judged
    # Of several arithmetics each has its own witnesses; one sentence tells of the first.
    return Judgement(
        node=first.node,
        convicted=first.convicted + tuple(w for each in others for w in each.convicted),
        witnesses=first.witnesses,
        sides=first.sides,
        differ=tuple(sorted({w for each in judged for w in each.differ})),
        why=first.why,
        apart=first.apart,
        digest=first.digest,
        seen=first.seen,
    )


def _judge(members: Sequence[Given], nodes: Sequence[Node], grains: Sequence[int]) -> Judgement:
    """The same among the workers of one arithmetic."""
    leaves = [Node(grain, grain + 1) for grain in grains]
    steady = [
        each for each in members if not each.wavers and all(node in each.digests for node in leaves)
    ]
    # A sum that not all of them have made proves nothing against anybody.
    shared = set.intersection(*(set(each.digests) for each in steady)) if steady else set()
    proof = sorted(shared, key=leaves_first)
    results: dict[tuple[bytes, ...], list[Given]] = defaultdict(list)
    for each in steady:
        results[tuple(each.digests[node][0] for node in proof)].append(each)
    agreeing = [digests for digests, each in results.items() if len(each) > 1]
    if len(agreeing) != 1:
        why = "witnesses contradict each other" if agreeing else _too_few(members)
        return _nobody(members, nodes, why)
    true, witnesses = dict(zip(proof, agreeing[0], strict=True)), results[agreeing[0]]
    wrong = [each for each in members if each not in witnesses and _against(each, true)]
    convicted = [each for each in wrong if len(_independent(witnesses, each)) > 1]
    if not convicted:
        why = "who agrees now has given the same as the others, so nobody knows who was wrong"
        if wrong:
            why = (
                f"who contradicts worker {wrong[0].worker} has got its weights from it, and nobody "
                "else has compared them since, so it is no witness"
            )
        return _nobody(members, nodes, why)
    accused = convicted[0]
    node, digest = _against(accused, true)[0]
    return Judgement(
        node=node,
        convicted=tuple(convicted),
        witnesses=tuple(sorted(each.worker for each in _independent(witnesses, accused))),
        sides=_sides(members, node),
        differ=_differing(members),
        apart=_apart((digest, true[node]), members),
        digest=digest,
        seen=first_seen(members, disputes_of(accused, witnesses), node),
    )


def _independent(witnesses: Iterable[Given], accused: Given) -> list[Given]:
    """Those that did not get their weights from the accused."""
    return [each for each in witnesses if each.source != accused.worker]


def _against(each: Given, true: Mapping[Node, bytes]) -> list[tuple[Node, bytes]]:
    """What a worker gave of nodes that is not what witnesses agree on; what tells most first."""
    wrong = [
        (node, digest)
        for node in true
        for digest in each.digests.get(node, ())
        if digest != true[node]
    ]
    return sorted(wrong, key=lambda it: (it[1] not in each.components, leaves_first(it[0])))


def _differing(members: Collection[Given]) -> tuple[int, ...]:
    """The workers that wavered, or gave something of a node that another one contradicts."""
    nodes = _contested(each.digests for each in members)
    return tuple(sorted(each.worker for each in members if not nodes.isdisjoint(each.digests)))


def _sides(members: Iterable[Given], node: Node) -> tuple[tuple[int, ...], ...]:
    holders: dict[bytes, list[int]] = defaultdict(list)
    for each in members:
        for digest in each.digests.get(node, ()):
            holders[digest].append(each.worker)
    return tuple(sorted(tuple(sorted(each)) for each in holders.values()))


def _nobody(members: Sequence[Given], nodes: Sequence[Node], why: str) -> Judgement:
    node = min(nodes, key=leaves_first)
    given = [digest for each in members for digest in each.digests.get(node, ())]
    itemised = {digest for each in members for digest in each.components} & set(given)
    told = sorted(itemised) if len(itemised) > 1 else given
    disputes = [it for one in members for it in disputes_of(one, members)]
    return Judgement(
        node=node,
        convicted=(),
        sides=_sides(members, node),
        differ=_differing(members),
        why=why,
        apart=_apart(told[:2], members),
        seen=first_seen(members, disputes, node),
    )


def _too_few(members: Sequence[Given]) -> str:
    if len(members) < 3:
        return "two can't tell who is wrong, it takes a third worker of the same arithmetic"
    return "no two of those that gave one result each agree, so nobody knows who is wrong"


def _apart(digests: Iterable[bytes], members: Iterable[Given]) -> int | None:
    """The first component that differs between two sums, if both were itemised."""
    items: dict[bytes, bytes] = {}
    for each in members:
        items.update(each.components)
    one, other = [*(items.get(digest, b"") for digest in digests), b"", b""][:2]
    return first_component(one, other)
