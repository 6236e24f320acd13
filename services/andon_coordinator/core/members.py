"""Members: the workers of the line, as the core knows them.

Theory of operation. After every event the rules ask who is live, in sync, waits for work, has been
silent. If the answer took a look at each member, an event would cost as much as the roster is long,
and a step the square of that. So `Members` keeps indices. A rule sets an attribute of a member and
knows nothing of them: the member itself tells its `Members` (`LineMember.__setattr__`), so no rule
can forget to. Every index is a function of the members, and holds nothing that a scan of them would
not give.

Methods that return a list take as long as the list is: they are for what concerns everybody, once a
step. What is asked after every event has a method that counts.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from andon.protocol.arithmetic import Arithmetic
from andon.protocol.records import Key
from andon_coordinator.core.events import (
    Activity,
    JoinRequest,
    LeaveReason,
    ProcessUse,
    ScalarAllReduceArrived,
    StepTimings,
)
from andon_coordinator.core.learner import Learning
from andon_coordinator.core.quorum import Pace
from andon_coordinator.core.readings import PacedProcess
from andon_coordinator.core.suspicion import ProcessAnswers

__all__ = ["LastStep", "LineMember", "Members", "devices_of"]

_WORKS = (Activity.LOADING, Activity.COMPUTING, Activity.BUSY, Activity.EVALUATING)


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

    home: Members | None = field(default=None, init=False, repr=False)
    """The members that it is one of; they keep indices of it."""
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
    use: ProcessUse = field(default_factory=ProcessUse)
    grace_until: float | None = None
    """Until when it may come back without being lost; None: it is connected, left or lost."""
    expected_until: float | None = None
    """Until when its process may still come back after its loss, as far as anybody knows; None: it
    is connected, left, or knows that the run is over."""
    knows_the_end: bool = False
    """Whether it was told that the run is over, and that it need not come back."""
    left: LeaveReason | None = None
    final_digest: bytes = b""
    final_head: Key | None = None
    final_base_hashed: bool = False
    last_weights: ScalarAllReduceArrived | None = None
    """Its report of the weights that its loop ended with."""
    voided_attempt: int | None = None
    """The attempt that ended because its stream broke or its script raised."""
    notice: str = ""
    """Why its machine is about to go, by its own notice; empty if it gave none."""
    slow_since: float | None = None
    """Since when the others wait for it; None: they don't, or there is no straggler time-out."""
    raised: str = ""
    """The exception that its script raised."""
    learning: Learning | None = None
    """How far it has come, if it learns; None: it takes part, or waits for a transfer."""
    gave_up: Learning | None = None
    """How far it had come when it ended its stream though it learnt."""
    spare: bool = False
    """Whether it is a spare that has not taken a place: it takes part in nothing."""
    weights_from: int | None = None
    """The worker that it got its weights from, until a third one has compared them."""
    unproven: bool = False
    """Whether it has learnt its weights, and nobody has compared them yet."""
    doubted: Key | None = None
    """The head at which its weights differed from the others': there, it has no state that counts.
    """
    left_out: int = 0
    """Out of how many consecutive records it was left while it computed."""
    pace: Pace = field(default_factory=Pace)
    """How fast it computes its shares, on a line with a quorum."""
    last_step: LastStep = field(default_factory=LastStep)
    answers: ProcessAnswers = field(default_factory=ProcessAnswers)
    """How fast it answers when it is asked whether it is there."""
    process: PacedProcess = field(init=False)
    """Who it is, as far as its speed is concerned."""

    def __post_init__(self) -> None:
        """Derives what never changes."""
        self.process = _process_of(self.worker, self.request)

    @property
    def arithmetic(self) -> Arithmetic:
        """What decides the bits of its results; an empty one equals nobody's."""
        return self.request.arithmetic

    @property
    def works(self) -> bool:
        """Whether it says that its script has something to do yet."""
        return self.activity in _WORKS

    @property
    def exchanges(self) -> bool:
        """Whether it says that its own part of the step is computed."""
        return self.activity is Activity.EXCHANGING or self.activity is Activity.COMMITTING

    @property
    def reported_weights(self) -> bool:
        """Whether it has reported the digest of the weights that it has now, as its last ones."""
        return self.last_weights is not None and self.last_weights.digest_head == self.head

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute, and keeps the indices right."""
        home = self.home if name in _INDEXED else None
        if home is None:
            object.__setattr__(self, name, value)
        elif name == "heard_at":
            earlier = value < self.heard_at
            object.__setattr__(self, name, value)
            if earlier:
                home.note_heard(self)
        elif getattr(self, name) != value:
            # Out of the indices under the old value, and in under the new one.
            home.leave_indices(self)
            object.__setattr__(self, name, value)
            home.enter_indices(self)


@dataclass(slots=True)
class _AtHead:
    """The live members at one head, by id."""

    all: set[int] = field(default_factory=set)
    idle: set[int] = field(default_factory=set)
    """Those that have not asked for work."""
    unreported: set[int] = field(default_factory=set)
    """Those of `idle` that have not reported the digest of these weights as their last."""
    accepting: set[int] = field(default_factory=set)
    """Those that wait for the line, so that they may receive state."""


_NOBODY = _AtHead()


class _Earliest:
    """A time for each worker that usually moves later; finds the due ones without a look at all.

    The heap has an entry for each worker that is not later than its time. So a time that moves
    later needs no work until its entry comes up.
    """

    __slots__ = ("_entries", "_noted")

    def __init__(self) -> None:
        self._entries: list[tuple[float, int]] = []
        self._noted: dict[int, float] = {}

    def note(self, worker: int, at: float) -> None:
        """Notes that a worker's time may be as early as `at`."""
        if at < self._noted.get(worker, math.inf):
            self._noted[worker] = at
            heapq.heappush(self._entries, (at, worker))

    def due(
        self, is_due: Callable[[float], bool], time_of: Callable[[int], float | None]
    ) -> list[int]:
        """The workers whose time is due, by id.

        Args:
            is_due: whether a time is due; if it is, so are all earlier ones.
            time_of: a worker's time; None: it has none any more.
        """
        if not self._entries or not is_due(self._entries[0][0]):
            return []  # As after nearly every event.
        found: list[tuple[int, float]] = []
        while self._entries and is_due(self._entries[0][0]):
            entry, worker = heapq.heappop(self._entries)
            if self._noted.get(worker) != entry:
                continue  # It was replaced by an earlier one.
            del self._noted[worker]
            at = time_of(worker)
            if at is not None and is_due(at):
                found.append((worker, at))
            elif at is not None:
                self.note(worker, at)
        for worker, at in found:
            self.note(worker, at)  # It stays due until its member changes.
        return sorted(worker for worker, _ in found)


