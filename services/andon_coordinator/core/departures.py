"""Departures: workers leave, are lost or are cut off, reducers are lost; when a run is complete.

A member of the open round that goes away, worker or reducer, voids the round (rule 5). A worker
whose stream broke may come back within a grace period. After that it counts as lost, and the others
go on without it.

By default a slow worker only shows in the status. If the line has a straggler time-out, a worker
that the others have waited for that long is cut off, and they go on without it. It may join again,
as any lost worker may. A worker counts as slow while another one waits for it:

- between two steps, if it has not asked for work and another one has; with a quorum also if it is
  late, and the next window waits for everybody (`dealing`) or for it (`max_late`);
- in a round, if another one holds all averages and it does not;
- in a round in which nobody holds them yet, if it reports that it still loads or computes, and
  another one has sent its gradient and waits. Among workers that exchange, nobody can tell the slow
  sender from those that wait for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from andon.protocol.capabilities import LEARNING
from andon.protocol.halts import HaltReason
from andon.protocol.records import Key
from andon.protocol.run_settings import Topology
from andon_coordinator.core.defects import LineDefect
from andon_coordinator.core.effects import CloseStream, EndSession, SaveDeparture, SendShutdown
from andon_coordinator.core.events import (
    LeaveReason,
    ReducerLost,
    WorkerLeft,
    WorkerStopped,
    WorkerStreamEnded,
)
from andon_coordinator.core.line_state import LineState
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.state import CoreState

__all__ = [
    "can_be_followed",
    "cancel_transfer",
    "cut_off",
    "detach",
    "drop",
    "go_on_without",
    "has_last_weights",
    "is_complete",
    "keep_state",
    "left",
    "look_for_silence",
    "look_for_stragglers",
    "lose",
    "not_gone",
    "reducer_lost",
    "release",
    "release_noticed",
    "remove_reducer",
    "restart",
    "restart_learners",
    "stopped",
    "stream_ended",
]

_BETWEEN_TRIES_S = 4.0
"""A process whose connection broke, and that lives, has tried to join again by then."""


# -------------------------------------------------------------------------- a worker goes away


def stream_ended(core: CoreState, member: LineMember, event: WorkerStreamEnded) -> None:
    """A stream broke: its round is void at once, its worker is lost after the grace."""
    why = _how_it_ended(core, member, event)
    over = bool(core.stop_reason) or any(core.departed.values())
    if over:
        # The run is over, so nobody waits for this decision. A worker that comes back must not be
        # refused though, and a network outage may last as long as a lease.
        grace_s = core.settings.liveness.lease_s
    else:
        # Most often its process has ended, and no process comes back within the grace.
        grace_s = 0.0 if event.gone else core.settings.rejoin_grace_s
    member.gave_up = member.learning
    detach(core, member, why, grace_s=grace_s)


def _how_it_ended(core: CoreState, member: LineMember, event: WorkerStreamEnded) -> str:
    """What is known of a stream's end. Nobody here knows whether the process lives."""
    if not event.gone:
        return "its stream ended"
    if not _is_silent(core, member):
        return "its connection broke"
    # Its pings were not answered: it was stopped, or its host or the network is gone.
    return f"silent for {core.now - member.heard_at:.0f} s"


def _is_silent(core: CoreState, member: LineMember) -> bool:
    """Whether it was not heard for two heartbeats: it is stopped, or cut off, or its host is."""
    return core.now - member.heard_at >= 2 * core.settings.liveness.heartbeat_s


def stopped(core: CoreState, member: LineMember, event: WorkerStopped) -> None:
    """A worker's process is stopped: the others go on without it, if they wait for it now.

    To be wrong costs little. If the process goes on it joins again, and learns what it missed while
    the others train. A worker that can't learn, and a line that would need it, have their lease.
    """
    if not (LEARNING in member.request.capabilities and can_be_followed(core)):
        return
    # A window is long, and nobody waits for a worker in the middle of it: its part would be lost.
    if core.settings.policy.local_steps:
        return
    if not _is_waited_for(core, member):
        return
    if core.members.in_sync_count(core.chain.head) - 1 < core.needed:
        return
    go_on_without(core, member, f"its process has been stopped for {event.seconds:.1f} s")


