"""Averaging in a host: its processes add up their gradients, and the leader exchanges the sum.

Theory of operation. Before a step's last backward the processes agree on the host's weight W (see
`steps`). Each scales its gradient to its part of W, so that the sum over the host is the host's
mean, and blocks are summed while backward runs. The leader sends each sum as a worker sends its
gradient, with weight W. What comes back, the mean over all hosts, goes to the others' `p.grad`.

The leader tells the others twice in a step: whether the round was begun, since they add up blocks
only if it was, and what came of it. Whatever else goes wrong in between, in any process, closes the
group: the others may wait in a sum that this process will never take part in.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from andon_trainer.averaging.averager import IntactGradient, TrainedModels
from andon_trainer.averaging.averaging import Averaged
from andon_trainer.averaging.broadcast import NormBuffers
from andon_trainer.averaging.compute_clock import make_clock
from andon_trainer.averaging.copied_buffers import script_buffers
from andon_trainer.averaging.held_buffers import Held
from andon_trainer.averaging.line_averaging import HostPart, LineAverager, staged_with
from andon_trainer.averaging.readings import HostReader, LossReadings
from andon_trainer.averaging.tap import GradientTap, dense_gradient
from andon_trainer.core.events import TransferAsked
from andon_trainer.hosts.calls import BACKWARD, RefusedLoss, failing_together, meet, told_by_leader
from andon_trainer.hosts.group import HostGroup
from andon_trainer.hosts.sums import HostSums
from andon_trainer.model.guards import LateGradients
from andon_trainer.place.member import RunMember
from andon_trainer.place.membership import Membership

__all__ = [
    "Agreed",
    "FollowerAverager",
    "LeaderAverager",
    "OfHost",
    "Outcome",
    "Passing",
    "closing_if_raising",
    "first_refused",
]


@dataclass(frozen=True, slots=True)
class Agreed:
    """What the processes of a host agreed on before a step's last backward."""

    takes_part: bool
    """Whether this process's weight is above 0."""
    sends_again: bool
    """Whether the host sends what it kept, and nobody's gradient is needed."""
    samples_of_others: int
    """What the other processes computed in this attempt."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a round ended."""

    averaged: Averaged | None
    """None: the round is void."""
    intact: bool
    """Whether the leader has the host's gradient, to send it again."""
    missing: tuple[tuple[int, ...], ...] = ()
    """For each block, the parameters that no worker has a gradient for."""


_BEGUN = "begun"


