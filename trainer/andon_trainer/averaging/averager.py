"""Averagers: what a loop of steps asks of the object that averages for it.

A worker on a line has a `LineAverager`, or `LineGrains` if the line keeps the same bits; one that
is alone has a `SoloAverager` or `SoloGrains`; `hosts` has those of a host's processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from andon.protocol.grains import Grains
from andon_trainer.averaging.averaging import Averaged
from andon_trainer.averaging.compute_clock import ComputeClock
from andon_trainer.averaging.loss_scale import LossScale
from andon_trainer.averaging.readings import LossReadings
from andon_trainer.averaging.result_checks import ResultChecks
from andon_trainer.averaging.verification import Verification
from andon_trainer.core.calls import NodePart
from andon_trainer.model.guards import LateGradients
from andon_trainer.model.layout import ModelPlan

__all__ = [
    "Averager",
    "GrainAverager",
    "IntactGradient",
    "LoopAverager",
    "StepAverager",
    "TrainedModels",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModels:
    """The models of a loop, whose gradients are averaged."""

    plan: ModelPlan
    """Their blocks."""
    device: torch.device
    """Where they are."""
    modules: Sequence[nn.Module] = ()
    """The models, whose buffers go with the gradients."""
    scaling: LossScale | None = None
    """That of the script's scaler, which may be off."""

    @property
    def loss_scale(self) -> LossScale | None:
        """The scale that gradients have in `p.grad`, and lose on their way; None: they have none.

        `None` also if the scaler is off.
        """
        return self.scaling if self.scaling is not None and self.scaling.enabled else None

    @property
    def blocks(self) -> range:
        """The numbers of the blocks."""
        return range(len(self.plan.parameters))


class LoopAverager(Protocol):
    """What the loop of any schedule asks."""

    late: LateGradients
    """Gradients that were added to the mean."""
    clock: ComputeClock
    """Times forward and backward of each attempt."""
    losses: LossReadings
    """The losses of the step's micro-batches, on their way to the host."""

    def refuse_loss(self, value: float) -> None:
        """Halts the line: this worker's loss is not finite."""

    def close(self) -> None:
        """Removes the hooks from the parameters; a second call does nothing."""


class StepAverager(LoopAverager, Protocol):
    """What steps ask whose mean is in `p.grad` until their commit."""

    @property
    def overflowed(self) -> bool:
        """Whether the last run's scaled gradients overflowed, and the loss scale tolerates it."""

    def put_away(self) -> None:
        """The worker waits between two attempts: the models must hold the line's state."""

    def committed(self, *, overflow: bool = False) -> None:
        """The step whose mean is in `p.grad` is committed; after an `overflow` no weight moves."""


class IntactGradient(Protocol):
    """This worker's gradient of its last run, whole and finite, in the buffers it was sent from."""

    def resend(self, loss: torch.Tensor, weight: float) -> Averaged | None:
        """Sends it to another round; None if that is void too.

        Args:
            loss: a scalar to go backward from; its gradients are not used.
            weight: as in `Averager.run`.

        Raises:
            LineHalted: the line stopped, and this worker raises.
        """

    def recall(self, weight: float) -> None:
        """Puts it, times its weight, into `p.grad`, for more to be added."""


class Averager(StepAverager, Protocol):
    """Runs a step's last backward and puts the mean over all workers into `p.grad`."""

    @property
    def intact(self) -> IntactGradient | None:
        """The gradient of the last run, if another round can have it."""

    def begin(self, *, kept: bool) -> None:
        """An attempt of a step begins; `kept`: the intact gradient will be a part of it."""

    def run(self, loss: torch.Tensor, weight: float, scale: float | None) -> Averaged | None:
        """Runs backward and averages; None if the round is void (`p.grad` is no mean then).

        Args:
            loss: a scalar to go backward from; scaled, if the script has a scaler.
            weight: this worker's weight in the mean; with 0 it contributes nothing.
            scale: factor for its accumulated gradients; None: they are a mean already.

        Raises:
            LineHalted: the line stopped, and this worker raises.
        """


class GrainAverager(StepAverager, Protocol):
    """Takes a step's grains one after another, and puts the mean of all into `p.grad`."""

    @property
    def intact(self) -> bool:
        """Whether the sums of the last attempt are whole, and kept for the next one."""

    @property
    def verification(self) -> Verification:
        """Takes the grains that this worker verifies, and attests."""

    @property
    def checks(self) -> ResultChecks | None:
        """What `finish` found of the line's results; None: this process compares none."""

    def begin_grains(
        self, grains: Grains, *, kept: bool, attests: bool, anew: bool = False
    ) -> None:
        """An attempt begins.

        Args:
            grains: those of the batch.
            kept: the sums of the attempt before are a part of it.
            attests: what is computed is hashed, for `verification`.
            anew: results of the attempt before differed.
        """

    def next_grain(self) -> None:
        """A loop body follows, whose forward starts from the head's buffers."""

    def take_grain(self, grain: int, weight: float) -> None:
        """A grain's backward is over: takes its gradient out of `p.grad`."""

    def leave_out(self, grain: int) -> None:
        """A grain has the weight 0, and did not go backward."""

    def finish(
        self, nodes: tuple[NodePart, ...], loss: torch.Tensor | None, last: tuple[int, float] | None
    ) -> Averaged | None:
        """Averages; None if the round is void (`p.grad` is no mean then).

        Args:
            nodes: the maximal nodes of this worker's grains, with their weights.
            loss: a scalar to go backward from first; None: all backwards are over.
            last: grain and weight of that backward; None: its gradients are not used.

        Raises:
            LineHalted: the line stopped, and this worker raises.
        """
