"""Averaging in a prepared script: from a loss to gradients that are the mean over all workers.

This is where a gradient enters the line, block by block while backward runs, and where the mean
comes back into `p.grad`. `LineAverager` exchanges; a worker that is alone has a `SoloAverager`.

The line may limit the norm of what each worker sends. The norm is known only after backward, so no
block leaves before: the limit costs the time by which exchange and backward overlap, and up to two
passes over the staging buffers. A gradient is limited where it lies. One that is kept is therefore
sent again as it was, and put back into `p.grad` without the factor, so that no gradient is ever
limited twice. If the line only wants to know the norm, blocks leave during backward as ever.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from andon.protocol.capabilities import BLOCK_NORMS, OVERFLOW
from andon.protocol.halts import describe_value
from andon.protocol.sums import sum_in_order
from andon_trainer.averaging.averaging import Averaged, Averaging, OpenExchange
from andon_trainer.averaging.compute_clock import ComputeClock, make_clock
from andon_trainer.averaging.copied_buffers import StepBuffers
from andon_trainer.averaging.loss_scale import LossScale
from andon_trainer.averaging.norms import limiting_factor, sum_of_squares
from andon_trainer.averaging.readings import HostReader, LossReadings
from andon_trainer.averaging.running_statistics import (
    MeanStatistics,
    RankZeroStatistics,
    StepStatistics,
)
from andon_trainer.averaging.staging import Factor, Staging, make_staging
from andon_trainer.averaging.step_gather import Given, StepGather
from andon_trainer.averaging.tap import GradientTap
from andon_trainer.core.calls import Floats, NodePart
from andon_trainer.core.values import first_not_finite
from andon_trainer.exchange.path import lent_by
from andon_trainer.model.guards import LateGradients
from andon_trainer.model.layout import ModelPlan
from andon_trainer.place.membership import Membership

__all__ = ["Averager", "HostPart", "LineAverager", "staged_with"]


class Averager(Protocol):
    """Runs a step's last backward and puts the mean over all workers into `p.grad`."""

    late: LateGradients
    """Gradients that were added to the mean."""
    clock: ComputeClock
    """Times forward and backward of each attempt."""
    losses: LossReadings
    """The losses of the step's micro-batches, on their way to the host."""

    @property
    def overflowed(self) -> bool:
        """Whether the last run's scaled gradients overflowed, and the loss scale tolerates it."""

    @property
    def intact(self) -> bool:
        """Whether the buffers hold this worker's gradient of the last run, whole and finite."""

    def begin(self, *, kept: bool) -> None:
        """An attempt of a step begins; `kept`: the intact gradient will be a part of it."""

    def put_away(self) -> None:
        """The worker waits between two attempts: the models must hold the line's state."""

    def refuse_loss(self, value: float) -> None:
        """Halts the line: this worker's loss is not finite."""

    def gather(self, given: Given) -> list[Given] | None:
        """What all ranks give before their gradients, by rank; None if the round is void.

        Raises:
            ValueError: the model is too small to carry so many bytes.
            LineHalted: the line stopped, and this worker raises.
        """

    def run(self, loss: torch.Tensor, weight: float, scale: float | None) -> Averaged | None:
        """Runs backward and averages; None if the round is void (`p.grad` is no mean then).

        Args:
            loss: a scalar to go backward from; scaled, if the script has a scaler.
            weight: this worker's weight in the mean; with 0 it contributes nothing.
            scale: factor for its accumulated gradients; None: they are a mean already.

        Raises:
            LineHalted: the line stopped, and this worker raises.
        """

    def resend(self, loss: torch.Tensor, weight: float) -> Averaged | None:
        """Sends the intact gradient to another round; None if that is void too.

        Args:
            loss: a scalar to go backward from; its gradients are not used.
            weight: as in `run`.

        Raises:
            LineHalted: the line stopped, and this worker raises.
        """

    def recall(self, weight: float) -> None:
        """Puts the intact gradient, times its weight, into `p.grad`, for more to be added."""

    def committed(self, *, overflow: bool = False) -> None:
        """The step whose mean is in `p.grad` is committed; after an `overflow` no weight moves."""

    def close(self) -> None:
        """Removes the hooks from the parameters; a second call does nothing."""


@dataclass(frozen=True, slots=True)
class HostPart:
    """What is different where this process sends sums: of its host's processes, or of grains."""

    staging: Staging
    """Adds the gradients up; it must be given blocks in the layout's order."""
    sending: Callable[[], AbstractContextManager[None]]
    """Around all that is computed and sent, once a round was begun for it."""


