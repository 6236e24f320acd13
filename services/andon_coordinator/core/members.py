"""Members: the workers and the reducers of the line, as the core knows them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from andon.protocol.layout import Layout
from andon.protocol.records import Key
from andon.protocol.reducers import ReducerShare, partition
from andon_coordinator.core.events import (
    Activity,
    JoinRequest,
    LeaveReason,
    ScalarAllReduceArrived,
    StepTimings,
)

__all__ = ["LastStep", "LineMember", "Members", "Reducers"]


@dataclass(slots=True)
class LastStep:
    """What a worker did in the last step that it took part in; shown to people."""

    samples: int = 0
    seconds: float = 0.0
    timings: StepTimings = field(default_factory=StepTimings)
    share: float = 0.0
    """Its part of the step's positions, from 0 to 1."""
    micro_batches: int = 0
    """How many it was told to make of them; 0: it was left to it."""


@dataclass(slots=True, eq=False)
class LineMember:
    """One worker: the process that has slot `worker`, or had it last."""

    worker: int
    request: JoinRequest
    stream: int | None
    """Its current stream; None while it is away."""
    head: Key | None
    """The last record that it has applied, or will apply because we sent it on its stream."""
    held: Key | None
    """The key whose averages it holds."""
    step: int
    heard_at: float
    wants_work: bool = False
    """Whether it asked for work and got none yet."""
    accepts_state: bool = False
    """Whether it waits for the line, so that received state may replace everything it holds."""
    leaves_epoch: bool = False
    """Whether it asked for the end of the current epoch rather than for work."""
    ring_address: str = ""
    """Where its predecessor in the ring reaches it, as it reported last."""
    activity: Activity = Activity.UNSPECIFIED
    detail: str = ""
    grace_until: float | None = None
    """Until when it may come back without being lost; None: it is connected, left or lost."""
    left: LeaveReason | None = None
    final_digest: bytes = b""
    final_head: Key | None = None
    final_base_hashed: bool = False
    last_weights: ScalarAllReduceArrived | None = None
    """Its report of the weights that its loop ended with."""
    voided_attempt: int | None = None
    """The attempt that ended because its stream broke or its script raised."""
    slow_since: float | None = None
    """Since when the others wait for it; None: they don't, or there is no straggler time-out."""
    raised: str = ""
    """The exception that its script raised."""
    last_step: LastStep = field(default_factory=LastStep)


class Members:
    """The workers by id. A worker that went away keeps its entry until its slot is reused."""

    def __init__(self) -> None:
        """Starts empty."""
        self._members: dict[int, LineMember] = {}

    def __iter__(self) -> Iterator[LineMember]:
        """All workers by id, including those that are away."""
        return iter([self._members[worker] for worker in sorted(self._members)])

    def __len__(self) -> int:
        """How many slots were ever taken, less those whose worker was dropped."""
        return len(self._members)

    def get(self, worker: int) -> LineMember | None:
        """The member with this id."""
        return self._members.get(worker)

    def on_stream(self, stream: int) -> LineMember | None:
        """The member whose current stream this is."""
        return next((each for each in self._members.values() if each.stream == stream), None)

    def of_incarnation(self, incarnation: int) -> LineMember | None:
        """The member that is this process."""
        processes = self._members.values()
        return next((each for each in processes if each.request.incarnation == incarnation), None)

    def put(self, member: LineMember) -> None:
        """Puts a member into its slot."""
        self._members[member.worker] = member

    def remove(self, worker: int) -> None:
        """Frees a slot."""
        del self._members[worker]

    def live(self) -> list[LineMember]:
        """Members with an open stream, by id."""
        return [each for each in self if each.stream is not None]

    # In sync means an equal head, never an equal step number: two histories can have the same
    # length (rule 3).

    def in_sync(self, head: Key | None) -> list[LineMember]:
        """Live members whose head is the line's, by id."""
        return [each for each in self.live() if head is not None and each.head == head]

    def behind(self, head: Key | None) -> list[LineMember]:
        """Live members whose head is not the line's, by id."""
        return [each for each in self.live() if head is not None and each.head != head]

    def in_grace(self) -> list[LineMember]:
        """Members whose stream broke and that may still come back without being lost."""
        return [each for each in self if each.grace_until is not None]


@dataclass(slots=True, kw_only=True)
class Reducers:
    """The reducers that are here, and how the model is partitioned among them."""

    own: bool = True
    """Whether the coordinator's own process is a reducer too; that one is always here."""
    _by_stream: dict[int, str] = field(default_factory=dict)
    _map: tuple[ReducerShare, ...] | None = None

    def __len__(self) -> int:
        """How many are here."""
        return len(self._by_stream) + self.own

    @property
    def addresses(self) -> tuple[str, ...]:
        """Their addresses; the coordinator's own reducer comes first, with an empty address."""
        others = sorted(self._by_stream.values())
        return ("", *others) if self.own else tuple(others)

    def stream_of(self, address: str) -> int | None:
        """The stream of the reducer that registered this address."""
        return next((each for each, at in self._by_stream.items() if at == address), None)

    def add(self, stream: int, address: str) -> None:
        """Adds a reducer that registered."""
        self._by_stream[stream] = address
        self._map = None

    def remove(self, stream: int) -> str | None:
        """Removes a reducer; returns its address, or None if it was removed before."""
        self._map = None
        return self._by_stream.pop(stream, None)

    def map_of(self, layout: Layout | None, chunk_elements: int) -> tuple[ReducerShare, ...]:
        """Which reducer averages which part of the model; empty before the model is known."""
        if layout is None:
            return ()
        if self._map is None:
            self._map = partition(layout, chunk_elements, self.addresses)
        return self._map
