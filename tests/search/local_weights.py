"""Local weights: which positions' change a worker's own weights have, and its head's have not.

Positions are counted through all epochs. One may be there more than once, which is a defect. The
cores know nothing of this: it is what really happens to weights if a worker does what they say.
"""

from __future__ import annotations

from dataclasses import dataclass

from andon.protocol.halts import HaltEvidence
from andon.protocol.records import Record, RecordKind
from andon_trainer.core.events import Committed, Event, Halted, TransferAsked
from andon_trainer.core.keeping import doubted
from search.weights import Wrong

__all__ = ["LocalWeights"]


@dataclass(slots=True)
class LocalWeights:
    """One worker's."""

    slot: int
    change: tuple[int, ...] = ()
    """Positions whose change is in them."""
    sent: tuple[int, ...] = ()
    """Those of them that are in what the worker sends."""
    left_over: tuple[int, ...] = ()
    """Positions that records cover, but that have changes of blocks that were not exchanged yet."""
    doubtful: bool = False
    """Whether a halt came since, in which these may have been wrong."""
    rejoined: bool = False
    """Whether the worker joined again since it was dealt them."""

    def compute(self, positions: tuple[int, ...], *, ahead: bool) -> None:
        """A few more local steps; what is not ahead is sent."""
        self.change = tuple(sorted((*self.change, *positions)))
        if not ahead:
            self.sent = tuple(sorted((*self.sent, *positions)))
            self.rejoined = False

    def send(self) -> tuple[int, ...]:
        """What is really in the change that is sent."""
        if self.doubtful:
            raise Wrong(f"worker {self.slot} sends {list(self.sent)} again, which is in doubt")
        return self.sent

    def rejoin(self) -> None:
        """The worker joins again: others may have been given what it has."""
        self.rejoined = bool(self.change)

    def halted(self, evidence: HaltEvidence) -> None:
        """The line was halted."""
        self.doubtful = bool(self.change) and doubted(evidence, self.slot)

    def committed(self, record: Record, fragment: int | None) -> None:
        """`new = head_new + (local displacement - sent displacement)`: the rest is sent next."""
        if self.sent:
            self.left_over = () if fragment is None else (*self.left_over, *self.sent)
        if self.left_over and not record.cursor.position:
            raise Wrong(f"worker {self.slot} ends an epoch with {list(self.left_over)} left over")
        self.change = self.sent = without(self.change, self.sent)
        self.rejoined = self.rejoined and bool(self.change)

    def drop(self, why: str, cause: Event | None) -> None:
        """They are the head's again, because of an event, or because of what was assigned."""
        match cause:
            case Halted():
                needed = True
            case TransferAsked():
                # To a learner a worker sends what lies beneath, and goes on.
                needed = not (cause.sends and cause.beside_training)
            case Committed():
                needed = cause.record.kind is RecordKind.MARK
            case _:
                # Nobody else was given what it has, unless it was lost for a time, or the
                # coordinator was.
                needed = self.rejoined
        if not needed:
            raise Wrong(f"worker {self.slot} throws away {list(self.change)}: {why}")
        self.forget()

    def forget(self) -> None:
        """Nothing is in them, or in what is sent."""
        self.change = self.sent = self.left_over = ()
        self.doubtful = self.rejoined = False


def without(positions: tuple[int, ...], taken: tuple[int, ...]) -> tuple[int, ...]:
    """What is left of positions."""
    left = list(positions)
    for each in taken:
        left.remove(each)
    return tuple(left)