class LineAverager:
    """Averages over the line, block by block while backward runs."""

    def __init__(
        self,
        member: Membership,
        plan: ModelPlan,
        device: torch.device,
        modules: Sequence[nn.Module],
        loss_scale: LossScale | None = None,
        host: HostPart | None = None,
    ) -> None:
        """Puts hooks on the parameters; the buffers of `modules` follow the gradients.

        `loss_scale`: the scale of gradients in `p.grad`; they travel without it.
        """
        self._sending = nullcontext if host is None else host.sending
        self._member = member
        self._loss_scale = loss_scale if loss_scale is not None and loss_scale.enabled else None
        self.overflowed = False
        self._plan = plan
        self._modules = modules
        self._averaging = Averaging(member, plan.layout)
        self._buffers = StepBuffers(self._averaging, self._make_statistics(), modules)
        self.late = LateGradients(plan, watch=False)
        self.clock = make_clock(device, member.timeline)
        self.losses = LossReadings(HostReader())
        staging = (
            host.staging
            if host is not None
            else make_staging(
                plan, device, lambda block: lent_by(member.exchange, block), member.timeline
            )
        )
        self._tap = GradientTap(plan, device, staging, self.late, in_order=host is not None)
        self._gather = StepGather(self._averaging)
        self._open: OpenExchange | None = None
        """The exchange of gradients, once a round has one."""
        self._whole = False
        """Whether the buffers hold all of this worker's last gradient."""
        self._squares: dict[int, float] | None = None
        """Sum of the squares of each block delivered so far; None: nobody wants to know."""
        self._own_norm: float | None = None
        """The norm of the gradient in the buffers, before it was limited."""
        self._limited_by = 1.0
        """The factor that is in the buffers."""

    @property
    def moved_buffers(self) -> list[str]:
        """The names of the buffers that came with the mean, and are set at its commit."""
        return self._buffers.copied.moved

    @property
    def intact(self) -> bool:
        """See `Averager`: a bad value may be found long after it was sent."""
        return self._whole and not self._member.exchange.refused

    def begin(self, *, kept: bool) -> None:
        """Notes the buffers that the step begins with."""
        averages = isinstance(self._buffers.statistics, MeanStatistics)
        if self._member.policy.average_buffers != averages:
            # Between two attempts, so none of their exchanges is under way.
            self._buffers.statistics = self._make_statistics()  # The coordinator began anew.
        if kept:
            self._buffers.add()
        else:
            self._buffers.begin()

    def put_away(self) -> None:
        """Sets the buffers back to the line's."""
        self._buffers.put_away()

    def _make_statistics(self) -> StepStatistics:
        if self._member.policy.average_buffers:
            return MeanStatistics(self._averaging, self._modules)
        return RankZeroStatistics(self._averaging, self._modules)

    def refuse_loss(self, value: float) -> None:
        """Reports the loss, and waits for the halt that follows."""
        self._member.refuse_loss(describe_value(value))

    def gather(self, given: Given) -> list[Given] | None:
        """See `Averager`; the others are waited for."""
        self.clock.pause()
        self._member.talk.show("EXCHANGING", "line.gather")
        found = self._gather.run(given)
        self._member.talk.show("COMPUTING")
        self.clock.resume()
        return found

    def run(self, loss: torch.Tensor, weight: float, scale: float | None) -> Averaged | None:
        """Sends each block as soon as backward has made it, or all at its end if there is a limit.

        Returns with the mean in place.
        """
        # First: as long as backward fills the buffers they hold no whole gradient.
        self._whole = self.overflowed = False
        self._own_norm, self._squares = None, None
        return self._average(weight, lambda: self._compute(loss, weight, scale))

    def resend(self, loss: torch.Tensor, weight: float) -> Averaged | None:
        """Sends the buffers as they are, block by block; then runs a backward for nothing."""
        assert self.intact
        return self._average(weight, lambda: self._send_again(loss))

    def recall(self, weight: float) -> None:
        """Multiplies on the device; the next backward's hooks send the sum."""
        assert self.intact
        # The sum's mean is limited as a whole.
        self._tap.recall(weight / self._limited_by, self._factor)

    def committed(self, *, overflow: bool = False) -> None:
        """Sets the buffers that came with the mean; residuals move."""
        self._buffers.apply()
        self._averaging.committed(moves_weights=not overflow)

    def close(self) -> None:
        """Removes the hooks from the parameters; a second call does nothing."""
        self._tap.close()
        self.late.close()

    def _average(
        self, weight: float, send: Callable[[], None], nodes: tuple[NodePart, ...] = ()
    ) -> Averaged | None:
        self._drop_buffers()
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
        follow = self._follow
        averages = self._open.finish(last=not follow)
        if averages is None:
            return None
        # Before the buffers are exchanged, which may use the memory of the averages.
        factor = self._factor
        for block, average in enumerate(averages.blocks):
            self._tap.write_back(block, torch.from_numpy(average), factor)
        self._note_averages(averages.blocks)
        norm = self._averaging.norm(averages.blocks)
        # After the averages are in `p.grad`: what is added from here on is too late.
        self.late.averaged(range(len(self._plan.parameters)))
        self._member.talk.show("COMMITTING")
        began = time.perf_counter()
        if follow and not self._exchange_buffers(weight, averages.total_weight):
            return None
        more = time.perf_counter() - began  # What lies between is no exchange.
        return averages.averaged(norm, self._own_norm, block_norms=self._block_norms(), more_s=more)

    def _block_norms(self) -> tuple[float, ...]:
        """The norm of each block of the own gradient, if the line compares them."""
        squares = self._squares
        if (
            squares is None
            or len(squares) != len(self._plan.parameters)
            or not self._member.policy.own_gradient_norm
            or BLOCK_NORMS not in self._member.position.coordinator_can
        ):
            return ()
        return tuple(math.sqrt(squares[block]) for block in range(len(squares)))

    def _note_averages(self, blocks: Sequence[Floats]) -> None:
        """The averages came, and the next exchange may use their memory."""

    @property
    def _follow(self) -> bool:
        """Whether exchanges of buffers follow those of the gradients."""
        return self._buffers.follow

    def _exchange_buffers(self, weight: float, _total_weight: float) -> bool:
        """Makes them; False if the round is void."""
        return self._buffers.exchange(weight)

    def _drop_buffers(self) -> None:
        """Forgets what came of buffers in another round."""
        self._buffers.drop()

    @property
    def _factor(self) -> torch.Tensor | None:
        """What the averages are multiplied with in `p.grad`."""
        return None if self._loss_scale is None else self._loss_scale.factor

    def _compute(self, loss: torch.Tensor, weight: float, scale: float | None) -> None:
        if weight == 0.0:
            # The others know. The script still gets its backward: hooks and graph are as in any
            # other step.
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
            self.clock.done()
            return
        policy = self._member.policy
        limit = policy.max_grad_norm
        self._limited_by = 1.0
        self._squares = {} if limit is not None or policy.own_gradient_norm else None
        deliver = self._measure_and_send if limit is None else self._measure
        # After all that `deliver` looks at was set: the first hook calls it.
        self._tap.arm(deliver, staged_with(self._loss_scale, scale), loss)
        try:
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
            self.clock.done()  # Before `finish`, which waits for copies and blocks to leave.
            self._tap.finish()
            if self._squares is not None:
                self._own_norm = math.sqrt(sum_in_order(self._squares.values()))
            if limit is not None:
                self._send_limited(limit)
        except BaseException:
            # Some blocks may have been sent already: no other worker may average them.
            self._tap.disarm()
            self._member.abandon("backward raised")
            raise
        # Not in a `finally`: half a gradient must not be kept.
        self._whole = True
        self._buffers.keep()

    def _send_limited(self, limit: float) -> None:
        assert self._own_norm is not None
        factor = limiting_factor(self._own_norm, limit)
        if factor is not None:
            self._tap.rescale(factor)
            # `recall` takes it out again, so that a kept gradient is limited with the sum, and
            # once.
            self._limited_by = factor
        self._tap.deliver_again(self._send)

    def _send_again(self, loss: torch.Tensor) -> None:
        # The blocks leave first, since the others wait for them. Nothing of this backward is sent.
        self._tap.deliver_again(self._send)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
        self.clock.done()
        self._buffers.take_out()  # Forward has moved them by the borrowed samples.

    # While backward runs, these are called on autograd's threads: one at a time, in order.

    def _send(self, block: int, flat: torch.Tensor) -> None:
        assert self._open is not None
        self._open.submit(block, flat.numpy())

    def _measure(self, block: int, flat: torch.Tensor) -> None:
        if self._loss_scale is not None:
            self._look_for_overflow(flat, self._loss_scale)
        if self._squares is not None:
            self._squares[block] = sum_of_squares(flat.numpy())

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

    def _measure_and_send(self, block: int, flat: torch.Tensor) -> None:
        self._measure(block, flat)
        self._send(block, flat)


def staged_with(loss_scale: LossScale | None, scale: float | None) -> Factor | None:
    """What gradients are multiplied with on their way to the line, where the loss is scaled."""
    if loss_scale is None:
        return scale
    inverse = loss_scale.inverse
    return inverse if scale is None else inverse * scale
