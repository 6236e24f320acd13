"""Carried rows: whether state that a script carries from batch to batch fits the next one.

Theory of operation. A script that trains on long sequences reads them side by side. Row i of a
batch goes on where row i of the batch before ended, and the hidden state has a row for each. A
worker has some rows of every batch, always the same ones while its share stays as it is. Its state
is of no use once it has other rows, even if they are as many; after a step that it had no part in;
and in a step that is tried again, since the first attempt has moved the state on already.
"""

from __future__ import annotations

from dataclasses import dataclass

from andon.protocol.records import PositionRange
from andon.protocol.shards import Ranges
from andon_trainer.data.feed import MicroBatch, Share

__all__ = ["CarriedRows"]


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one loop body."""

    share: Ranges
    """This worker's positions, counted from the batch's first."""
    done: int
    """Number of those that earlier loop bodies of the step had."""
    positions: int
    samples: int


class CarriedRows:
    """Compares the rows of each loop body with those of the one before."""

    def __init__(self, batch_size: int) -> None:
        """There was no loop body yet; the script's batches have `batch_size` rows."""
        self._batch_size = batch_size
        self._last: tuple[int, _Rows | None] = (-1, None)
        """Step and rows of the last loop body."""
        self.changed = True
        """Whether the present loop body's rows do not go on those of the body before."""

    def take(self, step: int, share: Share, done: int, micro_batch: MicroBatch) -> None:
        """The next loop body gets a micro-batch of a share, after `done` positions of it."""
        batch, rows = share.batch, None
        # A batch of another size, as a window of several, has other rows at the same places.
        if batch is not None and len(batch) == self._batch_size:
            first = batch.start
            ranges = (PositionRange(part.start - first, part.stop - first) for part in share.ranges)
            rows = _Rows(tuple(ranges), done, micro_batch.positions, micro_batch.samples)
        before, self._last = self._last, (step, rows)
        self.changed = rows is None or before != (step - 1, rows)

    def take_none(self, step: int) -> None:
        """The next loop body gets borrowed samples, which are no rows of its batch."""
        self._last, self.changed = (step, None), True
