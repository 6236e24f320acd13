"""Effects: what the worker's core asks its owner to do, in order, before the next event."""

from __future__ import annotations

from dataclasses import dataclass

from andon.protocol.halts import HaltEvidence
from andon.protocol.records import Key
from andon_trainer.core.events import ExchangeFailed, LearningAsked, TransferAsked
from andon_trainer.core.reports import NO_DIGEST, Digest

__all__ = [
    "AwaitAnswer",
    "DropComputed",
    "Effect",
    "EndExchange",
    "EndRun",
    "GoOn",
    "HearOn",
    "JoinAgain",
    "Listen",
    "MoveState",
    "RaiseDropped",
    "RaiseHalted",
    "RaiseRefused",
    "ReportComputed",
    "ReportDefect",
    "ReportFault",
    "ReportListening",
    "ReportState",
    "RequestWork",
    "SendNumber",
    "StepDone",
    "StopListening",
]


@dataclass(frozen=True, slots=True)
class EndExchange:
    """The present round is void: stop its exchange, and drop whatever of it is on the way."""

    message: str


@dataclass(frozen=True, slots=True)
class DropComputed:
    """Make the weights the head's again: what was computed since then is in no record."""

    why: str


@dataclass(frozen=True, slots=True)
class JoinAgain:
    """Close the control stream, and join on a new one."""

    why: str


@dataclass(frozen=True, slots=True)
class ReportFault:
    """Report to the coordinator what went wrong in the present round."""

    fault: ExchangeFailed


@dataclass(frozen=True, slots=True)
class StepDone:
    """Count a step: its round is committed, and its weights may move."""

    key: Key


@dataclass(frozen=True, slots=True)
class RequestWork:
    """Ask for an assignment or, with `leaves_epoch`, for the end of the head's epoch."""

    head: Key | None
    leaves_epoch: bool = False
    voided: Key | None = None
    """The last round that a worker which learns has heard to be void."""


@dataclass(frozen=True, slots=True)
class ReportDefect:
    """Report a defect outside any round; `kind` is a name of `andon.v1.FaultKind`."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class SendNumber:
    """Give this worker's number to a scalar all-reduce."""

    head: Key | None
    sequence: int
    value: float
    weight: float
    digest: Digest = NO_DIGEST
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class MoveState:
    """Send or receive the line's state, then call `Conversation.moved`."""

    asked: TransferAsked


@dataclass(frozen=True, slots=True)
class Listen:
    """Open listening streams, and say so with `ReportListening`."""

    asked: LearningAsked


@dataclass(frozen=True, slots=True)
class ReportListening:
    """Say that this worker hears the averages of every round that begins from now on."""


@dataclass(frozen=True, slots=True)
class HearOn:
    """Keep the listening streams that were opened when the line went on without this worker."""


@dataclass(frozen=True, slots=True)
class ReportComputed:
    """Say that this worker's share is computed: what it sends in round `key` is on its way."""

    key: Key


@dataclass(frozen=True, slots=True)
class StopListening:
    """Close the listening streams: this worker is on the roster, or needs no averages."""


@dataclass(frozen=True, slots=True)
class ReportState:
    """Report how a transfer ended at this end; an empty `failure` is success."""

    transfer_id: int
    head: Key | None
    failure: str


@dataclass(frozen=True, slots=True)
class AwaitAnswer:
    """Tell people that the line is halted, and that this worker waits for an operator."""

    evidence: HaltEvidence


@dataclass(frozen=True, slots=True)
class GoOn:
    """Tell people that the halt was answered."""


@dataclass(frozen=True, slots=True)
class RaiseHalted:
    """Raise in the script: the line is halted."""

    evidence: HaltEvidence


@dataclass(frozen=True, slots=True)
class RaiseDropped:
    """Raise in the script: the line dropped this worker, and no other.

    With `keep_state` it lets a worker go that was asked to leave, once its state is on disk.
    """

    message: str
    keep_state: bool = False


@dataclass(frozen=True, slots=True)
class RaiseRefused:
    """Raise in the script: the coordinator refuses this worker for good."""

    refusal: Exception


@dataclass(frozen=True, slots=True)
class EndRun:
    """Raise in the script: the run is over for everybody, and nothing is left to wait for."""

    reason: str


Effect = (
    EndExchange
    | DropComputed
    | JoinAgain
    | ReportFault
    | StepDone
    | RequestWork
    | ReportDefect
    | SendNumber
    | MoveState
    | Listen
    | HearOn
    | ReportComputed
    | ReportListening
    | StopListening
    | ReportState
    | AwaitAnswer
    | GoOn
    | RaiseHalted
    | RaiseDropped
    | RaiseRefused
    | EndRun
)
