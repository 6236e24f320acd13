"""The steps of a host: its share is divided among its processes, whose gradients become one.

Theory of operation. To the line a host is one worker: it is assigned positions, and contributes one
gradient with one weight. Every process of the host runs the same steps, on its own part of the
positions. Process 0 has the first part, so it has samples if any process has. What is kept of a
void round is the whole host's. It lies at process 0, which adds to it.

When a process is about to run the last backward of its part, it meets the others. They add up their
weights, losses and counts, and learn whether one of them has a loss that is not finite.

Before that they never meet. In forward and backward of each micro-batch a model may wait for the
other processes itself (SyncBatchNorm). A process that waited elsewhere, or left a backward out,
would never be found there. So a loss that is not finite goes backward like any other, and is told
when they meet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from torch import nn

from andon.protocol.shards import Ranges, divide
from andon_trainer.data.feed import Share
from andon_trainer.hosts.averaging import Agreed, FollowerAverager, LeaderAverager
from andon_trainer.hosts.calls import BACKWARD, RefusedLoss, meet, refuse_other_weights
from andon_trainer.hosts.group import HostGroup
from andon_trainer.schedules.loop_steps import LoopParts
from andon_trainer.schedules.processes import Weighed
from andon_trainer.schedules.step_state import StepState

__all__ = ["HostProcesses"]


@dataclass(frozen=True, slots=True)
class _Part:
    """What one process brings to a step of its host."""

    weight: float
    loss_sum: float
    correct: int | None
    computed: int
    """Samples that went backward in this attempt."""
    sends_again: bool
    """Whether it has kept a gradient, and nothing to add."""
    stop_wanted: str
    digest: bytes


class HostProcesses:
    """The processes of this host: they divide its share, and make one gradient of it."""

    several = True

    def __init__(
        self,
        group: HostGroup,
        parts: LoopParts,
        averager: LeaderAverager | FollowerAverager,
    ) -> None:
        """They meet in `group`, and `averager` adds their gradients up."""
        self._group = group
        self._averager = averager
        self._feeder = parts.feeder
        self._member = parts.member
        self._micro_batch_size = parts.micro_batch_size
        self.waits_in_model = any(
            isinstance(layer, nn.SyncBatchNorm)
            for module in parts.replica.modules
            for layer in module.modules()
        )

    def refuse_gather(self) -> None:
        """Raises RuntimeError: only one process of a host speaks to the line."""
        raise RuntimeError(
            "line.gather in a loop body is not supported in a host whose processes average by "
            "DistributedDataParallel: start one worker for each GPU, and prepare the model itself"
        )

    def begin(self, state: StepState) -> None:
        """What is kept is the whole host's, and process 0 counts it."""
        if self._group.rank:
            state.weight, state.loss_sum, state.correct = 0.0, 0.0, 0

    def part_of(self, share: Share, epoch: int) -> Share:
        """This process's part of a share of the host.

        All processes make as many micro-batches, as long as there are samples enough: a model may
        wait for the other processes in forward (SyncBatchNorm).
        """
        parts = list(divide(share.ranges, self._group.size))
        if share.epoch == epoch:  # To ask for samples of another epoch would begin it.
            # Positions may hold no sample. The sort is stable.
            parts.sort(key=lambda part: not self._feeder.samples_of(epoch, part))
        largest = max(sum(map(len, part)) for part in parts)
        limit = None if share.limit is None else ceil(share.limit / self._group.size)
        least = min(self._micro_batch_size or largest, limit or largest) or 1
        pieces = ceil(ceil(largest / share.parts) / least)
        mine: Ranges = parts[self._group.rank]
        return replace(share, ranges=mine, limit=limit, parts=share.parts * max(1, pieces))

    def refuses_later(self, state: StepState, loss: float) -> bool:
        """True before the last backward, in which the processes meet."""
        if not state.last and state.refused is None:
            state.refused = loss
        return not state.last

    def weigh(self, state: StepState, *, whole: bool, stop_wanted: str) -> Weighed | None:
        """The host's weight, and this process's factor; None if the line halted meanwhile."""
        state.collect()
        own = state.weight
        part: _Part | RefusedLoss = _Part(
            weight=own,
            loss_sum=state.loss_sum,
            correct=state.correct,
            computed=self._averager.clock.counted,
            sends_again=state.kept is not None and state.borrowed,
            stop_wanted=stop_wanted,
            digest=state.digest.sha256,
        )
        if state.refused is not None:
            part = RefusedLoss(state.refused)
        given = [each.given for each in meet(self._group, BACKWARD, part)]
        for each in given:
            if isinstance(each, RefusedLoss):
                self._averager.halt(each.value)
                return None
        parts: list[_Part] = given
        refuse_other_weights([each.digest for each in parts], self._member.position.step)
        total = sum(each.weight for each in parts)
        if not self._group.rank:
            _count(state, parts)
            stop_wanted = next((each.stop_wanted for each in parts if each.stop_wanted), "")
        self._averager.agreed(
            Agreed(
                takes_part=own > 0,
                sends_again=parts[0].sends_again,
                samples_of_others=sum(each.computed for each in parts[1:]),
            )
        )
        scale = (own if whole else state.unit) / total if total else None
        return Weighed(total, scale, stop_wanted)


def _count(state: StepState, parts: list[_Part]) -> None:
    """Makes the leader's step the host's: its weight, its loss, and what it got right."""
    state.weight = sum(each.weight for each in parts)
    state.loss_sum = sum(each.loss_sum for each in parts)
    counts = [each.correct for each in parts if each.correct is not None]
    state.correct = sum(counts) if len(counts) == len(parts) else None
