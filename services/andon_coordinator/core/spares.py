"""Spares: workers that follow the line and compute nothing, until one of its workers is lost.

Theory of operation. A spare learns, as `learning` says, and goes on learning once it has caught up:
it applies every record together with the others, and is on no roster. It takes a place at the
moments at which any learner is let in, but only if fewer workers are in sync than the line expects.
Then `LineMember.spare` is False, and nothing distinguishes it from the others any more. A Join says
again whether its worker is a spare, and that counts unless there is a place at that moment.

The line never waits for a spare. It is in no index that a rule asks for workers who are in sync or
behind, so it neither completes the number that a line waits for at its start, nor gives the initial
weights. It gets a transfer, for which the line stands still, only if a worker is missing.

A worker in its grace is not missing: it may be back before a spare has begun.

A coordinator that starts again knows no workers, and all that come may be spares, since a process
that was killed comes back as one. Those that were on the last step's roster have their places at
once; others wait until the recovery window is over, as a line does for workers.

A worker that was slow for long is a spare too (`evicting`), and not missed: it takes a place only
if fewer are in sync than there were without it. A spare that was never slow takes its place.
"""

from __future__ import annotations

from andon_coordinator.core import departures
from andon_coordinator.core.events import LeaveReason
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.state import CoreState

__all__ = ["awaiting_state", "call_in", "lacks_worker", "slow_here", "takes_place"]


def takes_place(core: CoreState, member: LineMember, in_sync: int | None = None) -> bool:
    """Whether a spare that has caught up is let in: too few workers are in sync.

    Args:
        core: the state.
        member: the spare.
        in_sync: how many are, or are about to be; None: as many as the members say.
    """
    members = core.members
    if in_sync is None:
        in_sync = members.in_sync_count(core.chain.head)
    if core.draining or core.stop_reason:
        return False
    if not core.workers_ready_once and member.worker not in core.last_roster:
        return False
    # A worker that is done leaves no place: the others are about to be done, too.
    done = any(each.left is LeaveReason.COMPLETE for each in members)
    wanted = core.expected
    if member.request.incarnation in core.evicted:
        wanted = min(wanted, core.stand)
    return not done and in_sync + members.grace_count < wanted


def lacks_worker(core: CoreState) -> bool:
    """Whether fewer workers are here than the line expects, in sync or not."""
    here = core.members.worker_count + core.members.grace_count
    return core.workers_ready_once and here + slow_here(core) < core.expected


def slow_here(core: CoreState) -> int:
    """How many workers are here that follow because they were slow for long."""
    if not core.evicted:
        return 0
    return sum(each.request.incarnation in core.evicted for each in core.members.spares())


def awaiting_state(core: CoreState) -> list[LineMember]:
    """The spares that have no state, and may get it now, by id."""
    transfers = core.transfers
    return [
        each
        for each in core.members.spares()
        if each.learning is None
        and each.accepts_state
        and not transfers.busy(each.worker)
        and transfers.may_begin(
            each.worker, each.request.node_id, core.chain.step, core.now, trains=True
        )
    ]


def call_in(core: CoreState) -> None:
    """Makes a spare join again that has the line's head, and was told that it is behind."""
    head = core.chain.head
    for member in core.members.spares():
        if member.learning is None and head is not None and member.head == head:
            if not takes_place(core, member):
                continue
            why = "a worker is missing, and this one has the line's state"
            # Now it is a worker that is missed: the line waits for it to come back.
            member.spare = False
            departures.restart(core, member, why)
