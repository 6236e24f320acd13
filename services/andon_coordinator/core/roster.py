"""The roster: who is on the line, with which weights, and when each was last heard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from andon.protocol.records import Key
from andon_coordinator.core.events import (
    Activity,
    JoinRequest,
    LeaveReason,
    ScalarAllReduceArrived,
    Timings,
)

__all__ = ["Member", "Roster"]


@dataclass(slots=True)
class LastStep:
    """What a member did in the last step that it was part of, for people."""

    samples: int = 0
    seconds: float = 0.0
    timings: Timings = field(default_factory=Timings)


@dataclass(slots=True, eq=False)
class Member:
    """One worker: the process that holds slot `worker`, or held it last.

    `held` is the key whose averages it holds; `head` that of the last record that it has applied
    or is bound to apply, since the record is on its stream.
    """

    worker: int
    request: JoinRequest
    stream: int | None
    head: Key | None
    held: Key | None
    step: int
    heard_at: float
    asked: bool = False
    takes_state: bool = False
    """Whether its script waits for what the line sends: state may replace all that it holds."""
    leaves_epoch: bool = False
    """Whether what it asked for is the end of the present epoch."""
    ring_address: str = ""
    """Where the rank before it reaches it, as it said last."""
    activity: Activity = Activity.UNSPECIFIED
    detail: str = ""
    grace_until: float | None = None
    """Until then it may come back; None if it is here, left, or is lost."""
    left: LeaveReason | None = None
    final_digest: bytes = b""
    final_head: Key | None = None
    last_weights: ScalarAllReduceArrived | None = None
    """What it said of the weights that its loop ended with."""
    broke_attempt: int | None = None
    """The attempt that its broken stream, or its script, voided."""
    slow_since: float | None = None
    """Since when the others wait for it; None if they don't, or nobody looks."""
    raised: str = ""
    """What its script raised."""
    last_step: LastStep = field(default_factory=LastStep)


class Roster:
    """The members by worker id."""

    def __init__(self) -> None:
        """Starts empty."""
        self._members: dict[int, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        """All of them by id, those that are away too."""
        return iter([self._members[worker] for worker in sorted(self._members)])

    def __len__(self) -> int:
        """How many slots were ever taken and not dropped."""
        return len(self._members)

    def get(self, worker: int) -> Member | None:
        """The member with this id."""
        return self._members.get(worker)

    def on_stream(self, stream: int) -> Member | None:
        """The member whose current stream this is."""
        return next((each for each in self._members.values() if each.stream == stream), None)

    def of_incarnation(self, incarnation: int) -> Member | None:
        """The member that is this process."""
        processes = self._members.values()
        return next((each for each in processes if each.request.incarnation == incarnation), None)

    def put(self, member: Member) -> None:
        """Takes a slot."""
        self._members[member.worker] = member

    def remove(self, worker: int) -> None:
        """Frees a slot."""
        del self._members[worker]

    def live(self) -> list[Member]:
        """Those whose stream is open, by id."""
        return [each for each in self if each.stream is not None]

    def in_sync(self, head: Key | None) -> list[Member]:
        """Those live whose head is the line's (rule 3), by id."""
        return [each for each in self.live() if head is not None and each.head == head]

    def behind(self, head: Key | None) -> list[Member]:
        """Those live whose head is not the line's, by id."""
        return [each for each in self.live() if head is not None and each.head != head]

    def in_grace(self) -> list[Member]:
        """Those whose stream broke, and who may come back any moment."""
        return [each for each in self if each.grace_until is not None]
