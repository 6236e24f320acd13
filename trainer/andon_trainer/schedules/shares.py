"""Shares: which positions this process computes of a round, and of the rounds to come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from andon.protocol.grains import Grains
from andon.protocol.records import Cursor, PositionRange
from andon.protocol.shards import Ranges, cursor_after, deal, divide, merged, next_batch
from andon_trainer.core.events import Assigned
from andon_trainer.data.feed import Feeder, Share
from andon_trainer.schedules.processes import Processes

__all__ = ["Shares"]


class Shares:
    """Makes shares of positions that the line assigned."""

    def __init__(
        self, feeder: Feeder, processes: Processes, *, in_parts: bool, grain: int = 0
    ) -> None:
        """Makes none yet.

        Args:
            feeder: where samples come from.
            processes: those of this worker.
            in_parts: whether shares are divided into parts even if the line does not say so.
            grain: positions of a grain; 0: the line has none.
        """
        self._grain = grain
        self._feeder = feeder
        self._processes = processes
        self._in_parts = in_parts

    def of(self, assigned: Assigned, epoch: int, positions: Ranges, batch: PositionRange) -> Share:
        """A share that was assigned at a first attempt, in as many parts as the line wants."""
        if self._grain or not (assigned.micro_batches or self._in_parts):
            return Share(epoch, positions, batch=batch, grain=self._grain)
        samples = sum(map(len, positions))
        part = -(-self._feeder.batch_size // assigned.world_size)
        parts = -(-samples // part)
        if positions == assigned.positions:  # Of shares to come the line has not said it yet.
            parts = max(parts, min(assigned.micro_batches, samples))
        return Share(epoch, positions, parts=max(1, parts), batch=batch)

    def split(self, share: Share, first: int) -> tuple[Share, Share]:
        """The first parts of a share, and the others, which are computed later."""
        parts = list(divide(share.ranges, share.parts))

        def of(some: list[Ranges]) -> Share:
            return replace(share, ranges=merged(chain(*some)), parts=max(1, len(some)))

        return of(parts[:first]), of(parts[first:])

    def filled(self, share: Share) -> list[Ranges]:
        """The parts of a share that hold samples: of a batch sampler's positions not all do."""
        parts = divide(share.ranges, share.parts) if len(share) else iter(())
        return [part for part in parts if part and self._feeder.samples_of(share.epoch, part)]

    def samples_of(self, assigned: Assigned) -> int:
        """How many samples the worker's share holds."""
        # Of a later epoch a batch may have more samples than positions.
        positions = sum(map(len, assigned.positions))
        return min(self._feeder.samples_of(assigned.epoch, assigned.positions), positions)

    def plan_steps(self, epoch: int, window: PositionRange, made: int, left: int) -> range | None:
        """Which steps of one process a worker's next local step of a window stands for.

        One process would make a step of each whole batch. A window's are spread evenly over the
        local steps that this worker makes of it.

        Args:
            epoch: the window's.
            window: what all workers compute of it.
            made: how many local steps this worker has made of it.
            left: how many it has still to make; at least 1.

        Returns:
            None if nobody knows how many batches the epochs before had, or if this is the worker's
            only local step of several batches: it can't be told then whether a script steps its
            scheduler at each local step, or at each window.
        """
        size, steps = self._feeder.epoch_size, made + left
        if size is None:
            return None

        def batches(positions: int) -> int:
            return -(-positions // self._feeder.batch_size)

        begin = epoch * batches(size) + batches(window.start)
        whole = batches(window.stop) - batches(window.start)
        if steps == 1 < whole:
            return None
        return range(begin + whole * made // steps, begin + whole * (made + 1) // steps)

    def upcoming(self, assigned: Assigned) -> Iterator[Share]:
        """This process's shares of the steps to come.

        They are a guess: roster, window and split may change before they are assigned. A worker
        that only attends has none.
        """
        if assigned.attends:
            return
        size, window = self._feeder.epoch_size, assigned.window or self._feeder.batch_size
        last = assigned.ahead_batch or assigned.batch
        cursor = cursor_after(Cursor(assigned.epoch, last.start), last, size)
        while True:
            batch = next_batch(cursor, window, size)
            share = self.of(assigned, cursor.epoch, self._dealt(assigned, batch), batch)
            yield self._processes.part_of(share, assigned.epoch)
            cursor = cursor_after(cursor, batch, size)

    def _dealt(self, assigned: Assigned, batch: PositionRange) -> Ranges:
        """What this worker would get of a batch at its first attempt."""
        if not self._grain:
            return deal(batch, assigned.split, assigned.world_size)[assigned.rank]
        grains = Grains(batch, self._grain)
        dealt = grains.deal([()] * assigned.world_size, assigned.split)
        return grains.ranges(dealt[assigned.rank])
