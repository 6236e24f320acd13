"""Notices: a worker whose machine is about to go gives what it has, and leaves.

Theory of operation. Once a worker has given notice it gets no new positions. It goes on with what
it has, and that counts: the open round, and what is computed beyond the head. After every event,
before anything else becomes possible, those that have nothing left to give are *released*: they are
told so, and to the line they have left. So nobody waits for one whose script evaluates, and the
next round opens without it, also if that round opens in the very event that announces a record.

What a worker has beyond the head depends on the schedule. With overlapped windows it is the window
that was computed ahead: the worker takes part in one more round, which deals it nothing ahead. With
a quorum it is what a late worker owes. In a void round it is what the worker has computed for the
next attempt, and that is dealt to the others: to keep the worker for it could take as long as the
line needs to get rid of whatever voids its rounds.

If all workers that hold the line's state give notice, the last one is not released before its state
is safe. If somebody is here that lacks the state, the worker stays until that one has it, and no
round opens meanwhile. Else, if the run writes checkpoints, it is asked to write one and to leave;
to the line it is there until it has left. If neither is possible, nothing is won by keeping it.

The worker decides how long it waits. If its time is short it leaves as any other does.
"""

from __future__ import annotations

from andon_coordinator.core import departures, late
from andon_coordinator.core.effects import NoteNotice
from andon_coordinator.core.events import NoticeGiven, WorkerLeft, WorkerStreamEnded
from andon_coordinator.core.line_state import LineState
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.state import CoreState

__all__ = ["after_release", "given", "release"]


def given(core: CoreState, member: LineMember, event: NoticeGiven) -> None:
    """A worker's machine is about to go; a second notice on the stream changes nothing."""
    if member.notice:
        return
    member.notice = event.message or "it did not say why"
    core.noticed[event.stream] = member.worker
    core.emit(NoteNotice(member.worker, member.notice))


def release(core: CoreState) -> None:
    """Sends the workers away that gave notice and have nothing left to give."""
    core.holds_alone = None
    if core.stop_reason:
        return  # They leave by themselves, with the run's weights.
    for stream in sorted(core.noticed, key=lambda stream: _keeps_best(core, stream)):
        member = core.members.on_stream(stream)
        if member is None:
            del core.noticed[stream]  # It left by itself, or was lost.
            core.keeping.discard(stream)
        elif stream in core.keeping or _has_part(core, member):
            continue
        elif not _holds_alone(core, member):
            del core.noticed[stream]
            core.released[stream] = member.worker
            departures.release_noticed(core, member)
        elif _is_awaited(core):
            core.holds_alone = member.worker
        else:
            core.keeping.add(stream)
            # It is about to leave: no round and no transfer has it.
            member.wants_work = False
            core.standing -= {member.worker}
            departures.keep_state(core, member)


def after_release(core: CoreState, event: WorkerLeft | WorkerStreamEnded) -> None:
    """A released worker says good-bye, or is gone: the checkpoint that it wrote last counts."""
    worker = core.released.pop(event.stream, None)
    if worker is not None and isinstance(event, WorkerLeft):
        core.emit(*core.checkpoints.note_written(worker, event.checkpoint, core.chain.step))


def _keeps_best(core: CoreState, stream: int) -> tuple[bool, bool]:
    """Who is released last: one that can write a checkpoint, the writer before all."""
    member = core.members.on_stream(stream)
    if member is None:
        return False, False
    return _can_write(member), member.worker == core.checkpoints.writer


def _can_write(member: LineMember) -> bool:
    plan = member.request.checkpoints
    return plan is not None and plan.every > 0


def _holds_alone(core: CoreState, member: LineMember) -> bool:
    """Whether the line's state would be lost with a worker, though it can be kept."""
    chain = core.chain
    # Initial weights are no loss, and a run that is about to end has what it was for.
    if member.head != chain.head or not chain.step or core.draining:
        return False
    spares = (each for each in core.members.spares() if each.head == chain.head)
    holders = [*core.members.in_sync(chain.head), *spares]
    if any(each is not member and each.stream not in core.keeping for each in holders):
        return False
    if core.checkpoints.step >= chain.step:
        return False
    return _is_awaited(core) or _can_write(member)


def _is_awaited(core: CoreState) -> bool:
    """Whether somebody is here that lacks the line's state and may get it."""
    members = core.members
    behind = [*members.behind(core.chain.head), *members.learners(), *members.spares()]
    trains = core.line_state not in (LineState.HALTED, LineState.COMPLETE)
    return trains and bool(core.reducers) and any(not each.notice for each in behind)


def _has_part(core: CoreState, member: LineMember) -> bool:
    """Whether anything is open that needs this worker."""
    # A pending record may be of its round: it has to be announced first.
    if core.pending_record is not None:
        return True
    round_, stream = core.round, member.stream
    assert stream is not None
    if round_ is not None and round_.has(member.worker, stream):
        return True
    if core.transfers.donates(member.worker):
        return True  # The line stands still until the other end has its state.
    if member.learning is not None:
        return member.learning.late
    policy = core.settings.policy
    keeps = policy.overlap or policy.quorum is not None
    if not keeps or member.spare or not core.attempts.assigned.get(member.worker):
        return False
    # Without a round nobody can take up what it has.
    short = late.taking_part(core) < core.needed and not core.members.any_in_grace
    return core.line_state is not LineState.HALTED and not short
