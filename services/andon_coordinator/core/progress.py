"""Progress: after every event, what the line can go on with.

`go_on` checks from the top: has the run ended; may the line bootstrap; do workers need state; may a
round open. It does the first of these that is possible. No round opens while a record is pending, a
term is not yet durable, a transfer runs (rule 10), a broken stream may still come back, or the
back-off after a void round lasts.
"""

from __future__ import annotations

from andon.protocol.capabilities import COPIED_BUFFERS, OVERFLOW
from andon.protocol.halts import HaltReason
from andon.protocol.records import Cursor, PositionRange, Record, RecordKind
from andon.protocol.rounds import RoundTerms
from andon.protocol.run_settings import DRAINED, Topology
from andon_coordinator.core import (
    dealing,
    departures,
    evicting,
    going_back,
    late,
    learning,
    lost_state,
    overlap,
    spares,
    standing,
    steps,
    syncing,
    verifying,
)
from andon_coordinator.core.agreement import divergence
from andon_coordinator.core.defects import LineDefect
from andon_coordinator.core.effects import NoteSchedule, RefuseJoin, SaveDeparture
from andon_coordinator.core.events import LeaveReason, WorkerLeft, WorkRequested
from andon_coordinator.core.join_checks import refusal_of_an_ended_run
from andon_coordinator.core.line_state import LineState, Trigger
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.round import PendingRecord, StepRound
from andon_coordinator.core.state import CoreState
from andon_coordinator.core.status import waiting_for
from andon_coordinator.core.step_results import Skip

__all__ = ["go_on"]


def go_on(core: CoreState) -> None:
    """Does whatever the state of the core allows."""
    # Before the returns below: numbers are averaged on a halted line, too.
    syncing.answer_scalar_all_reduces(core)
    # While a record is pending, the head is about to move: nothing may be built on the old one.
    if core.line_state is LineState.COMPLETE or core.pending_record is not None:
        return
    if core.line_state is LineState.HALTED:
        if core.draining:
            _shut_down(core)
        return
    if core.draining and core.line_state is not LineState.DRAINING:
        core.enter(Trigger.DRAIN_BEGAN)
    if _finished(core):
        _complete(core)
        return
    _admit_alone(core)
    if core.stop_reason:
        if not core.members.live_count:
            _wait_or_halt(core)  # No worker has left with the run's weights yet.
    else:
        late.look(core)
        if core.round is not None:
            # A newcomer listens before the next round opens, and so is sent its head already.
            learning.begin(core)
        elif core.keys.saved and core.going_back is None:
            _go_on_training(core)


def _admit_alone(core: CoreState) -> None:
    """Learners that wait for others, of whom none is left, get what they wait for."""
    for member, waits_for in learning.admit_alone(core):
        if isinstance(waits_for, WorkRequested):
            steps.work_requested(core, member, waits_for)
        else:
            # It had no part in what the others have computed: this is not their mean.
            syncing.answer_alone(core, member, waits_for, lost=True)


def _go_on_training(core: CoreState) -> None:
    evicting.look(core)
    # Before learners are let in: a spare takes a place only in a line that has gathered.
    workers_ready = _workers_ready(core)
    learning.admit(core)
    if not workers_ready or not _reducers_ready(core):
        _wait(core)
    elif core.chain.head is None or _may_bootstrap_again(core):
        _bootstrap(core)
    elif going_back.restores(core):
        core.forming_since = None
        core.enter(Trigger.TRANSFER_BEGAN)
    elif lost_state.is_lost(core):
        # A learner may have got the head's state from a worker that is lost, and comes back with
        # it.
        if not learning.release_if_short(core):
            lost_state.go_on_without_head(core)
    elif not core.members.any_in_grace:
        # A worker in its grace period may come back at any moment. A round without it would compute
        # its samples again for nothing.
        learning.begin(core)
        if overlap.lets_transfer(core):
            syncing.begin_transfers(core)
        if len(core.transfers):
            core.forming_since = None
            core.enter(Trigger.TRANSFER_BEGAN)
        elif late.taking_part(core) < core.needed:
            learning.release_if_short(core)
            _wait(core)
        else:
            core.forming_since = None
            core.enter(Trigger.FORMED)
            _open_round(core)


