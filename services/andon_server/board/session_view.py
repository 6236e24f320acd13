"""Session view: a run's sessions as the JSON that the board's page reads."""

from __future__ import annotations

from typing import Any

from andon.protocol.sessions import SessionOver
from andon_coordinator.core.session_status import RankSnapshot, RankState, SessionSnapshot

__all__ = ["session_view"]

_MOST_NAMED = 16
"""Ranks that a list names; its count says how many there are."""
_GONE = (RankState.LEFT, RankState.OVER)


def session_view(session: SessionSnapshot) -> dict[str, Any]:
    """The sessions for the page.

    `phase` is `forming`, `live` or `over`. `last` says why the session before ended, or the one
    that is over; it is null if all of its ranks left in order.
    """
    return {
        "phase": _phase(session),
        "key": None if session.key is None else str(session.key),
        "world_size": session.world_size,
        "waiting_for": session.waiting_for,
        "age_s": session.age_s,
        "formed": session.formed,
        "last": None if session.last is None else _over(session.last),
        "ranks": [_rank(each) for each in session.ranks],
    }


def _phase(session: SessionSnapshot) -> str:
    if session.key is not None:
        return "live"
    over = session.ranks and all(each.state in _GONE for each in session.ranks)
    return "over" if over else "forming"


def _over(over: SessionOver) -> dict[str, Any]:
    fault = over.fault
    return {
        "end": over.end.label,
        "is_halt": over.end.is_halt,
        "culprit": over.culprit,
        "host": over.culprit_node,
        "message": over.message,
        "reported_by": over.reported_by,
        "call": "" if fault is None or fault.call is None else str(fault.call),
        "other_call": "" if fault is None or fault.other_call is None else str(fault.other_call),
        "parameter": "" if fault is None else fault.parameter,
        "element": [] if fault is None else list(fault.element),
        "value": "" if fault is None else fault.value,
    }


def _rank(rank: RankSnapshot) -> dict[str, Any]:
    request, report, pending = rank.request, rank.report, rank.report.pending
    return {
        "rank": request.rank,
        "host": request.node_id,
        "backend": request.backend,
        "device": request.device,
        "state": rank.state.label,
        "steps": report.steps,
        "overflows": report.overflows,
        "exchange_s": report.exchange_s,
        "exchange_ratio": rank.exchange_ratio,
        "bytes": report.bytes,
        "calls": report.calls,
        "silent_s": rank.silent_s,
        "pending": None
        if pending is None
        else {
            "text": str(pending),
            "open_s": rank.pending_s,
            "missing": list(pending.missing[:_MOST_NAMED]),
            "missing_count": len(pending.missing),
        },
    }
