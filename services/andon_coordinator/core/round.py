"""A round: one attempt at one step. How attempts are counted, and the record that a round becomes.

A step is tried until one attempt succeeds. Each attempt is a round with a key of its own and a
roster that never changes (rule 5): whatever is lost, the round is void and the next attempt is a
new round. A round whose whole roster is ready becomes a record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from andon.protocol.grains import Grains, NodeLoss
from andon.protocol.records import Key, PositionRange, Record
from andon.protocol.reducers import ReducerShare
from andon.protocol.rounds import RoundTerms
from andon.protocol.run_settings import cut_at_each_end
from andon.protocol.shards import Ranges
from andon.protocol.sums import sum_in_order
from andon_coordinator.core.comparison import Comparison
from andon_coordinator.core.effects import Assign, Assignment, Effect, SaveAnswer
from andon_coordinator.core.events import Ready, StandingRequest
from andon_coordinator.core.pacing import StepWindow
from andon_coordinator.core.same_bits import along_tree
from andon_coordinator.core.step_results import StepContribution, StepResult
from andon_coordinator.core.verdicts import Inquest
from andon_coordinator.core.verification import Proved, RoundChecks

__all__ = ["AttemptCounts", "PendingRecord", "StepRound"]

NOBODY_LATE: Mapping[int, int] = {}


@dataclass(slots=True, kw_only=True)
class StepRound:
    """An open round. `streams` and `shares` belong to the roster; all three are in rank order."""

    terms: RoundTerms
    """What its members are told of it."""
    streams: tuple[int, ...]
    shares: tuple[Ranges, ...]
    opened_at: float
    micro_batches: tuple[int, ...] = ()
    """How many micro-batches each rank is to make; empty: each as it likes."""
    ahead_shares: tuple[Ranges, ...] = ()
    """Each rank's part of what is computed ahead; empty if nothing is."""
    ahead_micro_batches: tuple[int, ...] = ()
    """How many local steps each rank is to make of its part; empty: each as it likes."""
    ring_addresses: tuple[str, ...] = ()
    """Where each rank listens, if the line is a ring."""
    writer: int | None = None
    """The worker that writes the checkpoint, if one is due after this step."""
    lacks_overflow: int | None = None
    """The lowest rank's worker that can't skip a step whose gradients overflowed; None: all can."""
    attending: tuple[int, ...] = ()
    """The streams of learners that hear its averages."""
    owing: dict[int, tuple[Ranges, int]] = field(default_factory=dict)
    """Of each stream in `attending` whose worker is late: what it owes, in so many local steps."""
    whole: bool = True
    """Whether nobody may be late, since nothing may stay owed behind it."""
    computed: set[int] = field(default_factory=set)
    """Its workers that have computed their shares, as far as they say so."""
    change_scale: float | None = None
    """What its mean change is multiplied with; None: the line has no quorum."""
    quorum_at: float | None = None
    """Since when a quorum of its workers has computed; None: none has."""
    checks: RoundChecks | None = None
    """What is computed again, and attested; None: nothing."""
    grains: Grains | None = None
    """The batch's grains, if its numbers are added along their tree; else in rank order."""
    gradient_scale: float = 1.0
    """What everybody multiplies the averaged gradient with, before the optimizer."""
    comparison: Comparison | None = None
    """What is remembered of its workers, if it becomes a record; None: nothing is compared."""
    ready: dict[int, Ready] = field(default_factory=dict)
    """The report of each worker that holds all averages."""
    key: Key = field(init=False)
    """The round's key."""
    roster: tuple[int, ...] = field(init=False)
    """Its members, in rank order."""
    rank_of: dict[int, int] = field(init=False)
    """The rank of each worker of the roster."""
    _in_rank_order: list[tuple[int, Ready]] = field(init=False, default_factory=list)
    """What `in_rank_order` returned; empty: it was not asked for."""
    _weight: float | None = field(init=False, default=None)
    """Likewise of `weight`."""
    _loss: float | None = field(init=False, default=None)
    """Likewise of `loss`."""
    overflow: bool = field(init=False, default=False)
    """Whether the scaled gradients of a member overflowed, so that no weight may move."""

    def __post_init__(self) -> None:
        """Takes out of the terms what every event asks for."""
        self.key, self.roster = self.terms.key, self.terms.roster
        self.rank_of = {worker: rank for rank, worker in enumerate(self.roster)}

    def has(self, worker: int, stream: int) -> bool:
        """Whether a worker takes part in this round, on this stream."""
        rank = self.rank_of.get(worker)
        return rank is not None and self.streams[rank] == stream

    def assignments(self) -> list[Assign]:
        """The assignment of each member, in rank order, and of those that attend."""
        members = [self._assignment(rank, stream) for rank, stream in enumerate(self.streams)]
        size = len(self.roster)
        attends = Assignment.of(self.terms, rank=size, positions=(), attends=True)
        for stream in self.attending:
            owed, steps = self.owing.get(stream, ((), 0))
            own = replace(attends, positions=owed, micro_batches=steps) if owed else attends
            members.append(Assign(stream, own))
        return members

    def positions_of(self, rank: int) -> int:
        """How many positions a rank may compute in this round: its share, and those ahead."""
        ahead = self.ahead_shares[rank] if self.ahead_shares else ()
        return sum(map(len, (*self.shares[rank], *ahead)))

    def take(self, worker: int, ready: Ready) -> None:
        """Notes that a member holds all averages; its first report counts."""
        assert ready.key == self.key
        assert worker in self.rank_of
        # A second report of a worker changes nothing, so the sums can't change once all are ready.
        if worker not in self.ready:
            self.ready[worker] = ready
            self.overflow |= ready.overflow

    @property
    def complete(self) -> bool:
        """Whether every member is ready."""
        return len(self.ready) == len(self.roster)

    @property
    def in_rank_order(self) -> list[tuple[int, Ready]]:
        """Worker and report of each rank of a complete round."""
        # Kept, since each step asks for it dozens of times. It can't change any more.
        if not self._in_rank_order:
            self._in_rank_order = [(worker, self.ready[worker]) for worker in self.roster]
        return self._in_rank_order

    # Sums are taken in rank order, so that they do not depend on who was ready first: floating
    # point addition is not associative. Along the tree they do not depend on the ranks, either.

    @property
    def weight(self) -> float:
        """The sum of all weights of a complete round, in float64."""
        if self._weight is None:
            if self.grains is not None:
                self._weight = self._along_tree(lambda node: node.weight)
            else:
                self._weight = sum_in_order(ready.weight for _, ready in self.in_rank_order)
        return self._weight

    @property
    def loss(self) -> float:
        """The weighted mean of the losses, in float64; 0.0 if all members abstained."""
        if self._loss is None:
            self._loss = self._mean_loss() if self.weight > 0 else 0.0
        return self._loss

    def _mean_loss(self) -> float:
        if self.grains is not None:
            return self._along_tree(lambda node: node.loss_sum) / self.weight
        parts = [ready.loss_sum for _, ready in self.in_rank_order if ready.weight > 0]
        return sum_in_order(parts) / self.weight

    @property
    def gradient_norm(self) -> float | None:
        """The norm of the averaged gradients, from the lowest rank that reported it.

        None if gradients overflowed: then it is partly a norm of zeros.
        """
        if self.overflow:
            return None
        reported = (ready.gradient_norm for _, ready in self.in_rank_order)
        return next((norm for norm in reported if norm is not None), None)

    @property
    def end_of_data(self) -> bool:
        """Whether a member reached the end of its stream of samples."""
        return any(ready.end_of_data for ready in self.ready.values())

    @property
    def stop_reason(self) -> str:
        """Why a script wants all loops to end; the lowest rank's reason if several do."""
        reasons = (ready.stop_reason for _, ready in self.in_rank_order)
        return next((reason for reason in reasons if reason), "")

    @property
    def positions(self) -> int:
        """How many positions its roster has."""
        return sum(len(part) for share in self.shares for part in share)

    def result(
        self,
        *,
        seconds: float,
        stop_reason: str,
        late: Mapping[int, int] = NOBODY_LATE,
        trims: bool = False,
    ) -> StepResult:
        """The result of a complete round.

        Args:
            seconds: for how long it was open.
            stop_reason: why the run is over after it; empty if it goes on.
            late: of each worker out of how many records it was left before, if of any.
            trims: whether the line asks for a trimmed mean.
        """
        corrects = [ready.correct for _, ready in self.in_rank_order]
        counted = [correct for correct in corrects if correct is not None]
        return StepResult(
            epoch=self.terms.epoch,
            batch=self.terms.batch,
            loss=self.loss,
            samples=sum(ready.samples for ready in self.ready.values()),
            weight=self.weight,
            attempt=self.terms.attempt,
            seconds=seconds,
            contributions=tuple(
                StepContribution(
                    worker=worker,
                    rank=rank,
                    positions=self.shares[rank],
                    samples=ready.samples,
                    weight=ready.weight,
                    loss_sum=ready.loss_sum,
                    late=late.get(worker, 0),
                )
                for rank, (worker, ready) in enumerate(self.in_rank_order)
            ),
            stop_reason=stop_reason,
            # A sum over some of the workers would look like a bad accuracy.
            correct=sum(counted) if len(counted) == len(corrects) else None,
            gradient_norm=self.gradient_norm,
            overflow=self.overflow,
            gradient_scale=self.gradient_scale,
            change_scale=self.change_scale,
            trimmed=cut_at_each_end(self._contributors) if trims else None,
        )

    @property
    def _contributors(self) -> int:
        """How many members of a complete round gave something to its first exchange."""
        return sum(ready.weight > 0 for ready in self.ready.values())

    def _along_tree(self, number: Callable[[NodeLoss], float]) -> float:
        assert self.grains is not None
        losses = [loss for _, ready in self.in_rank_order for loss in ready.node_losses]
        return along_tree(losses, self.grains, number)

    def _assignment(self, rank: int, stream: int) -> Assign:
        assignment = Assignment.of(
            self.terms,
            rank=rank,
            positions=self.shares[rank],
            micro_batches=self.micro_batches[rank] if self.micro_batches else 0,
            ahead=self.ahead_shares[rank] if self.ahead_shares else (),
            ahead_micro_batches=self.ahead_micro_batches[rank] if self.ahead_micro_batches else 0,
            writes_checkpoint=self.roster[rank] == self.writer,
            ring_addresses=self.ring_addresses,
            **({} if self.checks is None else self.checks.terms_of(rank)),
        )
        return Assign(stream, assignment)


