"""Running statistics on a line: rank 0's for all workers, or the mean of all workers'.

Theory of operation. Each worker's forward moves its own running means and variances by its own
samples. After each commit they must be the same on all workers. There are two ways.

*Rank 0's* follow the gradients as a broadcast (decision 21). The state that a step began with plays
no part.

*The mean* is that of each worker's change, weighted as the gradients are: all workers begin a step
with the same values, and set them to `start - mean(start - now)` when it is committed. The protocol
has no exchange of its own for it. The changes, as float32, are laid one after another into the
layout's blocks, filled up with zeros, and travel as a gradient does, in several exchanges if all
blocks together have too little room. Under int8, int4, int2 and topk they travel as float32: a
layer that changes little beside the others would be rounded to no change at all, in each step.
Integers, such as the number of batches, can't be averaged: they are rank 0's, by a broadcast that
follows.

On local steps with overlap, forward has moved the statistics for the window ahead when they are
exchanged. What is sent is the change until the window's end. The commit sets the line's values, and
what forward did ahead is added to them, so that it can be dropped.

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
from andon_trainer.averaging.averaging import Averaging
from andon_trainer.averaging.block_numbers import BlockNumbers, rooms_for
from andon_trainer.averaging.broadcast import NormBuffers, RunningStatistics
from andon_trainer.averaging.held_buffers import Held
from andon_trainer.core.calls import Call, Floats
from andon_trainer.core.events import TransferAsked
from andon_trainer.core.values import bad_value_of

__all__ = ["MeanStatistics", "RankZeroStatistics", "StepStatistics"]

log = logging.getLogger(__name__)

_NAME = "running statistics"


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

    def exchange(self, weight: float) -> bool:
        """Makes the round's last exchanges; False if the round is void."""

    def apply(self) -> None:
        """The step is committed: sets what came. A void step must not move them."""

    def drop(self) -> None:
        """Forgets what came: the round is void, or a new one begins."""


class RankZeroStatistics(Held):
    """All workers take over rank 0's. Used by one thread."""

    def __init__(self, averaging: Averaging, modules: Sequence[nn.Module]) -> None:
        """Finds the layers of `modules`."""
        super().__init__(NormBuffers(modules))
        self._averaging = averaging
        self._statistics = RunningStatistics(modules)

    @property
    def follow(self) -> bool:
        """See `StepStatistics`."""
        return bool(self._statistics) and not self._averaging.alone

    def exchange(self, weight: float) -> bool:
        """See `StepStatistics`."""
        return self._statistics.exchange(self._averaging)

    def apply(self) -> None:
        """See `StepStatistics`."""
        self._statistics.load_arrived()
        self.close()

    def drop(self) -> None:
        """See `StepStatistics`."""
        self._statistics.drop()


