"""Effects: what the line's core wants done, in this order."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from andon.protocol.halts import HaltAnswer, HaltEvidence
from andon.protocol.layout import Layout
from andon.protocol.reasons import Reason
from andon.protocol.records import Cursor, Key, PositionRange, Record
from andon.protocol.reducers import ReducerShare
from andon.protocol.run_settings import RunPlan
from andon_coordinator.core.events import LeaveReason

__all__ = [
    "AcceptJoin",
    "Assign",
    "Assignment",
    "CloseReducer",
    "CloseStream",
    "Contribution",
    "Effect",
    "JoinStatus",
    "LineState",
    "NoteCheckpoint",
    "NoteOverdue",
    "NoteSetback",
    "NoteWriter",
    "Refusal",
    "RefuseJoin",
    "RefuseOperator",
    "SaveAnswer",
    "SaveDeparture",
    "SaveHalt",
    "SaveRecord",
    "SaveRun",
    "SaveTerm",
    "SendCommitted",
    "SendHalt",
    "SendHeartbeatAnswer",
    "SendResume",
    "SendScalarAllReduceResult",
    "SendShutdown",
    "SendTransfer",
    "SendVoided",
    "Skip",
    "StepResult",
    "TransferRole",
]


class LineState(enum.Enum):
    """What the line is doing, for people; values are those of `andon.v1.LineState`."""

    FORMING = 1
    RUNNING = 2
    SYNCING = 3
    HALTED = 4
    DRAINING = 5
    COMPLETE = 6


class JoinStatus(enum.Enum):
    """Where a joined worker stands to the line; values are those of `andon.v1.JoinStatus`."""

    IN_SYNC = 1
    BEHIND = 2
    RECORD_FOLLOWS = 3
    FRESH = 4


class TransferRole(enum.Enum):
    """Which end of a transfer; values are those of `andon.v1.TransferRole`."""

    SEND = 1
    RECEIVE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a join is refused: `component` differs, `mine` at the worker, `theirs` on the line."""

    reason: Reason
    message: str
    component: str = ""
    mine: str = ""
    theirs: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One worker's share of one step; see `andon.v1.ShardAssignment`."""

    key: Key
    parent: Key | None
    roster: tuple[int, ...]
    rank: int
    step: int
    attempt: int
    epoch: int
    positions: tuple[PositionRange, ...]
    batch: PositionRange
    reducers: tuple[ReducerShare, ...] = ()
    ring_addresses: tuple[str, ...] = ()
    """Where each rank listens, if the line is a ring."""
    writes_checkpoint: bool = False
    checkpoint_step: int = 0
    """The step of the last checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What one worker of the roster put into a step."""

    worker: int
    rank: int
    positions: tuple[PositionRange, ...]
    samples: int
    weight: float
    loss_sum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step came to; its positions are in epoch `epoch`.

    `loss` is the weighted mean over the roster in float64, `seconds` the time since the round's
    assignment was sent.
    """

    epoch: int
    batch: PositionRange
    loss: float
    samples: int
    weight: float
    attempt: int
    seconds: float
    contributions: tuple[Contribution, ...]
    stop_reason: str = ""
    correct: int | None = None
    gradient_norm: float | None = None
    """The L2 norm of the averaged gradients, if it was asked for."""

    @property
    def contributors(self) -> int:
        """Workers that contributed with a weight above 0."""
        return sum(part.weight > 0 for part in self.contributions)


@dataclass(frozen=True, slots=True)
class Skip:
    """Positions that a MARK leaves out, and the halt whose answer asked for it."""

    epoch: int
    positions: PositionRange
    halt_id: int
    operator: str


@dataclass(frozen=True, slots=True)
class SaveTerm:
    """Make a term durable, then say TermSaved."""

    term: int


@dataclass(frozen=True, slots=True)
class SaveRun:
    """Write down what the run is: once, when its first worker is accepted."""

    plan: RunPlan
    layout: Layout


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """Make a record durable, then say RecordSaved; `result` for a STEP, `skipped` for a MARK."""

    record: Record
    result: StepResult | None = None
    note: str = ""
    skipped: Skip | None = None
    rolls_back: bool = False
    """Whether the MARK goes back to a record that it names as its parent."""


@dataclass(frozen=True, slots=True)
class SaveHalt:
    """Write down a halt."""

    evidence: HaltEvidence


@dataclass(frozen=True, slots=True)
class SaveAnswer:
    """Write down how a halt was answered, and by whom."""

    halt_id: int
    answer: HaltAnswer
    worker: int | None
    operator: str


@dataclass(frozen=True, slots=True)
class SaveDeparture:
    """Write down that a worker went, at which step, with which weights."""

    worker: int
    reason: LeaveReason | None
    """None: it was lost."""
    message: str
    step: int
    digest: bytes
    dropped: bool = False
    """Whether a person sent it away for good."""


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


@dataclass(frozen=True, slots=True)
class RefuseJoin:
    """Refuse a Join and end its stream."""

    stream: int
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class RefuseOperator:
    """The operator's request of this event can't be done; nothing changed."""

    message: str


@dataclass(frozen=True, slots=True)
class CloseStream:
    """End a stream; the worker must join again unless its run is over."""

    stream: int
    message: str


@dataclass(frozen=True, slots=True)
class CloseReducer:
    """End a reducer's stream."""

    stream: int
    message: str