def go_on_without(core: CoreState, member: LineMember, why: str) -> None:
    """Cuts off a member that gives no sign; it may come back at any time, and learns then."""
    # Before its stream is closed: averages on their way to it would fill the reducers' room.
    core.emit(EndSession(member.worker))
    # No sample stops a process, or silences it, so none is suspected of it.
    cut_off(core, member, f"{why}: join again", why, grace_s=0.0, crash=False)
    # It is not known to have ended, whatever its heartbeats say: it tries once it goes on.
    member.expected_until = core.now + core.settings.liveness.reconnect_s


def can_be_followed(core: CoreState) -> bool:
    """Whether the line trains in a way that a learner can follow."""
    star = core.settings.policy.topology is Topology.STAR
    # Before the first step there is nothing to go on with meanwhile: a transfer is faster.
    return star and bool(core.last_roster) and not (core.draining or core.stop_reason)


def _is_waited_for(core: CoreState, member: LineMember) -> bool:
    """Whether the present round, or the next one, can't go on without a member."""
    if not _trains(core) or len(core.transfers):
        return False
    round_, members, head = core.round, core.members, core.chain.head
    if round_ is not None:
        return member.worker in round_.rank_of and member.worker not in round_.ready
    takes_part = member.learning is None and not member.spare
    late = takes_part and member.head == head and not member.wants_work
    return late and members.in_sync_count(head) > members.idle_count(head)


def left(core: CoreState, member: LineMember, event: WorkerLeft) -> None:
    """A worker leaves on purpose."""
    core.emit(*core.checkpoints.note_written(member.worker, event.checkpoint, core.chain.step))
    _leave_stream(core, member, f"worker {member.worker} left: {event.reason.name.lower()}")
    member.left = event.reason
    member.final_digest = event.digest
    member.final_head = event.digest_head
    member.final_base_hashed = event.digest_base_hashed
    core.emit(
        SaveDeparture(member.worker, event.reason, event.message, event.final_step, event.digest)
    )
    ends = has_last_weights(member.worker, event.final_step, core.last_roster, core.chain.step)
    core.note_departure(member.worker, in_order=event.reason.in_order and ends)
    if event.reason is LeaveReason.FAILED:
        _count_loss(core, member)


def release_noticed(core: CoreState, member: LineMember) -> None:
    """Sends a worker away that gave notice; it has no part in anything that is open."""
    assert member.stream is not None
    why = f"notice: {member.notice}"
    core.emit(SendShutdown(member.stream, f"the line goes on without this worker ({why})"))
    _leave_stream(core, member, f"worker {member.worker} left: {why}")
    member.left = LeaveReason.INTERRUPTED
    member.knows_the_end = True
    core.emit(SaveDeparture(member.worker, LeaveReason.INTERRUPTED, why, member.step, b""))
    core.note_departure(member.worker, in_order=False)


def keep_state(core: CoreState, member: LineMember) -> None:
    """Asks a worker that gave notice for a checkpoint: it alone holds the line's state.

    It is on the line until its Leave, which names the checkpoint.
    """
    assert member.stream is not None
    message = f"nobody else holds step {core.chain.step} (notice: {member.notice})"
    core.emit(SendShutdown(member.stream, message, keep_state=True))
    member.knows_the_end = True


def detach(
    core: CoreState, member: LineMember, why: str, *, grace_s: float, crash: bool = True
) -> None:
    """A member's stream is over; the member may come back within the grace.

    `crash` says whether its samples may have caused this.
    """
    if member.spare:
        grace_s = 0.0  # No round opens while one is in its grace, and nobody waits for a spare.
    member.expected_until = _expected_until(core, member)
    _leave_stream(core, member, f"worker {member.worker}: {why}", crash=crash)
    member.grace_until = core.now + grace_s
    if grace_s == 0.0:
        lose(core, member, why)


def _expected_until(core: CoreState, member: LineMember) -> float | None:
    """Until when a worker whose stream is over may come back; None: it knows that it need not."""
    if _is_silent(core, member):
        # It is stopped or cut off. Once that is over it tries for so long.
        return core.now + core.settings.liveness.reconnect_s
    # Most often its process has ended.
    return None if member.knows_the_end else core.now + _BETWEEN_TRIES_S


