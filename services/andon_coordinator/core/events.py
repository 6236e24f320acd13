"""Events: what happened. They are the input of `LineCore.receive`.

A stream is named by a number that the adapter never uses twice. Events carry no times, because
`now` is an argument of `receive`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from andon.protocol.arithmetic import Arithmetic
from andon.protocol.attestations import Attestation, MeanCheck, NodeApart
from andon.protocol.grains import NodeLoss
from andon.protocol.halts import HaltAnswer, HaltEvidence
from andon.protocol.layout import Layout
from andon.protocol.records import Cursor, Key, Record
from andon.protocol.run_settings import RunPlan
from andon.protocol.scalars import Scalar
from andon.protocol.slowness import Explanation

__all__ = [
    "Activity",
    "AncestorFound",
    "CordPulled",
    "Device",
    "DrainRequested",
    "Event",
    "ExplanationArrived",
    "Fault",
    "FaultKind",
    "FaultReported",
    "FolderSearched",
    "HaltCleared",
    "HeartbeatArrived",
    "JoinRequest",
    "JournalFailed",
    "LeaveReason",
    "ListeningReported",
    "NoticeGiven",
    "ProbeAnswered",
    "ProcessUse",
    "Ready",
    "RecordSaved",
    "ReducerLost",
    "ReducerRegistered",
    "RoundFaulted",
    "ScalarAllReduceArrived",
    "ScalarsSaved",
    "StandingRequest",
    "StateReported",
    "StepTimings",
    "TermSaved",
    "TimePassed",
    "Undone",
    "WorkRequested",
    "WorkerJoined",
    "WorkerLeft",
    "WorkerReady",
    "WorkerStopped",
    "WorkerStreamEnded",
]


class Activity(enum.Enum):
    """What a worker is doing; values are those of `andon.v1.Activity`."""

    UNSPECIFIED = 0
    IDLE = 1
    LOADING = 2
    COMPUTING = 3
    EXCHANGING = 4
    COMMITTING = 5
    EVALUATING = 6
    BUSY = 7
    SYNCING = 8
    HALTED = 9


class LeaveReason(enum.Enum):
    """Why a worker leaves; values are those of `andon.v1.LeaveReason`."""

    COMPLETE = 1
    FAILED = 2
    DRAINED = 3
    INTERRUPTED = 4
    HALTED = 5

    @property
    def in_order(self) -> bool:
        """Whether the worker has the run's last weights, and nothing left to do."""
        return self in (LeaveReason.COMPLETE, LeaveReason.DRAINED)


class FaultKind(enum.Enum):
    """What a worker saw; values are those of `andon.v1.FaultKind`."""

    NON_FINITE_GRADIENT = 1
    NON_FINITE_LOSS = 2
    ENCODING_OVERFLOW = 3
    NON_FINITE_AVERAGE = 4
    PROTOCOL = 5
    DATA_STREAM_LOST = 6
    STALE_ROUND = 7
    SCRIPT_RAISED = 8
    CHECKPOINT = 9
    CORRUPT_CHUNK = 10


@dataclass(frozen=True, slots=True)
class Device:
    """A device that a worker trains on: `kind` is `cuda` or `cpu`."""

    kind: str
    name: str = ""
    memory_bytes: int = 0
    cores: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """Where a worker would write checkpoints, and every how many steps; 0: only on request."""

    every: int
    folder: str
    keep: int = 0
    """How many of the newest it keeps at least; 0: it does not say."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that a worker wrote, or resumed from."""

    step: int
    folder: str
    head: Key | None = None
    """The record that it was written at; None: an older worker does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """What a worker reports of itself when it joins (rule 8)."""

    run_id: str
    incarnation: int
    layout: Layout
    plan: RunPlan
    node_id: str = ""
    launch_slot: int | None = None
    devices: tuple[Device, ...] = ()
    backend: str = "cpu"
    protocol_version: int = 1
    capabilities: frozenset[str] = frozenset()
    metrics_address: str = ""
    head: Key | None = None
    cursor: Cursor = field(default_factory=lambda: Cursor(0, 0))
    step: int = 0
    held_key: Key | None = None
    greatest_term: int = 0
    halt: HaltEvidence | None = None
    mid_script: bool = False
    """Whether its script is running, so that it accepts no state before it asks for work."""
    checkpoints: CheckpointPlan | None = None
    """None: it can't write any."""
    token: bytes = field(default=b"", repr=False)
    credential: str = ""
    """The name of the token of its own with which it was admitted; empty: the run's token."""
    speed_hint: float | None = None
    """How fast it says it is, compared with the others; None if it does not say."""
    pacing: bytes = field(default=b"", repr=False)
    """The `pacing` of the last commit that it applied; untrusted, as everything here."""
    spare: bool = False
    """Whether it follows and computes nothing, as long as the line has all its workers."""
    arithmetic: Arithmetic = ()
    """Name and value of what decides the bits of its results, by name; empty: it does not say."""


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A stream's first message arrived."""

    stream: int
    request: JoinRequest
    attends: bool = False
    """Whether the run is one of sessions, whose ranks use Attend."""


