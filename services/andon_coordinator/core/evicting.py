"""Evicting: carries out what `eviction` finds about slow workers.

One that should follow joins again, as a spare that nobody missed (`spares`): it learns, applies
every record, and computes nothing. That takes back no sample, since no round is open. It takes part
again once fewer workers are in sync than there were after it went. A new process in its slot is no
spare, so a person brings it back by starting its process again.

The line keeps it

- if fewer than two others were left, or fewer than a round needs,
- if it can't follow (`departures.can_be_followed`),
- while it sends its state to somebody, or writes a checkpoint, and if nobody else could write one.

The journal has who follows, so a coordinator that starts again leaves it at that. How slow the
others are it measures anew.
"""

from __future__ import annotations

from andon.protocol.capabilities import LEARNING
from andon_coordinator.core import departures
from andon_coordinator.core.effects import NoteSlow, SaveEviction
from andon_coordinator.core.eviction import SlowStep
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.state import CoreState

__all__ = ["came_back", "look"]

_FEWEST = 2
"""So many workers stand at least, whoever is slow."""


def look(core: CoreState) -> None:
    """Tells of workers that are dealt less, and lets one follow; no round is open."""
    slow = core.pacing.slow
    if slow is None:
        return
    for process, what, why in slow.news():
        core.emit(NoteSlow(process.worker, what, why))
    if core.attempts.attempt:
        return  # Its gradients were kept, and would have to be computed again.
    for process, why in slow.should_follow.items():
        member = core.members.get(process.worker)
        if member is None or member.process != process or not _can_do_without(core, member):
            continue
        slow.forget(process)
        core.evicted[process.incarnation] = why
        core.stand = core.members.in_sync_count(core.chain.head) - 1
        core.emit(SaveEviction(process.incarnation, why, core.stand))
        core.emit(NoteSlow(member.worker, SlowStep.FOLLOWS, why))
        # Within its grace it is not lost: nobody's samples did this, and it is about to be back.
        departures.restart(core, member, f"it is {why}, and follows")
        return  # The next one, if the line can do without it too, once this one is back.


def _can_do_without(core: CoreState, member: LineMember) -> bool:
    """Whether the line goes on well without a worker, which can follow it."""
    members, head = core.members, core.chain.head
    in_sync = member.head == head and member.learning is None and not member.spare
    if not in_sync or member.stream is None or members.any_in_grace:
        return False
    if members.in_sync_count(head) - 1 < max(_FEWEST, core.needed):
        return False
    if not (LEARNING in member.request.capabilities and departures.can_be_followed(core)):
        return False
    if len(core.transfers) or core.snapshots.busy(member.worker):
        return False
    checkpoints = core.checkpoints
    if checkpoints.writer != member.worker:
        return True
    others = (each for each in members.in_sync(head) if each is not member)
    return not checkpoints.begun and any(each.request.checkpoints is not None for each in others)


def came_back(core: CoreState, member: LineMember) -> None:
    """A worker takes part: if it followed, that is over."""
    why = core.evicted.pop(member.request.incarnation, None)
    if why is not None:
        core.emit(SaveEviction(member.request.incarnation, "", core.stand))
        core.emit(NoteSlow(member.worker, SlowStep.BACK, f"a worker is missing; it was {why}"))