def cut_off(
    core: CoreState,
    member: LineMember,
    message: str,
    why: str,
    *,
    grace_s: float,
    crash: bool = True,
) -> None:
    """Closes a member's stream with a message and detaches the member; nothing without a stream.

    Callers that cut off several members need the check: the loss of one may have released another
    from a transfer, which cuts that one off too.
    """
    if member.stream is not None:
        # Before `detach`, after which nobody here knows the stream any more.
        core.emit(CloseStream(member.stream, message))
        detach(core, member, why, grace_s=grace_s, crash=crash)


def lose(core: CoreState, member: LineMember, why: str) -> None:
    """Counts a detached member as lost."""
    assert member.stream is None
    member.grace_until = None
    core.emit(SaveDeparture(member.worker, None, why, member.step, b""))
    core.note_departure(member.worker, in_order=False)
    _count_loss(core, member)


def drop(core: CoreState, member: LineMember, why: str, told: str) -> None:
    """Sends a worker away for good; from now on the line expects one worker fewer.

    Args:
        core: the state; no round is open that the worker takes part in.
        member: the worker.
        why: for the journal.
        told: what the worker hears.
    """
    incarnation, credential = member.request.incarnation, member.request.credential
    core.emit(
        SaveDeparture(
            member.worker,
            None,
            why,
            member.step,
            b"",
            dropped=True,
            incarnation=incarnation,
            credential=credential,
        )
    )
    core.barred.add(incarnation)
    if credential:
        core.barred.add(credential)
    core.note_departure(member.worker, in_order=False)
    if member.stream is not None:
        core.emit(SendShutdown(member.stream, told))
    cancel_transfer(core, member, why)
    core.members.remove(member.worker)
    core.dropped.add(member.worker)


def look_for_silence(core: CoreState) -> None:
    """Cuts off members that have been silent, and loses members whose grace is over."""
    silence_s = core.settings.liveness.silence_s
    for member in core.members.silent(lambda heard_at: core.now - heard_at >= silence_s):
        message = f"nothing was heard for {silence_s:g} s"
        cut_off(core, member, message, f"silent for {silence_s:g} s", grace_s=0.0)
    for member in core.members.grace_over(core.now):
        # The loss of one may have ended the grace of another.
        if member.grace_until is not None:
            lose(core, member, "it did not come back")


def cancel_transfer(core: CoreState, member: LineMember, why: str) -> None:
    """Cancels a departing worker's transfers, and makes the worker at the other end join again.

    Not the other end of a snapshot: nobody stands still for that.
    """
    _cancel_snapshot(core, member)
    transfer = core.transfers.cancel(member.worker)
    if transfer is None:
        return
    # A joiner that goes away has not got its state. A lost donor is not the joiner's fault.
    if member.worker == transfer.joiner:
        core.note_setback(transfer, member, why)
    release(core, transfer.donor if member.worker == transfer.joiner else transfer.joiner)


def release(core: CoreState, worker: int) -> None:
    """Makes one end of a failed transfer join again (rule 10).

    It may wait for something that never comes: a donor for its receiver to read, a joiner for the
    rest of the state. Ending its stream ends that wait, and discards what it received so far.
    """
    member = core.members.get(worker)
    if member is not None:
        why = "the other end of its state transfer is gone"
        cut_off(core, member, why, why, grace_s=core.settings.rejoin_grace_s)


def _leave_stream(core: CoreState, member: LineMember, message: str, *, crash: bool = True) -> None:
    """Takes a member off its stream, with everything that depends on the stream."""
    # The stream goes first: `void` sends to members on their streams, and this one is gone.
    member.stream = None
    member.wants_work = False
    member.held = None
    member.learning = None
    if core.round is not None and member.worker in core.round.rank_of:
        # A worker that dies of a sample was heard up to its death. One that was silent for two
        # heartbeats before has a dead link or a stopped host: no sample did that.
        counts = crash and not _is_silent(core, member)
        member.voided_attempt = core.attempts.attempt if counts else None
        core.void(message, pause=False)
    # Last: it may cut off the other end of a transfer, and so come here again for that member.
    cancel_transfer(core, member, message)