@dataclass(frozen=True, slots=True)
class WorkRequested:
    """A worker asked for an assignment from the head it has."""

    stream: int
    head: Key | None
    ring_address: str = ""
    """Where its predecessor in the ring reaches it, if the line is a ring."""
    leaves_epoch: bool = False
    """Whether it wants the epoch to end, rather than work."""
    checkpoint: Checkpoint | None = None
    """The last one that it wrote, or resumed from."""
    checkpoint_begun: int = 0
    """The step of one that it writes beside its steps; 0: none."""
    voided: Key | None = None
    """The last round that it has heard to be void, if it learns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimings:
    """How long one step took a worker, in seconds."""

    compute_s: float = 0.0
    exchange_s: float = 0.0
    wait_s: float = 0.0
    data_s: float = 0.0
    busy_s: float = 0.0
    """Forward and backward of all micro-batches; 0 if the worker does not measure it."""
    micro_batches: int = 0
    """How many micro-batches `busy_s` covers."""
    computed: int = 0
    """How many samples were in them."""


@dataclass(frozen=True, slots=True)
class StandingRequest:
    """A request for the step after a round, made before that is committed; see `standing`."""

    ring_address: str = ""
    checkpoint: Checkpoint | None = None
    checkpoint_begun: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A worker's report that it holds all averages of round `key`, and its share of the loss.

    `loss_sum` is the sum of weight times loss, in float64. `digest` is the SHA-256 of the weights
    that the step started from, which belong to head `digest_head`; or empty.
    """

    key: Key
    loss_sum: float
    weight: float
    samples: int
    total_weight: float
    world_size: int
    correct: int | None = None
    timings: StepTimings = field(default_factory=StepTimings)
    digest: bytes = b""
    digest_head: Key | None = None
    digest_prefixes: bytes = b""
    """Prefixes of the digest after each component, from the layout's last block to its first."""
    digest_base_hashed: bool = False
    """Whether the digest has hashes of frozen parameters in the place of their elements."""
    end_of_data: bool = False
    stop_reason: str = ""
    gradient_norm: float | None = None
    """The L2 norm of the averaged gradients, if the policy asks for it and there are gradients."""
    own_gradient_norm: float | None = None
    """The L2 norm of what this worker contributed, if the policy asks for it."""
    block_norms: tuple[float, ...] = field(default=(), repr=False)
    """That of each block of the layout; empty: it does not say."""
    overflow: bool = False
    """Whether its scaled gradients overflowed, so that it sent zeros in their place."""
    next: StandingRequest | None = None
    """What it asks for once the round is committed."""
    node_losses: tuple[NodeLoss, ...] = ()
    """Of each maximal node of its share, in rising order; empty if the plan has no grain."""
    attested: tuple[Attestation, ...] = field(default=(), repr=False)
    """What it has computed, if the assignment has `attests`."""
    averages_digest: bytes = b""
    """Likewise of the averages that it holds, `DIGEST_BYTES`; empty: it does not say."""
    mean_check: MeanCheck | None = None
    """The mean that it made of all nodes by itself, if the assignment has `sums`."""
    apart: tuple[NodeApart, ...] = ()
    """Where two results of one node differ, as far as it has seen both."""


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker holds all averages and has not touched its weights."""

    stream: int
    ready: Ready


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What a worker saw. `rank` is None if no single rank is at fault."""

    kind: FaultKind
    key: Key | None = None
    rank: int | None = None
    block: int | None = None
    element: int = 0
    value: str = ""
    message: str = ""
    error_type: str = ""
    greatest: Key | None = None


@dataclass(frozen=True, slots=True)
class FaultReported:
    """A worker saw something wrong."""

    stream: int
    fault: Fault


@dataclass(frozen=True, slots=True)
class RoundFaulted:
    """The reducer of this process stopped a round.

    `senders` are ranks and the workers that sent as them, which it knows by their session tokens.
    """

    fault: Fault
    senders: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What a worker's process uses of its host, for people; None: it does not say."""

    busy_cores: float | None = None
    """Since the heartbeat before."""
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class HeartbeatArrived:
    """A worker is alive; `scalars` are what its script logged."""

    stream: int
    sequence: int
    activity: Activity = Activity.UNSPECIFIED
    detail: str = ""
    scalars: tuple[Scalar, ...] = ()
    use: ProcessUse = ProcessUse()


@dataclass(frozen=True, slots=True)
class ProbeAnswered:
    """A worker is there, whatever its script does."""

    stream: int
    number: int


@dataclass(frozen=True, slots=True)
class ExplanationArrived:
    """A worker says what it does, because it was asked."""

    stream: int
    explanation: Explanation


@dataclass(frozen=True, slots=True)
class NoticeGiven:
    """A worker's machine is about to go; `message` says what the worker knows of it."""

    stream: int
    message: str


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """A worker leaves on purpose; `digest` is that of its final weights, at head `digest_head`."""

    stream: int
    reason: LeaveReason
    message: str = ""
    final_step: int = 0
    digest: bytes = b""
    digest_head: Key | None = None
    checkpoint: Checkpoint | None = None
    digest_base_hashed: bool = False