@dataclass(slots=True, kw_only=True)
class AttemptCounts:
    """What happened to the attempts at the step after the head. Each commit starts a new count."""

    attempt: int = 0
    """The number of the next attempt, from 0; shown to people."""
    voided: int = 0
    """Attempts voided since the head moved, or since a person answered a halt."""
    with_losses: set[int] = field(default_factory=set)
    """Attempts that each lost a worker; losses within one lease of each other count once."""
    last_loss_at: float = -math.inf
    """When the last of them lost its worker's stream."""
    assigned: dict[int, Ranges] = field(default_factory=dict)
    """The positions of each worker in the last attempt; it keeps them in the next one.

    Before the first attempt: those that it computed ahead, during the step before. With a quorum
    also those of workers that are late.
    """
    batch: PositionRange | None = None
    """With a quorum, what the step takes at the cursor, in all of its attempts; None: not dealt."""
    window: StepWindow | None = None
    """What the step takes; set by its first attempt, or when it was dealt ahead."""
    ahead_window: StepWindow | None = None
    """What the next step takes, if that is computed ahead during this one."""
    ahead_batch: PositionRange | None = None
    """What is computed ahead during this step, in all of its attempts; None: nothing."""
    ahead: dict[int, Ranges] = field(default_factory=dict)
    """Each worker's part of it in the last attempt; it keeps that in the next one."""
    fragment: int | None = None
    """Which group of blocks this step exchanges, in all of its attempts; None: the whole model."""
    left_over: bool | None = None
    """Whether workers may hold changes of blocks that the step before did not exchange; None: this
    coordinator did not see that step."""
    tried: bool = False
    """Whether it is decided what is computed ahead, and what is exchanged."""
    not_before: float = 0.0
    """The next round opens no earlier: the back-off."""
    last_participants: tuple[tuple[int, ...], tuple[ReducerShare, ...]] = ((), ())
    """Workers and reducers of the last attempt; empty if no reducer is a process of its own."""
    lost_reducer_streams: int = 0
    """Consecutive attempts of these participants that lost a stream to a reducer."""
    corrupted: int = 0
    """Attempts in which a chunk was corrupted in transit."""
    verified: bool = False
    """Whether every further attempt is verified."""
    inquest: Inquest | None = None
    """What two workers computed differently; the next attempt computes it again."""

    def reset(self) -> None:
        """Starts the counts that lead to a halt again: a person answered the last one."""
        self.voided = 0
        self.with_losses.clear()
        self.last_loss_at = -math.inf
        self.lost_reducer_streams = 0
        self.corrupted = 0
        self.not_before = 0.0


