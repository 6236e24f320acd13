"""Copied buffers: after each commit all workers hold rank 0's, as under DistributedDataParallel.

Theory of operation. Running statistics have exchanges of their own (`running_statistics`). Of the
other buffers most never change: masks, positions, frequencies. So rank 0 first says which of its
own have changed, in a broadcast of one byte for each. Then these follow in another one, if there
are any. Workers load them when the step is committed. What changed on a worker, and not on rank 0,
becomes what it was.

Changed means: since the last commit. So what a script writes between two steps, or between backward
and the commit, is found in the next exchange. Rank 0 loads nothing, so it loses none of that. Where
the workers may hold other values at a commit (in the first round, after another roster, in a round
that is tried again), rank 0 sends all.

On local steps with overlap, forward has moved buffers for the window ahead when they are exchanged.
What is sent is what they were at the window's end. If what is ahead is dropped, they become what
was committed.

Workers of an earlier version know nothing of these exchanges. The coordinator says in each
assignment whether all of the roster do (`Assigned.copies_buffers`). If not, each worker keeps its
own, and says so in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from andon_trainer.averaging.averaging import Averaging
from andon_trainer.averaging.broadcast import HEAD_BYTES, NormBuffers, pack, unpack
from andon_trainer.averaging.held_buffers import Held, PlainBuffers
from andon_trainer.averaging.running_statistics import MeanStatistics, StepStatistics
from andon_trainer.core.calls import Bytes, Call
from andon_trainer.core.events import Assigned, TransferAsked

__all__ = ["CopiedBuffers", "StepBuffers", "WindowBuffers", "script_buffers"]

log = logging.getLogger(__name__)

_NAME = "buffers"


def script_buffers(modules: Sequence[nn.Module]) -> PlainBuffers:
    """The buffers that are no running statistics."""
    return PlainBuffers(modules, lambda module: not isinstance(module, _NormBase))


@dataclass(frozen=True, slots=True)
class _Arrived:
    """What rank 0 sent in a round."""

    assigned: Assigned
    names: list[str]
    data: Bytes | None
    """None if there are no names."""


class CopiedBuffers:
    """The buffers of some modules that are no running statistics. Used by one thread."""

    def __init__(self, averaging: Averaging, modules: Sequence[nn.Module]) -> None:
        """Finds them."""
        self._averaging = averaging
        self._member = averaging.member
        self._buffers = script_buffers(modules)
        self.held = Held(self._buffers)
        self._line: dict[str, torch.Tensor] = {}
        """The line's values: what the last commit set, or what came with the line's state."""
        self._installed: TransferAsked | None = None
        """The transfer that brought that state."""
        self._roster: tuple[int, ...] = ()
        """The roster of the last commit, if all of it took over rank 0's."""
        self._arrived: _Arrived | None = None
        self._changed: list[str] = []
        """What this worker has changed, if there was an exchange."""
        self._told: set[str] = set()
        self._warned = False

    @property
    def follow(self) -> bool:
        """Whether the present round has an exchange of them."""
        assigned = self._member.position.assigned
        if not self._buffers or self._averaging.alone:
            return False
        return assigned is not None and assigned.copies_buffers

    def begin(self, *, ahead: bool = False) -> None:
        """An attempt begins, of which nothing is kept; `ahead`: a part of it is made already."""
        self._buffers.watch()
        self.held.begin(self._line if ahead else None)
        installed = self._member.position.installed_from
        if not self._line or installed is not self._installed:
            # What `held.begin` has noted just now. No roster: rank 0 sends all in the next round.
            self._installed, self._line, self._roster = installed, self.held.start, ()

    def add(self) -> None:
        """An attempt begins that sends the kept gradient again, or adds samples to it."""
        self._buffers.watch()
        self.held.add()

    def keep(self) -> None:
        """The last backward is over: what forward made of them belongs to its gradient.

        Raises:
            RuntimeError: forward has changed a buffer that is too large to be copied.
        """
        self._buffers.check()
        self.held.keep()

    def exchange(self, *, last: bool) -> bool:
        """Asks rank 0 what it has changed, and for that; False if the round is void.

        `last`: no other exchange of the round follows.
        """
        self._buffers.check()
        if not self.follow:
            return True
        assigned, names, now = self._member.position.assigned, self._buffers.names, self._now()
        assert assigned is not None
        self._changed = self._buffers.changed(self._line, now)
        self._changed += now.keys() - self._line.keys()
        source = assigned.rank == 0
        # Only then do all ranks hold what rank 0 compares with. In any other round it sends all
        # that it has (docs/protocol-data.md, section 18).
        alike = assigned.roster == self._roster and not assigned.attempt
        sent = self._changed if alike else now
        flags = torch.tensor([name in sent for name in names], dtype=torch.uint8)
        head = f"{_NAME}\n{self._buffers.outline}"
        data = pack(head, {"changed": flags}, filled=source)
        if not self._broadcast(data, last=False):
            return False
        # Rank 0's flags on all ranks: all of them make the next exchange, or none does.
        unpack(data, {"changed": flags})
        moved = [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]
        self._arrived = _Arrived(assigned, moved, None)
        # No exchange follows whose averages would complete the round.
        if not moved:
            return not last or self._member.hold()
        self._tell(self._changed if source else moved, aloud=source)
        tensors = {name: now.get(name, self._buffers.blank(name)) for name in moved}
        data = pack(head, tensors, filled=source)
        if not self._broadcast(data, last=last):
            return False
        self._arrived = _Arrived(assigned, moved, data)
        return True

    def apply(self) -> None:
        """The step is committed: sets what came, and puts back what rank 0 did not change."""
        arrived, self._arrived = self._arrived, None
        if arrived is None:
            if not (self._warned or self._averaging.alone):
                self._warn()
            self._line, self._roster = self.held.kept or self._buffers.read(), ()
        else:
            came: dict[str, torch.Tensor] = {}
            if arrived.data is not None:
                came = {name: torch.empty_like(self._buffers.blank(name)) for name in arrived.names}
                unpack(arrived.data, came)
            self._line, self._roster = {**self._line, **came}, arrived.assigned.roster
            # Rank 0 loads nothing: what its script has written since the exchange stays.
            if arrived.assigned.rank:
                names = self._line.keys() & {*came, *self._changed}
                self._buffers.write({name: self._line[name] for name in names})
        # Last: what it keeps is read above.
        self.held.close()

    @property
    def moved(self) -> list[str]:
        """The names of those that the step's commit changes, as long as it is not applied."""
        if self._arrived is None:  # There was no exchange: this worker's own.
            return self._buffers.changed(self._line, self._now())
        return self._arrived.names

    def _now(self) -> Mapping[str, torch.Tensor]:
        """What the step makes of them."""
        return self.held.kept or self._buffers.present()

    def drop(self) -> None:
        """Forgets what came: the round is void, or a new one begins."""
        self._arrived = None

    def _broadcast(self, data: Bytes, *, last: bool) -> bool:
        call = Call(name=_NAME, data=data, head_bytes=HEAD_BYTES)
        return self._averaging.broadcast(call, last=last)

    def _tell(self, moved: list[str], *, aloud: bool) -> None:
        """Says once what is copied; one worker of the line does, `aloud`."""
        new = [name for name in moved if name not in self._told]
        self._told.update(new)
        if new and aloud:
            log.warning(
                "a step changes the buffer %s%s: after each step all workers take over rank 0's, "
                "as under DistributedDataParallel; see docs/guide/models.md",
                new[0],
                f" and {len(new) - 1} others" if len(new) > 1 else "",
            )

    def _warn(self) -> None:
        changed = self._buffers.changed(self._line, self._now())
        if changed:
            self._warned = True
            log.warning(
                "a step changes the buffer %s, and each worker keeps its own: the coordinator, or "
                "another worker, is of a version that does not copy buffers. Update it",
                changed[0],
            )


