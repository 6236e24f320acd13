"""What happens to sessions, and what is to be done about it: events and effects of their core."""

from __future__ import annotations

from dataclasses import dataclass, field

from andon.protocol.reasons import Reason
from andon.protocol.records import Key
from andon.protocol.sessions import RankFault, RankReport, SessionOver
from andon_coordinator.core.effects import RefuseOperator, SaveHalt, SaveScalars
from andon_coordinator.core.events import (
    CordPulled,
    SessionNotSaved,
    SessionSaved,
    TimePassed,
)
from andon_coordinator.core.join_answers import JoinRefusal

__all__ = [
    "AttendRequest",
    "CloseAttendance",
    "RankAttended",
    "RankFaulted",
    "RankLeft",
    "RankReported",
    "RankStreamEnded",
    "RefuseAttendance",
    "SaveSession",
    "SaveSessionEnd",
    "SendFormed",
    "SendOver",
    "SendReportAnswer",
    "ServiceLeaving",
    "SessionEffect",
    "SessionEvent",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendRequest:
    """What a rank says of itself; the fields are those of `andon.v1.Attend`."""

    rank: int
    world_size: int
    incarnation: int
    node_id: str = ""
    protocol_version: int = 1
    capabilities: frozenset[str] = frozenset()
    address: str = ""
    """Where the other ranks reach its lanes, as host:port."""
    shared_folder: bytes = b""
    backend: str = ""
    device: str = ""
    metrics_address: str = ""
    greatest_term: int = 0


# ------------------------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class RankAttended:
    """A process asks to be a rank, on a new stream."""

    stream: int
    request: AttendRequest
    trains: bool = False
    """Whether the run's workers use Train."""


@dataclass(frozen=True, slots=True)
class RankReported:
    """A rank is alive, and this is what it does."""

    stream: int
    key: Key | None
    number: int
    report: RankReport


@dataclass(frozen=True, slots=True)
class RankFaulted:
    """A rank saw why its session can't go on."""

    stream: int
    key: Key | None
    fault: RankFault


@dataclass(frozen=True, slots=True)
class RankLeft:
    """A rank goes away on purpose."""

    stream: int
    key: Key | None
    done: bool


@dataclass(frozen=True, slots=True)
class RankStreamEnded:
    """A stream is over, whoever ended it."""

    stream: int


@dataclass(frozen=True, slots=True)
class ServiceLeaving:
    """The service goes away in order."""


SessionEvent = (
    RankAttended
    | RankReported
    | RankFaulted
    | RankLeft
    | RankStreamEnded
    | SessionSaved
    | SessionNotSaved
    | ServiceLeaving
    | CordPulled
    | TimePassed
)


# ------------------------------------------------------------------------------------ effects


@dataclass(frozen=True, slots=True)
class RefuseAttendance:
    """End a stream: its process can't be that rank."""

    stream: int
    refusal: JoinRefusal


@dataclass(frozen=True, slots=True)
class CloseAttendance:
    """End a rank's stream."""

    stream: int
    reason: Reason | None = None
    """None: with OK, once everything is sent."""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFormed:
    """Tell a rank that all are there."""

    stream: int
    rank: int
    key: Key
    roster: tuple[AttendRequest, ...]
    """All ranks in order."""
    capabilities: frozenset[str]
    lease_s: float
    report_s: float


@dataclass(frozen=True, slots=True)
class SendReportAnswer:
    """Answer a report."""

    stream: int
    number: int


@dataclass(frozen=True, slots=True)
class SendOver:
    """Tell a rank why the session is over."""

    stream: int
    over: SessionOver


@dataclass(frozen=True, slots=True)
class SaveSession:
    """Make a session durable, and its term if that is new; then report SessionSaved."""

    key: Key
    roster: tuple[AttendRequest, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class SaveSessionEnd:
    """Save how a session ended; `over` is None if all its ranks left in order."""

    key: Key
    over: SessionOver | None
    steps: int = 0
    """How many steps its ranks made."""


SessionEffect = (
    RefuseAttendance
    | CloseAttendance
    | SendFormed
    | SendReportAnswer
    | SendOver
    | SaveSession
    | SaveSessionEnd
    | SaveHalt
    | SaveScalars
    | RefuseOperator
)
