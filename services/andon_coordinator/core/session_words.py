"""How people read the end of a session: who, what, and the remedy."""

from __future__ import annotations

from andon.protocol.halts import HaltReason, indexed
from andon.protocol.limits import clipped
from andon.protocol.sessions import RankFault, SessionEnd

__all__ = ["HALT_REASONS", "message_of", "name_of"]

HALT_REASONS = {
    SessionEnd.NON_FINITE: HaltReason.NON_FINITE_GRADIENT,
    SessionEnd.NON_FINITE_REDUCTION: HaltReason.NON_FINITE_AVERAGE,
    SessionEnd.OPERATOR: HaltReason.OPERATOR,
}
"""What a halt of a session is called where halts are counted."""

_REMEDIES = {
    SessionEnd.RANK_LOST: "its own output may say why: start all ranks again",
    SessionEnd.NON_FINITE: "no rank has the result",
    SessionEnd.NON_FINITE_REDUCTION: "no rank has the result",
    SessionEnd.CALLS_DIFFER: "all ranks of a group make the same calls in the same order",
    SessionEnd.RANK_LEFT: "all ranks make the same number of steps",
    SessionEnd.UNREACHABLE: "look at firewalls and at the address that the rank announces",
    SessionEnd.SCRIPT_FAILED: "its own output has the traceback",
    SessionEnd.REPLACED: "give each process a rank of its own",
    SessionEnd.SERVICE_LEAVING: "start the ranks again once it serves",
}


def name_of(rank: int, node_id: str) -> str:
    """A rank as people write it: `rank 1 on beta`."""
    return f"rank {rank} on {node_id}" if node_id else f"rank {rank}"


def message_of(
    end: SessionEnd, culprit: str, what: str, fault: RankFault | None, reporter: str
) -> str:
    """The sentence for people.

    Args:
        end: why the session ended.
        culprit: the accused rank's name; empty if no single one is.
        what: what happened, if the coordinator saw it itself.
        fault: what a rank reported, if one did.
        reporter: that rank's name.
    """
    fact = what if fault is None else _fact(fault)
    text = f"{culprit} {fact}" if culprit and fact else fact or culprit or end.label
    if fault is not None and culprit and reporter and reporter != culprit:
        text += f", says {reporter}"
    remedy = _REMEDIES.get(end, "")
    return clipped(f"{text}; {remedy}" if remedy else text)


def _fact(fault: RankFault) -> str:
    where = f" in {fault.call}" if fault.call is not None else ""
    index = indexed("", fault.element)
    match fault.end:
        case SessionEnd.NON_FINITE if fault.value:
            place = f"{fault.parameter}{index}" if fault.parameter else f"element {index} of it"
            gave = f"gave {fault.value} in {place}" if fault.parameter or index else fault.value
            return f"{gave}{where}"
        case SessionEnd.CALLS_DIFFER if fault.call is not None and fault.other_call is not None:
            return f"makes {fault.other_call}, where another rank makes {fault.call}"
    defaults = {
        SessionEnd.UNREACHABLE: "can't be reached",
        SessionEnd.RANK_LEFT: "has ended its part while it is needed",
        SessionEnd.CORRUPT: "sent what breaks the protocol",
        SessionEnd.SCRIPT_FAILED: "failed",
        SessionEnd.NON_FINITE: "gave a value that is not finite",
        SessionEnd.NON_FINITE_REDUCTION: "all inputs were finite, and their reduction was not",
    }
    said = f": {fault.message}" if fault.message else ""
    return f"{defaults.get(fault.end, fault.end.label)}{where}{said}"