@dataclass(frozen=True, slots=True)
class ListeningReported:
    """A worker that learns hears the averages of every round that opens from now on."""

    stream: int


@dataclass(frozen=True, slots=True)
class WorkerComputed:
    """A worker has computed its share of a round; what it sends is on its way."""

    stream: int
    key: Key


@dataclass(frozen=True, slots=True)
class StateReported:
    """One end of a state transfer is done; `failure` is empty if it succeeded."""

    stream: int
    transfer_id: int
    head: Key | None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class ScalarAllReduceArrived:
    """A worker has a number to average outside any step; `digest` is that of its last weights."""

    stream: int
    head: Key | None
    sequence: int
    value: float
    weight: float
    digest: bytes = b""
    digest_head: Key | None = None
    digest_prefixes: bytes = b""
    data: bytes = b""
    digest_base_hashed: bool = False


@dataclass(frozen=True, slots=True)
class WorkerStopped:
    """A worker's process is stopped, and has been for `seconds`: nothing will come of it now."""

    stream: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerStreamEnded:
    """A stream is over. `gone` if the process at its end is known to be gone."""

    stream: int
    gone: bool = False


@dataclass(frozen=True, slots=True)
class ReducerRegistered:
    """A reducer that is a process of its own proved that it has the run's secret."""

    stream: int
    address: str
    """Where workers reach it, as host:port."""


@dataclass(frozen=True, slots=True)
class ReducerLost:
    """The stream of a reducer that registered is over."""

    stream: int


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time passed; leases, graces and back-offs may be over."""

    late_s: float = 0.0
    """How much later than due this comes: so long this process did not listen."""


@dataclass(frozen=True, slots=True)
class SessionSaved:
    """A session is durable."""

    key: Key


@dataclass(frozen=True, slots=True)
class SessionNotSaved:
    """The journal could not take a session."""

    key: Key
    why: str


@dataclass(frozen=True, slots=True)
class SessionHappened:
    """Something happened to a session of ranks. For observers: a line's core never gets it."""


@dataclass(frozen=True, slots=True)
class TermSaved:
    """A term is durable in the journal."""

    term: int


@dataclass(frozen=True, slots=True)
class Undone:
    """What the steps had that a roll-back undoes."""

    step: int
    """The step that the line goes on from."""
    samples: int
    tokens: float
    """As scripts logged them."""


@dataclass(frozen=True, slots=True)
class RecordSaved:
    """A record is durable in the journal: it may be announced."""

    key: Key
    undone: Undone | None = None
    """What does not count any more, if the record rolls the line back."""


@dataclass(frozen=True, slots=True)
class ScalarsSaved:
    """The journal is done with the scalars of a heartbeat: they are durable, or given up.

    They are given up if the journal can't keep up, or can't write. They decide nothing, so a
    worker need not keep them for a better time.
    """

    stream: int
    sequence: int


@dataclass(frozen=True, slots=True)
class AncestorFound:
    """The journal's answer to FindAncestor, about these heads."""

    heads: tuple[Key, ...]
    record: Record | None
    """The newest of them that is in the line's history; None: none of them is."""


@dataclass(frozen=True, slots=True)
class FolderSearched:
    """The service looked for checkpoints in the run's folder, when it started."""

    folder: str
    step: int | None
    """Of the newest whole one in the line's history; None: there is none."""
    damaged: tuple[str, ...] = ()
    """What is wrong with newer ones, the newest first."""


@dataclass(frozen=True, slots=True)
class JournalFailed:
    """What the journal was given last could not be done: a record, a term, a search.

    It will not be done later: the core voids the record, or asks again. This is not
    reported for facts that nothing later undoes (halts, answers, departures): the journal keeps
    them in memory, and writes them before any later record.
    """

    message: str


@dataclass(frozen=True, slots=True)
class CordPulled:
    """A person halts the line."""

    reason: str
    operator: str = ""


@dataclass(frozen=True, slots=True)
class HaltCleared:
    """A person answers the halt `halt_id`; `worker` is the one to drop, if the answer is DROP."""

    halt_id: int
    answer: HaltAnswer
    worker: int | None = None
    operator: str = ""


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """A person ends the run after the current step."""

    operator: str = ""


Event = (
    WorkerJoined
    | WorkRequested
    | WorkerReady
    | FaultReported
    | HeartbeatArrived
    | ProbeAnswered
    | ExplanationArrived
    | NoticeGiven
    | WorkerLeft
    | StateReported
    | ListeningReported
    | WorkerComputed
    | ScalarAllReduceArrived
    | WorkerStopped
    | WorkerStreamEnded
    | ReducerRegistered
    | ReducerLost
    | RoundFaulted
    | TimePassed
    | TermSaved
    | RecordSaved
    | ScalarsSaved
    | AncestorFound
    | FolderSearched
    | JournalFailed
    | CordPulled
    | HaltCleared
    | DrainRequested
    | SessionSaved
    | SessionNotSaved
    | SessionHappened
)
