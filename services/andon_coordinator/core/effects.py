"""Effects: what has to be done. They are the output of `LineCore.receive`.

`Save...` and `FindAncestor` go to the journal, `Send...` and `Assign` to a worker, `Note...` to
people only. The adapter carries them out in the order in which they are listed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from andon.protocol.arithmetic import Arithmetic
from andon.protocol.halts import HaltAnswer, HaltEvidence
from andon.protocol.layout import Layout
from andon.protocol.records import Cursor, Key, Record
from andon.protocol.reducers import ReducerShare
from andon.protocol.rounds import RankTerms
from andon.protocol.run_settings import RunPlan
from andon.protocol.scalars import Scalar
from andon.protocol.schedules import Schedule
from andon.protocol.slowness import Slowness
from andon_coordinator.core.events import Checkpoint, LeaveReason
from andon_coordinator.core.eviction import SlowStep
from andon_coordinator.core.join_answers import JoinRefusal, JoinStatus
from andon_coordinator.core.run_events import RunEvent
from andon_coordinator.core.scalar_all_reduces import ScalarAllReduceMean
from andon_coordinator.core.spikes import SpikeDecision
from andon_coordinator.core.step_results import Skip, StepResult
from andon_coordinator.core.transfers import TransferRole
from andon_coordinator.core.verification import Proved

__all__ = [
    "AcceptJoin",
    "Assign",
    "Assignment",
    "CloseReducer",
    "CloseStream",
    "Effect",
    "EndSession",
    "FindAncestor",
    "NoteArithmetic",
    "NoteCaughtUp",
    "NoteCheckpoint",
    "NoteDifference",
    "NoteFewGrains",
    "NoteNotice",
    "NoteOverdue",
    "NoteScalarsRefused",
    "NoteSchedule",
    "NoteSetback",
    "NoteSlow",
    "NoteSlowness",
    "NoteStopRefused",
    "NoteSuspected",
    "NoteUnverified",
    "NoteWentBack",
    "NoteWriter",
    "RefuseJoin",
    "RefuseOperator",
    "SaveAnswer",
    "SaveArithmetic",
    "SaveDeparture",
    "SaveEviction",
    "SaveHalt",
    "SaveRecord",
    "SaveRun",
    "SaveRunEvent",
    "SaveScalars",
    "SaveSlowness",
    "SaveSpike",
    "SaveSteered",
    "SaveTerm",
    "SaveVerdict",
    "SendCommitted",
    "SendExplain",
    "SendHalt",
    "SendHeartbeatAnswer",
    "SendLate",
    "SendLearn",
    "SendProbe",
    "SendResume",
    "SendScalarAllReduceResult",
    "SendShutdown",
    "SendTransfer",
    "SendVoided",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment(RankTerms):
    """One worker's share of one step; see `andon.v1.ShardAssignment`."""

    ring_addresses: tuple[str, ...] = ()
    """Where each rank listens, if the line is a ring."""


@dataclass(frozen=True, slots=True)
class SaveTerm:
    """Make a term durable, then report TermSaved."""

    term: int


@dataclass(frozen=True, slots=True)
class SaveRun:
    """Save what the run is: once its first worker is accepted, or a resumed run is extended."""

    plan: RunPlan
    layout: Layout


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """Make a record durable, then report RecordSaved; `result` for a STEP, `skipped` for a MARK."""

    record: Record
    result: StepResult | None = None
    note: str = ""
    skipped: Skip | None = None
    rolls_back: bool = False
    """Whether the MARK rolls the line back to its parent."""
    pacing: bytes = field(default=b"", repr=False)
    """What is known of the workers' pace once it is durable; empty: nothing new."""
    by_itself: bool = False
    """Whether the line rolls back by itself: then what people decided of workers stands."""
    proved: Proved | None = None
    """What its round has shown of weights and gradients."""
    comparison: bytes = field(default=b"", repr=False)
    """What is remembered of how workers compare; empty: nothing new."""


@dataclass(frozen=True, slots=True)
class FindAncestor:
    """Find the newest of these records in the line's history, then report AncestorFound."""

    heads: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class SaveHalt:
    """Save a halt."""

    evidence: HaltEvidence


@dataclass(frozen=True, slots=True)
class SaveAnswer:
    """Save how a halt was answered, and by whom."""

    halt_id: int
    answer: HaltAnswer
    worker: int | None
    operator: str


