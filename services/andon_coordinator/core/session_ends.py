"""How a session ends: what ranks are told, and the evidence of a halt."""

from __future__ import annotations

from dataclasses import dataclass

from andon.protocol.halts import HaltEvidence
from andon.protocol.peer_calls import CallKind
from andon.protocol.sessions import RankFault, SessionEnd, SessionOver
from andon_coordinator.core.session_roster import Attended, Session
from andon_coordinator.core.session_words import HALT_REASONS, message_of

__all__ = ["Ending", "difference", "evidence_of", "over_of"]


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a session ends."""

    end: SessionEnd
    culprit: Attended | None = None
    """The rank at fault; None: no single one is."""
    what: str = ""
    """What the coordinator saw itself."""
    fault: RankFault | None = None
    reporter: Attended | None = None
    """The rank that reported the fault; None: none did."""


def over_of(session: Session, ending: Ending, halt_id: int) -> SessionOver:
    """What all ranks are told."""
    culprit, reporter = ending.culprit, ending.reporter
    return SessionOver(
        key=session.key,
        end=ending.end,
        culprit=None if culprit is None else culprit.request.rank,
        culprit_node="" if culprit is None else culprit.request.node_id,
        message=message_of(
            ending.end,
            "" if culprit is None else culprit.name,
            ending.what,
            None if reporter is None else ending.fault,
            "" if reporter is None else reporter.name,
        ),
        fault=ending.fault,
        reported_by=None if reporter is None else reporter.request.rank,
        halt_id=halt_id,
    )


def evidence_of(session: Session, over: SessionOver, wall: float) -> HaltEvidence:
    """The evidence of an end that is a halt."""
    fault = over.fault
    return HaltEvidence(
        id=over.halt_id,
        reason=HALT_REASONS[over.end],
        step=session.steps,
        key=session.key,
        worker=over.culprit,
        parameter="" if fault is None else fault.parameter,
        element=() if fault is None else fault.element,
        value="" if fault is None else fault.value,
        message=over.message,
        at_unix_s=wall,
        reported_by=over.reported_by,
    )


def difference(session: Session, rank: Attended) -> RankFault | None:
    """That another rank is in the call that `rank` is in, and made it differently; None: none is.

    A call's place never gets another call, so a report may be old and still tell the truth. SENDs
    are counted by pair and tag, and only their two ranks can compare them.
    """
    mine = rank.report.pending
    if mine is None or mine.call.kind is CallKind.SEND:
        return None
    for other in session.present:
        theirs = other.report.pending
        if other is rank or theirs is None or theirs.call.kind is CallKind.SEND:
            continue
        same_place = (theirs.group, theirs.sequence) == (mine.group, mine.sequence)
        if same_place and theirs.call != mine.call:
            return RankFault(
                end=SessionEnd.CALLS_DIFFER,
                culprit=None,
                message=f"{rank.name} makes {mine}, and {other.name} makes {theirs.call}",
                call=mine,
                other_call=theirs,
            )
    return None
