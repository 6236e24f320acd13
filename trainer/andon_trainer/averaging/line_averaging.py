"""Averaging in a prepared script: from a loss to gradients that are the mean over all workers.

This is where a gradient enters the line, block by block while backward runs, and where the mean
comes back into `p.grad` (see `over_line`).

The line may limit the norm of what each worker sends. The norm is known only after backward, so no
block leaves before: the limit costs the time by which exchange and backward overlap, and up to two
passes over the staging buffers. A gradient is limited where it lies. One that is kept is therefore
sent again as it was, and put back into `p.grad` without the factor, so that no gradient is ever
limited twice. If the line only wants to know the norm, blocks leave during backward as ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from andon.protocol.capabilities import BLOCK_NORMS
from andon.protocol.sums import sum_in_order
from andon_trainer.averaging.averager import IntactGradient, TrainedModels
from andon_trainer.averaging.averaging import Averaged, Averages
from andon_trainer.averaging.copied_buffers import StepBuffers
from andon_trainer.averaging.loss_scale import LossScale
from andon_trainer.averaging.norms import limiting_factor, sum_of_squares
from andon_trainer.averaging.over_line import OverLine
from andon_trainer.averaging.running_statistics import (
    MeanStatistics,
    RankZeroStatistics,
    StepStatistics,
)
from andon_trainer.averaging.staging import Factor, Staging, make_staging
from andon_trainer.averaging.step_gather import Given, StepGather
from andon_trainer.place.membership import Membership

__all__ = ["HostPart", "LineAverager", "staged_with"]


@dataclass(frozen=True, slots=True)
class HostPart:
    """What is different where this process sends the sums of its host's processes."""

    staging: Staging
    """Adds the gradients up; it must be given blocks in the layout's order."""
    sending: Callable[[], AbstractContextManager[None]]
    """Around all that is computed and sent, once a round was begun for it."""


class LineAverager(OverLine):
    """Averages a gradient; the models' buffers follow it."""

    def __init__(
        self, member: Membership, models: TrainedModels, host: HostPart | None = None
    ) -> None:
        """Puts hooks on the parameters; gradients travel without their loss scale."""
        staging = (
            host.staging
            if host is not None
            else make_staging(
                models.plan,
                models.device,
                lambda block: member.exchange.lend(block),
                member.timeline,
            )
        )
        super().__init__(member, models, staging, in_order=host is not None)
        self._host = host
        self._modules = models.modules
        self._buffers = StepBuffers(self._averaging, self._make_statistics(), models.modules)
        self._gather = StepGather(self._averaging)
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
    def intact(self) -> IntactGradient | None:
        """See `Averager`."""
        return self if self._intact else None

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

    def gather(self, given: Given) -> list[Given] | None:
        """What all ranks give before their gradients, by rank; None if the round is void.

        Raises:
            ValueError: the model is too small to carry so many bytes.
            LineHalted: the line stopped, and this worker raises.
        """
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
        return self._average_gradient(weight, lambda: self._compute(loss, weight, scale))

    def resend(self, loss: torch.Tensor, weight: float) -> Averaged | None:
        """Sends the buffers as they are, block by block; then runs a backward for nothing."""
        assert self._intact
        return self._average_gradient(weight, lambda: self._send_again(loss))

    def recall(self, weight: float) -> None:
        """Multiplies on the device; the next backward's hooks send the sum."""
        assert self._intact
        # The sum's mean is limited as a whole.
        self._tap.recall(weight / self._limited_by, self._factor)

    def committed(self, *, overflow: bool = False) -> None:
        """Sets the buffers that came with the mean; residuals move."""
        self._buffers.apply()
        self._averaging.committed(moves_weights=not overflow)

    def _average_gradient(self, weight: float, send: Callable[[], None]) -> Averaged | None:
        averaged = self._average(weight, send)
        if averaged is None:
            return None
        norms = self._block_norms()
        return replace(averaged, own_gradient_norm=self._own_norm, block_norms=norms)

    def _block_norms(self) -> tuple[float, ...]:
        """The norm of each block of the own gradient, if the line compares them."""
        squares = self._squares
        if (
            squares is None
            or len(squares) != len(self._blocks)
            or not self._member.policy.own_gradient_norm
            or BLOCK_NORMS not in self._member.position.coordinator_can
        ):
            return ()
        return tuple(math.sqrt(squares[block]) for block in range(len(squares)))

    def _sending(self) -> AbstractContextManager[None]:
        return super()._sending() if self._host is None else self._host.sending()

    @property
    def _follow(self) -> bool:
        return self._buffers.follow

    def _follow_up(self, averages: Averages, weight: float) -> bool:
        return not self._follow or self._buffers.exchange(weight)

    def _drop_followers(self) -> None:
        self._buffers.drop()

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
            self._gone_wrong()
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

    def _measure_and_send(self, block: int, flat: torch.Tensor) -> None:
        self._measure(block, flat)
        self._send(block, flat)


def staged_with(loss_scale: LossScale | None, scale: float | None) -> Factor | None:
    """What gradients are multiplied with on their way to the line, where the loss is scaled."""
    if loss_scale is None:
        return scale
    inverse = loss_scale.inverse
    return inverse if scale is None else inverse * scale
