"""Running statistics on a line: rank 0's for all workers, or the mean of all workers'.

Theory of operation. Each worker's forward moves its own running means and variances by its own
samples. After each commit they must be the same on all workers. There are two ways.

*Rank 0's* follow the gradients as a broadcast, exchange 1 of the round (decision 21). The state
that a step began with plays no part.

*The mean* is that of each worker's change, weighted as the gradients are: all workers begin a step
with the same values, and set them to `start - mean(start - now)` when it is committed. The protocol
has no exchange of its own for it. The changes, as float32, are laid one after another into the
layout's blocks, filled up with zeros, and travel as a gradient does: exchange 1, and more if all
blocks together have too little room. Under int8 and int4 they travel as float32: a layer that
changes little beside the others of its strip would be rounded to no change at all, in each step.
Integers, such as the number of batches, can't be averaged: they are rank 0's, by a broadcast that
follows.

A step that is void leaves no trace. What a worker's forward made of its statistics is put away with
its gradient while the worker waits, so that a newcomer gets the line's values, and is taken out
again if the gradient is sent again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import nn

from andon.protocol.encoding import Encoding
from andon_trainer.averaging.block_numbers import BlockNumbers, rooms_for
from andon_trainer.averaging.broadcast import NormBuffers, RunningStatistics
from andon_trainer.averaging.held_buffers import Held
from andon_trainer.core.calls import Call, Floats
from andon_trainer.core.events import TransferAsked
from andon_trainer.core.values import bad_value_of
from andon_trainer.model.layout import ModelPlan
from andon_trainer.place.membership import Membership

__all__ = [
    "FIRST",
    "MeanStatistics",
    "RankZeroStatistics",
    "StepStatistics",
    "broadcast",
    "is_alone",
]

log = logging.getLogger(__name__)

_NAME = "running statistics"
FIRST = 1  # The gradients are exchange number 0 of the round, unless the script gathers in it.


class StepStatistics(Protocol):
    """What `LineAverager` needs of running statistics, one step after another."""

    @property
    def follow(self) -> bool:
        """Whether the present round has an exchange of them."""

    def begin(self) -> None:
        """A step's first attempt begins, or one of which nothing is kept."""

    def keep(self) -> None:
        """The last backward is over: what forward made of them belongs to its gradient."""

    def add(self) -> None:
        """An attempt begins that sends the kept gradient again, or adds samples to it."""

    def take_out(self) -> None:
        """The kept gradient is sent again, and with it what `keep` kept."""

    def put_away(self) -> None:
        """The worker waits between two attempts: the models get the line's values."""

    def exchange(self, weight: float, first: int = FIRST) -> bool:
        """Makes the round's last exchanges, from number `first` on; False if the round is void."""

    def apply(self) -> None:
        """The step is committed: sets what came. A void step must not move them."""

    def drop(self) -> None:
        """Forgets what came: the round is void, or a new one begins."""


class RankZeroStatistics:
    """All workers take over rank 0's."""

    def __init__(self, member: Membership, modules: Sequence[nn.Module]) -> None:
        """Finds the layers of `modules`."""
        self._member = member
        self._statistics = RunningStatistics(modules)
        self._held = Held(NormBuffers(modules))

    @property
    def follow(self) -> bool:
        """See `StepStatistics`."""
        return bool(self._statistics) and not is_alone(self._member)

    def begin(self) -> None:
        """See `StepStatistics`."""
        self._held.begin()

    def keep(self) -> None:
        """See `StepStatistics`."""
        self._held.keep()

    def add(self) -> None:
        """See `StepStatistics`."""
        self._held.add()

    def take_out(self) -> None:
        """See `StepStatistics`."""
        self._held.take_out()

    def put_away(self) -> None:
        """See `StepStatistics`."""
        self._held.put_away()

    def exchange(self, weight: float, first: int = FIRST) -> bool:
        """See `StepStatistics`."""
        return _broadcast(self._member, self._statistics, first)

    def apply(self) -> None:
        """See `StepStatistics`."""
        self._statistics.load_arrived()
        self._held.close()

    def drop(self) -> None:
        """See `StepStatistics`."""
        self._statistics.drop()