class StepBuffers:
    """All buffers of a worker's models: running statistics, and those that are copied."""

    def __init__(
        self, averaging: Averaging, statistics: StepStatistics, modules: Sequence[nn.Module]
    ) -> None:
        """Finds the others beside `statistics`."""
        self._member = averaging.member
        self.statistics = statistics
        self.copied = CopiedBuffers(averaging, modules)

    @property
    def follow(self) -> bool:
        """Whether the present round has exchanges of buffers."""
        return self.statistics.follow or self.copied.follow

    def begin(self) -> None:
        """A step's first attempt begins, or one of which nothing is kept."""
        self.statistics.begin()
        self.copied.begin()

    def add(self) -> None:
        """An attempt begins that sends the kept gradient again, or adds samples to it."""
        self.statistics.add()
        self.copied.add()

    def keep(self) -> None:
        """The last backward is over: what forward made of them belongs to its gradient."""
        self.statistics.keep()
        self.copied.keep()

    def take_out(self) -> None:
        """The kept gradient is sent again, and with it what `keep` kept."""
        self.statistics.take_out()
        self.copied.held.take_out()

    def put_away(self) -> None:
        """The worker waits between two attempts: the models get the line's values."""
        self.statistics.put_away()
        self.copied.held.put_away()

    def exchange(self, weight: float) -> bool:
        """Makes the round's last exchanges; False if the round is void."""
        # What came in another round, which was not committed, must not be what this one sets,
        # though nothing may come in it.
        self.drop()
        follow, more = self.copied.follow, self.statistics.follow
        # In this order: workers pair exchanges by their numbers, and the protocol puts these in
        # front of those of running statistics.
        if not self.copied.exchange(last=not more):
            return False
        if more:
            return self.statistics.exchange(weight)
        return follow or self._member.hold()

    def apply(self) -> None:
        """The step is committed: sets what came. A void step must not move them."""
        self.statistics.apply()
        self.copied.apply()

    def drop(self) -> None:
        """Forgets what came: the round is void, or a new one begins."""
        self.statistics.drop()
        self.copied.drop()


class WindowBuffers(StepBuffers):
    """Those of a worker that makes local steps, perhaps some ahead of the exchange."""

    statistics: MeanStatistics

    def __init__(self, averaging: Averaging, modules: Sequence[nn.Module]) -> None:
        """Finds them. Each worker has moved its statistics by samples of its own: their mean."""
        super().__init__(averaging, MeanStatistics(averaging, modules), modules)
        self._lent = [Held(NormBuffers(modules)), Held(script_buffers(modules))]

    def begin_ahead(self) -> None:
        """A window begins that was computed ahead in part; the models hold the line's values."""
        self.copied.begin(ahead=True)
        self.statistics.begin_ahead()

    def end_window(self) -> None:
        """The window's steps are made: what forward makes of buffers now belongs to the next."""
        self.statistics.end_window()
        self.copied.held.note()

    def attend(self) -> None:
        """The present round is one that this worker only attends: its own steps belong to none."""
        self.statistics.attend()

    def borrow(self) -> None:
        """A forward of borrowed samples follows, which `give_back` ends: it moves no buffer."""
        for each in self._lent:
            each.begin()

    def give_back(self) -> None:
        """See `borrow`."""
        for each in self._lent:
            each.put_away()

    def go_back(self) -> None:
        """What was computed does not count, and the weights are what they were."""
        self.drop()
        self.copied.held.put_away()
