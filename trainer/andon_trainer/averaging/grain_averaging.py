"""Averaging by grains: the sums of a worker's nodes go to the line, and its mean has the same bits.

See `grain_sums` for what is sent when, and `andon.protocol.grains` for the arithmetic.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import nn

from andon.protocol.attestations import Attestation, MeanCheck, NodeApart
from andon.protocol.grains import Grains
from andon.protocol.sums import sum_in_order
from andon_trainer.averaging.averaging import Averaged
from andon_trainer.averaging.earlier_sums import EarlierSums
from andon_trainer.averaging.grain_buffers import GrainBuffers, LineGrainBuffers
from andon_trainer.averaging.grain_sums import GrainSums, NodeStaging
from andon_trainer.averaging.line_averaging import Averager, HostPart, LineAverager
from andon_trainer.averaging.loss_scale import LossScale
from andon_trainer.averaging.mean_checks import MeanChecks
from andon_trainer.averaging.node_sums import divided, gradient_of
from andon_trainer.averaging.readings import Reader
from andon_trainer.averaging.solo_averaging import SoloAverager
from andon_trainer.averaging.staging import Staging, make_staging
from andon_trainer.averaging.verification import Verification
from andon_trainer.core.calls import Floats, NodePart
from andon_trainer.core.reports import Timings
from andon_trainer.exchange.path import lent_by
from andon_trainer.model.layout import ModelPlan
from andon_trainer.place.member import RunMember
from andon_trainer.place.membership import Membership

__all__ = ["GrainAverager", "LineGrains", "SoloGrains", "TakesGrains"]


class GrainAverager(Averager, Protocol):
    """Takes a step's grains one after another, and puts the mean of all into `p.grad`."""

    @property
    def verification(self) -> Verification | None:
        """Takes the grains that this worker verifies, and attests; None: there is no line."""

    @property
    def mean_check(self) -> MeanCheck | None:
        """What `finish` found of the line's averages; None: nobody asked."""

    def apart(
        self, hashes: Sequence[bytes], attested: Sequence[Attestation]
    ) -> tuple[NodeApart, ...]:
        """Results that differ and of which this worker has both; ask once, after `finish`.

        Args:
            hashes: those of the components of `p.grad`.
            attested: what this worker attests.
        """

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


class TakesGrains:
    """Takes the grains of one process, each from the head's buffers."""

    _sums: GrainSums
    _grain_buffers: GrainBuffers
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

    @property
    @abstractmethod
    def _unscale(self) -> torch.Tensor | None:
        """The inverse of the loss scale that gradients have; None: they have none."""


