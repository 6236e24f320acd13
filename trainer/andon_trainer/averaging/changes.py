"""Changes: what a window of local steps did to the weights, exchanged and applied.

A worker sends `start - now`, as if it were a gradient, with its number of samples as the weight.
The mean comes back to all workers as the same bits. An outer optimizer (SGD, perhaps with
Nesterov's momentum) applies it to the weights that all of them had at the window's start. With rate
1 and no momentum that is the weighted mean of the workers' weights.

Source: A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
arXiv:2311.08105; with plain averaging S. U. Stich, "Local SGD Converges Fast and Communicates
Little", arXiv:1805.09767.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from andon.protocol.halts import describe_value
from andon.protocol.schedules import OuterOptimizer
from andon_trainer.averaging.averaging import Averaged, Averaging, OpenExchange
from andon_trainer.averaging.compute_clock import make_clock
from andon_trainer.averaging.copied_buffers import WindowBuffers
from andon_trainer.averaging.finite import PlacedGradient, groups_of, signs_of
from andon_trainer.averaging.loss_scale import LossScale
from andon_trainer.averaging.missing import MissingGradients
from andon_trainer.averaging.norms import l2_norm
from andon_trainer.averaging.readings import HostReader, LossReadings
from andon_trainer.averaging.staging import make_staging
from andon_trainer.averaging.tap import put_average
from andon_trainer.core.calls import Call
from andon_trainer.model.guards import LateGradients
from andon_trainer.model.layout import ModelPlan
from andon_trainer.place.membership import Membership

__all__ = ["ChangeExchange", "outer_optimizer"]


def outer_optimizer(plan: ModelPlan, outer: OuterOptimizer) -> torch.optim.SGD:
    """The optimizer that applies the mean change, over the parameters that are exchanged."""
    parameters = [part for parameters in plan.parameters for part in parameters]
    return torch.optim.SGD(
        parameters, lr=outer.learning_rate, momentum=outer.momentum, nesterov=outer.momentum > 0
    )


class ChangeExchange:
    """Exchanges one worker's changes of the weights. Used by one thread."""

    def __init__(
        self,
        member: Membership,
        plan: ModelPlan,
        device: torch.device,
        modules: Sequence[nn.Module] = (),
    ) -> None:
        """Allocates nothing yet; the buffers of `modules` follow the changes."""
        self._member = member
        self._averaging = Averaging(member, plan.layout)
        self._open: OpenExchange | None = None
        self.buffers = WindowBuffers(self._averaging, modules)
        """Those of the models, which no optimizer moves."""
        self._plan = plan
        self._staging = make_staging(
            plan, device, lambda block: member.exchange.lend(block), member.timeline
        )
        self._missing = MissingGradients(plan)
        # Gradients are this worker's own, so none of them can be late.
        self.late = LateGradients(plan, watch=False)
        self.clock = make_clock(device, member.timeline)
        self.losses = LossReadings(HostReader())
        self._blocks = range(0)
        """Of the present round."""
        self._staged = range(0)
        """The blocks whose buffers hold the change that was sent last."""
        self._own_norm: float | None = None
        self.overflowed = False
        """Whether the scaled gradients of the last local step overflowed."""

    def close(self) -> None:
        """Lets go of lent memory."""
        self._staging.close()

    # ------------------------------------------------------------------ a local step

    def settle(
        self, scale: float | None, max_norm: float | None, loss_scale: LossScale | None = None
    ) -> bool:
        """Makes the gradients of a local step a mean, and limits its norm.

        Args:
            scale: the factor that makes sums a mean; None: they are one.
            max_norm: the greatest L2 norm; None: any.
            loss_scale: the scale that they have, and may overflow with.

        Returns:
            False if a value is not finite: the line halts for it.

        Raises:
            LineHalted: the same, if this worker raises.
        """
        self.overflowed, placed = False, list(self._gradients())
        found = [gradient for _, _, gradient in placed]
        if scale is not None:
            for gradient in found:
                gradient.mul_(float(np.float32(scale)))
        # Of all at once: a GPU is waited for once, and not once for each parameter.
        if not all(torch.isfinite(signs_of(each)).all() for each in groups_of(placed)):
            for block, index, gradient in placed:
                if torch.isfinite(gradient.sum()):
                    continue
                if loss_scale is not None and (self.overflowed or loss_scale.tolerates()):
                    self.overflowed = True  # The scaler finds it, and skips the step.
                elif self._refuse(block, index, gradient):
                    return False
        if max_norm is not None and found:
            norms = [_norm_of(each).to(found[0].device) for each in found]
            norm = torch.linalg.vector_norm(torch.stack(norms))
            # A tensor, so that a GPU need not be waited for.
            limit = max_norm if loss_scale is None else loss_scale.factor.double() * max_norm
            factor = torch.clamp(limit / norm, max=1.0)
            for gradient in found:
                gradient.mul_(factor.to(gradient.device, gradient.dtype))
        return True

    def refuse_loss(self, value: float) -> None:
        """Reports the loss, and waits for the halt that follows."""
        self._member.refuse_loss(describe_value(value))

    def _gradients(self) -> Iterator[PlacedGradient]:
        for block, parameters in enumerate(self._plan.parameters):
            for index, parameter in enumerate(parameters):
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    # As an average is: what works on one schedule works on the other.
                    parameter.grad = parameter.grad.to_dense()
                yield block, index, parameter.grad

    def _refuse(self, block: int, index: int, gradient: torch.Tensor) -> bool:
        """Reports the first element that is not finite; False if only their sum is not."""
        wrong = torch.nonzero(~torch.isfinite(gradient.reshape(-1)))
        if not len(wrong):
            return False
        before = sum(part.numel() for part in self._plan.parameters[block][:index])
        element = int(wrong[0])
        value = describe_value(float(gradient.reshape(-1)[element]))
        self._member.refuse_gradient(block, before + element, value)
        return True

    # ------------------------------------------------------------------ a window

    def renew(self) -> None:
        """The change is another one than was sent last."""
        self._staged = range(0)

    def blocks_of(self, fragment: int | None) -> range:
        """The blocks of a fragment; None: all."""
        count = len(self._plan.parameters)
        if fragment is None:
            return range(count)
        return range(fragment, count, self._member.policy.fragments)

    def parameters_of(self, fragment: int | None) -> Iterator[nn.Parameter]:
        """The parameters of a fragment's blocks; None: all that are exchanged."""
        for block in self.blocks_of(fragment):
            yield from self._plan.parameters[block]

    def send(
        self, weight: float, changes: Mapping[int, torch.Tensor], fragment: int | None = None
    ) -> bool:
        """Sends this worker's change in the present round; returns without waiting.

        What was sent in a void round is sent again bit for bit, unless `renew` was called.

        Args:
            weight: this worker's; with 0 it contributes nothing.
            changes: `start - now` in float32, by the parameters' ids.
            fragment: whose blocks are exchanged; None: all are.

        Returns:
            False if the round is void.
        """
        self._own_norm, self._blocks = None, self.blocks_of(fragment)
        call = None if fragment is None else Call(name="line.backward", blocks=self._blocks)
        # Kept until `receive`: a window may be computed ahead in between.
        self._open = opened = self._averaging.open(weight, call)
        if opened is None:
            return False
        if not opened.gives:
            return True
        if self._staged != self._blocks:
            self._stage(changes)
        blocks = [self._staging.collect(block).numpy() for block in self._blocks]
        for block, flat in zip(self._blocks, blocks, strict=True):
            opened.submit(block, flat)
        if self._member.policy.own_gradient_norm:
            self._own_norm = l2_norm(blocks)
        return True

    def receive(self, weight: float) -> Averaged | None:
        """Waits for the mean of all changes, and leaves it in `p.grad`.

        Args:
            weight: as it was sent.

        Returns:
            The averaging; None if the round is void.

        Raises:
            LineHalted: the line stopped, and this worker raises.
        """
        opened = self._open
        assert opened is not None
        self._member.talk.show("EXCHANGING")
        follow = self.buffers.follow
        averages = opened.finish(last=not follow)
        if averages is None:
            # A value that must not be sent is found in these buffers: they are of no use.
            if opened.exchange.refused:
                self.renew()
            return None
        # Before the buffers are exchanged, which may use the memory of the averages.
        blocks = [averages.blocks[block] for block in self._blocks]
        for block, average in zip(self._blocks, blocks, strict=True):
            put_average(
                self._staging,
                block,
                self._plan.parameters[block],
                torch.from_numpy(average),
                self._missing,
            )
        # Before the buffers, too, for the same reason.
        norm = self._averaging.norm(blocks)
        self._member.talk.show("COMMITTING")
        if follow and not self.buffers.exchange(weight):
            return None
        return averages.averaged(norm, self._own_norm)

    def scale(self, factor: float) -> None:
        """Multiplies the mean change in `p.grad` by `factor`, rounded to float32."""
        if factor != 1.0:
            for _, _, mean in self._gradients():
                mean.mul_(float(np.float32(factor)))

    def committed(self) -> None:
        """The window is committed: what the encoding lost of its change is sent with the next."""
        self._averaging.committed()

    def _stage(self, changes: Mapping[int, torch.Tensor]) -> None:
        """Copies each block's change to the host."""
        for block in self._blocks:
            parts = [changes[id(part)] for part in self._plan.parameters[block]]
            self._staging.begin(block, parts, None)
        self._staged = self._blocks


def _norm_of(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient's L2 norm. In float64: in float32 that of finite numbers may be infinite."""
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return norm