# -------------------------------------------------------------------------------- forming


def _workers_ready(core: CoreState) -> bool:
    """Whether all expected workers were here once, or the recovery window is over (rule 9).

    From then on the line goes on with fewer workers, down to `needed`.
    """
    members = core.members
    if not core.workers_ready_once:
        # A spare may take the place of a worker that did not come back.
        recovered = _recovery_window_over(core) and members.live_count >= core.needed
        here = members.worker_count + spares.slow_here(core)
        if core.last_roster and not lost_state.awaited(core):
            here = members.live_count  # Whoever lost its state meanwhile comes back as a spare.
        core.workers_ready_once = here >= core.expected or recovered
        # Numbers that were given before then waited for just that.
        syncing.answer_scalar_all_reduces(core)
    return core.workers_ready_once


def _reducers_ready(core: CoreState) -> bool:
    """Whether there is a reducer; at first, whether all expected ones are here."""
    here = len(core.reducers)
    if here and not core.reducers_ready_once:
        core.reducers_ready_once = (
            _recovery_window_over(core) or here >= core.settings.expect_reducers
        )
    return here > 0 and core.reducers_ready_once


def _recovery_window_over(core: CoreState) -> bool:
    # Without a head this never ends the wait: a missing worker may hold a head, and bootstrapping
    # without it would start a second history.
    window = core.settings.recovery_window_s
    waited = core.first_join_at is not None and core.now - core.first_join_at >= window
    return core.chain.head is not None and waited


def _wait(core: CoreState) -> None:
    """Goes back to FORMING; a draining line does not wait for anybody, it ends."""
    core.enter(Trigger.FELL_SHORT)
    if not core.draining:
        _wait_or_halt(core)
    elif not core.members.any_in_grace:
        _shut_down(core)


def _wait_or_halt(core: CoreState) -> None:
    """Halts a line that has waited for workers or reducers longer than `forming_timeout_s`."""
    timeout_s = core.settings.forming_timeout_s
    if core.forming_since is None:
        core.forming_since = core.now
    if timeout_s is not None and core.now - core.forming_since >= timeout_s:
        core.forming_since = None  # After an answer it waits as long again.
        message = f"the line waited {timeout_s:g} s for {waiting_for(core)}"
        core.stop_line(LineDefect(reason=HaltReason.TOO_FEW_WORKERS, message=message))


# -------------------------------------------------------------------------- bootstrapping


def _may_bootstrap_again(core: CoreState) -> bool:
    if not core.bootstrap_again or core.members.in_sync_count(core.chain.head):
        return False
    here = core.members.workers()
    return len(here) >= core.expected and any(member.head is None for member in here)


def _bootstrap(core: CoreState) -> None:
    """Makes the initial weights of the lowest fresh worker the line's (rule 11)."""
    here = core.members.workers()
    if len(here) < core.expected:
        _wait(core)
        return
    # Equal seeds do not make equal weights on different machines. So one worker's weights are
    # taken, and the others get them by a state transfer.
    chosen = next(member for member in here if member.head is None)
    # Once the record is durable, `can_apply` asks whose weights these are.
    core.bootstrap_process = chosen.request.incarnation
    core.bootstrap_again = False
    record = Record(
        key=core.keys.draw(),
        parent=core.chain.head,
        kind=RecordKind.INITIAL,
        step=0,
        cursor=core.chain.cursor,
        roster=(chosen.worker,),
    )
    why = core.pacing.choose(here)
    if why:
        core.emit(NoteSchedule(core.pacing.schedule, why))
    core.save(
        PendingRecord(record=record, pacing=core.pacing.saved()),
        note=f"initial weights of worker {chosen.worker}",
    )


# --------------------------------------------------------------------------------- rounds