class MeanStatistics:
    """All workers take over the mean of all workers'. Used by one thread."""

    def __init__(self, member: Membership, plan: ModelPlan, modules: Sequence[nn.Module]) -> None:
        """Finds the layers of `modules`; `plan` has the blocks that the changes travel in."""
        self._member = member
        self._numbers = BlockNumbers(member, [block.elements for block in plan.layout.blocks])
        self._buffers = NormBuffers(modules)
        self._integers = RunningStatistics(modules, integers=True)
        self._start: dict[str, torch.Tensor] | None = None
        """The line's values, which are the same bits on all workers."""
        self._kept: dict[str, torch.Tensor] | None = None
        self._installed: TransferAsked | None = None
        """The transfer that brought the state which `_start` was read from."""
        self._open = False
        """Whether a step was begun that is neither committed nor put away."""
        self._mean: Floats | None = None
        self._warned = False

    @property
    def follow(self) -> bool:
        """See `StepStatistics`."""
        return bool(self._buffers) and not is_alone(self._member)

    def begin(self) -> None:
        """A step or a window begins: the line's values are the ones that its change starts from.

        They are those of the last commit, and not the present ones. So if a worker's forward moved
        its own between two steps, that goes into the next mean, and the workers do not drift apart.
        """
        installed = self._member.installed_from
        if self._start is None or installed is not self._installed:
            self._installed, self._start = installed, self._buffers.read()
        self._kept, self._open = None, True

    def keep(self) -> None:
        """See `StepStatistics`."""
        self._kept = self._buffers.read()

    def add(self) -> None:
        """Goes on from what was kept: all samples count in the mean."""
        self.take_out()

    def take_out(self) -> None:
        """See `StepStatistics`."""
        self._open = True
        if self._kept is not None:
            self._buffers.write(self._kept)

    def put_away(self) -> None:
        """See `StepStatistics`."""
        if self._open and self._start is not None:
            self._buffers.write(self._start)
        self._open = False

    def exchange(self, weight: float, first: int = FIRST) -> bool:
        """Sends this worker's change, weighted; with weight 0 it only receives.

        Returns:
            False if the round is void.
        """
        # What came in a round whose commit was not awaited (a halt that the script caught) must not
        # be what this one sets, though nothing may come in it.
        self.drop()
        if not self.follow:
            return self._member.hold()
        change = self._change()
        if weight and not self._may_be_sent(change):
            weight = 0.0
        mean, more = np.empty_like(change), bool(self._integers)
        sizes = self._numbers.sizes
        rooms = list(rooms_for(sizes, change.size))
        ends = accumulate((sum(sizes[room.start : room.stop]) for room in rooms), initial=0)
        for number, (room, start) in enumerate(zip(rooms, ends, strict=False)):
            call = Call(name=_NAME, sequence=first + number, blocks=room, exact=self._exact)
            last = not more and number == len(rooms) - 1
            parts = change[start:], mean[start:]
            if not self._numbers.share(call, weight, *parts, last=last):
                return False
        if more and not _broadcast(self._member, self._integers, first + len(rooms)):
            return False
        self._mean = mean
        return True

    def apply(self) -> None:
        """Sets the mean, and rank 0's integers; if none came, this worker is the whole line."""
        mean, self._mean = self._mean, None
        if mean is not None:
            assert self._start is not None
            at, after = 0, {}
            for name, start in _floats(self._start).items():
                wide = torch.promote_types(start.dtype, torch.float32)
                part = torch.from_numpy(mean[at : at + start.numel()]).to(start.device, wide)
                after[name] = (start.to(wide) - part).to(start.dtype)
                at += start.numel()
            self._buffers.write(after)
            # The mean is rounded: it may be greater than a variance that became almost 0.
            self._buffers.keep_variances_positive()
            self._integers.load_arrived()
        self._start, self._kept, self._open = self._buffers.read(), None, False

    @property
    def _exact(self) -> bool:
        """Whether the changes travel as float32, though gradients do not."""
        return self._member.policy.encoding.strips is not None

    def drop(self) -> None:
        """See `StepStatistics`."""
        self._mean = None
        self._integers.drop()

    def _change(self) -> Floats:
        """What this worker's forward did to the floats, float32, all one after another."""
        if self._start is None:
            self.begin()
        assert self._start is not None
        now, start = _floats(self._buffers.read()), _floats(self._start)
        parts = [
            (start[name].to(wide) - values.to(wide)).float()
            for name, values in now.items()
            for wide in (torch.promote_types(values.dtype, torch.float32),)
        ]
        change: Floats = torch.cat([part.cpu() for part in parts]).numpy()
        return change

    def _may_be_sent(self, change: Floats) -> bool:
        """Whether all of it is finite, and fits into the line's encoding.

        If it is not, the statistics are no reason to stop the line: this worker takes the others'.
        """
        encoding = Encoding.FLOAT32 if self._exact else self._member.policy.encoding
        bad = bad_value_of(change, encoding)
        if bad is None:
            return True
        assert self._start is not None
        if not all(bool(torch.isfinite(each).all()) for each in _floats(self._start).values()):
            self._start = None  # As they were loaded. The next step begins with what is there then.
        if not self._warned:
            self._warned = True
            log.warning(
                "the running statistics in %s changed by %s in one step, which can't be averaged: "
                "this worker takes the other workers' statistics instead",
                self._buffers.name_at(bad.element),
                bad.value,
            )
        return False


def _floats(flat: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: values for name, values in flat.items() if values.dtype.is_floating_point}


def is_alone(member: Membership) -> bool:
    """Whether there is no other worker in the present round."""
    return member.assigned is None or member.assigned.world_size == 1


def broadcast(member: Membership, call: Call, *, last: bool = True) -> bool:
    """Brings rank 0's bytes to all workers; False if the round is void."""
    assert member.assigned is not None
    source = member.assigned.rank == 0
    if not member.begin(float(source), call):
        return False
    if source:
        member.exchange.submit_data()
    else:
        member.exchange.abstain()
    return member.await_averages(last=last) is not None


def _broadcast(member: Membership, statistics: RunningStatistics, sequence: int) -> bool:
    """Brings rank 0's statistics to all workers; False if the round is void."""
    assert member.assigned is not None
    source = member.assigned.rank == 0
    return broadcast(member, statistics.call(source=source, sequence=sequence))
