"""Averaging by grains in a host: its processes add up their grains, and the leader contributes.

Theory of operation. Each process takes its own grains, as a worker does (`TakesGrains`). Once all
know the step's weights (see `grain_steps`), they go backward for the last time, and the others hand
their sums over to the leader (`handing`). It has the host's maximal nodes then, and contributes
them like any worker. If the round is void they stay with it, also if it was void before anything
was sent: so the others begin each attempt with nothing, and compute what is dealt to them anew.

The leader's word about a failure is expected in the meeting in which sums are handed over, or, once
they are, instead of the outcome. In between a process that fails closes the group.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from andon.protocol.grains import Grains
from andon_trainer.averaging.averager import TrainedModels
from andon_trainer.averaging.averaging import Averaged
from andon_trainer.averaging.compute_clock import make_clock
from andon_trainer.averaging.grain_averaging import LineGrains, TakesGrains
from andon_trainer.averaging.grain_buffers import GrainBuffers
from andon_trainer.averaging.grain_sums import GrainSums
from andon_trainer.averaging.readings import HostReader, LossReadings
from andon_trainer.averaging.verification import Verification
from andon_trainer.core.calls import NodePart
from andon_trainer.errors import HostLost
from andon_trainer.hosts.averaging import (
    Agreed,
    OfHost,
    Outcome,
    Passing,
    closing_if_raising,
)
from andon_trainer.hosts.calls import (
    Failure,
    failing_together,
    told_by_leader,
)
from andon_trainer.hosts.group import HostGroup
from andon_trainer.hosts.handing import HandOver
from andon_trainer.model.guards import LateGradients
from andon_trainer.place.membership import Membership

__all__ = ["FollowerGrains", "LeaderGrains"]


class LeaderGrains(OfHost, LineGrains):
    """Averages over the line, for its host; see `LineGrains`."""

    def __init__(self, group: HostGroup, member: Membership, models: TrainedModels) -> None:
        """Puts hooks on the parameters."""
        super().__init__(member, models)
        self._group = group
        self._passing = Passing(group, models)
        self._hand_over = HandOver(group, models.plan, self.verification.sums, self._grain_buffers)
        self._handed_over = False
        """Whether all sums of this attempt are here."""
        self._told_intact = False

    @property
    def intact(self) -> bool:
        """Whether the host's sums are kept, as the others were told."""
        return self._told_intact

    def agreed(self, on: Agreed) -> None:
        """Notes what the others computed."""
        self.clock.others = on.samples_of_others

    def halt(self, value: float) -> None:
        """Reports a loss of this host, and waits for the halt that follows."""
        with failing_together(self._group):
            LineGrains.refuse_loss(self, value)
        self._tell(None)

    def finish(
        self, nodes: tuple[NodePart, ...], loss: torch.Tensor | None, last: tuple[int, float] | None
    ) -> Averaged | None:
        """See `GrainAverager`; `nodes` are the host's, and the mean goes to all its processes."""
        self._handed_over = False
        try:
            averaged = super().finish(nodes, loss, last)
        except HostLost:
            raise
        except BaseException as error:
            failure = Failure.of(error)
            # The error is raised in any case. That the others are gone too would say less.
            with suppress(HostLost):
                if self._handed_over:
                    self._group.tell(failure)
                else:
                    self._group.meet(failure)
            raise
        self._tell(averaged)
        return averaged

    def committed(self, *, overflow: bool = False) -> None:
        """Sets the statistics that came with the mean, in all processes."""
        super().committed(overflow=overflow)
        self._passing.pass_statistics()

    def _tell(self, averaged: Averaged | None) -> None:
        self._told_intact = super().intact
        self._passing.outcome(averaged, intact=self._told_intact)

    def _send_sums(self, loss: torch.Tensor | None, last: tuple[int, float] | None) -> None:
        self._add_up(loss, last, sends=bool(self._nodes))

    def _keep_unsent(self, loss: torch.Tensor | None, last: tuple[int, float] | None) -> None:
        self.clock.resume()
        self._add_up(loss, last, sends=False)

    def _add_up(
        self, loss: torch.Tensor | None, last: tuple[int, float] | None, *, sends: bool
    ) -> None:
        """Makes the host's sums, and sends each block as soon as it is whole."""
        self._go_back(loss)
        if last is not None:
            self.take_grain(*last)
        elif loss is not None:
            self._tap.clear()
        # Of a failure of the leader's the others hear in this meeting: they close nothing for it.
        brought = self._hand_over.meet()
        with closing_if_raising(self._group):
            for block in self._hand_over.receive(brought):
                if sends:
                    self._staging.stage(block)
                    self._send_block(block, None)
        self._handed_over = True

    def _go_back(self, loss: torch.Tensor | None) -> None:
        try:
            super()._go_back(loss)
        except BaseException:
            self._member.abandon("backward raised")
            raise


class FollowerGrains(OfHost, TakesGrains):
    """Adds up this process's grains, hands them over, and takes over the mean."""

    checks = None
    """The leader compares what it has of the line's results."""

    def __init__(self, group: HostGroup, models: TrainedModels) -> None:
        """Puts hooks on the parameters; `models` as the leader has them."""
        plan, self._blocks = models.plan, models.blocks
        self._group = group
        self._loss_scale = models.loss_scale
        self._sums = GrainSums(plan)
        self._grain_buffers = GrainBuffers(models.modules)
        self._passing = Passing(group, models)
        self.late = LateGradients(plan, watch=True)
        self.clock = make_clock(models.device)
        self.losses = LossReadings(HostReader())
        self.verification = Verification(plan, self._sums, self._loss_scale)
        self._hand_over = HandOver(group, plan, self.verification.sums, self._grain_buffers)
        self.overflowed = False
        """Never: the leader finds it in the sums, and the commit says it."""
        self.intact = False
        """Whether the leader keeps the host's sums."""

    def agreed(self, on: Agreed) -> None:
        """Does nothing: the leader reports."""

    def halt(self, value: float) -> None:
        """Waits for the halt that the leader waits for."""
        told_by_leader(self._group)

    def begin_grains(
        self, grains: Grains, *, kept: bool, attests: bool, anew: bool = False
    ) -> None:
        """See `GrainAverager`; what was kept is the leader's."""
        self.intact = False
        self._begin_sums(grains, kept=kept, attests=attests)

    def finish(
        self, nodes: tuple[NodePart, ...], loss: torch.Tensor | None, last: tuple[int, float] | None
    ) -> Averaged | None:
        """See `GrainAverager`; the leader exchanges the host's `nodes`."""
        with closing_if_raising(self._group):
            self._take_last(loss, last)
        self._hand_over.meet()
        with closing_if_raising(self._group):
            self._hand_over.send()
        outcome = told_by_leader(self._group)
        assert isinstance(outcome, Outcome)
        self.intact = outcome.intact
        if outcome.averaged is not None:
            self._passing.mean(outcome.missing)
            # From here on a gradient that is added is too late.
            self.late.averaged(self._blocks)
        return outcome.averaged

    def committed(self, *, overflow: bool = False) -> None:
        """Takes over the leader's statistics."""
        self.put_away()
        self._passing.pass_statistics()
        self._drop_sums()

    def close(self) -> None:
        """Removes the hooks from the parameters; a second call does nothing."""
        self.late.close()
