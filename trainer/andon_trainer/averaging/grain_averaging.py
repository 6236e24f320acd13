"""Averaging by grains: the sums of a worker's nodes go to the line, and its mean has the same bits.

See `grain_sums` for what is sent when, and `andon.protocol.grains` for the arithmetic.
"""

from __future__ import annotations

import time

import torch

from andon.protocol.grains import Grains
from andon.protocol.sums import sum_in_order
from andon_trainer.averaging.averager import TrainedModels
from andon_trainer.averaging.averaging import Averaged, Averages
from andon_trainer.averaging.compute_clock import ComputeClock, HostStopwatch
from andon_trainer.averaging.grain_buffers import GrainBuffers, LineGrainBuffers
from andon_trainer.averaging.grain_sums import GrainSums, NodeStaging
from andon_trainer.averaging.loss_scale import LossScale
from andon_trainer.averaging.node_sums import divided, gradient_of
from andon_trainer.averaging.over_line import OverLine
from andon_trainer.averaging.result_checks import ResultChecks
from andon_trainer.averaging.solo_gate import SoloGate
from andon_trainer.averaging.staging import Staging, make_staging
from andon_trainer.averaging.verification import Verification
from andon_trainer.core.calls import NodePart
from andon_trainer.core.reports import Timings
from andon_trainer.place.member import RunMember
from andon_trainer.place.membership import Membership

__all__ = ["LineGrains", "SoloGrains", "TakesGrains"]


class TakesGrains:
    """Takes the grains of one process, each from the head's buffers."""

    _loss_scale: LossScale | None
    """The scale that gradients have; None: they have none."""
    _sums: GrainSums
    _grain_buffers: GrainBuffers
    clock: ComputeClock
    verification: Verification

    def put_away(self) -> None:
        """Sets the buffers back to the line's, if the step is void, halted or was left."""
        self._grain_buffers.put_away()

    def next_grain(self) -> None:
        """See `GrainAverager`."""
        self._grain_buffers.next_grain()

    def take_grain(self, grain: int, weight: float) -> None:
        """See `GrainAverager`."""
        self._sums.take(grain, weight, self._unscale)
        self._grain_buffers.take(grain, weight)

    def leave_out(self, grain: int) -> None:
        """See `GrainAverager`."""
        self._sums.leave_out(grain)
        self._grain_buffers.take(grain, 0.0)

    def _begin_sums(self, grains: Grains, *, kept: bool, attests: bool) -> None:
        """An attempt begins: with the sums of the one before if they were kept, or with none."""
        if kept:
            self._grain_buffers.begin_again()
        else:
            self._sums.begin(grains, attests=attests)
            self._grain_buffers.begin(grains)
        if attests:
            self.verification.begin(grains)
        else:
            self.verification.end()  # Of an attempt that was void before anything was attested.

    def _go_back(self, loss: torch.Tensor | None) -> None:
        """Runs the step's last backward, if there is one, and stops the clock."""
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
        self.clock.done()

    def _take_last(self, loss: torch.Tensor | None, last: tuple[int, float] | None) -> None:
        """Runs the last backward, and takes its grain; nothing leaves meanwhile."""
        self._grain_buffers.check()
        self._go_back(loss)
        if last is not None:
            self.take_grain(*last)

    def _drop_sums(self) -> None:
        """The step is committed."""
        self._sums.clear()
        self.verification.end()

    @property
    def _unscale(self) -> torch.Tensor | None:
        """The inverse of their loss scale."""
        return None if self._loss_scale is None else self._loss_scale.inverse