@dataclass(frozen=True, slots=True)
class SaveDeparture:
    """Save that a worker went, at which step and with which weights."""

    worker: int
    reason: LeaveReason | None
    """None: it was lost."""
    message: str
    step: int
    digest: bytes
    dropped: bool = False
    """Whether a person dropped it, or the line did because it computes wrong."""
    incarnation: int = 0
    """Of a worker that was dropped: the process that may not join again."""
    credential: str = ""
    """Likewise the name of its own token, which opens nothing any more; empty: it had none."""


@dataclass(frozen=True, slots=True)
class SaveArithmetic:
    """Save that a worker joined, at which step, with another arithmetic than it had last."""

    worker: int
    node_id: str
    items: Arithmetic
    step: int


@dataclass(frozen=True, slots=True)
class SaveScalars:
    """Save what a worker's script logged, then report ScalarsSaved.

    A scalar that is there already is replaced.
    """

    worker: int
    scalars: tuple[Scalar, ...]
    stream: int = 0
    """The stream that they came on; 0: nobody waits for an answer."""
    sequence: int = 0
    """The heartbeat that carried them."""


@dataclass(frozen=True, slots=True)
class SaveSteered:
    """Save the answer of a scalar all-reduce: scripts decide by it, and an audit answers with it.

    Only a line with grains can be audited.
    """

    step: int
    """Committed steps of the head."""
    answer: ScalarAllReduceMean
    left_out: bool = False
    """Whether it and all that follow it at this head are too much to keep: it has no data."""


@dataclass(frozen=True, slots=True)
class SaveRunEvent:
    """Save something that people look up later. No core emits it: `Chronicle` derives it."""

    event: RunEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptJoin:
    """Answer a Join."""

    stream: int
    worker: int
    plan: RunPlan
    join_status: JoinStatus
    head: Key | None
    step: int
    halt: HaltEvidence | None
    reducers: tuple[ReducerShare, ...] = ()
    credential: str = ""
    """The name of the worker's own token, for people; empty: it has none."""
    mistaken_s: float | None = None
    """It was suspected by mistake, after a silence that has ended after so long; None: it was not.
    """


@dataclass(frozen=True, slots=True)
class RefuseJoin:
    """Refuse a Join and end its stream."""

    stream: int
    refusal: JoinRefusal


@dataclass(frozen=True, slots=True)
class RefuseOperator:
    """Refuse the request of the operator's event; nothing changed."""

    message: str


@dataclass(frozen=True, slots=True)
class CloseStream:
    """End a worker's stream; it joins again unless its run is over."""

    stream: int
    message: str


@dataclass(frozen=True, slots=True)
class CloseReducer:
    """End a reducer's stream."""

    stream: int
    message: str


@dataclass(frozen=True, slots=True)
class Assign:
    """Send a worker its assignment."""

    stream: int
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class SendCommitted:
    """Tell a worker that a record is durable; `result` for a STEP.

    `stop_reason` says why all loops end after it, whatever its kind; it is empty if they go on.
    """

    stream: int
    record: Record
    result: StepResult | None
    stop_reason: str = ""
    pacing: bytes = field(default=b"", repr=False)
    """What was measured of the workers' speed; they keep it for the next coordinator."""


@dataclass(frozen=True, slots=True)
class SendVoided:
    """Tell a worker that its round is void, and that no other is open yet."""

    stream: int
    key: Key
    message: str


@dataclass(frozen=True, slots=True)
class SendHalt:
    """Tell a worker that the line is halted."""

    stream: int
    evidence: HaltEvidence


@dataclass(frozen=True, slots=True)
class SendResume:
    """Tell a worker that the halt is answered."""

    stream: int
    halt_id: int
    answer: HaltAnswer


@dataclass(frozen=True, slots=True)
class SendShutdown:
    """Tell a worker that the run is over for it; `stop_reason` is set if it is for everybody.

    With `keep_state` it writes a checkpoint first: nobody else holds the line's state.
    """

    stream: int
    message: str
    stop_reason: str = ""
    keep_state: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SendTransfer:
    """Tell a worker to send or to receive state."""

    stream: int
    transfer_id: int
    role: TransferRole
    head: Key
    step: int
    cursor: Cursor
    peer: int
    relay: str = ""
    """The address of the reducer that passes it on; empty: the coordinator's own."""
    beside_training: bool = False
    """Whether rounds run meanwhile."""
    holds_up: bool = False
    """Whether workers wait for it that could train."""
    checkpoint: Checkpoint | None = None
    """Where the worker reads the state from, if no other worker sends it."""