class LineGrains(TakesGrains, LineAverager):
    """Averages over the line, block by block while the last grain's backward runs."""

    _grain_buffers: LineGrainBuffers

    def __init__(
        self,
        member: Membership,
        plan: ModelPlan,
        device: torch.device,
        modules: Sequence[nn.Module],
        loss_scale: LossScale | None = None,
    ) -> None:
        """Puts hooks on the parameters; the buffers of `modules` follow the gradients."""
        areas: list[Staging] = []

        def make(area: int) -> Staging:
            areas.append(
                make_staging(
                    plan,
                    device,
                    lambda block: lent_by(member.exchange, block, area),
                    member.timeline,
                    beside=areas[0] if areas else None,
                )
            )
            return areas[-1]

        self._sums = GrainSums(plan)
        self._staging = NodeStaging(self._sums, make)
        super().__init__(
            member, plan, device, modules, loss_scale, HostPart(self._staging, nullcontext)
        )
        self._grain_buffers = LineGrainBuffers(self._averaging, modules)
        self._nodes: tuple[NodePart, ...] = ()
        self.verification = Verification(plan, self._sums, self._loss_scale)
        self._mean_checks = MeanChecks(self._averaging, plan, self.verification.sums, self._staging)
        self.mean_check: MeanCheck | None = None
        self._earlier = EarlierSums(plan, self.verification.sums, self._staging)
        self._grains: Grains | None = None

    @property
    def moved_buffers(self) -> list[str]:
        """None: a forward that changes a buffer is refused."""
        return []

    def begin_grains(
        self, grains: Grains, *, kept: bool, attests: bool, anew: bool = False
    ) -> None:
        """See `GrainAverager`."""
        self._earlier.begin(anew=anew)
        self._whole = True
        self._grains = grains
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
        self.mean_check = None
        if averaged is not None:
            assert self._grains is not None
            self.mean_check = self._mean_checks.finish(self._grains, averaged.total_weight)
        return averaged

    def apart(
        self, hashes: Sequence[bytes], attested: Sequence[Attestation]
    ) -> tuple[NodeApart, ...]:
        """See `GrainAverager`."""
        assert self._grains is not None
        if self._factor is None:  # Else `p.grad` is no copy of what came.
            self._mean_checks.compare_written(hashes, self._grains.root)
        return (*self._mean_checks.apart, *self._earlier.compare(attested))

    def committed(self, *, overflow: bool = False) -> None:
        """Sets the buffers that came with the mean."""
        self._grain_buffers.committed()
        self._averaging.committed(moves_weights=not overflow)
        self._sums.clear()
        self.verification.end()

    @property
    def _follow(self) -> bool:
        return self._mean_checks.relays or self._grain_buffers.follow

    def _note_averages(self, blocks: Sequence[Floats]) -> None:
        self._mean_checks.begin(blocks)

    def _exchange_buffers(self, weight: float, total_weight: float) -> bool:
        # Sums first: buffers are sent from the memory that the sums were sent from.
        follow = self._grain_buffers.follow
        if self._mean_checks.relays and not self._mean_checks.relay(last=not follow):
            return False
        return not follow or self._grain_buffers.exchange(self._nodes, total_weight)

    def _drop_buffers(self) -> None:
        self._grain_buffers.drop()
        self._mean_checks.drop()  # Of a round that became void behind its averages.

    @property
    def _unscale(self) -> torch.Tensor | None:
        return None if self._loss_scale is None else self._loss_scale.inverse

    def _go_back(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
        self.clock.done()

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
            # Some blocks may have been sent already: no other worker may average them.
            self._tap.disarm()
            self._member.abandon("backward raised")
            raise
        # Not in a `finally`: sums that lack the grain in some blocks must not be kept.
        self._whole = True
        self._grain_buffers.take(*last)

    def _send_what_is_here(self, loss: torch.Tensor | None) -> None:
        # The sums leave first, since the others wait for them. Nothing of a backward is sent.
        for block in range(len(self._plan.parameters)) if self._nodes else ():
            self._staging.stage(block)
            self._send_block(block, None)
        if loss is None:
            self.clock.done()
        else:
            self._go_back(loss)
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


class SoloGrains(TakesGrains, SoloAverager):
    """The same tree for a script that runs alone: its mean has the bits of a line's."""

    def __init__(
        self,
        member: RunMember,
        plan: ModelPlan,
        device: torch.device,
        reader: Reader | None = None,
        loss_scale: LossScale | None = None,
        modules: Sequence[nn.Module] = (),
    ) -> None:
        """Puts hooks on the parameters; see `SoloAverager`."""
        super().__init__(member, plan, device, reader, loss_scale, modules)
        self._sums = GrainSums(plan)
        self._grain_buffers = GrainBuffers(modules)
        self._grains: Grains | None = None
        # Nobody else's grains are verified alone; an audit has its own ones attested.
        self.verification = Verification(plan, self._sums)
        self.mean_check = None

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
        self._grain_buffers.check()
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
        self.clock.done()
        if last is not None and loss is not None:
            self.take_grain(*last)
        self.overflowed = False
        total = sum_in_order(part.weight for part in nodes)
        if self._sums.hashes is not None:
            self._sums.hash_nodes()
        self._put_mean(total)
        # After the check: from here on a gradient that is added is too late, as on a line.
        self.late.averaged(range(len(self._plan.parameters)))
        return Averaged(total, 1, Timings(), computed_at=time.perf_counter())

    def apart(
        self, hashes: Sequence[bytes], attested: Sequence[Attestation]
    ) -> tuple[NodeApart, ...]:
        """None: there is nobody else."""
        return ()

    def committed(self, *, overflow: bool = False) -> None:
        """Sets the statistics that the grains made."""
        self._grain_buffers.committed()
        self._sums.clear()
        self.verification.end()

    @property
    def _unscale(self) -> torch.Tensor | None:
        scale = self._loss_scale
        return scale.inverse if scale is not None and scale.enabled else None

    def _put_mean(self, total: float) -> None:
        assert self._grains is not None
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
                    parameter.grad = gradient_of(parameter, mean, self._factor)
                    there.append((block, index, parameter.grad))
        self._look(there)

    @property
    def _factor(self) -> torch.Tensor | None:
        """The loss scale that gradients have in `p.grad`."""
        scaled = self._loss_scale is not None and self._loss_scale.enabled
        return self._loss_scale.factor if scaled and self._loss_scale is not None else None