class MeanStatistics:
    """All workers take over the mean of all workers'. Used by one thread."""

    def __init__(self, averaging: Averaging, modules: Sequence[nn.Module]) -> None:
        """Finds the layers of `modules`."""
        self._averaging = averaging
        self._member = averaging.member
        self._numbers = BlockNumbers(averaging)
        self._buffers = NormBuffers(modules)
        self._integers = RunningStatistics(modules, integers=True)
        self._start: dict[str, torch.Tensor] | None = None
        """The line's values, which are the same bits on all workers."""
        self._kept: dict[str, torch.Tensor] | None = None
        self._ended: dict[str, torch.Tensor] | None = None
        """What a window's end made of them, once forward may go on ahead of it."""
        self._ahead: dict[str, torch.Tensor] = {}
        """What forward added to them since then, as of the commit."""
        self._installed: TransferAsked | None = None
        """The transfer that brought the state which `_start` was read from."""
        self._open = False
        """Whether a step was begun that is neither committed nor put away."""
        self._mean: Floats | None = None
        self._warned = False

    @property
    def follow(self) -> bool:
        """See `StepStatistics`."""
        return bool(self._buffers) and not self._averaging.alone

    def begin(self) -> None:
        """A step or a window begins: the line's values are the ones that its change starts from.

        They are those of the last commit, and not the present ones. So if a worker's forward moved
        its own between two steps, that goes into the next mean, and the workers do not drift apart.
        """
        installed = self._member.position.installed_from
        if self._start is None or installed is not self._installed:
            self._installed, self._start = installed, self._buffers.read()
        self._kept, self._ended, self._open = None, None, True

    def begin_ahead(self) -> None:
        """The window that was computed ahead begins: the models hold the line's values.

        What forward did ahead is added to these.
        """
        # In this order: `begin` may read what the models hold as the line's values.
        ahead = self._ahead
        self.begin()
        now = self._buffers.read()
        self._buffers.write({name: now[name] + moved for name, moved in ahead.items()})

    def end_window(self) -> None:
        """The window's steps are made: what forward does now belongs to the next."""
        self._ended = self._buffers.read()

    def attend(self) -> None:
        """A round of others: what forward did here stays, on top of what it makes of them."""
        self._ended = self._start

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

    def exchange(self, weight: float) -> bool:
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
            # In these exchanges alone: the gradients have the weight that they were sent with.
            weight = 0.0
        mean, more = np.empty_like(change), bool(self._integers)
        sizes = self._numbers.sizes
        # The same on all workers. One that abstains makes these exchanges, too.
        rooms = list(rooms_for(sizes, change.size))
        ends = accumulate((sum(sizes[room.start : room.stop]) for room in rooms), initial=0)
        for number, (room, start) in enumerate(zip(rooms, ends, strict=False)):
            call = Call(name=_NAME, blocks=room, exact=self._exact)
            last = not more and number == len(rooms) - 1
            parts = change[start:], mean[start:]
            if not self._numbers.share(call, weight, *parts, last=last):
                return False
        if more and not self._integers.exchange(self._averaging, self._made()):
            return False
        # Only now that all parts are here: a void round must leave none.
        self._mean = mean
        return True

    def apply(self) -> None:
        """Sets the mean, and rank 0's integers; if none came, this worker is the whole line."""
        mean, self._mean = self._mean, None
        # Before anything is written: what forward did ahead is the difference of the two.
        now, made = self._buffers.read(), self._made()
        self._ahead = {name: now[name] - values for name, values in made.items()}
        if self._ended is not None:
            self._buffers.write(made)
        if mean is not None:
            assert self._start is not None
            at, after = 0, {}
            assigned = self._member.position.assigned
            if assigned is not None and assigned.change_scale != 1.0:
                mean *= np.float32(assigned.change_scale)  # As the weights' mean change.
            for name, start in _floats(self._start).items():
                wide = torch.promote_types(start.dtype, torch.float32)
                part = torch.from_numpy(mean[at : at + start.numel()]).to(start.device, wide)
                after[name] = (start.to(wide) - part).to(start.dtype)
                at += start.numel()
            self._buffers.write(after)
            # The mean is rounded: it may be greater than a variance that became almost 0.
            self._buffers.keep_variances_positive()
            self._integers.load_arrived()
        # Last: the models hold the line's values now, and nothing of this worker's own.
        self._start, self._kept, self._ended = self._buffers.read(), None, None
        self._open = False

    def _made(self) -> dict[str, torch.Tensor]:
        """What the step, or the window, made of them."""
        return self._buffers.read() if self._ended is None else self._ended

    @property
    def _exact(self) -> bool:
        """Whether the changes travel as float32, though gradients do not."""
        return self._member.policy.encoding.loses_much

    def drop(self) -> None:
        """See `StepStatistics`."""
        self._mean = None
        self._integers.drop()

    def _change(self) -> Floats:
        """What this worker's forward did to the floats, float32, all one after another."""
        if self._start is None:
            self.begin()
        assert self._start is not None
        now, start = _floats(self._made()), _floats(self._start)
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
