"""The steps of a host: its share is divided among its processes, whose gradients become one.

On a line of grains see `HostGrains`: there whole grains are dealt, and what is kept are sums.

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

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Protocol

from torch import nn

from andon.protocol.grains import Grains
from andon.protocol.shards import Ranges, divide
from andon.protocol.sums import sum_in_order
from andon_trainer.averaging.compute_clock import ComputeClock
from andon_trainer.data.feed import Share
from andon_trainer.hosts.averaging import Agreed
from andon_trainer.hosts.calls import BACKWARD, RefusedLoss, meet, refuse_other_weights
from andon_trainer.hosts.dealing import deal_grains
from andon_trainer.hosts.group import HostGroup
from andon_trainer.schedules.grain_losses import GrainLosses
from andon_trainer.schedules.loop_steps import LoopParts
from andon_trainer.schedules.processes import Weighed
from andon_trainer.schedules.step_state import StepState

__all__ = ["HostGrains", "HostProcesses"]


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
    grains: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """On a line of grains: weight and weighted loss of each that it knows."""


class _InHost(Protocol):
    """What averages in a process of a host."""

    clock: ComputeClock

    def agreed(self, on: Agreed) -> None:
        """The processes agreed on what the step's last backward is for."""

    def halt(self, value: float) -> None:
        """A loss of this host is not finite: reports it, or waits for the halt that follows."""


class _OfHost:
    """What processes of a host have in common, whatever they divide and add up."""

    several = True

    def __init__(self, group: HostGroup, parts: LoopParts, averager: _InHost) -> None:
        """They meet in `group`, and `averager` adds up what they have computed."""
        self.leads = not group.rank
        self._group = group
        self._averager = averager
        self._member = parts.member

    def begin(self, state: StepState) -> None:
        """What is kept is the whole host's, and process 0 counts it."""
        if self._group.rank:
            state.weight, state.loss_sum, state.correct = 0.0, 0.0, 0

    def _meet(self, part: _Part | RefusedLoss) -> list[_Part] | None:
        """What each process brings to the step; None if the line halted for a loss of one."""
        given = [each.given for each in meet(self._group, BACKWARD, part)]
        for each in given:
            if isinstance(each, RefusedLoss):
                self._averager.halt(each.value)
                return None
        refuse_other_weights([each.digest for each in given], self._member.position.step)
        return given


class HostProcesses(_OfHost):
    """The processes of this host: they divide its share, and make one gradient of it."""

    def __init__(self, group: HostGroup, parts: LoopParts, averager: _InHost) -> None:
        """They meet in `group`, and `averager` adds their gradients up."""
        super().__init__(group, parts, averager)
        self._feeder = parts.feeder
        self._micro_batch_size = parts.micro_batch_size
        self.waits_in_model = any(
            isinstance(layer, nn.SyncBatchNorm)
            for module in parts.replica.modules
            for layer in module.modules()
        )

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
        parts = self._meet(part)
        if parts is None:
            return None
        total = sum_in_order(each.weight for each in parts)
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


class HostGrains(_OfHost):
    """The same on a line of grains: each process computes some of the host's grains whole.

    Nobody waits for the others in a model: a grain's forward sees its own samples alone. So the
    processes may have different numbers of loop bodies.
    """

    def part_of(self, share: Share, epoch: int) -> Share:
        """The grains that this process computes of some of the host's."""
        assert share.batch is not None, "grains are counted from a batch's first position"
        grains = Grains(share.batch, share.grain)
        dealt = deal_grains(grains.of(share.ranges), grains.count, self._group.size)
        return replace(share, ranges=grains.ranges(dealt[self._group.rank]))

    def share_losses(self, state: StepState, losses: GrainLosses, stop_wanted: str) -> str | None:
        """Every process knows the weights and losses of all grains then, and the leader reports."""
        state.collect()
        parts = self._meet(
            _Part(
                weight=0.0,
                loss_sum=0.0,
                correct=state.correct,
                computed=self._averager.clock.counted,
                sends_again=False,
                stop_wanted=stop_wanted,
                digest=state.digest.sha256,
                grains=losses.known,
            )
        )
        if parts is None:
            return None
        for each in parts:
            losses.take(each.grains)
        if self.leads:
            _count(state, parts)
            stop_wanted = next((each.stop_wanted for each in parts if each.stop_wanted), "")
        others = sum(each.computed for each in parts[1:])
        self._averager.agreed(Agreed(takes_part=True, sends_again=False, samples_of_others=others))
        return stop_wanted


def _count(state: StepState, parts: list[_Part]) -> None:
    """Makes the leader's step the host's: its weight, its loss, and what it got right."""
    state.weight = sum_in_order(each.weight for each in parts)
    state.loss_sum = sum_in_order(each.loss_sum for each in parts)
    counts = [each.correct for each in parts if each.correct is not None]
    state.correct = sum(counts) if len(counts) == len(parts) else None
