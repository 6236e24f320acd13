"""What a worker has computed beyond its head, if it makes local steps: two piles of positions.

Theory of operation. A worker that makes local steps moves its weights away from the head's, which
it keeps apart. All that it computed since is one displacement, the local weights minus the head's,
and this module says which positions are in it. They lie in two piles:

    due     what the present round's record will cover. This part is what the worker sends.
    ahead   what it computed while that travels. No record covers it before the next round's.

The commit of a round takes the due pile away, and makes the pile ahead the due one:

    local weights = new head's weights + (displacement - what was sent)

Whatever ends a round otherwise leaves both piles alone. The next assignment at the same head asks
for all of them, and for a lost worker's positions too: those are computed as further local steps,
and added to what is sent. If something is in a pile that is not asked for, or must not count any
more, both piles are dropped and the weights are the head's again: one part of a displacement can't
be told from another.

On a line of fragments a record moves a part of the blocks. In the others the change of its
positions is *left over*: they are in no pile any more, and the local weights are still not the
head's. It goes with the piles.
"""

from __future__ import annotations

from dataclasses import dataclass

from andon.protocol.shards import Ranges, merged, subtract
from andon_trainer.core.events import Assigned

__all__ = ["Computed"]


@dataclass(slots=True)
class Computed:
    """Positions in the epoch of the head's cursor that are computed, and in no record."""

    due: Ranges = ()
    ahead: Ranges = ()
    left_over: bool = False
    """Whether the local weights have changes of blocks that no record has taken up yet."""

    def __bool__(self) -> bool:
        """Whether positions are in the local weights that are in no record."""
        return bool(self.due or self.ahead)

    def missing(self, work: Assigned) -> Ranges:
        """What is to be computed, and added to what is sent, before the round's exchange."""
        return subtract(work.positions, self.due)

    def missing_ahead(self, work: Assigned) -> Ranges:
        """What is to be computed while the round's exchange travels."""
        return subtract(work.ahead, self.ahead)

    def add(self, positions: Ranges) -> None:
        """Positions were computed, and are in what is sent."""
        self.due = merged((*self.due, *positions))

    def add_ahead(self, positions: Ranges) -> None:
        """Positions were computed, and are not in what is sent."""
        self.ahead = merged((*self.ahead, *positions))

    def serves(self, work: Assigned) -> bool:
        """Whether each pile is a part of what `work` asks for, at the head that they belong to."""
        return not (subtract(self.due, work.positions) or subtract(self.ahead, work.ahead))

    def committed(self) -> None:
        """The due pile is in a record, and the pile ahead is what the next one covers."""
        self.due, self.ahead = self.ahead, ()

    def drop(self) -> bool:
        """Forgets both; returns whether there was anything."""
        there = bool(self) or self.left_over
        self.due = self.ahead = ()
        self.left_over = False
        return there
