"""The terms of a round: what its members are told of it, and each rank's part.

Coordinator and worker hold the same value, and one message carries it. So a new term is a field
here, and one of `andon.v1.ShardAssignment` with the same name.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Self

from andon.protocol.attestations import NodeOwner
from andon.protocol.records import Key, PositionRange
from andon.protocol.reducers import ReducerShare
from andon.protocol.shards import Ranges, Split

__all__ = ["TOLD_TO_ALL", "RankTerms", "RoundTerms"]

_EQUAL = Split()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTerms:
    """What every member of a round is told of it."""

    key: Key
    parent: Key | None
    """The head that the round continues."""
    step: int
    """The step that it attempts; one more than the head's."""
    attempt: int
    """Which attempt at the step it is, from 0."""
    epoch: int
    """The epoch of all positions."""
    batch: PositionRange
    """The positions of the whole step. With a quorum, those that the step takes in addition to what
    is owed; then it may be empty."""
    roster: tuple[int, ...]
    """The workers that take part, in rank order."""
    reducers: tuple[ReducerShare, ...] = ()
    """The map of reducers; empty: the one that the answer to Join had."""
    checkpoint_step: int = 0
    """The step of the last checkpoint that the line knows; 0: there is none."""
    split: Split = _EQUAL
    """How the batch is divided among the ranks, as long as nothing changes."""
    window: int = 0
    """Positions of a step, as long as nothing changes; 0: the run's global batch."""
    ahead_batch: PositionRange | None = None
    """What all ranks compute while the exchange travels; it is never in this round's record."""
    learning_rate_scale: float = 1.0
    """What workers multiply their learning rates with in this step."""
    change_scale: float = 1.0
    """What workers multiply the mean change with before the outer optimizer (schedule LOCAL)."""
    copies_buffers: bool = False
    """Whether all workers of the roster can bring rank 0's buffers to all."""
    wants_digest: bool = False
    """Whether every member reports the digest of the weights that the step starts from."""
    fragment: int | None = None
    """Which group of blocks is exchanged, of a line that has fragments; None: the whole model."""
    attended: bool = False
    """Whether a worker attends it that is not on the roster; see `RankTerms.attends`."""
    sums: tuple[NodeOwner, ...] = ()
    """All nodes of all shares, in rising order: each worker makes their mean by itself, as well."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.roster)

    @property
    def leaves_over(self) -> bool:
        """Whether workers have something after the round that only a later one exchanges."""
        return self.ahead_batch is not None or self.fragment is not None

    @property
    def alone(self) -> bool:
        """Whether nobody but one worker takes averages, so that exchanges may be left out."""
        return len(self.roster) == 1 and not self.attended


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTerms(RoundTerms):
    """Those terms, and the part of one rank."""

    rank: int
    positions: Ranges
    """This rank's part of the round's work; empty if there are fewer positions than ranks. If it
    attends because it is late: what it owes."""
    micro_batches: int = 0
    """How many micro-batches, or local steps, to make of the positions; 0: the worker decides."""
    ahead: Ranges = ()
    """This rank's part of `ahead_batch`."""
    ahead_micro_batches: int = 0
    """How many local steps to make of `ahead`; 0: the worker decides."""
    writes_checkpoint: bool = False
    """Whether this worker writes the checkpoint that the step may make due."""
    attends: bool = False
    """Whether the worker is not on the roster: it takes the averages, and gives nothing."""
    attests: bool = False
    """Whether the worker reports digests of what it computed; see `attestations`."""
    verifies: tuple[int, ...] = ()
    """Grains of the batch that it computes beside its own, in rising order, to attest them."""
    anew: bool = False
    """Whether it keeps nothing of earlier attempts: it computes all of its grains again."""
    itemised: bool = False
    """Whether each attestation of a grain in `verifies` has the hashes of its components."""

    @classmethod
    def of(cls, terms: RoundTerms, **own: Any) -> Self:
        """All of `terms`, and the fields `own` beside them."""
        return cls(**dict(zip(TOLD_TO_ALL, _told_to_all(terms), strict=True)), **own)


TOLD_TO_ALL = tuple(each.name for each in fields(RoundTerms))
"""The names of the terms that every member is told."""
_told_to_all = attrgetter(*TOLD_TO_ALL)
