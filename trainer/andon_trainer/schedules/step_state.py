"""The state of one step on this worker: its share, what went backward of it, and its phase."""

from __future__ import annotations

import enum
import math
import time
from dataclasses import dataclass, field

from andon.protocol.attestations import Attestation, MeanCheck, NodeApart
from andon.protocol.grains import NodeLoss
from andon_trainer.averaging.averaging import Averaged
from andon_trainer.averaging.compute_clock import Busy
from andon_trainer.averaging.readings import PendingNumbers
from andon_trainer.core.events import Assigned
from andon_trainer.core.keeping import Kept
from andon_trainer.core.reports import NO_DIGEST, Digest, StepReport, Timings

__all__ = ["StepPhase", "StepState"]


class StepPhase(enum.Enum):
    """Where a step stands on this worker."""

    ACCUMULATING = enum.auto()
    """Some micro-batches have not gone backward yet."""
    AVERAGED = enum.auto()
    """`p.grad` is the mean; the commit is missing."""
    COMMITTED = enum.auto()
    """Over: the weights moved, or may."""
    VOID = enum.auto()
    """Over without a commit: its positions are assigned again."""


@dataclass(slots=True)
class StepState:
    """One step, from its assignment to its end."""

    assigned: Assigned
    samples: int
    """Number of samples in this worker's share."""
    doubts: int = 0
    """The member's `doubts` when the step began."""
    kept: Kept | None = None
    """This worker's gradient of an earlier attempt; its positions are not computed again."""
    gathered: bool = False
    """Whether the script has gathered in this attempt: its loss is of all workers' samples."""
    borrowed: bool = False
    """Whether there is nothing to compute, and the loop body runs on borrowed samples."""
    verifying: bool = False
    """Whether the loop body has a grain of another worker's, of which nothing is contributed."""
    digest: Digest = NO_DIGEST
    """Of the weights that the step began with, if the line compares them in this step."""
    end_of_data: bool = False
    """Whether the epoch's stream of samples ended in this step."""
    phase: StepPhase = StepPhase.ACCUMULATING
    waiting: int = 0
    """Samples of the micro-batch that the loop body has, until backward takes it."""
    last: bool = False
    """Whether that micro-batch is the share's last."""
    micro_batches: int = 0
    """How many of them went backward."""
    weight: float = 0.0
    """Sum of the micro-batches' weights."""
    loss_sum: float = 0.0
    """Sum of their losses, each times its weight."""
    correct: int | None = 0
    """Samples that the model got right; None once a micro-batch did not say."""
    _losses: list[tuple[PendingNumbers, float]] = field(default_factory=list)
    """Losses on their way, with their weights: not in `loss_sum` yet."""
    _counts: list[tuple[PendingNumbers, int]] = field(default_factory=list)
    """Numbers of right samples on their way, each with its micro-batch's samples."""
    unit: float = 0.0
    """A power of two, at least `weight`: micro-batches are accumulated times their weight in it.

    So the sum is never greater than a mean, and float16 holds it; and since it is a power of two,
    the sum has the same digits whatever it is. 0: nothing was accumulated.
    """
    overflow: bool = False
    """Whether scaled gradients overflowed: this worker's, or by the commit those of any."""
    refused: float | None = None
    """A loss that is not finite, for which the step is void once its share went backward."""
    data_s: float = 0.0
    """Time that the loop waited for data, in seconds."""
    averaged: Averaged | None = None
    node_losses: tuple[NodeLoss, ...] = ()
    """On a line of grains, once all losses are here."""
    attested: tuple[Attestation, ...] = ()
    """What this worker attests, if the assignment asks for it, once all averages are here."""
    averages_digest: bytes = b""
    """Of the averages, likewise."""
    mean_check: MeanCheck | None = None
    """Its own mean of all nodes, likewise."""
    apart: tuple[NodeApart, ...] = ()
    """Where two results of one node differ, as far as both are here."""
    assigned_at: float = field(default_factory=time.perf_counter)
    """When the step was begun, by `time.perf_counter`."""

    @classmethod
    def begin(
        cls, assigned: Assigned, doubts: int, kept: Kept | None, samples: int | None = None
    ) -> StepState:
        """The step of an assignment. If a gradient is kept, its sums are those to begin with.

        `samples` is what its positions hold; None: one each.
        """
        positions = sum(map(len, assigned.positions))
        state = cls(assigned, positions if samples is None else samples, doubts, kept)
        if kept is not None:
            state.weight, state.loss_sum, state.correct = kept.weight, kept.loss_sum, kept.correct
            state.overflow = kept.overflow
            done = sum(map(len, kept.positions))
            # Room for the whole share, if what is missing weighs like what was kept.
            state.unit = _power_of_two(kept.weight * max(1.0, state.samples / max(done, 1)))
        return state

    @property
    def is_under_way(self) -> bool:
        """Whether it is neither committed nor void."""
        return self.phase in (StepPhase.ACCUMULATING, StepPhase.AVERAGED)

    @property
    def moves_weights(self) -> bool:
        """Whether there is a mean: not if all workers' weights are 0."""
        return self.averaged is not None and self.averaged.total_weight > 0

    def make_room(self, given: float) -> float:
        """Makes the unit large enough for the waiting micro-batch, of weight `given`.

        Returns:
            What must be multiplied into what is accumulated already; almost always 1.
        """
        total = self.weight + given
        if total <= self.unit:
            return 1.0
        # What the whole share will weigh, if all of it is like this micro-batch.
        whole = given * (self.samples / max(self.waiting, 1))
        before, self.unit = self.unit, _power_of_two(max(total, whole))
        return before / self.unit if before else 1.0

    def add_loss(self, loss: PendingNumbers, weight: float) -> None:
        """Adds a micro-batch's loss and its weight."""
        self.weight += weight
        self._losses.append((loss, weight))
        if loss.here:
            self._add_losses()

    def count(self, correct: PendingNumbers | None) -> None:
        """Adds how many samples of a micro-batch the model got right.

        Raises:
            ValueError: these are more than the micro-batch has.
        """
        if correct is None or self.correct is None:
            self.correct = None
        elif not (self.borrowed or self.verifying):  # They count for the rank that has them.
            self._counts.append((correct, self.waiting))
            if correct.here:
                self._add_counts()

    def collect(self) -> None:
        """Waits for the losses and counts that are on their way.

        Raises:
            ValueError: more samples are right than a micro-batch has.
        """
        self._add_losses()
        self._add_counts()

    def _add_losses(self) -> None:
        # In the order of the micro-batches: a sum of floats depends on it.
        losses, self._losses = self._losses, []
        for loss, weight in losses:
            self.loss_sum += weight * loss.number()

    def _add_counts(self) -> None:
        counts, self._counts = self._counts, []
        for reading, samples in counts:
            right = int(reading.number())
            if not 0 <= right <= samples:
                raise ValueError(
                    f"correct counts samples, of which this batch has {samples}: not {right}"
                )
            if self.correct is not None:
                self.correct += right

    def keep(self) -> Kept:
        """What is kept of the share's gradient until the commit."""
        return Kept(
            parent=self.assigned.parent,
            epoch=self.assigned.epoch,
            positions=self.assigned.positions,
            weight=self.weight,
            loss_sum=self.loss_sum,
            correct=self.correct,
            doubts=self.doubts,
            overflow=self.overflow,
        )

    def report(self, averaged: Averaged, busy: Busy, stop_reason: str) -> StepReport:
        """What the coordinator is told once all averages are here."""
        timings = averaged.timings
        return StepReport(
            key=self.assigned.key,
            loss_sum=self.loss_sum,
            correct=self.correct,
            weight=self.weight,
            samples=self.samples,
            timings=Timings(
                compute_s=averaged.computed_at - self.assigned_at,
                exchange_s=timings.exchange_s,
                wait_s=timings.wait_s,
                data_s=self.data_s,
                busy_s=busy.seconds,
                micro_batches=busy.micro_batches,
                computed=busy.samples,
            ),
            digest=self.digest,
            digest_head=self.assigned.parent,
            stop_reason=stop_reason,
            end_of_data=self.end_of_data,
            total_weight=averaged.total_weight,
            world_size=averaged.world_size,
            gradient_norm=averaged.gradient_norm,
            own_gradient_norm=averaged.own_gradient_norm,
            block_norms=averaged.block_norms,
            overflow=self.overflow,
            node_losses=self.node_losses,
            attested=self.attested,
            averages_digest=self.averages_digest,
            mean_check=self.mean_check,
            apart=self.apart,
        )


def _power_of_two(number: float) -> float:
    """The smallest power of two that is at least a positive number, as far as floats go."""
    mantissa, exponent = math.frexp(min(number, 2.0**1023))
    return math.ldexp(1.0, exponent - (mantissa == 0.5))
