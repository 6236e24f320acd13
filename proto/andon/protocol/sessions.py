"""Sessions: the ranks of a plain script under one key, and what ends a session.

docs/protocol-sessions.md, section 26, is normative.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from andon.protocol.peer_calls import PendingCall
from andon.protocol.records import Key

__all__ = [
    "ACCUSATIONS",
    "GRACE_S",
    "SILENT_LEASES",
    "Peer",
    "RankFault",
    "RankReport",
    "SessionEnd",
    "SessionFormed",
    "SessionOver",
]

GRACE_S = 0.5
"""An accusation waits so long for the end of the accused's stream, which would explain it."""

SILENT_LEASES = 10
"""A rank that sends no report for so many leases is lost.

A frozen process, and one that is cut off, lose their stream by HTTP/2 pings within one. Here a
process is left whose interpreter's lock is held: compiling or pickling may take seconds.
"""


class SessionEnd(enum.Enum):
    """Why a session ended; values are those of `andon.v1.SessionEnd`."""

    RANK_LOST = 1
    NON_FINITE = 2
    NON_FINITE_REDUCTION = 3
    CALLS_DIFFER = 4
    RANK_LEFT = 5
    UNREACHABLE = 6
    CORRUPT = 7
    SCRIPT_FAILED = 8
    OPERATOR = 9
    REPLACED = 10
    SERVICE_LEAVING = 11

    @property
    def label(self) -> str:
        """The end as a metric's label and as people write it: `rank_lost`."""
        return self.name.lower()

    @property
    def is_halt(self) -> bool:
        """Whether it counts as a halt: exit code 3, and not 5."""
        return self in _HALTS

    @property
    def from_ranks(self) -> bool:
        """Whether a rank may report it; the others are for the coordinator to say."""
        return self not in _OF_THE_COORDINATOR


_HALTS = frozenset({SessionEnd.NON_FINITE, SessionEnd.NON_FINITE_REDUCTION, SessionEnd.OPERATOR})
_OF_THE_COORDINATOR = frozenset(
    {
        SessionEnd.RANK_LOST,
        SessionEnd.OPERATOR,
        SessionEnd.REPLACED,
        SessionEnd.SERVICE_LEAVING,
    }
)

ACCUSATIONS = frozenset({SessionEnd.UNREACHABLE, SessionEnd.RANK_LEFT, SessionEnd.CORRUPT})
"""What one rank sees of another one that was killed, before anybody hears of its death."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One rank of a session, as another one needs it."""

    rank: int
    node_id: str
    """Its host's name, for people."""
    address: str
    """Where its lanes are taken, as host:port."""
    shared_folder: bytes = b""
    """The identity of the folder in which it shares memory; empty if it shares none."""
    token_to: bytes = field(default=b"", repr=False)
    """The token that opens a lane to it."""
    token_from: bytes = field(default=b"", repr=False)
    """The token with which it opens a lane to this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFormed:
    """All ranks are there: calls may begin."""

    key: Key
    peers: tuple[Peer, ...]
    """All ranks in order, this one too; its own tokens are empty."""
    capabilities: frozenset[str]
    """Those that all ranks have."""
    lease_s: float
    report_s: float
    """How often a rank sends a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What a rank did since the session began, and what it does now."""

    steps: int = 0
    """Backward passes that exchanged something."""
    exchange_s: float = 0.0
    """For how long calls were open, in seconds."""
    bytes: int = 0
    """Bytes of the inputs of all calls."""
    calls: int = 0
    """Calls that have ended."""
    pending: PendingCall | None = None
    """The call that has been open for longest."""
    overflows: int = 0
    """Steps whose gradients overflowed, where a gradient scaler expects that."""
    numbers: tuple[tuple[str, int, float], ...] = field(default=())
    """What the script logged since the last report: name, step, value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFault:
    """Why a rank ends its session, and whom it accuses."""

    end: SessionEnd
    culprit: int | None
    """A rank of the session: itself, or another one."""
    message: str
    call: PendingCall | None = None
    """The call in which it was seen."""
    other_call: PendingCall | None = None
    """The culprit's call, if calls differ."""
    parameter: str = ""
    element: tuple[int, ...] = ()
    """The index in the parameter; in the call's input if there is no parameter."""
    value: str = ""
    """What was found there: `nan`, `inf`, `-inf` or a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOver:
    """The session is over. Every call that is open, and every later one, fails with this."""

    key: Key | None
    """None: no session was formed."""
    end: SessionEnd
    culprit: int | None
    culprit_node: str
    message: str
    """A sentence for people: who, what, and the remedy."""
    fault: RankFault | None = None
    reported_by: int | None = None
    halt_id: int = 0