class Members:
    """The workers by id. A worker that went away keeps its entry until its slot is reused."""

    def __init__(self) -> None:
        """Starts empty."""
        self._members: dict[int, LineMember] = {}
        self._live: set[int] = set()
        self._learning: set[int] = set()
        self._spare: set[int] = set()
        self._graced: set[int] = set()
        self._by_stream: dict[int, int] = {}
        self._by_process: dict[int, int] = {}
        self._by_head: dict[Key | None, _AtHead] = {}
        self._accepting: set[int] = set()
        self._exchanging: set[int] = set()
        self._silence = _Earliest()
        self._graces = _Earliest()
        self._none_free_below = 0
        """All slots below this are taken."""

    def __iter__(self) -> Iterator[LineMember]:
        """All workers by id, including those that are away."""
        return iter(self._of(self._members))

    def __len__(self) -> int:
        """How many slots were ever taken, less those whose worker was dropped."""
        return len(self._members)

    def get(self, worker: int) -> LineMember | None:
        """The member with this id."""
        return self._members.get(worker)

    def on_stream(self, stream: int) -> LineMember | None:
        """The member whose current stream this is."""
        worker = self._by_stream.get(stream)
        return None if worker is None else self._members[worker]

    def of_incarnation(self, incarnation: int) -> LineMember | None:
        """The member that is this process."""
        worker = self._by_process.get(incarnation)
        return None if worker is None else self._members[worker]

    def first_free(self, slots: int) -> int | None:
        """The lowest of so many slots that nobody has; None if all are taken."""
        # `remove` and `enter_indices` lower it when a slot becomes free.
        while self._is_taken(self._none_free_below):
            self._none_free_below += 1
        return self._none_free_below if self._none_free_below < slots else None

    def put(self, member: LineMember) -> None:
        """Puts a member into its slot."""
        if member.worker in self._members:
            self.remove(member.worker)
        self._members[member.worker] = member
        self._by_process[member.request.incarnation] = member.worker
        # From here on the member tells of its own changes. `enter_indices` takes it as it is now.
        member.home = self
        self.enter_indices(member)

    def remove(self, worker: int) -> None:
        """Frees a slot."""
        member = self._members[worker]
        self.leave_indices(member)
        member.home = None
        del self._members[worker]
        if self._by_process.get(member.request.incarnation) == worker:
            del self._by_process[member.request.incarnation]
        self._none_free_below = min(self._none_free_below, worker)

    # ---------------------------------------------------------------------------- everybody

    def live(self) -> list[LineMember]:
        """Members with an open stream, by id."""
        return self._of(self._live)

    def live_after(self, worker: int, slots: int) -> LineMember | None:
        """The live member whose id comes next among so many slots; after the last the first."""
        for further in range(1, slots):
            other = (worker + further) % slots
            if other in self._live:
                return self._members[other]
        return None

    # In sync means an equal head, never an equal step number: two histories can have the same
    # length (rule 3).

    def in_sync(self, head: Key | None) -> list[LineMember]:
        """Live members whose head is the line's, by id."""
        return self._of(self._at(head).all)

    def behind(self, head: Key | None) -> list[LineMember]:
        """Live members whose head is not the line's, by id."""
        if head is None:
            return []
        return self._of(self._live - self._at(head).all - self._learning - self._spare)

    def behind_accepting(self, head: Key | None) -> list[LineMember]:
        """Live members whose head is not the line's, and that may receive state, by id."""
        if not self._accepting:
            return []
        return [] if head is None else self._of(self._accepting - self._at(head).accepting)

    def learners(self) -> list[LineMember]:
        """Live members that learn, by id. They are neither in sync nor behind."""
        return self._of(self._learning) if self._learning else []

    def late(self) -> list[LineMember]:
        """Those of them that are late: they compute, and have the line's state."""
        if not self._learning:
            return []
        return [each for each in self.learners() if each.learning and each.learning.late]

    def spares(self) -> list[LineMember]:
        """Live spares without a place, by id; learners and those that wait to learn."""
        return self._of(self._spare) if self._spare else []

    def workers(self) -> list[LineMember]:
        """Live members that are no spares, by id."""
        return self._of(self._live - self._spare)

    def following(self) -> list[LineMember]:
        """Those of them that are told of every round and record, by id."""
        if not self._learning:
            return []
        return [each for each in self.learners() if each.learning and each.learning.follows]

    def in_grace(self) -> list[LineMember]:
        """Members whose stream broke and that may still come back without being lost."""
        return self._of(self._graced)

    # ----------------------------------------------------------------- asked after every event

    @property
    def live_count(self) -> int:
        """How many have an open stream."""
        return len(self._live)

    @property
    def worker_count(self) -> int:
        """How many of them are no spares."""
        return len(self._live) - len(self._spare)

    @property
    def grace_count(self) -> int:
        """How many may still come back."""
        return len(self._graced)

    @property
    def any_in_grace(self) -> bool:
        """Whether one may still come back."""
        return bool(self._graced)

    def in_sync_count(self, head: Key | None) -> int:
        """How many are in sync."""
        found = None if head is None else self._by_head.get(head)
        return 0 if found is None else len(found.all)

    def idle_count(self, head: Key | None) -> int:
        """How many are in sync and have not asked for work."""
        return len(self._at(head).idle)

    def unreported_count(self, head: Key | None) -> int:
        """How many are in sync, have not asked for work, and have not reported their last weights.

        A report of other weights than the head's does not count.
        """
        return len(self._at(head).unreported)

    def any_behind_accepting(self, head: Key | None) -> bool:
        """Whether a member that is behind may receive state."""
        return head is not None and len(self._accepting) > len(self._at(head).accepting)

    @property
    def any_exchanging(self) -> bool:
        """Whether a live member says that its own part of the step is computed."""
        return bool(self._exchanging)

    def silent(self, is_silence: Callable[[float], bool]) -> list[LineMember]:
        """Live members that were heard of so long ago that it is silence, by id."""

        def heard_at(worker: int) -> float | None:
            return self._members[worker].heard_at if worker in self._live else None

        silent = self._silence.due(is_silence, heard_at)
        return self._of(silent) if silent else []

    def grace_over(self, now: float) -> list[LineMember]:
        """Members whose grace is over, by id."""

        if not self._graced:
            return []

        def until(worker: int) -> float | None:
            return self._members[worker].grace_until if worker in self._graced else None

        return self._of(self._graces.due(lambda at: at <= now, until))

    # ------------------------------------------------------------------------------ indices

    def enter_indices(self, member: LineMember) -> None:
        """Takes a member into every index that it belongs to."""
        worker = member.worker
        if member.grace_until is not None:
            self._graced.add(worker)
            self._graces.note(worker, member.grace_until)
        if member.stream is not None:
            self._live.add(worker)
            self._by_stream[member.stream] = worker
            self._silence.note(worker, member.heard_at)
            if member.spare:
                self._spare.add(worker)
            if member.learning is not None:
                # Neither this one nor a spare is in an index of its head: nobody waits for it, and
                # nobody sends it state as to one behind, whatever its head is.
                self._learning.add(worker)
            if member.learning is None and not member.spare:
                self._enter_head(member)
        elif member.grace_until is None:
            self._none_free_below = min(self._none_free_below, worker)

    def _enter_head(self, member: LineMember) -> None:
        """Takes a live member that neither learns nor is a spare into the indices of its head."""
        worker = member.worker
        if member.exchanges:
            self._exchanging.add(worker)
        at_head = self._by_head.get(member.head)
        if at_head is None:
            at_head = self._by_head[member.head] = _AtHead()
        at_head.all.add(worker)
        if not member.wants_work:
            at_head.idle.add(worker)
            if not member.reported_weights:
                at_head.unreported.add(worker)
        if member.accepts_state:
            at_head.accepting.add(worker)
            self._accepting.add(worker)

    def leave_indices(self, member: LineMember) -> None:
        """Takes a member out of every index, before it changes."""
        worker = member.worker
        self._graced.discard(worker)
        if member.stream is None:
            return
        self._live.discard(worker)
        del self._by_stream[member.stream]
        self._learning.discard(worker)
        self._spare.discard(worker)
        if member.learning is not None or member.spare:
            return
        self._accepting.discard(worker)
        self._exchanging.discard(worker)
        at_head = self._by_head[member.head]
        at_head.all.discard(worker)
        at_head.idle.discard(worker)
        at_head.unreported.discard(worker)
        at_head.accepting.discard(worker)
        # Each step has a head of its own: empty entries would stay for ever.
        if not at_head.all:
            del self._by_head[member.head]

    def note_heard(self, member: LineMember) -> None:
        """Notes that a member was heard of last earlier than it seemed."""
        if member.stream is not None:
            self._silence.note(member.worker, member.heard_at)

    def _of(self, workers: Iterable[int]) -> list[LineMember]:
        return [self._members[worker] for worker in sorted(workers)]

    def _at(self, head: Key | None) -> _AtHead:
        # Nobody is in sync with a line that has no head yet.
        return _NOBODY if head is None else self._by_head.get(head, _NOBODY)

    def _is_taken(self, slot: int) -> bool:
        return slot in self._live or slot in self._graced


_INDEXED = frozenset(
    {
        "stream",
        "head",
        "wants_work",
        "accepts_state",
        "grace_until",
        "activity",
        "last_weights",
        "heard_at",
        "learning",
        "spare",
    }
)
"""The attributes that indices follow from."""


def devices_of(request: JoinRequest) -> str:
    """The names of a worker's devices; empty if it names none."""
    return ", ".join(filter(None, (device.name for device in request.devices)))


def _process_of(worker: int, request: JoinRequest) -> PacedProcess:
    where = f"{request.node_id}\0{devices_of(request)}"
    # A digest, because names may be long, and state travels with each commit.
    machine = hashlib.blake2s(where.encode(), digest_size=6).hexdigest() if request.node_id else ""
    return PacedProcess(worker, request.incarnation, machine, request.speed_hint or 0.0)
