"""Late workers: a window goes on without them, and their change is in a later record.

Theory of operation. A round opens with everybody in sync, as ever. Each member says when it has
computed its share (`computed`). Once a quorum has, and it is not worth waiting for the rest
(`quorum`), the round is withdrawn, which costs no attempt and no back-off. Those that have computed
send the same change again in the next attempt. The others are told that they are *late*, and go on
computing. From then on they are learners that have their state (`learning`): they hear the rounds
of the others, and make them up. So they come back as learners do. What they hold stays out of the
rounds meanwhile (`dealing`), and is on the next roster with them.

The next attempt opens once every late worker listens, so that it can follow. One that does not in
time is gone on without, and learns like any other.

A worker that comes back while a round is open has computed, so it counts for that round's quorum.
If it is asked to wait although no member has computed, the round is withdrawn for it: nothing was
sent, so nothing is lost. But not if a member came into the round by a standing request: the next
round would wait for it to ask again, and it may stand still.

Nobody is left out of more than `max_late` records in a row: no round opens without one that was.
"""

from __future__ import annotations

from collections.abc import Sequence

from andon.protocol.records import Record, RecordKind
from andon.protocol.shards import subtract
from andon_coordinator.core import departures
from andon_coordinator.core.effects import SendLate
from andon_coordinator.core.events import WorkerComputed
from andon_coordinator.core.learner import Learning
from andon_coordinator.core.line_state import LineState
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.quorum import OpenWindow, Working, late_workers, needed
from andon_coordinator.core.round import StepRound
from andon_coordinator.core.state import CoreState

__all__ = ["assigned", "came_back", "computed", "holds_up", "look", "recorded", "taking_part"]

_FIRST_S = 1.0
"""A late worker may take so long to listen, as long as nobody has done it."""
_LEAST_S, _TIMES = 0.1, 4.0
"""Later so many times the longest of the last answers, but never less."""


# ------------------------------------------------------------------------------ what is known


def taking_part(core: CoreState) -> int:
    """How many workers are in sync, or late."""
    return core.members.in_sync_count(core.chain.head) + len(core.members.late())


def assigned(core: CoreState, round_: StepRound, roster: Sequence[LineMember]) -> None:
    """A round opens: its members compute what they were assigned."""
    if core.settings.policy.quorum is None:
        return
    for member, share in zip(roster, round_.shares, strict=True):
        if share and not subtract(share, member.pace.done):
            # It has said so in an earlier attempt. Without this, workers that have all computed
            # could make each other late for ever: whoever is heard first, before the rest is.
            round_.computed.add(member.worker)
        member.pace.assigned(share, core.now)


def came_back(core: CoreState, member: LineMember) -> None:
    """A late worker is in sync again: it has computed what it holds."""
    member.pace.computed(core.attempts.assigned.get(member.worker, ()), core.now)


def computed(core: CoreState, member: LineMember, event: WorkerComputed) -> None:
    """A worker has computed its share of a round."""
    round_ = core.round
    if round_ is None or event.key != round_.key or not round_.has(member.worker, event.stream):
        return
    # It is at this round, also if it came there by a standing request: if the round is made void,
    # it waits for the next one.
    member.wants_work = True
    if member.worker not in round_.computed:
        round_.computed.add(member.worker)
        member.pace.computed(round_.shares[round_.rank_of[member.worker]], core.now)


def recorded(core: CoreState, record: Record) -> None:
    """A record is durable: who is in it, who was left out. A MARK drops what is computed."""
    if record.kind is not RecordKind.STEP:
        for each in core.members:
            each.pace.recorded()
        return
    for worker in record.roster:
        member = core.members.get(worker)
        if member is not None:
            member.left_out = 0
            member.pace.recorded()
    for member in core.members.late():
        if member.worker not in record.roster:
            member.left_out += 1


# ------------------------------------------------------------------------- an open round