def _cancel_snapshot(core: CoreState, member: LineMember) -> None:
    """Forgets the snapshot that a worker sends or gets; nobody stands still for it."""
    snapshot = core.snapshots.cancel(member.worker)
    learner = None if snapshot is None else core.members.get(snapshot.joiner)
    if learner is not None and learner.learning is not None:
        # Its donor is gone. It listens still, and gets the state of a later head.
        learner.learning.stop_following()


def restart(core: CoreState, member: LineMember, why: str) -> None:
    """Makes a member join again; it is not lost if it does so within the grace."""
    grace_s = core.settings.rejoin_grace_s
    cut_off(core, member, f"{why}: join again", why, grace_s=grace_s)


def restart_learners(core: CoreState, why: str) -> None:
    """Makes all learners join again: they don't listen at the reducers that there are now."""
    for member in core.members.learners():
        restart(core, member, why)


def _count_loss(core: CoreState, member: LineMember) -> None:
    """Counts attempts that lost a worker, and halts after `max_attempts` of them.

    A sample that kills every process that computes it would otherwise kill the workers one after
    the other, for ever. But one outage takes several streams shortly after each other, and that
    must not halt the line. So streams lost within one lease of each other count as one loss. A
    script that raised is no outage: each of those counts.
    """
    attempts, settings = core.attempts, core.settings
    lease_s = settings.liveness.lease_s
    if attempts.voided <= 1:
        # The loss explains why the round is void, so the next one need not wait for longer.
        attempts.not_before = core.now
    # Taken away: one void attempt counts once, whatever else happens to the member.
    attempt, member.voided_attempt = member.voided_attempt, None
    if attempt is None:
        return
    if not member.raised:
        another = core.now - attempts.last_loss_at >= lease_s
        if another:
            attempts.last_loss_at = core.now
        if attempts.with_losses:
            # After the first loss the next round opens at once. From the second loss on it waits
            # a lease: if it is an outage, that gives it time to end. If it is a sample, its next
            # victims come more than a lease later and count, instead of dying uncounted.
            attempts.not_before = max(attempts.not_before, attempts.last_loss_at + lease_s)
        if not another:
            return
    attempts.with_losses.add(attempt)
    if len(attempts.with_losses) < settings.max_attempts:
        return
    raised = f"; worker {member.worker} raised {member.raised}" if member.raised else ""
    step, cursor = core.chain.step + 1, core.chain.cursor
    core.stop_line(
        LineDefect(
            reason=HaltReason.REPEATED_FAILURE,
            message=f"step {step}, from position {cursor.position} of epoch {cursor.epoch}, "
            f"lost a worker in {len(attempts.with_losses)} attempts{raised}",
            worker=member.worker,
        )
    )


# ----------------------------------------------------------------------------- stragglers


def look_for_stragglers(core: CoreState, *, ticked: bool) -> None:
    """Cuts off members that were slow for too long, unless too few would be left to go on.

    Args:
        core: the state.
        ticked: whether this is a tick.
    """
    timeout_s = core.settings.straggler_timeout_s
    if timeout_s is None:
        return
    # This looks at every member, so not after every event: on each tick, and when a wait begins.
    # Nobody is slow before that.
    wait = _wait(core)
    if wait == core.last_wait and not ticked:
        return
    core.last_wait = wait
    slow = _slow(core)
    for member in core.members:
        if member not in slow:
            member.slow_since = None
        elif member.slow_since is None:
            member.slow_since = core.now
    late = [each for each in slow if core.now - (each.slow_since or 0.0) >= timeout_s]
    left = core.members.in_sync_count(core.chain.head)
    if left - sum(each.learning is None for each in late) < core.needed:
        return
    for member in late:
        message = f"the others waited {timeout_s:g} s for worker {member.worker}"
        why = f"too slow: {message}"
        # Slowness is no crash, so no sample is suspected of it.
        cut_off(core, member, message, why, grace_s=0.0, crash=False)