@dataclass(frozen=True, slots=True)
class EndSession:
    """End what a worker has open at reducers; once it joins again it may open that anew."""

    worker: int


@dataclass(frozen=True, slots=True)
class SendLearn:
    """Tell a worker to learn the line's state, and where to listen for averages."""

    stream: int
    reducers: tuple[ReducerShare, ...]


@dataclass(frozen=True, slots=True)
class SendLate:
    """Tell a worker that its round is void, and that the next attempt goes on without it."""

    stream: int
    key: Key


@dataclass(frozen=True, slots=True)
class NoteCaughtUp:
    """Tell people that a worker that was behind is in sync, and what that cost the others."""

    worker: int
    seconds: float
    """How long it took."""
    waited_s: float
    """How long the line waited for it."""
    learnt: bool
    """Whether it learnt the state while the line trained; else by a transfer."""

    @property
    def in_words(self) -> str:
        """One sentence of it, without the worker's name."""
        if not self.learnt:
            return f"got the line's state in {self.seconds:.2f} s, while the line waited"
        waited = f"waited {self.waited_s:.2f} s" if self.waited_s >= 0.005 else "did not wait"
        return f"learnt the line's state in {self.seconds:.2f} s; the line {waited} for it"


@dataclass(frozen=True, slots=True)
class NoteSetback:
    """Tell people that a state transfer failed, and when it is tried again."""

    worker: int
    host: str
    failures: int
    """Consecutive ones."""
    pause_s: float
    why: str


@dataclass(frozen=True, slots=True)
class NoteWentBack:
    """Tell people that the line goes on from an older record."""

    step: int
    """Steps committed at that record."""
    lost: int
    """Steps committed at the head that it gives up."""
    holders: tuple[int, ...]
    """The workers that hold the older record."""
    why: str = ""
    """The spike for which it gives that up; empty: nobody held it."""

    @property
    def in_words(self) -> str:
        """One sentence of it."""
        if self.why:
            return (
                f"went back to the checkpoint of step {self.step}, and left out the samples from "
                f"there to step {self.lost + 1}: {self.why}"
            )
        who = " and ".join(map(str, self.holders)) or "none that is still here"
        several = "workers" if len(self.holders) > 1 else "worker"
        return (
            f"went on after step {self.step}, which {several} {who} brought: no worker held step "
            f"{self.lost}"
        )


@dataclass(frozen=True, slots=True)
class NoteWriter:
    """Tell people which worker writes checkpoints from now on; None: no worker can."""

    worker: int | None
    host: str
    folder: str
    elsewhere: bool
    """Whether that is another host than the service's."""


@dataclass(frozen=True, slots=True)
class NoteCheckpoint:
    """Tell people that a checkpoint was written."""

    worker: int
    step: int
    folder: str


@dataclass(frozen=True, slots=True)
class NoteOverdue:
    """Tell people that a step has no checkpoint that it should have."""

    step: int
    writer: int | None
    last: int
    """The step of the last checkpoint."""


@dataclass(frozen=True, slots=True)
class NoteScalarsRefused:
    """Tell people that scalars of this name are not kept: the run has too many names."""

    worker: int
    name: str


@dataclass(frozen=True, slots=True)
class NoteStopRefused:
    """Tell people that a worker's script wants to end the run, and may not."""

    worker: int
    why: str


@dataclass(frozen=True, slots=True)
class SendScalarAllReduceResult:
    """Tell a worker the average of a scalar all-reduce."""

    stream: int
    head: Key | None
    sequence: int
    value: float
    weight: float
    contributors: int
    data: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class SendHeartbeatAnswer:
    """Answer a heartbeat."""

    stream: int
    sequence: int


@dataclass(frozen=True, slots=True)
class SendProbe:
    """Ask a worker whether it is there."""

    stream: int
    number: int


@dataclass(frozen=True, slots=True)
class SendExplain:
    """Ask a worker what it does."""

    stream: int
    number: int


