"""Verdicts on reducers: whether their mean is that of the sums that workers sent.

Section 37 of docs/protocol-same-bits.md has the rules. Each worker makes the mean of all nodes by
itself. The nodes that it got from others it hashes, so that what changed on its way is told from
what was added wrong. Everything here is a pure function of what workers say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from andon.protocol.attestations import ElementApart, MeanCheck, NodeOwner
from andon.protocol.grains import Node, cover
from andon.protocol.records import PositionRange

__all__ = ["MeanJudgement", "judge_means", "sums_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanJudgement:
    """What the workers' own means come to, if the mean that came is not theirs."""

    convicts: bool
    """Whether it was added wrong where it was made."""
    witnesses: tuple[int, ...]
    """Who made another mean than the one that came; if nobody did, who got other sums."""
    apart: ElementApart | None = None
    """The first element in which they differ."""
    why: str = ""
    """Why nobody is convicted."""


def sums_of(
    shares: Sequence[Collection[PositionRange]],
    verifies: Sequence[Sequence[int]],
    count: int,
    disputed: Collection[Node] = (),
) -> tuple[NodeOwner, ...]:
    """All maximal nodes of all shares, in rising order.

    Args:
        shares: each rank's own grains.
        verifies: the grains that each rank verifies.
        count: the batch's grains.
        disputed: nodes of which there are two results. Those that have a grain of one are relayed
            in any case: so whoever has made another one sees in which element they differ.
    """
    owners = {node: rank for rank, share in enumerate(shares) for node in cover(share, count)}
    made = [{*cover([PositionRange(at, at + 1) for at in each], count)} for each in verifies]
    return tuple(
        NodeOwner(
            node=node,
            rank=owner,
            relayed=any(node not in each for rank, each in enumerate(made) if rank != owner)
            or any(node.first < each.stop and each.first < node.stop for each in disputed),
        )
        for node, owner in sorted(owners.items())
    )


def judge_means(
    checks: Mapping[int, MeanCheck], sums: Sequence[NodeOwner], attested: Mapping[Node, bytes]
) -> MeanJudgement | None:
    """What is wrong with the mean that came; None: nothing.

    Args:
        checks: what each worker found.
        sums: the nodes that the mean was made of.
        attested: the digest of each, as its owner sent it. Nobody disputes it.
    """
    relayed = [attested[each.node] for each in sums if each.relayed]
    sound = {worker for worker, each in checks.items() if list(each.relayed) == relayed}
    apart = {worker: each for worker, each in checks.items() if each.expected != each.came}
    if not apart:
        unsound = tuple(sorted(checks.keys() - sound))
        if not unsound:
            return None
        why = "sums that workers sent once more, to be added up again, came changed"
        return MeanJudgement(convicts=False, witnesses=unsound, why=why)
    found = [each for worker, each in apart.items() if worker in sound]
    place = next(iter(found or apart.values())).apart
    why = next(_doubts(checks, sound, found), "")
    return MeanJudgement(convicts=not why, witnesses=tuple(sorted(apart)), apart=place, why=why)


def _doubts(
    checks: Mapping[int, MeanCheck], sound: Collection[int], found: Sequence[MeanCheck]
) -> Iterator[str]:
    """Why nobody can be convicted."""
    if len({each.came for each in checks.values()}) > 1:
        yield "not all workers got the same averages"
    if len(sound) < 2:
        yield "it takes two workers that made the mean of the sums as they were sent"
    if len(found) < len(sound) or len({each.expected for each in found}) > 1:
        yield "workers made different means of the same sums"
