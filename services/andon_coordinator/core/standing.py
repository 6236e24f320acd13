"""Standing requests: the next assignment comes with the commit, without a round trip of its own.

A worker that will want the next step, whatever the commit says, asks for it with its StepReady.
Once the record is durable, the round after it opens in the same event, and each member gets its
assignment together with the record.

A standing request is good for that one event. It is not what `LineMember.wants_work` is, which says
that a script waits in its loop: a script that has heard of a commit may first take a checkpoint,
evaluate, average a number or leave. So wherever the line has anything else to do (state to move,
a checkpoint to be taken, a halt to be answered), or if one member does not stand, the round does
not open. Nobody has to be told: a worker whose record came without an assignment asks as ever.

A member of a round that was opened like this may turn out to do something else first. If it only
takes long, the others wait, as they would for its request. If it averages a number or leaves the
epoch, the round is withdrawn, and each asks for itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from andon_coordinator.core import learning, syncing
from andon_coordinator.core.events import StandingRequest
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.round import PendingRecord, StepRound
from andon_coordinator.core.state import CoreState

__all__ = ["asked_in", "suffices", "take"]


def asked_in(round_: StepRound) -> dict[int, StandingRequest]:
    """The standing requests of a round, by the stream that each came on."""
    streams = dict(zip(round_.roster, round_.streams, strict=True))
    asked = ((streams[worker], ready.next) for worker, ready in round_.ready.items())
    return {stream: request for stream, request in asked if request is not None}


def take(core: CoreState, pending: PendingRecord, able: Iterable[LineMember]) -> None:
    """Counts the standing requests of a round whose record has just become the head.

    They are forgotten when the present event is over.
    """
    result = pending.result
    if result is None or core.chain.cursor.epoch != result.epoch:
        return  # The epoch is over: scripts evaluate, or end.
    standing = set()
    for member in able:
        # By its stream: a worker that joined again since then knows nothing of its request.
        request = pending.standing.get(member.stream or 0)
        if request is not None:
            written, step = request.checkpoint, core.chain.step
            core.emit(*core.checkpoints.note_written(member.worker, written, step, member.request))
            core.checkpoints.note_begun(member.worker, request.checkpoint_begun, core.chain.step)
            member.ring_address = request.ring_address
            standing.add(member.worker)
    core.standing = frozenset(standing)


def suffices(core: CoreState) -> bool:
    """Whether the next round may open because all its members stand."""
    if not core.standing:
        return False
    # By name: some of those that stood may have left in this very event, and who is left may not.
    if any(each.worker not in core.standing for each in core.members.in_sync(core.chain.head)):
        return False
    # Its writer says in its next request that it has taken it.
    if core.checkpoints.is_due_after(core.chain.step):
        return False
    # Only a worker that asks can give its state, and it never would if rounds followed each other.
    return not (syncing.awaiting_state(core) or learning.awaits_snapshot(core))
