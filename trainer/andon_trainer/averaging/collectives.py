"""Collectives of manual steps: all-reduce, broadcast and barrier, one call after the other.

In a prepared script gradients travel while backward runs: that is `averaging`. In a script with
manual steps each call is one exchange of the round, and returns with its result in place. If the
line limits the norm of each worker's own gradient, that holds for the gradient of each call.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Protocol

import torch

from andon_trainer.averaging.averaging import Averaged, Averaging, OpenExchange
from andon_trainer.averaging.missing import MissingGradients
from andon_trainer.averaging.norms import l2_norm, limiting_factor
from andon_trainer.averaging.solo_gate import SoloGate
from andon_trainer.averaging.staging import make_staging
from andon_trainer.averaging.tap import put_average
from andon_trainer.core.calls import Call, mean_of_gradients
from andon_trainer.core.reports import Timings
from andon_trainer.model.guards import LateGradients
from andon_trainer.model.layout import ModelPlan
from andon_trainer.place.membership import Membership

__all__ = ["Collectives", "LineCollectives", "SoloCollectives"]


class Collectives(Protocol):
    """Makes the calls of a round."""

    late: LateGradients
    """Gradients that were added after the call that averaged them."""

    def committed(self) -> None:
        """The step is committed."""

    def close(self) -> None:
        """Undoes what it did to the process; a second call does nothing."""

    def run(self, call: Call, weight: float) -> Averaged | None:
        """Makes a call together with all workers; None if the round is void.

        Afterwards `p.grad` of the call's blocks is the mean, or the call's data is rank 0's.

        Args:
            call: an all-reduce of blocks, a broadcast of bytes, or a barrier.
            weight: this worker's weight; with 0 it contributes nothing.

        Raises:
            LineHalted: the line stopped, and this worker raises.
        """


class LineCollectives:
    """Collectives over the line's exchange."""

    def __init__(self, member: Membership, plan: ModelPlan, device: torch.device) -> None:
        """Puts hooks on the parameters, which notice late gradients."""
        self._member = member
        self._plan = plan
        self.late = LateGradients(plan, watch=True)
        self._staging = make_staging(
            plan, device, lambda block: member.exchange.lend(block), member.timeline
        )
        self._missing = MissingGradients(plan)
        self._averaging = Averaging(member, plan.layout)

    def committed(self) -> None:
        """Residuals move."""
        self._averaging.committed()

    def close(self) -> None:
        """Ends the watch for late gradients, and lets go of lent memory."""
        self.late.close()
        self._staging.close()

    def run(self, call: Call, weight: float) -> Averaged | None:
        """Sends, waits for the answer and puts it in place."""
        began = time.perf_counter()
        if call.blocks:
            call = replace(call, mean=mean_of_gradients(self._member.policy))
        opened = self._averaging.open(weight, call)
        if opened is None:
            return None
        self._member.talk.show("EXCHANGING", call.name)
        own_norm = self._send(opened, call.blocks) if opened.gives else None
        # `should_commit` says that no call follows, which nobody knows before.
        averages = opened.finish(last=False)
        if averages is None:
            return None
        # At once: the next call may use the memory of the averages again.
        for block in call.blocks:
            average = torch.from_numpy(averages.blocks[block])
            parameters = self._plan.parameters[block]
            put_average(self._staging, block, parameters, average, self._missing)
        self._member.talk.show("COMPUTING")
        timings = Timings(exchange_s=time.perf_counter() - began)
        if self._member.timeline is not None:
            self._member.timeline.span(call.name, began)
        norm = self._averaging.norm([averages.blocks[block] for block in call.blocks])
        return Averaged(
            averages.total_weight,
            averages.world_size,
            timings,
            gradient_norm=norm,
            own_gradient_norm=own_norm,
        )

    def _send(self, opened: OpenExchange, blocks: range) -> float | None:
        """Sends the gradients of some blocks; returns their norm if the line asks for it."""
        # All copies to the host are begun before the first is waited for, so that they overlap.
        for block in blocks:
            gradients = [parameter.grad for parameter in self._plan.parameters[block]]
            self._staging.begin(block, gradients, None)
        policy = self._member.policy
        norm, factor = None, None
        if blocks and (policy.max_grad_norm is not None or policy.own_gradient_norm):
            norm = l2_norm(self._staging.collect(block).numpy() for block in blocks)
        if norm is not None and policy.max_grad_norm is not None:
            factor = limiting_factor(norm, policy.max_grad_norm)
        for block in blocks:
            flat = self._staging.collect(block)
            if factor is not None:
                flat.mul_(factor)
            # After the factor: products may be too small for float32, and all of them -0.0, which
            # would say that there is no gradient.
            self._missing.mark_present(block, flat, self._plan.parameters[block])
            opened.submit(block, flat.numpy())
        return norm


class SoloCollectives:
    """Collectives of one worker: its mean is its own gradient, and rank 0's bytes are its own."""

    def __init__(self, gate: SoloGate) -> None:
        """Has values checked by `gate`."""
        self._gate = gate
        self.late = gate.late

    def committed(self) -> None:
        """Nothing is lost on the way to oneself."""

    def close(self) -> None:
        """Ends the watch for late gradients."""
        self._gate.close()

    def run(self, call: Call, weight: float) -> Averaged | None:
        """Checks the gradients for non-finite values, as a line would."""
        self._gate.settle(call.blocks, weight)
        return Averaged(weight, 1, Timings())