class Passing:
    """Brings the leader's tensors to the others: the mean, and buffers."""

    def __init__(self, group: HostGroup, models: TrainedModels) -> None:
        """`models` are those of this process."""
        self._group = group
        self._plan = models.plan
        self.statistics = NormBuffers(models.modules)
        self.buffers = script_buffers(models.modules)

    def outcome(self, averaged: Averaged | None, *, intact: bool) -> None:
        """Tells the others how the leader's round ended, and gives them its mean.

        Args:
            averaged: None: the round is void.
            intact: whether the leader has the host's gradient, to send it again.
        """
        missing = () if averaged is None else self._missing()
        self._group.tell(Outcome(averaged, intact, missing))
        if averaged is not None:
            self.mean(missing)

    def mean(self, missing: tuple[tuple[int, ...], ...]) -> None:
        """Makes every process's `p.grad` the leader's, bit for bit."""
        for parameters, absent in zip(self._plan.parameters, missing, strict=True):
            present = [part for index, part in enumerate(parameters) if index not in absent]
            for index in absent:
                parameters[index].grad = None
            targets = [dense_gradient(part) for part in present]
            # By dtype: no rounding on the way.
            for dtype in dict.fromkeys(target.dtype for target in targets):
                self._pass([each for each in targets if each.dtype == dtype])

    def pass_statistics(self) -> None:
        """Makes every process's running statistics the leader's."""
        flat = self.statistics.read()
        for values in flat.values():
            self._group.broadcast(values)
        if self._group.rank:
            self.statistics.write(flat)

    def pass_buffers(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Makes these buffers of every process the leader's, and returns them."""
        values = {name: self.buffers.blank(name).clone() for name in names}
        for each in values.values():
            self._group.broadcast(each)
        if self._group.rank:
            self.buffers.write(values)
        return values

    def _missing(self) -> tuple[tuple[int, ...], ...]:
        """For each block the parameters that have no gradient."""
        return tuple(
            tuple(index for index, part in enumerate(parameters) if part.grad is None)
            for parameters in self._plan.parameters
        )

    def _pass(self, tensors: list[torch.Tensor]) -> None:
        with torch.no_grad():
            flat = torch.cat([each.reshape(-1).to(tensors[0].device) for each in tensors])
            self._group.broadcast(flat)
            if self._group.rank:
                pieces = torch.split(flat, [each.numel() for each in tensors])
                for target, piece in zip(tensors, pieces, strict=True):
                    target.copy_(piece.view(target.shape))


class OfHost:
    """What each process of a host averages with; whichever has a bad loss halts the line."""

    _group: HostGroup

    def refuse_loss(self, value: float) -> None:
        """Has this process's loss reported, and waits for the halt that follows."""
        self.halt(first_refused(meet(self._group, BACKWARD, RefusedLoss(value))))

    @abstractmethod
    def halt(self, value: float) -> None:
        """Reports a loss of this host, or has it reported, and waits for the halt that follows."""


class LeaderAverager(OfHost):
    """Averages over the line, for its host."""

    def __init__(self, group: HostGroup, member: Membership, models: TrainedModels) -> None:
        """Puts hooks on the parameters; see `LineAverager`."""
        self._group = group
        self._passing = Passing(group, models)
        self._sums = HostSums(
            group, models.plan, models.device, lambda block: member.exchange.lend(block)
        )
        host = HostPart(self._sums, self._sending)
        self._line = LineAverager(member, models, host)
        self.late, self.clock, self.losses = self._line.late, self._line.clock, self._line.losses
        self.begin, self.put_away = self._line.begin, self._line.put_away
        self.recall, self.close = self._line.recall, self._line.close
        self.intact: IntactGradient | None = None
        """The host's gradient, if it is kept, as the others were told."""

    @property
    def overflowed(self) -> bool:
        """Whether the host's sum overflowed."""
        return self._line.overflowed

    def agreed(self, on: Agreed) -> None:
        """Notes what the step's last backward is for."""
        self._sums.takes_part = on.takes_part
        self.clock.others = on.samples_of_others

    def halt(self, value: float) -> None:
        """Reports a loss of this host, and waits for the halt that follows."""
        with failing_together(self._group):
            self._line.refuse_loss(value)
        self._tell(None)

    def run(self, loss: torch.Tensor, weight: float, scale: float | None) -> Averaged | None:
        """Runs backward, sends the host's sums, and gives the mean to all processes."""
        return self._pass_on(lambda: self._line.run(loss, weight, scale))

    def resend(self, loss: torch.Tensor, weight: float) -> Averaged | None:
        """Sends the host's kept gradient again, and gives the mean to all processes."""
        return self._pass_on(lambda: self._line.resend(loss, weight))

    def committed(self, *, overflow: bool = False) -> None:
        """Sets the buffers that came with the mean, in all processes."""
        names = self._line.moved_buffers if self._passing.buffers else []
        self._line.committed(overflow=overflow)
        self._passing.pass_statistics()
        if self._passing.buffers:
            self._group.tell(names)
            self._passing.pass_buffers(names)

    @contextmanager
    def _sending(self) -> Iterator[None]:
        """Around the sending of a round that was begun: the others add up their blocks."""
        self._group.tell(_BEGUN)
        with closing_if_raising(self._group):
            yield

    def _pass_on(self, average: Callable[[], Averaged | None]) -> Averaged | None:
        with failing_together(self._group):
            averaged = average()
        self._tell(averaged)
        return averaged

    def _tell(self, averaged: Averaged | None) -> None:
        kept = self._line.intact is not None
        self.intact = self if kept else None
        self._passing.outcome(averaged, intact=kept)


class FollowerAverager(OfHost):
    """Adds this process's gradients to its host's, and takes over the mean."""

    def __init__(self, group: HostGroup, member: RunMember, models: TrainedModels) -> None:
        """Puts hooks on the parameters; `models` as the leader has them."""
        self._member = member
        self._loss_scale = models.loss_scale
        self.overflowed = False
        """Never: the leader finds it in the sum, and the commit says it."""
        self._group = group
        self._blocks = models.blocks
        self._passing = Passing(group, models)
        self._sums = HostSums(group, models.plan, models.device)
        self.late = LateGradients(models.plan, watch=False)
        self.clock = make_clock(models.device)
        self.losses = LossReadings(HostReader())
        self._tap = GradientTap(models.plan, models.device, self._sums, self.late, in_order=True)
        self._held = [Held(self._passing.statistics), Held(self._passing.buffers)]
        self._line: dict[str, torch.Tensor] = {}
        """The line's buffers, as the last commit or the line's state set them."""
        self._installed: TransferAsked | None = None
        """The transfer that brought that state."""
        self._sends_again = False
        self.intact: IntactGradient | None = None
        """Not None: the leader has the host's gradient."""

    def begin(self, *, kept: bool) -> None:
        """Notes the buffers that the step begins with."""
        installed = self._member.position.installed_from
        if not self._line or installed is not self._installed:
            self._installed, self._line = installed, self._passing.buffers.read()
        statistics, buffers = self._held
        if kept:
            statistics.add()
            buffers.add()
        else:
            statistics.begin()
            buffers.begin(self._line)  # What this process's script wrote since then does not count.

    def put_away(self) -> None:
        """Sets the buffers back to the line's."""
        for each in self._held:
            each.put_away()

    def agreed(self, on: Agreed) -> None:
        """Notes what the step's last backward is for."""
        self._sums.takes_part = on.takes_part
        self._sends_again = on.sends_again

    def halt(self, value: float) -> None:
        """Waits for the halt that the leader waits for."""
        told_by_leader(self._group)

    def run(
        self,
        loss: torch.Tensor,
        weight: float,
        scale: float | None,
    ) -> Averaged | None:
        """Runs backward for a host of weight `weight`, adds up, and takes over the mean."""
        self.clock.pause()
        self.intact = None
        told = told_by_leader(self._group)
        if isinstance(told, Outcome):
            return self._take(told)  # Void before it began.
        self.clock.resume()
        with closing_if_raising(self._group):
            self._compute(loss, scale, sums=weight > 0 and not self._sends_again)
        outcome = told_by_leader(self._group)
        assert isinstance(outcome, Outcome)
        return self._take(outcome)

    def resend(self, loss: torch.Tensor, weight: float) -> Averaged | None:
        """There is nothing new in this process: its part is in what the leader kept."""
        return self.run(loss, weight, None)

    def recall(self, weight: float) -> None:
        """Does nothing: the leader recalls the host's gradient."""

    def committed(self, *, overflow: bool = False) -> None:
        """Takes over the leader's buffers; residuals are the leader's."""
        for each in self._held:
            each.put_away()  # What forward changed here, and not there.
            each.close()
        self._passing.pass_statistics()
        if self._passing.buffers:
            came = self._passing.pass_buffers(self._group.hear())
            self._line = {**self._line, **came}

    def close(self) -> None:
        """Removes the hooks from the parameters; a second call does nothing."""
        self._tap.close()
        self.late.close()

    def _compute(self, loss: torch.Tensor, scale: float | None, *, sums: bool) -> None:
        self._go_backward(loss, scale, sums=sums)
        for each in self._held:
            each.keep()

    def _go_backward(self, loss: torch.Tensor, scale: float | None, *, sums: bool) -> None:
        if not sums:
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
            self.clock.done()
            return
        self._tap.arm(lambda _block, _flat: None, staged_with(self._loss_scale, scale), loss)
        try:
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
            self.clock.done()
            self._tap.finish()
        except BaseException:
            self._tap.disarm()
            raise

    def _take(self, outcome: Outcome) -> Averaged | None:
        self.intact = self if outcome.intact else None
        if outcome.averaged is not None:
            self._passing.mean(outcome.missing)
            self.late.averaged(self._blocks)
        return outcome.averaged


def first_refused(called: Sequence[Any]) -> float:
    """The loss of the first process whose loss is not finite."""
    return next(each.given.value for each in called if isinstance(each.given, RefusedLoss))


@contextmanager
def closing_if_raising(group: HostGroup) -> Iterator[None]:
    """Ends the group if this process fails where the others may wait for its gradients."""
    try:
        yield
    except BaseException:
        group.close()
        raise