@dataclass(frozen=True, slots=True)
class Assign:
    """Send a worker its share."""

    stream: int
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class SendCommitted:
    """Tell a worker that a record is durable; `result` for a STEP.

    `stop_reason` says why all loops end after it, whatever its kind; empty if they go on.
    """

    stream: int
    record: Record
    result: StepResult | None
    stop_reason: str = ""


@dataclass(frozen=True, slots=True)
class SendVoided:
    """Tell a worker that its round is void and that none is open yet."""

    stream: int
    key: Key
    message: str


@dataclass(frozen=True, slots=True)
class SendHalt:
    """Tell a worker that the line stopped."""

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
    """Tell a worker that the run is over for it; `stop_reason` if it is so for everybody."""

    stream: int
    message: str
    stop_reason: str = ""


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
    """The address of the reducer that it goes through; empty is the coordinator's own."""


@dataclass(frozen=True, slots=True)
class NoteSetback:
    """Tell people that the line's state did not reach a worker, and when it is tried again."""

    worker: int
    host: str
    failures: int
    """In a row."""
    pause_s: float
    why: str


@dataclass(frozen=True, slots=True)
class NoteWriter:
    """Tell people which worker writes checkpoints from now on; None: nobody can."""

    worker: int | None
    host: str
    folder: str
    elsewhere: bool
    """Whether that is another host than the service's."""


@dataclass(frozen=True, slots=True)
class NoteCheckpoint:
    """Tell people of a checkpoint."""

    worker: int
    step: int
    folder: str


@dataclass(frozen=True, slots=True)
class NoteOverdue:
    """Tell people that a step has no checkpoint that it should have."""

    step: int
    writer: int | None
    last: int
    """The step of the last one that there is."""


@dataclass(frozen=True, slots=True)
class SendScalarAllReduceResult:
    """Tell a worker the average of a scalar all-reduce."""

    stream: int
    head: Key | None
    sequence: int
    value: float
    weight: float
    contributors: int


@dataclass(frozen=True, slots=True)
class SendHeartbeatAnswer:
    """Answer a heartbeat."""

    stream: int
    sequence: int


Effect = (
    SaveTerm
    | SaveRun
    | SaveRecord
    | SaveHalt
    | SaveAnswer
    | SaveDeparture
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
    | NoteCheckpoint
    | NoteOverdue
    | NoteSetback
    | NoteWriter
    | SendScalarAllReduceResult
    | SendHeartbeatAnswer
)
