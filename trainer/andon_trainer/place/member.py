"""A worker's membership as a step sees it: where it stands, its rounds, and what it tells.

On a line `Membership` does this over gRPC; alone `SoloMember` does it in this process. In a host
`LeaderMember` does it for all processes, and `FollowerMember` hears it from there.
"""

from __future__ import annotations

from typing import Protocol

from andon_trainer.core.events import Assigned, Committed
from andon_trainer.core.reports import Digest, StepReport
from andon_trainer.place.position import Position
from andon_trainer.place.talk import Talk
from andon_trainer.timeline import Timeline

__all__ = ["RunMember", "WorkerMember"]


class RunMember(Protocol):
    """A process's place in a run. Used by one thread."""

    @property
    def position(self) -> Position:
        """Where this worker stands now."""

    @property
    def talk(self) -> Talk:
        """What this worker tells the others beside its steps."""

    @property
    def timeline(self) -> Timeline | None:
        """Where what this worker does is recorded; None: nowhere."""

    def next_round(self) -> Assigned:
        """Asks for work and waits for it."""

    def catch_up(self) -> None:
        """Gets the line's state between two epochs, if the line has gone on without this worker."""

    def leave_epoch(self) -> None:
        """Ends the current epoch on all workers: the script left its batches."""

    def report(self, report: StepReport) -> None:
        """Reports that all averages of the round are here."""

    def abandon(self, message: str) -> None:
        """Gives the current round up: all workers try the step again."""

    def hold(self) -> bool:
        """Notes that all exchanges of the round are done; False if the round is void."""

    def await_commit(self) -> Committed | None:
        """Waits for the round's record; None if the round is void."""

    def scalar_all_reduce(self, value: float, weight: float) -> tuple[float, float, int]:
        """The weighted mean over the roster, the total weight, and the number of contributors."""

    def compare(self, digest: Digest) -> None:
        """Compares the weights that the loop ended with against all other workers'."""


class WorkerMember(RunMember, Protocol):
    """The place of the process that acts for its whole worker: it is alone in it, or leads it."""

    def stop_line(self, kind: str, message: str) -> bool:
        """Halts the line between two steps; returns once an operator has answered.

        False: the run is over, and nobody will answer.
        """

    def all_gather(self, data: bytes) -> tuple[bytes, ...]:
        """What each worker of the roster gives, in the same order on all of them."""