@dataclass(frozen=True, slots=True)
class NoteSlowness:
    """Tell people why a worker was slow."""

    slowness: Slowness


@dataclass(frozen=True, slots=True)
class SaveSlowness:
    """Keep it in the journal as well."""

    slowness: Slowness


@dataclass(frozen=True, slots=True)
class NoteSuspected:
    """Tell people that the line goes on without a worker that does not answer."""

    worker: int
    silent_s: float
    usual_s: float
    """How long its answers took."""


@dataclass(frozen=True, slots=True)
class NoteNotice:
    """Tell people that a worker's machine is about to go."""

    worker: int
    why: str


@dataclass(frozen=True, slots=True)
class NoteSchedule:
    """Tell people that the line chose its schedule, and why."""

    schedule: Schedule
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveVerdict:
    """Save what an inquest came to, or why a verified step halts the line."""

    step: int
    key: Key
    """The round's."""
    worker: int | None
    """Who is convicted; None: nobody."""
    text: str
    evidence: str = field(repr=False)
    """What each process attested, as JSON."""


@dataclass(frozen=True, slots=True)
class SaveEviction:
    """Save that a process follows the line because it is slow; or no longer."""

    incarnation: int
    why: str
    """For people; empty: it takes part again."""
    stand: int
    """How many are in sync without it; see `CoreState.stand`."""


@dataclass(frozen=True, slots=True)
class SaveSpike:
    """Save what the line does by itself about a spike, and tell people."""

    decision: SpikeDecision


@dataclass(frozen=True, slots=True)
class NoteDifference:
    """Tell people that workers computed different results of the same samples."""

    step: int
    node: str
    """The first one that differs, as people read it."""
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NoteUnverified:
    """Tell people that steps of these workers are not verified: nobody has their arithmetic."""

    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NoteFewGrains:
    """Tell people that a batch has fewer grains than the line has workers: some get none."""

    grains: int
    workers: int


@dataclass(frozen=True, slots=True)
class NoteSlow:
    """Tell people that the line deals a slow worker less, or does without it, or no more."""

    worker: int
    what: SlowStep
    why: str
    """How slow it is, or why it is back."""

    @property
    def in_words(self) -> str:
        """What was done, without the worker's name."""
        match self.what:
            case SlowStep.EASED:
                return f"is dealt less: {self.why}"
            case SlowStep.RECOVERED:
                return f"is dealt as the others again: {self.why}"
            case SlowStep.FOLLOWS:
                return f"follows: {self.why}"
            case SlowStep.BACK:
                return f"takes part again: {self.why}"


@dataclass(frozen=True, slots=True)
class NoteArithmetic:
    """Tell people that a worker joined whose arithmetic is not the line's."""

    worker: int
    name: str = ""
    """The first name in which they differ; empty: neither is stated."""
    mine: str = ""
    theirs: str = ""

    @property
    def in_words(self) -> str:
        """What differs, for people."""
        if not self.name:
            return "neither it nor the line's first worker states its arithmetic"
        return f"it computes with {self.name} {self.mine}, and the line with {self.theirs}"


Effect = (
    FindAncestor
    | SaveTerm
    | SaveRun
    | SaveRecord
    | SaveHalt
    | SaveAnswer
    | SaveDeparture
    | SaveArithmetic
    | SaveVerdict
    | SaveEviction
    | SaveSpike
    | SaveSlowness
    | SaveScalars
    | SaveSteered
    | SaveRunEvent
    | AcceptJoin
    | RefuseJoin
    | RefuseOperator
    | CloseStream
    | CloseReducer
    | Assign
    | SendCommitted
    | SendVoided
    | SendHalt
    | SendResume
    | SendShutdown
    | SendTransfer
    | SendLate
    | SendLearn
    | EndSession
    | NoteCaughtUp
    | NoteCheckpoint
    | NoteOverdue
    | NoteScalarsRefused
    | NoteSetback
    | NoteSlow
    | NoteStopRefused
    | NoteNotice
    | NoteSchedule
    | NoteFewGrains
    | NoteArithmetic
    | NoteDifference
    | NoteUnverified
    | NoteSuspected
    | NoteSlowness
    | NoteWentBack
    | NoteWriter
    | SendScalarAllReduceResult
    | SendHeartbeatAnswer
    | SendProbe
    | SendExplain
)