class LineGrains(TakesGrains, OverLine):
    """Averages over the line, block by block while the last grain's backward runs."""

    _grain_buffers: LineGrainBuffers

    def __init__(self, member: Membership, models: TrainedModels) -> None:
        """Puts hooks on the parameters; what grains make of buffers follows the gradients."""
        plan = models.plan
        areas: list[Staging] = []

        def make(area: int) -> Staging:
            areas.append(
                make_staging(
                    plan,
                    models.device,
                    lambda block: member.exchange.lend(block, area),
                    member.timeline,
                    beside=areas[0] if areas else None,
                )
            )
            return areas[-1]

        self._sums = GrainSums(plan)
        self._staging = NodeStaging(self._sums, make)
        super().__init__(member, models, self._staging, in_order=True)
        self._grain_buffers = LineGrainBuffers(self._averaging, models.modules)
        self._nodes: tuple[NodePart, ...] = ()
        self.verification = Verification(plan, self._sums, self._loss_scale)
        self.checks = ResultChecks(
            self._averaging,
            plan,
            self.verification.sums,
            self._staging,
            scaled=self._loss_scale is not None,
        )

    @property
    def intact(self) -> bool:
        """See `GrainAverager`."""
        return self._intact

    def begin_grains(
        self, grains: Grains, *, kept: bool, attests: bool, anew: bool = False
    ) -> None:
        """See `GrainAverager`."""
        self.checks.begin(grains, anew=anew)
        self._whole = True
        self._begin_sums(grains, kept=kept, attests=attests)

    def finish(
        self, nodes: tuple[NodePart, ...], loss: torch.Tensor | None, last: tuple[int, float] | None
    ) -> Averaged | None:
        """See `GrainAverager`; a node leaves as soon as backward has made it."""
        self._grain_buffers.check()
        self._whole = True
        self.overflowed = False
        self._nodes = nodes
        weight = sum_in_order(part.weight for part in nodes)
        averaged = self._average(weight, lambda: self._send_sums(loss, last), nodes)
        if self._open is None:
            self._keep_unsent(loss, last)
        self.checks.finish(None if averaged is None else averaged.total_weight)
        return averaged

    def committed(self, *, overflow: bool = False) -> None:
        """Sets the buffers that came with the mean."""
        self._grain_buffers.committed()
        self._averaging.committed(moves_weights=not overflow)
        self._drop_sums()

    @property
    def _follow(self) -> bool:
        return self.checks.means.relays or self._grain_buffers.follow

    def _follow_up(self, averages: Averages, weight: float) -> bool:
        self.checks.means.begin(averages.blocks)
        # Sums first: buffers are sent from the memory that the sums were sent from.
        means, follow = self.checks.means, self._grain_buffers.follow
        if means.relays and not means.relay(last=not follow):
            return False
        return not follow or self._grain_buffers.exchange(self._nodes, averages.total_weight)

    def _drop_followers(self) -> None:
        self._grain_buffers.drop()
        self.checks.means.drop()  # Of a round that became void behind its averages.

    def _keep_unsent(self, loss: torch.Tensor | None, last: tuple[int, float] | None) -> None:
        """The round was void before anything was sent. The grain is a part of the next one."""
        if loss is not None and last is not None:
            self.clock.resume()
            self._go_back(loss)
            self.take_grain(*last)

    def _send_sums(self, loss: torch.Tensor | None, last: tuple[int, float] | None) -> None:
        if last is None or loss is None:
            self._send_what_is_here(loss)
            return
        self._whole = False
        self._staging.arm(*last)
        self._tap.arm(self._send_block, self._unscale, loss)
        try:
            self._go_back(loss)
            self._tap.finish()
        except BaseException:
            self._gone_wrong()
            raise
        # Not in a `finally`: sums that lack the grain in some blocks must not be kept.
        self._whole = True
        self._grain_buffers.take(*last)

    def _send_what_is_here(self, loss: torch.Tensor | None) -> None:
        # The sums leave first, since the others wait for them. Nothing of a backward is sent.
        for block in self._blocks if self._nodes else ():
            self._staging.stage(block)
            self._send_block(block, None)
        self._go_back(loss)
        if loss is not None:
            self._tap.clear()

    def _send_block(self, block: int, _flat: torch.Tensor | None) -> None:
        """Sends the sums of a block; while backward runs, on autograd's threads."""
        assert self._open is not None
        flats = self._staging.flats(block)
        if self._sums.hashes is not None:
            # Before zeros take the place of an overflow: whoever verifies has none.
            self._sums.hash_sent(block, flats)
        if self._loss_scale is not None:
            for flat in flats:
                self._look_for_overflow(flat, self._loss_scale)
        self._open.submit_nodes(block, [flat.numpy() for flat in flats])


class SoloGrains(TakesGrains, SoloGate):
    """The same tree for a script that runs alone: its mean has the bits of a line's."""

    intact = False
    """Never: no step of a line of one is void."""
    checks = None

    def __init__(self, member: RunMember, models: TrainedModels) -> None:
        """Puts hooks on the parameters."""
        super().__init__(member, models)
        self.clock = ComputeClock(HostStopwatch(), member.timeline)
        self._sums = GrainSums(models.plan)
        self._grain_buffers = GrainBuffers(models.modules)
        self._grains: Grains | None = None
        # Nobody else's grains are verified alone; an audit has its own ones attested.
        self.verification = Verification(models.plan, self._sums)

    def begin_grains(
        self, grains: Grains, *, kept: bool, attests: bool, anew: bool = False
    ) -> None:
        """See `GrainAverager`."""
        self.losses.clear()
        self._grains = grains
        self._begin_sums(grains, kept=False, attests=attests)

    def finish(
        self, nodes: tuple[NodePart, ...], loss: torch.Tensor | None, last: tuple[int, float] | None
    ) -> Averaged | None:
        """See `GrainAverager`; this worker has all grains."""
        self._take_last(loss, last)
        self.overflowed = False
        total = sum_in_order(part.weight for part in nodes)
        if self._sums.hashes is not None:
            self._sums.hash_nodes()
        self._put_mean(total)
        # After the check: from here on a gradient that is added is too late, as on a line.
        self.late.averaged(self._blocks)
        return Averaged(total, 1, Timings(), computed_at=time.perf_counter())

    def committed(self, *, overflow: bool = False) -> None:
        """Sets the statistics that the grains made."""
        self._grain_buffers.committed()
        self._drop_sums()

    def _put_mean(self, total: float) -> None:
        assert self._grains is not None
        factor = None if self._loss_scale is None else self._loss_scale.factor
        there = []
        for block, parameters in enumerate(self._plan.parameters):
            parts = self._sums[block][self._grains.root]
            for index, (parameter, part) in enumerate(zip(parameters, parts, strict=True)):
                parameter.grad = None
                if total == 0.0:
                    # A line's reducer has nothing to divide by, and returns zeros.
                    parameter.grad = torch.zeros_like(parameter)
                elif part is not None:
                    mean = divided(part, total, self._grains.micro_batch, self._grains.count)
                    parameter.grad = gradient_of(parameter, mean, factor)
                    there.append((block, index, parameter.grad))
        self._look(there)