@dataclass(slots=True, kw_only=True)
class PendingRecord:
    """A record that was given to the journal, and what to do once it is durable."""

    record: Record
    result: StepResult | None = None
    stop_reason: str = ""
    """Why the run is over after this record; empty if it goes on."""
    departed: dict[int, bool] = field(default_factory=dict)
    """Workers that are gone since the journal got it; True if a worker left in order."""
    rolls_back: bool = False
    """Whether the record is the MARK that rolls the line back."""
    standing: dict[int, StandingRequest] = field(default_factory=dict)
    """The requests for the step after it that came with the round's reports, by stream."""
    back_to: Record | None = None
    """The older record that the line goes back to once the MARK is durable; see `lost_state`."""
    why_back: str = ""
    """The spike for which it goes back; empty: nobody holds the head."""
    answer: SaveAnswer | None = None
    """The answer to a halt that this record carries out; saved once the record is durable."""
    resume: Callable[[int], Effect] | None = None
    """Makes the effect that tells a stream that the halt is answered."""
    pacing: bytes = b""
    """What is known of the workers' pace with this record; empty: nothing new."""
    given_at: float = 0.0
    """When the journal got it."""
    attempts: AttemptCounts = field(default_factory=AttemptCounts)
    """The counts of the step after it, with what was computed ahead of that."""
    proved: Proved | None = None
    """What its round has shown of weights and gradients."""
    comparison: Comparison | None = None
    """What is remembered of its workers with this record; None: nothing new."""
