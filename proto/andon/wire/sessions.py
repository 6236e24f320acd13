"""Sessions and calls as messages, and back with every rule checked.

As in `conversion`: `x_to_proto` takes a plain value, and `x_from_proto` returns one or raises
WireError.
"""

from __future__ import annotations

from andon.protocol.limits import (
    COUNT_LIMIT,
    MAX_DIMENSIONS,
    MAX_SCALAR_NAME_BYTES,
    MAX_TEXT_BYTES,
    clipped,
    on_one_line,
    require_at_most,
)
from andon.protocol.peer_calls import MAX_WORLD_SIZE, Call, CallKind, PendingCall
from andon.protocol.scalars import require_scalar_name
from andon.protocol.sessions import (
    Peer,
    RankFault,
    RankReport,
    SessionEnd,
    SessionFormed,
    SessionOver,
)
from andon.v1 import session_pb2 as pb
from andon.wire import conversion
from andon.wire.conversion import WireError, reading

__all__ = [
    "MAX_REPORTED_NUMBERS",
    "call_from_proto",
    "call_to_proto",
    "fault_from_proto",
    "fault_to_proto",
    "formed_from_proto",
    "formed_to_proto",
    "over_from_proto",
    "over_to_proto",
    "pending_from_proto",
    "pending_to_proto",
    "report_from_proto",
    "report_to_proto",
]

MAX_REPORTED_NUMBERS = 64
"""Numbers for the curves in one report."""

_MAX_WORD_BYTES = 64
"""Bytes of the name of an element type, or of a reduction."""


def call_to_proto(call: Call) -> pb.Call:
    """A call."""
    return pb.Call(
        kind=conversion.enum_to_proto(call.kind),
        dtype=call.dtype,
        count=call.count,
        reduction=call.reduction,
        root=0 if call.root is None else call.root + 1,
        tag=call.tag,
        tensors=call.tensors,
    )


def call_from_proto(message: pb.Call) -> Call:
    """A call.

    Raises:
        WireError: its kind is not known, or no rank can mean it.
    """
    with reading(message):
        for word in (message.dtype, message.reduction):
            require_at_most(len(word.encode()), _MAX_WORD_BYTES, "bytes in a word of a call")
        return Call(
            kind=conversion.enum_from_proto(CallKind, message.kind),
            dtype=message.dtype,
            count=message.count,
            reduction=message.reduction,
            root=message.root - 1 if message.root else None,
            tag=message.tag,
            tensors=message.tensors,
        )


def pending_to_proto(pending: PendingCall | None) -> pb.PendingCall | None:
    """A call that is open; None for None."""
    if pending is None:
        return None
    return pb.PendingCall(
        group_name=clipped(pending.group_name),
        group=pending.group,
        sequence=pending.sequence,
        call=call_to_proto(pending.call),
        open_s=pending.open_s,
        missing=pending.missing,
    )


def pending_from_proto(message: pb.PendingCall) -> PendingCall:
    """A call that is open.

    Raises:
        WireError: see `call_from_proto`; or it misses more ranks than there can be.
    """
    require_at_most(len(message.missing), MAX_WORLD_SIZE, "ranks that are missing")
    return PendingCall(
        group_name=_said(message.group_name),
        group=message.group,
        sequence=message.sequence,
        call=call_from_proto(message.call),
        open_s=_seconds("open_s", message.open_s),
        missing=tuple(message.missing),
    )


def report_to_proto(report: RankReport) -> pb.RankReport:
    """A report, without its key and its number."""
    return pb.RankReport(
        steps=report.steps,
        exchange_s=report.exchange_s,
        bytes=report.bytes,
        calls=report.calls,
        pending=pending_to_proto(report.pending),
        numbers=[
            pb.NamedNumber(name=name, step=step, value=value)
            for name, step, value in report.numbers[:MAX_REPORTED_NUMBERS]
        ],
        overflows=report.overflows,
    )


def report_from_proto(message: pb.RankReport) -> RankReport:
    """A report.

    Raises:
        WireError: a count, a name or a call is illegal.
        LimitExceeded: it has too many numbers.
    """
    require_at_most(len(message.numbers), MAX_REPORTED_NUMBERS, "numbers in a report")
    for each in message.numbers:
        require_at_most(len(each.name), MAX_SCALAR_NAME_BYTES, "characters in a number's name")
    with reading(message):
        for each in message.numbers:
            require_scalar_name(each.name)
            _count("step", each.step)
        return RankReport(
            steps=_count("steps", message.steps),
            exchange_s=_seconds("exchange_s", message.exchange_s),
            bytes=message.bytes,
            calls=_count("calls", message.calls),
            pending=pending_from_proto(message.pending) if message.HasField("pending") else None,
            numbers=tuple((each.name, each.step, each.value) for each in message.numbers),
            overflows=_count("overflows", message.overflows),
        )