def _wait(core: CoreState) -> tuple[Key | None, str]:
    """In which phase somebody waits, and how that shows; the text is empty if nobody does."""
    head, members, round_ = core.chain.head, core.members, core.round
    if not _trains(core):
        return head, ""
    if round_ is None:
        asked = members.in_sync_count(head) > members.idle_count(head)
        return head, "asked" if asked and not len(core.transfers) else ""
    if round_.ready:
        return round_.key, "ready"
    return round_.key, "exchanging" if members.any_exchanging else ""


def _slow(core: CoreState) -> list[LineMember]:
    """Members in sync that another one waits for now."""
    if not _trains(core):
        return []
    members, round_ = core.members.in_sync(core.chain.head), core.round
    if round_ is not None:
        members = [each for each in members if each.worker in round_.rank_of]
    if round_ is None:
        if len(core.transfers):
            return []
        slow = [each for each in members if not each.wants_work]
        if not slow:
            # All that are in sync have asked, and no round is open: it waits for the late ones.
            away = [each for each in core.members.late() if not each.wants_work]
            slow, members = away, [*members, *away]
    elif round_.ready:
        slow = [each for each in members if each.worker not in round_.ready]
    elif any(each.exchanges for each in members):
        slow = [each for each in members if each.works]
    else:
        return []
    # If all are slow, nobody waits.
    return slow if len(slow) < len(members) else []


def _trains(core: CoreState) -> bool:
    running = core.line_state in (LineState.RUNNING, LineState.DRAINING)
    return running and core.pending_record is None and not core.stop_reason


# ------------------------------------------------------------------------ a reducer goes away


def reducer_lost(core: CoreState, event: ReducerLost) -> None:
    """A reducer's stream is over: it is off the map, and its round is void."""
    remove_reducer(core, event.stream, "is gone")


def remove_reducer(core: CoreState, stream: int, why: str) -> None:
    """Takes a reducer off the map, and voids or cancels what runs through it."""
    address = core.reducers.remove(stream)
    if address is None:
        return
    restart_learners(core, f"the reducer at {address} {why}")
    round_ = core.round
    if round_ is not None and any(share.address == address for share in round_.terms.reducers):
        core.void(f"the reducer at {address} {why}", pause=False)
    for transfer in core.transfers.through(address):
        # The transfer ends before its workers are released, which would cancel it otherwise and
        # count a setback against a joiner that is not at fault.
        core.transfers.end(transfer)
        for worker in (transfer.donor, transfer.joiner):
            release(core, worker)


# ------------------------------------------------------------------- when a run is complete


def not_gone(roster: Collection[int], departed: Mapping[int, bool]) -> list[int]:
    """Workers of the last step without a known departure."""
    return [worker for worker in roster if worker not in departed]


def has_last_weights(worker: int, final_step: int, roster: Collection[int], step: int) -> bool:
    """Whether a worker that left in order after `final_step` had the weights of the last `step`.

    One of that step's roster had. Another one has followed the line, and may have made it up. With
    no step since the run was started or resumed, whoever left in order had all there is.
    """
    return not roster or worker in roster or final_step == step


def is_complete(roster: Collection[int], departed: Mapping[int, bool], *, over: bool) -> bool:
    """Whether a run is complete, once no worker with its last weights is on the line.

    The line decides by this, and so does a reader of its journal.

    One worker must have left in order, that is, with the run's weights and nothing left to do. Then
    it does not matter how the others went after the last step: by a signal, an error or a crash.
    None of its workers may be missing, unless the journal itself says that the step was the last
    one. In that case workers without a recorded departure count as gone: they left while no
    coordinator was running, or their departure could not be saved.

    Args:
        roster: the workers of the last step; empty if there was none since the run was started or
            resumed.
        departed: the workers that are gone since then; True if a worker left in order, and
            `has_last_weights`.
        over: whether the line had reached the end of the run.
    """
    one_left_in_order = any(departed.values())
    # Somebody of the roster has no recorded departure, or nothing at all is recorded.
    some_unknown = bool(not_gone(roster, departed)) or not (roster or departed)
    if over:
        return one_left_in_order or some_unknown
    return one_left_in_order and not some_unknown