def _open_round(core: CoreState) -> None:
    """Assigns the next step, if every worker in sync asked for it."""
    chain, plan, attempts = core.chain, core.plan, core.attempts
    # A tick comes here again once it is over.
    if core.now < attempts.not_before:
        return
    if core.members.idle_count(chain.head) and not standing.suffices(core):
        return
    if learning.worth_waiting(core) or late.holds_up(core):
        return
    if core.holds_alone is not None:
        # The others get the state of this head, and not of one that they would have to make up.
        learning.begin_snapshots(core)
        return
    roster = core.members.in_sync(chain.head)
    assert plan is not None
    assert chain.head is not None
    if any(member.leaves_epoch for member in roster):
        _end_epoch(core)
        return
    workers = tuple(member.worker for member in roster)
    away = core.members.late()
    everybody = sorted((*roster, *away), key=lambda member: member.worker)
    window = attempts.window or core.pacing.window(everybody, plan)
    dealt = dealing.deal(core, roster, window)
    if away and (dealt.whole or not any(dealt.shares)):
        # It takes everybody, and they are about to come; or all that is left of the epoch is held
        # by them.
        return
    attempts.window, batch, shares, grains = window, dealt.batch, dealt.shares, dealt.grains
    dealing.note(core, workers, dealt)
    split = window.split(workers)
    ring = core.settings.policy.topology is Topology.RING
    _note_participants(core, workers)
    core.emit(*core.checkpoints.choose_writer(everybody, chain.step))
    # Before the terms, which say what is computed ahead.
    overlap.deal_ahead(core, batch, roster)
    learning.begin_snapshots(core)
    attending = tuple(map(_stream, core.members.following()))
    checks = verifying.checks_of(core, roster, grains, shares)
    terms = RoundTerms(
        key=core.keys.draw(),
        parent=chain.head,
        step=chain.step + 1,
        attempt=attempts.attempt,
        epoch=chain.cursor.epoch,
        batch=batch,
        roster=workers,
        reducers=core.reducer_map,
        checkpoint_step=core.checkpoints.step,
        split=split,
        window=window.size if window.size != plan.global_batch else 0,
        ahead_batch=attempts.ahead_batch,
        fragment=attempts.fragment,
        learning_rate_scale=window.learning_rate_scale(len(batch), plan.global_batch),
        copies_buffers=all(COPIED_BUFFERS in each.request.capabilities for each in roster),
        wants_digest=checks is not None
        or (
            len(workers) > 1
            and workers != core.asked_for_digests
            and not core.uncompared.isdisjoint(workers)
        ),
        attended=bool(attending),
        change_scale=dealt.change_scale or 1.0,
        sums=() if checks is None else checks.sums,
    )
    core.round = StepRound(
        terms=terms,
        streams=tuple(_stream(member) for member in roster),
        shares=shares,
        opened_at=core.now,
        micro_batches=window.micro_batches(shares),
        ahead_shares=tuple(attempts.ahead.values()),
        ahead_micro_batches=overlap.micro_batches_ahead(core),
        ring_addresses=tuple(member.ring_address for member in roster) if ring else (),
        writer=core.checkpoints.writer,
        attending=attending,
        owing=dealing.owing(core, window),
        whole=dealt.whole,
        change_scale=dealt.change_scale,
        checks=checks,
        grains=grains,
        lacks_overflow=next(
            (each.worker for each in roster if OVERFLOW not in each.request.capabilities), None
        ),
    )
    # The head is in use now: a newer one, in a later Join, is another coordinator's (rule 9).
    core.recovery_over = True
    late.assigned(core, core.round, roster)
    core.emit(*core.round.assignments())


def _end_epoch(core: CoreState) -> None:
    """Moves the cursor to the next epoch by a MARK, because a script left the present one early.

    Workers that would have gone on in it move to the next epoch too: a step takes everybody.
    """
    chain, plan = core.chain, core.plan
    assert plan is not None
    epoch, position = chain.cursor.epoch, chain.cursor.position
    record = core.draw_mark(Cursor(epoch + 1, 0))
    left, owed = None, chain.cursor.owed
    if plan.epoch_size is not None and position < plan.epoch_size:
        rest = PositionRange(position, plan.epoch_size)
        both = dealing.work_at(chain.cursor, rest) if owed else None
        left = Skip(epoch, rest, 0, "the script", both)
    note = f"the script left epoch {epoch} at position {position}"
    stop = core.end_reached(record.step, record.cursor)
    core.save(PendingRecord(record=record, stop_reason=stop), note=note, skipped=left)


