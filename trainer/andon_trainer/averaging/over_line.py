"""Averaging over the line: a round's exchange of gradients, and the exchanges that follow it.

`LineAverager` sends a gradient, and `LineGrains` the sums of grains. This is what both do: they
open the round's exchange before backward, whose hooks send blocks to it, put the averages into
`p.grad`, and then exchange what follows in the same round.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from andon.protocol.capabilities import OVERFLOW
from andon.protocol.halts import describe_value
from andon_trainer.averaging.averager import TrainedModels
from andon_trainer.averaging.averaging import Averaged, Averages, Averaging, OpenExchange
from andon_trainer.averaging.compute_clock import make_clock
from andon_trainer.averaging.loss_scale import LossScale
from andon_trainer.averaging.readings import HostReader, LossReadings
from andon_trainer.averaging.staging import Staging
from andon_trainer.averaging.tap import GradientTap
from andon_trainer.core.calls import NodePart
from andon_trainer.core.values import first_not_finite
from andon_trainer.model.guards import LateGradients
from andon_trainer.place.membership import Membership

__all__ = ["OverLine"]


class OverLine(ABC):
    """Averages over the line, block by block while backward runs. Used by one thread."""

    def __init__(
        self, member: Membership, models: TrainedModels, staging: Staging, *, in_order: bool
    ) -> None:
        """Puts hooks on the parameters.

        Args:
            member: this worker's place on the line.
            models: what is averaged.
            staging: where blocks lie when they are sent.
            in_order: whether it must be given blocks in the layout's order.
        """
        self._member = member
        self._blocks = models.blocks
        self._loss_scale = models.loss_scale
        self.overflowed = False
        self._averaging = Averaging(member, models.plan.layout)
        self.late = LateGradients(models.plan, watch=False)
        self.clock = make_clock(models.device, member.timeline)
        self.losses = LossReadings(HostReader())
        self._tap = GradientTap(models.plan, models.device, staging, self.late, in_order=in_order)
        self._open: OpenExchange | None = None
        """The exchange of gradients, once a round has one."""
        self._whole = False
        """Whether the buffers hold all that this worker has made last."""

    @property
    def _intact(self) -> bool:
        """Whether they do, and no bad value, which may be found long after it was sent."""
        return self._whole and not self._member.exchange.refused

    def refuse_loss(self, value: float) -> None:
        """Reports the loss, and waits for the halt that follows."""
        self._member.refuse_loss(describe_value(value))

    def close(self) -> None:
        """Removes the hooks from the parameters; a second call does nothing."""
        self._tap.close()
        self.late.close()

    # ------------------------------------------------------------------ a round

    def _average(
        self, weight: float, send: Callable[[], None], nodes: tuple[NodePart, ...] = ()
    ) -> Averaged | None:
        """Makes the round's exchanges; None if the round is void.

        Args:
            weight: this worker's.
            send: goes backward and sends all blocks, once the round has begun.
            nodes: what it gives, on a line of grains.
        """
        self._drop_followers()
        self.clock.pause()  # Opening a round may wait for the network.
        # Before backward, whose hooks send blocks to it.
        self._open = self._averaging.open(weight, nodes=nodes)
        if self._open is None:
            return None
        self._member.talk.show("COMPUTING")
        self.clock.resume()
        with self._sending():
            send()
        self._member.talk.show("EXCHANGING")
        averages = self._open.finish(last=not self._follow)
        if averages is None:
            return None
        # Before what follows is exchanged, which may use the memory of the averages.
        factor = self._factor
        for block, average in enumerate(averages.blocks):
            self._tap.write_back(block, torch.from_numpy(average), factor)
        norm = self._averaging.norm(averages.blocks)
        # After the averages are in `p.grad`: what is added from here on is too late.
        self.late.averaged(self._blocks)
        self._member.talk.show("COMMITTING")
        began = time.perf_counter()
        if not self._follow_up(averages, weight):
            return None
        # What lies between is no exchange.
        return averages.averaged(norm, more_s=time.perf_counter() - began)

    @property
    def _factor(self) -> torch.Tensor | None:
        """What the averages are multiplied with in `p.grad`."""
        return None if self._loss_scale is None else self._loss_scale.factor

    def _sending(self) -> AbstractContextManager[None]:
        """Around all that is computed and sent, once a round was begun for it."""
        return nullcontext()

    @property
    @abstractmethod
    def _follow(self) -> bool:
        """Whether exchanges follow those of the gradients."""

    @abstractmethod
    def _follow_up(self, averages: Averages, weight: float) -> bool:
        """The averages came: makes the exchanges that follow; False if the round is void.

        Args:
            averages: valid until the first of these exchanges is opened.
            weight: this worker's.
        """

    @abstractmethod
    def _drop_followers(self) -> None:
        """Forgets what came so in another round."""

    # ------------------------------------------------------------------ what is sent

    def _gone_wrong(self) -> None:
        """Backward raised while it sent: no other worker may average the blocks that have left."""
        self._tap.disarm()
        self._member.abandon("backward raised")

    def _look_for_overflow(self, flat: torch.Tensor, loss_scale: LossScale) -> None:
        """Zeroes a block with a value that is not finite, if the loss scale tolerates that.

        A finite value that the encoding can't hold is no overflow of the scale: gradients travel
        without it.
        """
        if first_not_finite(flat.numpy()) is None:
            return
        # Without the capability no worker would be told to skip the step: it is a defect, then.
        told = OVERFLOW in self._member.position.coordinator_can
        if self.overflowed or (told and loss_scale.tolerates()):
            flat.zero_()
            self.overflowed = True
