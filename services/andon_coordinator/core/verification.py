"""Verification: which steps are computed twice, which grains a rank computes again, what it says.

Section 37 of docs/protocol-same-bits.md has the rules. Pure functions; `verifying` applies them to
the line, and `verdicts` says what differences mean.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from andon.protocol.arithmetic import Arithmetic, is_one
from andon.protocol.attestations import COMPONENT_BYTES, Attestation, MeanCheck, NodeOwner
from andon.protocol.grains import Node, cover
from andon.protocol.records import PositionRange
from andon_coordinator.core.defects import LineDefect, violation
from andon_coordinator.core.events import Ready

__all__ = [
    "Proved",
    "RoundChecks",
    "VerifiedTotals",
    "deal",
    "deal_to_newcomers",
    "in_attested",
    "in_mean_check",
    "is_drawn",
]

_DRAWN_BITS = 64


def is_drawn(key: bytes, step: int, fraction: float) -> bool:
    """Whether a step is verified: the same for whoever has the key, and unknown to who has not."""
    if not fraction > 0:
        return False
    digest = hmac.new(key, step.to_bytes(8, "big"), hashlib.sha256).digest()
    drawn = int.from_bytes(digest[: _DRAWN_BITS // 8], "big")
    return drawn < int(fraction * 2**_DRAWN_BITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundChecks:
    """What is computed again in a round, and attested; in rank order."""

    attests: tuple[bool, ...]
    verifies: tuple[tuple[int, ...], ...]
    """Grains of the batch."""
    inquest: bool = False
    """Whether all of it is computed anew."""
    itemised: bool = False
    """Whether each grain of `verifies` is attested with the hashes of its components."""
    sums: tuple[NodeOwner, ...] = ()
    """All nodes of the round, of which each worker makes the mean; empty: nobody does."""

    def terms_of(self, rank: int) -> dict[str, Any]:
        """The terms of one rank's assignment."""
        told = self.attests[rank]
        terms = {"attests": told, "verifies": self.verifies[rank]}
        return terms | {"anew": self.inquest, "itemised": self.itemised} if told else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proved:
    """What a complete round without a defect has shown; saved with its record."""

    weights: bytes = b""
    """SHA-256 of the weights that the step started from, if workers gave it; all gave this one."""
    prefixes: bytes = b""
    """Its running value after each component, of which audits read; empty: nobody gave them."""
    base_hashed: bool = False
    """Whether it has hashes of frozen parameters in the place of their elements."""
    attested: tuple[tuple[int, Attestation], ...] = ()
    """Worker and attestation."""
    averages: bytes = b""
    """XXH3-128 of the averages."""
    grains: int = 0
    """Grains that two workers computed alike."""
    drawn: bool = False
    """Whether the step was verified as a whole."""


@dataclass(slots=True, kw_only=True)
class VerifiedTotals:
    """How much of a run was computed twice before it was committed."""

    steps: int = 0
    """Committed steps that were verified."""
    grains: int = 0
    """Grains in them that two workers computed alike."""
    differences: int = 0
    """Attempts in which two results differed."""
    convicted: list[int] = field(default_factory=list)
    """Workers that were convicted, the last one last."""


def deal(
    owned: Sequence[Sequence[int]], arithmetics: Sequence[Arithmetic]
) -> tuple[tuple[int, ...], ...]:
    """The grains that each rank verifies, all of them in rank order.

    That is the share of the next rank with grains and the same arithmetic, up to its own number of
    grains plus one.

    Args:
        owned: each rank's own grains, in rising order.
        arithmetics: each rank's.
    """
    found = []
    for rank, own in enumerate(owned):
        next_ = next(_others(rank, owned, arithmetics), None)
        found.append(() if next_ is None else tuple(owned[next_][: len(own) + 1]))
    return tuple(found)


def deal_to_newcomers(
    owned: Sequence[Sequence[int]], arithmetics: Sequence[Arithmetic], newcomers: Collection[int]
) -> RoundChecks | None:
    """One grain of somebody else's for each rank of `newcomers`; None if nobody can be compared."""
    verifies, attests = [tuple[int, ...]() for _ in owned], set[int]()
    for rank in sorted(newcomers):
        next_ = next(_others(rank, owned, arithmetics), None)
        if next_ is not None:
            verifies[rank] = (owned[next_][0],)
            attests |= {rank, next_}
    if not attests:
        return None
    return RoundChecks(
        attests=tuple(rank in attests for rank in range(len(owned))), verifies=tuple(verifies)
    )


def _others(
    rank: int, owned: Sequence[Sequence[int]], arithmetics: Sequence[Arithmetic]
) -> Iterator[int]:
    """The ranks after `rank`, in cyclic order, that have grains and its arithmetic."""
    size = len(owned)
    for other in ((rank + step) % size for step in range(1, size)):
        if owned[other] and is_one(arithmetics[rank], arithmetics[other]):
            yield other


def in_mean_check(
    worker: int, check: MeanCheck | None, sums: Sequence[NodeOwner]
) -> LineDefect | None:
    """What is wrong with what a worker says of the mean of these nodes."""
    if not sums:
        return None
    if check is None:
        return violation(worker, "was to make the mean of all sums, and says nothing of it")
    asked = sum(each.relayed for each in sums)
    if len(check.relayed) != asked:
        return violation(worker, f"gave {len(check.relayed)} digests of {asked} sums")
    if (check.apart is None) != (check.expected == check.came):
        return violation(worker, "made another mean than came, and does not say where it differs")
    return None


def in_attested(
    worker: int,
    ready: Ready,
    own: Collection[PositionRange],
    verifies: Sequence[int],
    *,
    count: int,
    components: int | None,
) -> LineDefect | None:
    """What is wrong with the attestations of one worker's report.

    Args:
        worker: who reported.
        ready: its report.
        own: its own grains.
        verifies: the grains that it computed beside them.
        count: the batch's grains.
        components: how many hashes each grain of `verifies` has; None: nobody asked for them.
    """
    beside = [PositionRange(grain, grain + 1) for grain in verifies]
    parts = [*own, *beside]
    leaves = Counter(Node(at, at + 1) for part in parts for at in range(part.start, part.stop))
    sums = {node for grains in (own, beside) for node in cover(grains, count) if len(node) > 1}
    given = Counter(each.node for each in ready.attested if len(each.node) == 1)
    given_sums = {each.node for each in ready.attested if len(each.node) > 1}
    if given != leaves or given_sums != sums:
        missing = sorted({*(leaves - given), *(sums - given_sums)})
        odd = sorted({*(given - leaves), *(given_sums - sums)})
        what = f"attested nothing of {missing[0]}" if missing else f"attested {odd[0]}, unasked"
        return violation(worker, what)
    if not ready.averages_digest:
        return violation(worker, "attested grains, and nothing of the averages")
    items = None if components is None else components * COMPONENT_BYTES
    asked = {Node(grain, grain + 1) for grain in verifies}
    for each in ready.attested:
        if items is not None and each.node in asked and len(each.components) != items:
            number = len(each.components) // COMPONENT_BYTES
            return violation(worker, f"attested {number} of {components} components of {each.node}")
    return None
