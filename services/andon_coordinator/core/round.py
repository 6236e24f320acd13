"""A round: one try at one step, with a roster that never changes (rule 5)."""

from __future__ import annotations

from dataclasses import dataclass, field

from andon.protocol.records import Key, PositionRange
from andon.protocol.reducers import ReducerShare
from andon.protocol.shards import Ranges
from andon_coordinator.core.effects import Assign, Assignment, Contribution, StepResult
from andon_coordinator.core.events import Ready

__all__ = ["Round"]


@dataclass(slots=True, kw_only=True)
class Round:
    """A round that is open. `streams` and `shares` are its members', in rank order."""

    key: Key
    parent: Key
    step: int
    attempt: int
    epoch: int
    batch: PositionRange
    roster: tuple[int, ...]
    streams: tuple[int, ...]
    shares: tuple[Ranges, ...]
    opened_at: float
    reducers: tuple[ReducerShare, ...]
    ring_addresses: tuple[str, ...] = ()
    """Where each rank listens, if the line is a ring."""
    writer: int | None = None
    """Who writes the checkpoint that the step may make due."""
    checkpoint_step: int = 0
    ready: dict[int, Ready] = field(default_factory=dict)

    def assignments(self) -> list[Assign]:
        """What each member is told, in rank order."""
        return [self._assignment(rank, stream) for rank, stream in enumerate(self.streams)]

    def take(self, worker: int, ready: Ready) -> None:
        """Notes that a member holds all averages; its first word counts."""
        assert ready.key == self.key
        assert worker in self.roster
        self.ready.setdefault(worker, ready)

    @property
    def complete(self) -> bool:
        """Whether every member is ready."""
        return len(self.ready) == len(self.roster)

    @property
    def in_rank_order(self) -> list[tuple[int, Ready]]:
        """Worker and report of each rank of a complete round."""
        return [(worker, self.ready[worker]) for worker in self.roster]

    @property
    def weight(self) -> float:
        """The sum of all weights, in float64, in rank order."""
        return sum((ready.weight for _, ready in self.in_rank_order), 0.0)

    @property
    def loss(self) -> float:
        """The weighted mean of the losses, in float64, in rank order; 0.0 if all abstained."""
        parts = [ready.loss_sum for _, ready in self.in_rank_order if ready.weight > 0]
        return sum(parts, 0.0) / self.weight if self.weight > 0 else 0.0

    @property
    def gradient_norm(self) -> float | None:
        """The norm of the averaged gradients, as the lowest rank that told it has it."""
        told = (ready.gradient_norm for _, ready in self.in_rank_order)
        return next((norm for norm in told if norm is not None), None)

    @property
    def end_of_data(self) -> bool:
        """Whether a member met the end of its stream of samples."""
        return any(ready.end_of_data for ready in self.ready.values())

    @property
    def stop_reason(self) -> str:
        """Why a script wants all loops to end; the lowest rank's word if several do."""
        reasons = (ready.stop_reason for _, ready in self.in_rank_order)
        return next((reason for reason in reasons if reason), "")

    def result(self, *, seconds: float, stop_reason: str) -> StepResult:
        """What the step came to."""
        corrects = [ready.correct for _, ready in self.in_rank_order]
        counted = [correct for correct in corrects if correct is not None]
        return StepResult(
            epoch=self.epoch,
            batch=self.batch,
            loss=self.loss,
            samples=sum(ready.samples for ready in self.ready.values()),
            weight=self.weight,
            attempt=self.attempt,
            seconds=seconds,
            contributions=tuple(
                Contribution(
                    worker=worker,
                    rank=rank,
                    positions=self.shares[rank],
                    samples=ready.samples,
                    weight=ready.weight,
                    loss_sum=ready.loss_sum,
                )
                for rank, (worker, ready) in enumerate(self.in_rank_order)
            ),
            stop_reason=stop_reason,
            correct=sum(counted) if len(counted) == len(corrects) else None,
            gradient_norm=self.gradient_norm,
        )

    def _assignment(self, rank: int, stream: int) -> Assign:
        assignment = Assignment(
            key=self.key,
            parent=self.parent,
            roster=self.roster,
            rank=rank,
            step=self.step,
            attempt=self.attempt,
            epoch=self.epoch,
            positions=self.shares[rank],
            batch=self.batch,
            reducers=self.reducers,
            ring_addresses=self.ring_addresses,
            writes_checkpoint=self.roster[rank] == self.writer,
            checkpoint_step=self.checkpoint_step,
        )
        return Assign(stream, assignment)