def _note_participants(core: CoreState, workers: tuple[int, ...]) -> None:
    """Starts the count of lost reducer streams again if other workers or reducers take part."""
    if core.reducers.addresses == ("",):
        return  # Only the coordinator's own reducer: it can't be out of reach by itself.
    participants = (workers, core.reducer_map)
    if core.attempts.last_participants != participants:
        core.attempts.last_participants = participants
        core.attempts.lost_reducer_streams = 0


# ------------------------------------------------------------------------ the run's end


def _finished(core: CoreState) -> bool:
    """Whether nobody is here who could go on, and the run is complete; see `is_complete`."""
    members, over = core.members, bool(core.stop_reason)
    if members.any_in_grace or late.taking_part(core):
        return False
    if over and members.live_count:
        return False
    if core.shut_down:
        return True
    if not (over or core.last_roster or _ended_without_a_step(core)) and (
        members.live_count or not core.workers_ready_once
    ):
        return False  # There was no step yet, and others may still come.
    # A live worker that is behind took the slot of one that is gone.
    taken = [member.worker for member in members.live()]
    departed = dict.fromkeys(taken, False) | core.departed
    missing = departures.not_gone(core.last_roster, departed)
    if missing or (over and not departed):
        # They trained under the last coordinator, and may still come back to this one.
        assert core.started_at is not None
        if core.now - core.started_at < core.settings.recovery_window_s:
            return False
    # From here on nobody waits for the missing ones. Both readings count: that their departure is
    # unknown (enough if the run is over), and that they are lost (enough if another one left in
    # order).
    given_up = dict.fromkeys(missing, False) | departed
    return any(
        departures.is_complete(core.last_roster, each, over=over) for each in (departed, given_up)
    )


def _ended_without_a_step(core: CoreState) -> bool:
    """Whether who had the initial weights left in order, and who is here waits for them in vain.

    A worker that is done before its first step, since its script only evaluates, never asks for
    work, so it gives nobody its state.
    """
    members, head = core.members, core.chain.head
    if head is None or members.in_sync_count(head) or core.bootstrap_again:
        return False
    if any(member.head is not None for member in members.live()):
        return False
    return any(
        member.left is not None and member.left.in_order and member.final_head == head
        for member in members
    )


def _complete(core: CoreState) -> None:
    """Completes the run, unless the final weights differ (rule 17)."""
    if not core.final_weights_compared:
        # Before the halt: a person who answers it accepts the weights, and the run is complete
        # then.
        core.final_weights_compared = True
        digests = {
            member.worker: member.final_digest
            for member in core.members
            if member.left is not None
            and member.left.in_order
            and member.final_digest
            and member.final_head == core.chain.head
        }
        hashed = {member.worker for member in core.members if member.final_base_hashed}
        defect = divergence(digests, core.chain.step, {}, None, hashed)
        if defect is not None:
            core.stop_line(defect)
            return
    for member in core.members.live():
        _send_away(core, member)
    if any(core.departed.values()):
        # Workers that did not come back are recorded as lost, so that a reader of the journal
        # concludes what was decided here.
        for worker in departures.not_gone(core.last_roster, core.departed):
            why = "it did not come back to a run that is complete"
            core.emit(SaveDeparture(worker, None, why, core.chain.step, b""))
            core.note_departure(worker, in_order=False)
    core.enter(Trigger.COMPLETED)


def _send_away(core: CoreState, member: LineMember) -> None:
    """Refuses a joiner that waits for state: every worker that had it has left."""
    stream = _stream(member)
    core.emit(RefuseJoin(stream, refusal_of_an_ended_run(core)))
    if member.spare:
        # It was there in case a worker is lost, and none will be: it is not lost either.
        departures.left(
            core, member, WorkerLeft(stream, LeaveReason.COMPLETE, final_step=member.step)
        )
        return
    departures.detach(core, member, "the run was complete before it had its state", grace_s=0.0)
    member.expected_until = None  # It was told.


def _shut_down(core: CoreState) -> None:
    """Ends a draining run that has no step to finish: tells everybody to leave."""
    if core.line_state is not LineState.DRAINING:
        core.enter(Trigger.DRAIN_BEGAN)
    core.stop_reason = core.stop_reason or DRAINED
    core.shut_down = True
    for member in core.members.live():
        core.shut_down_member(member)
    if _finished(core):
        _complete(core)


def _stream(member: LineMember) -> int:
    assert member.stream is not None
    return member.stream
