"""Pools: what the workers of a round put together, one call after the other.

`Averager` is for a step whose gradients travel while backward runs; a pool is for scripts that
say themselves what is exchanged, and when.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch

from andon_trainer.core.calls import Call
from andon_trainer.core.reports import Timings
from andon_trainer.exchange.path import lent_by
from andon_trainer.gradients.averaging import Averaged, SoloAverager
from andon_trainer.gradients.guards import LateGradients
from andon_trainer.gradients.missing import Absence
from andon_trainer.gradients.model_layout import ModelPlan
from andon_trainer.gradients.norms import l2_norm
from andon_trainer.gradients.staging import make_staging
from andon_trainer.gradients.tap import put_average
from andon_trainer.membership import Membership

__all__ = ["LinePool", "Pool", "SoloPool"]


class Pool(Protocol):
    """Makes one call of a round."""

    late: LateGradients
    """What is added to the gradients of a call after it."""

    def exchange(self, call: Call, weight: float) -> Averaged | None:
        """Makes a call together with all workers; None if the round is void.

        Afterwards `p.grad` of the call's blocks is the mean, or its data is rank 0's.

        Args:
            call: gradients of blocks, bytes, or nothing.
            weight: this worker's weight; 0: it gives nothing.

        Raises:
            LineHalted: the line stopped, and this worker raises.
        """


class LinePool:
    """Over the reducer."""

    def __init__(self, member: Membership, plan: ModelPlan, device: torch.device) -> None:
        """Makes what brings gradients to the host; puts hooks on the parameters."""
        self._member = member
        self._plan = plan
        self.late = LateGradients(plan, watch=True)
        self._staging = make_staging(plan, device, lambda block: lent_by(member.exchange, block))
        self._absence = Absence(plan)

    def exchange(self, call: Call, weight: float) -> Averaged | None:
        """Sends, and returns with the answer in place."""
        began = time.perf_counter()
        if not self._member.begin(weight, call):
            return None
        exchange = self._member.exchange
        self._member.show("EXCHANGING", call.name)
        if not weight:
            exchange.abstain()
        elif call.data is not None:
            exchange.submit_data()
        else:
            self._send(call.blocks)
        complete = self._member.await_averages(last=False)
        if complete is None:
            return None
        for block in call.blocks:
            average = torch.from_numpy(exchange.averages[block])
            parameters = self._plan.parameters[block]
            put_average(self._staging, block, parameters, average, self._absence)
        self._member.show("COMPUTING")
        timings = Timings(exchange_s=time.perf_counter() - began)
        averages = [exchange.averages[block] for block in call.blocks]
        norm = l2_norm(averages) if averages and self._member.wants_gradient_norm else None
        return Averaged(complete.total_weight, complete.world_size, timings, norm)

    def _send(self, blocks: range) -> None:
        """Starts every copy to the host before it waits for the first."""
        for block in blocks:
            gradients = [parameter.grad for parameter in self._plan.parameters[block]]
            self._staging.begin(block, gradients, None)
        for block in blocks:
            flat = self._staging.collect(block)
            self._absence.tell_apart(block, flat, self._plan.parameters[block])
            self._member.exchange.submit(block, flat.numpy())


class SoloPool:
    """One worker's mean is its own gradient, and rank 0's bytes are its own."""

    def __init__(self, averager: SoloAverager) -> None:
        """`averager` has the line's value gate."""
        self._averager = averager
        self.late = averager.late

    def exchange(self, call: Call, weight: float) -> Averaged | None:
        """Checks."""
        self._averager.settle(call.blocks, weight)
        return Averaged(weight, 1, Timings())
