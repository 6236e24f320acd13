"""Messages of Attend: those of ranks become the core's events, and its effects become messages.

As in `incoming`, nothing is decided here: what breaks a MUST is refused, and texts for people are
clipped and put on one line.
"""

from __future__ import annotations

from urllib.parse import unquote

from andon.protocol import tokens
from andon.protocol.limits import LimitExceeded, clipped, on_one_line, require_at_most
from andon.protocol.reasons import Reason
from andon.protocol.ring import is_address
from andon.protocol.sessions import Peer, SessionFormed
from andon.v1 import session_pb2 as pb
from andon.wire import conversion, sessions
from andon_coordinator.core.session_events import (
    AttendRequest,
    RankFaulted,
    RankLeft,
    RankReported,
    SendFormed,
    SendOver,
    SendReportAnswer,
    SessionEvent,
)
from andon_coordinator.core.session_status import RankSnapshot, SessionSnapshot
from andon_coordinator.transport.errors import LineError

__all__ = [
    "SessionMessage",
    "SessionTokens",
    "attend_from",
    "host_of_peer",
    "session_event_from",
    "session_status_to",
]

SessionMessage = SendFormed | SendReportAnswer | SendOver
"""Effects that are a message to a rank."""

_MAX_CAPABILITIES = 1024
_FOLDER_BYTES = 16


def attend_from(message: pb.AttendRequest, host: str) -> AttendRequest:
    """The Attend that opens a stream, which comes from `host`.

    Raises:
        LineError: it is none, or has a value that can't be, or too many of something.
    """
    if message.WhichOneof("message") != "attend":
        raise _invalid(f"a stream's first message must be attend, not {_case(message)}")
    attend = message.attend
    try:
        require_at_most(len(attend.capabilities), _MAX_CAPABILITIES, "capabilities")
    except LimitExceeded as error:
        raise LineError(Reason.TOO_LARGE, f"attend: {error}") from None
    if len(attend.shared_folder) not in (0, _FOLDER_BYTES):
        raise _invalid(f"attend: the identity of a folder is {_FOLDER_BYTES} bytes")
    return AttendRequest(
        rank=attend.rank,
        world_size=attend.world_size,
        incarnation=attend.incarnation,
        node_id=_said(attend.node_id),
        protocol_version=attend.protocol_version,
        capabilities=frozenset(map(clipped, attend.capabilities)),
        address=_address(attend.address, host),
        shared_folder=attend.shared_folder,
        backend=_said(attend.backend),
        device=_said(attend.device),
        metrics_address=_said(attend.metrics_address),
        greatest_term=attend.greatest_term,
    )


def _address(text: str, host: str) -> str:
    """Where a rank's lanes are: at the host that it names, or at the one that it came from."""
    whole = f"{host}{text}" if text.startswith(":") else text
    if whole and not is_address(whole):
        raise _invalid(f"attend: an address is host:port, not {clipped(text)!r}")
    return whole


def host_of_peer(peer: str) -> str:
    """The host in what gRPC calls a peer: `ipv4:10.0.0.2:40152` or `ipv6:%5B::1%5D:40152`."""
    _, _, place = unquote(peer).partition(":")
    return place.rpartition(":")[0]


def session_event_from(stream: int, message: pb.AttendRequest) -> SessionEvent:
    """The event for a message that follows Attend.

    Raises:
        LineError: it breaks a MUST of the protocol.
    """
    try:
        match message.WhichOneof("message"):
            case "report":
                report = message.report
                key = conversion.optional_key_from_proto(report.key)
                told = sessions.report_from_proto(report)
                return RankReported(stream, key, report.number, told)
            case "fault":
                fault = message.fault
                key = conversion.optional_key_from_proto(fault.key)
                return RankFaulted(stream, key, sessions.fault_from_proto(fault))
            case "end":
                key = conversion.optional_key_from_proto(message.end.key)
                return RankLeft(stream, key, message.end.done)
    except LimitExceeded as error:
        raise LineError(Reason.TOO_LARGE, f"{_case(message)}: {error}") from None
    except ValueError as error:
        raise _invalid(f"{_case(message)}: {error}") from None
    raise _invalid(f"{_case(message)} can't follow attend")


class SessionTokens:
    """Makes the messages to ranks, with the tokens of their lanes."""

    def __init__(self, run_id: str, secret: bytes) -> None:
        """`secret` is that of the run."""
        self._run_id = run_id
        self._secret = secret

    def message_to(self, effect: SessionMessage) -> pb.AttendResponse:
        """An effect as a message."""
        match effect:
            case SendFormed():
                formed = sessions.formed_to_proto(self._formed(effect))
                return pb.AttendResponse(formed=formed)
            case SendReportAnswer():
                answer = pb.RankReportAnswer(number=effect.number)
                return pb.AttendResponse(report_answer=answer)
            case SendOver():
                return pb.AttendResponse(over=sessions.over_to_proto(effect.over))

    def _formed(self, effect: SendFormed) -> SessionFormed:
        return SessionFormed(
            key=effect.key,
            peers=tuple(self._peer(effect, each) for each in effect.roster),
            capabilities=effect.capabilities,
            lease_s=effect.lease_s,
            report_s=effect.report_s,
        )

    def _peer(self, effect: SendFormed, request: AttendRequest) -> Peer:
        own, other = effect.rank, request.rank

        def token(sender: int, receiver: int) -> bytes:
            if own == other:
                return b""
            return tokens.peer_token(self._secret, self._run_id, effect.key, sender, receiver)

        return Peer(
            rank=other,
            node_id=request.node_id,
            address=request.address,
            shared_folder=request.shared_folder,
            token_to=token(own, other),
            token_from=token(other, own),
        )


def session_status_to(status: SessionSnapshot) -> pb.SessionStatus:
    """The sessions, for people."""
    return pb.SessionStatus(
        key=conversion.key_to_proto(status.key),
        world_size=status.world_size,
        awaited=status.awaited,
        ranks=[_rank(each) for each in status.ranks],
        age_s=status.age_s,
        last=None if status.last is None else sessions.over_to_proto(status.last),
        formed=status.formed,
    )


def _rank(rank: RankSnapshot) -> pb.RankStatus:
    request, report = rank.request, rank.report
    message = pb.RankStatus(
        rank=request.rank,
        node_id=request.node_id,
        backend=request.backend,
        device=request.device,
        state=conversion.enum_to_proto(rank.state),
        steps=report.steps,
        exchange_s=report.exchange_s,
        exchange_ratio=rank.exchange_ratio,
        bytes=report.bytes,
        calls=report.calls,
        pending=sessions.pending_to_proto(report.pending),
        silent_s=rank.silent_s,
        overflows=report.overflows,
        metrics_address=request.metrics_address,
    )
    if report.pending is not None:
        message.pending.open_s = rank.pending_s
    return message


def _said(text: str) -> str:
    return on_one_line(clipped(text))


def _case(message: pb.AttendRequest) -> str:
    return message.WhichOneof("message") or "a message that is not known"


def _invalid(text: str) -> LineError:
    return LineError(Reason.INVALID_MESSAGE, text)