def look(core: CoreState) -> None:
    """Goes on without workers that are late, if a quorum of the open round has computed."""
    round_, part = core.round, core.settings.policy.quorum
    if round_ is None or part is None or round_.whole:
        return
    if core.line_state is not LineState.RUNNING or core.stop_wanted:
        return
    late = core.members.late()
    back = [each for each in late if _is_back(core, each)]
    # One whose positions were skipped, or went to others, has nothing to send.
    bring = [each for each in back if core.attempts.assigned.get(each.worker)]
    workers, working = len(round_.roster) + len(late), _working(core, round_)
    if not working:
        return  # It completes by itself.
    # Nobody gains by going on with those alone that have no share.
    shares = (round_.shares[round_.rank_of[worker]] for worker in round_.computed)
    done = sum(1 for share in shares if share) + len(bring)
    if done >= needed(part, workers):
        if round_.quorum_at is None:
            round_.quorum_at = core.now
        window = OpenWindow(
            workers=workers,
            done=done,
            positions=sum(len(ranges) for share in round_.shares for ranges in share),
            usual_s=_usual_s(core, round_),
            reached_at=round_.quorum_at,
        )
        found = late_workers(window, working, core.settings.grace_s, core.now)
        if found:
            _go_on_without(core, round_, found, back)
            return
    if back and not round_.computed and _all_asked(core, round_):
        _recall(core, back)
        core.withdraw(f"worker {back[0].worker} is back")


def _is_back(core: CoreState, member: LineMember) -> bool:
    """Whether a late worker has computed what it owes, and is at the line's head."""
    learning = member.learning
    assert learning is not None
    here = member.head == core.chain.head and member.wants_work
    return here and not learning.in_void_round


def _all_asked(core: CoreState, round_: StepRound) -> bool:
    """Whether the next round need not wait for a member of this one to ask again."""
    members = map(core.members.get, round_.roster)
    return all(member is not None and member.wants_work for member in members)


def _working(core: CoreState, round_: StepRound) -> list[Working]:
    found = []
    for worker, share in zip(round_.roster, round_.shares, strict=True):
        member = core.members.get(worker)
        # One without positions has nothing to compute.
        if share and worker not in round_.computed and member is not None:
            found.append(
                Working(
                    worker=worker,
                    positions=sum(map(len, share)),
                    expected_at=member.pace.expected_at,
                    may_be_late=member.left_out < core.settings.policy.max_late,
                )
            )
    return found


def _usual_s(core: CoreState, round_: StepRound) -> float:
    """How long workers take for a share; before anybody knows: since the round was opened."""
    known = sorted(
        member.pace.took_s
        for member in map(core.members.get, round_.roster)
        if member is not None and member.pace.took_s is not None
    )
    return known[len(known) // 2] if known else core.now - round_.opened_at


def _go_on_without(
    core: CoreState, round_: StepRound, workers: tuple[int, ...], back: Sequence[LineMember]
) -> None:
    _recall(core, back)
    which = ", ".join(map(str, workers))
    text = f"the window goes on without worker {which}, which computes"
    core.withdraw(text, untold=workers)
    for worker in workers:
        member = core.members.get(worker)
        assert member is not None
        assert member.stream is not None
        # After the round is void: this one is told by another message, and was not in the round as
        # one that attends.
        member.learning = Learning.of_late(core.chain.step, core.now)
        member.wants_work = False
        core.emit(SendLate(member.stream, round_.key))


def _recall(core: CoreState, back: Sequence[LineMember]) -> None:
    """The next round may wait for these to ask again: they attend the one that is made void."""
    for member in back:
        assert member.learning is not None
        member.learning.recalled_at = core.now


# ------------------------------------------------------------------------- the next round


def holds_up(core: CoreState) -> bool:
    """Whether the next round waits for a late worker; goes on without one that takes too long."""
    if core.settings.policy.quorum is None:
        return False
    waits, patience_s = False, _patience_s(core)
    for member in core.members.late():
        learning = member.learning
        assert learning is not None
        if not learning.listening:
            if core.now < learning.began_at + patience_s:
                waits = True
            else:
                why = f"it was late, and did not listen within {patience_s:.1f} s"
                departures.go_on_without(core, member, why)
            continue
        recalled = learning.recalled_at
        waits = waits or (recalled is not None and core.now < recalled + patience_s)
        waits = waits or member.left_out >= core.settings.policy.max_late
    # Late workers may be all that there is.
    return waits or not core.members.in_sync_count(core.chain.head)


def _patience_s(core: CoreState) -> float:
    answers = core.late_answers_s
    usual_s = max(_LEAST_S, _TIMES * max(answers)) if answers else _FIRST_S
    return max(usual_s, min(core.crowd.answer_s, core.settings.liveness.lease_s))