def fault_to_proto(fault: RankFault) -> pb.RankFault:
    """A fault, without its key."""
    message = pb.RankFault(
        end=conversion.enum_to_proto(fault.end),
        message=clipped(fault.message),
        call=pending_to_proto(fault.call),
        other_call=pending_to_proto(fault.other_call),
        parameter=clipped(fault.parameter),
        element=fault.element,
        value=clipped(fault.value),
    )
    if fault.culprit is not None:
        message.culprit = fault.culprit
    return message


def fault_from_proto(message: pb.RankFault, *, reported: bool = True) -> RankFault:
    """A fault.

    Args:
        message: it.
        reported: whether a rank says it, so that the ends which are not a rank's are refused.

    Raises:
        WireError: it is no end that a rank may report, or a call is illegal.
        LimitExceeded: the element has too many dimensions.
    """
    require_at_most(len(message.element), MAX_DIMENSIONS, "dimensions of an element")
    with reading(message):
        end = conversion.enum_from_proto(SessionEnd, message.end)
        if reported and not end.from_ranks:
            raise WireError(f"RankFault: a rank does not report {end.label}")
        return RankFault(
            end=end,
            culprit=message.culprit if message.HasField("culprit") else None,
            message=_said(message.message),
            call=pending_from_proto(message.call) if message.HasField("call") else None,
            other_call=pending_from_proto(message.other_call)
            if message.HasField("other_call")
            else None,
            parameter=_said(message.parameter),
            element=tuple(message.element),
            value=_said(message.value),
        )


def over_to_proto(over: SessionOver) -> pb.SessionOver:
    """How a session ended."""
    message = pb.SessionOver(
        key=conversion.key_to_proto(over.key),
        end=conversion.enum_to_proto(over.end),
        culprit_node=over.culprit_node,
        message=clipped(over.message),
        fault=None if over.fault is None else fault_to_proto(over.fault),
        halt_id=over.halt_id,
    )
    if over.culprit is not None:
        message.culprit = over.culprit
    if over.reported_by is not None:
        message.reported_by = over.reported_by
    return message


def over_from_proto(message: pb.SessionOver) -> SessionOver:
    """How a session ended. An unknown cause is an end, too: it is called SERVICE_LEAVING.

    Raises:
        WireError: a field is illegal.
    """
    known = {each.value for each in SessionEnd}
    text = message.message
    if message.end not in known:
        text = f"end {message.end}, unknown to this version: {text}"
    end = SessionEnd(message.end) if message.end in known else SessionEnd.SERVICE_LEAVING
    return SessionOver(
        key=conversion.optional_key_from_proto(message.key),
        end=end,
        culprit=message.culprit if message.HasField("culprit") else None,
        culprit_node=_said(message.culprit_node),
        message=_said(text),
        fault=fault_from_proto(message.fault, reported=False)
        if message.HasField("fault")
        else None,
        reported_by=message.reported_by if message.HasField("reported_by") else None,
        halt_id=message.halt_id,
    )


def formed_to_proto(formed: SessionFormed) -> pb.SessionFormed:
    """The terms of a session."""
    return pb.SessionFormed(
        key=conversion.key_to_proto(formed.key),
        peers=[
            pb.Peer(
                rank=peer.rank,
                node_id=peer.node_id,
                address=peer.address,
                shared_folder=peer.shared_folder,
                token_to=peer.token_to,
                token_from=peer.token_from,
            )
            for peer in formed.peers
        ],
        capabilities=sorted(formed.capabilities),
        lease_s=formed.lease_s,
        report_s=formed.report_s,
    )


def formed_from_proto(message: pb.SessionFormed) -> SessionFormed:
    """The terms of a session.

    Raises:
        WireError: ranks are missing or out of order, or a time is no time.
    """
    require_at_most(len(message.peers), MAX_WORLD_SIZE, "ranks")
    with reading(message):
        if [peer.rank for peer in message.peers] != list(range(len(message.peers))):
            raise WireError("SessionFormed: its ranks are not 0, 1 and so on")
        lease_s = _seconds("lease_s", message.lease_s)
        report_s = _seconds("report_s", message.report_s)
        if not 0 < report_s <= lease_s:
            raise WireError(f"SessionFormed: reports every {report_s} s, a lease of {lease_s} s")
        return SessionFormed(
            key=conversion.key_from_proto(message.key),
            peers=tuple(
                Peer(
                    rank=peer.rank,
                    node_id=_said(peer.node_id),
                    address=peer.address,
                    shared_folder=peer.shared_folder,
                    token_to=peer.token_to,
                    token_from=peer.token_from,
                )
                for peer in message.peers
            ),
            capabilities=frozenset(message.capabilities),
            lease_s=lease_s,
            report_s=report_s,
        )


def _said(text: str) -> str:
    """A peer's text for people."""
    return on_one_line(clipped(text, MAX_TEXT_BYTES))


def _count(name: str, number: int) -> int:
    if number >= COUNT_LIMIT:
        raise ValueError(f"{name} is {number}, but a count is below {COUNT_LIMIT}")
    return number


def _seconds(name: str, number: float) -> float:
    if not 0 <= number < COUNT_LIMIT:  # Not for NaN either.
        raise ValueError(f"{name} is {number}, which is no time")
    return number
