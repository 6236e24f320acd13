"""Steps: workers ask for work and report what came of it, until the round becomes a record.

This is where a step is committed (rules 4 to 7). A round whose whole roster is ready is checked;
then its record goes to the journal. Once the journal says that the record is durable, it becomes
the head and every worker that can apply it gets it. `progress` opens rounds.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from andon.protocol.capabilities import OVERFLOW
from andon.protocol.halts import HaltReason
from andon.protocol.records import TERM_AHEAD_S, Cursor, Key, Record, RecordKind
from andon.protocol.run_settings import DRAINED, Topology
from andon.protocol.scalars import Scalar
from andon_coordinator.core import (
    dealing,
    late,
    learning,
    lost_state,
    overlap,
    slowness,
    spiking,
    standing,
    syncing,
    verifying,
)
from andon_coordinator.core.agreement import in_round
from andon_coordinator.core.defects import (
    LineDefect,
    corruption,
    in_fault,
    in_ready,
    in_reducer,
    violation,
)
from andon_coordinator.core.effects import NoteStopRefused, SaveScalars
from andon_coordinator.core.events import (
    Fault,
    FaultKind,
    FaultReported,
    JournalFailed,
    Ready,
    RecordSaved,
    RoundFaulted,
    TermSaved,
    WorkerReady,
    WorkRequested,
)
from andon_coordinator.core.members import LastStep, LineMember
from andon_coordinator.core.noise_scale import NOISE_LOGGED_EVERY, NOISE_SCALAR, Contribution
from andon_coordinator.core.pacing import WindowReport, reading_of
from andon_coordinator.core.round import PendingRecord, StepRound
from andon_coordinator.core.same_bits import in_nodes
from andon_coordinator.core.state import CoreState

__all__ = [
    "fault",
    "journal_failed",
    "ready",
    "record_saved",
    "round_faulted",
    "term_saved",
    "work_requested",
]


# ------------------------------------------------------------------------ from the workers


def work_requested(core: CoreState, member: LineMember, event: WorkRequested) -> None:
    """A worker's loop wants its next batch.

    A request from an older head is ignored, and one of a worker that was sent away to keep the
    line's state.
    """
    chain = core.chain
    # Also if the request is ignored below: it says that the script waits, so that its state may be
    # replaced (rule 10).
    member.accepts_state = not event.leaves_epoch
    written, request = event.checkpoint, member.request
    core.emit(*core.checkpoints.note_written(member.worker, written, chain.step, request))
    core.checkpoints.note_begun(member.worker, event.checkpoint_begun, chain.step)
    if event.head is None:
        return
    if event.head == member.doubted:
        # Its weights differ from the others' there: it waits for the line's state.
        if core.stop_reason:
            core.shut_down_member(member)
        return
    _note_head(core, member, event.head)
    if event.head not in chain.request_heads or event.stream in core.keeping:
        return
    if core.stop_reason:
        core.shut_down_member(member)
        return
    if (defect := _without_address(core, member, event.ring_address)) is not None:
        core.stop_line(defect)
        return
    if event.leaves_epoch and event.head != chain.head:
        # Another worker's request has ended the epoch already. This worker asks again if it wants
        # work in the next epoch. But if a round is open that it takes part in, the request which
        # brought it there must stay valid after that round.
        member.wants_work = member.wants_work and core.round is not None
        return
    # Before it is set: a member of the round that had not asked came into it by a standing request.
    round_, asked = core.round, member.wants_work
    member.wants_work = True
    member.leaves_epoch = event.leaves_epoch
    member.ring_address = event.ring_address
    if event.leaves_epoch and round_ is not None and member.worker in round_.rank_of:
        why = f"worker {member.worker} left epoch {round_.terms.epoch}"
        if asked:
            core.void(why, pause=False)
        else:
            core.withdraw(why)


def _note_head(core: CoreState, member: LineMember, head: Key) -> None:
    """Notes where a worker is, which its request says.

    That matters after a cancelled transfer: it may have succeeded at the worker, but the report of
    that was ignored.
    """
    chain, record = core.chain, core.chain.record
    if head == chain.head:
        member.head = head
        member.step = chain.step
        return
    mark = record if record is not None and record.kind is RecordKind.MARK else None
    if mark is not None and member.head != chain.head and head == mark.parent:
        member.head = head
        core.announce(member, mark, chain.result)


def _without_address(core: CoreState, member: LineMember, ring_address: str) -> LineDefect | None:
    """The defect if a worker asks for work on a ring, and can't be reached by its neighbour."""
    if ring_address or core.settings.policy.topology is not Topology.RING:
        return None
    what = "asked for work on a ring without an address for its neighbour"
    return violation(member.worker, what)


def ready(core: CoreState, member: LineMember, event: WorkerReady) -> None:
    """A worker holds all averages. When the last one does, the step goes to the journal."""
    round_, report = core.round, event.ready
    # A report that was under way while its round was voided must not count for the next round of
    # the same step. The key tells them apart (rule 6).
    if round_ is None or report.key != round_.key:
        return
    if not round_.has(member.worker, event.stream):
        return
    assert core.plan is not None
    positions = round_.shares[round_.rank_of[member.worker]]
    share = sum(map(len, positions))
    # A stream of unknown length may end within the share.
    ended = report.end_of_data and core.plan.dataset_size is None
    fewest = 0 if ended or core.plan.sparse else share
    defect = in_ready(member.worker, report, range(fewest, share + 1))
    if defect is None and round_.grains is not None:
        defect = in_nodes(member.worker, report, positions, round_.grains)
        defect = defect or verifying.in_report(core, member.worker, report, round_)
    if defect is None and report.overflow:
        defect = _overflow_not_taken(member, round_)
    if defect is None and report.next is not None:
        defect = _without_address(core, member, report.next.ring_address)
    if defect is not None:
        core.stop_line(defect)
        return
    round_.take(member.worker, report)
    # Taken away again if the round becomes void (`_count_void`).
    member.held = round_.key
    if round_.complete:
        _prepare(core, round_)


def _overflow_not_taken(member: LineMember, round_: StepRound) -> LineDefect | None:
    """The defect if a worker of the round would move its weights though gradients overflowed.

    A worker that lacks the capability does not look at `StepCommitted.overflow`. If this step were
    committed, its weights would move and the others' would not.
    """
    lacking = round_.lacks_overflow
    if lacking is None:
        return None
    return LineDefect(
        reason=HaltReason.NON_FINITE_GRADIENT,
        message=f"worker {member.worker}'s scaled gradients overflowed, and worker {lacking} "
        f"lacks {OVERFLOW}, so it would not skip the step: update its client, or lower the "
        "scaler's scale",
        worker=member.worker,
    )


def fault(core: CoreState, member: LineMember, event: FaultReported) -> None:
    """A worker saw something wrong: the round is void, and a defect halts the line."""
    seen, round_ = event.fault, core.round
    greatest = seen.greatest
    implausible = greatest is not None and not core.keys.is_plausible(greatest.term, core.wall)
    if greatest is not None and not implausible and not core.keys.covers(greatest):
        # A reducer knows a newer round than any of ours, and would treat ours as stale (rule 14).
        core.raise_term(greatest.term)
    if seen.kind is FaultKind.SCRIPT_RAISED:
        member.raised = f"{seen.error_type}: {seen.message}" if seen.error_type else seen.message
        member.wants_work = False  # It is about to leave.
    # `raise_term` may have voided the round, so it is compared with the open one again.
    current = (
        round_ is not None and core.round is round_ and round_.has(member.worker, event.stream)
    )
    if seen.key is not None and (round_ is None or not current or seen.key != round_.key):
        return
    roster = round_.roster if round_ is not None and current else ()
    defect = in_fault(seen, member.worker, roster, core.layout)
    if current and seen.kind is FaultKind.DATA_STREAM_LOST:
        defect = _unreachable(core, member, seen)
    elif current and seen.kind is FaultKind.CORRUPT_CHUNK:
        defect = _corrupted(core, member.worker, seen, roster)
    elif current and implausible:
        defect = _impossible_term(member, seen)
    if defect is not None:
        core.stop_line(defect)
    elif current:
        script = seen.kind is FaultKind.SCRIPT_RAISED
        if script:
            member.voided_attempt = core.attempts.attempt
        why = f"worker {member.worker}: {seen.message or seen.kind.name.lower().replace('_', ' ')}"
        # An exception does not pass by waiting; a broken network may.
        core.void(why, pause=not script)


def round_faulted(core: CoreState, event: RoundFaulted) -> None:
    """The reducer of this process stopped a round, which the workers are about to report too."""
    round_ = core.round
    if round_ is None or event.fault.key != round_.key:
        return
    defect = in_reducer(event.fault, event.senders, round_.roster, core.layout)
    if defect is not None:
        core.stop_line(defect)


def _unreachable(core: CoreState, member: LineMember, seen: Fault) -> LineDefect | None:
    """The defect if the same workers lose a stream to the same reducers again and again.

    The coordinator takes a dead reducer off the map by itself. A reducer that is still on the map
    runs, so the worker that reports the loss can't reach it.
    """
    counts, most = core.attempts, core.settings.max_attempts
    counts.lost_reducer_streams += bool(counts.last_participants[1])
    if counts.lost_reducer_streams < most:
        return None
    return LineDefect(
        reason=HaltReason.REPEATED_FAILURE,
        message=f"step {core.chain.step + 1}: {most} consecutive attempts lost a stream to a "
        f"reducer, the last one at worker {member.worker}: {seen.message or 'no cause reported'}. "
        "Let every worker reach every reducer's address, or stop the reducer that can't be reached",
        worker=member.worker,
        reported_by=member.worker,
    )


def _corrupted(
    core: CoreState, reporter: int, seen: Fault, roster: tuple[int, ...]
) -> LineDefect | None:
    """The defect if chunks are corrupted in transit again and again.

    Once may be a cosmic ray, and costs one attempt. A network or a memory that corrupts every
    attempt would keep the line at one step for ever, and nobody would know why.
    """
    core.attempts.corrupted += 1
    count, step = core.attempts.corrupted, core.chain.step + 1
    if count < core.settings.max_attempts:
        return None
    return corruption(seen, reporter, roster, core.layout, step=step, attempts=count)


def _impossible_term(member: LineMember, seen: Fault) -> LineDefect:
    """The defect if a reducer holds a round of a term that no coordinator can have had.

    No round of this line would ever be above it, so trying again would go on for ever.
    """
    assert seen.greatest is not None
    term = seen.greatest.term
    return LineDefect(
        reason=HaltReason.PROTOCOL_VIOLATION,
        message=f"worker {member.worker} says that a reducer reported to it a round of the term "
        f"{term}, whose counter {term >> 32} is more than {TERM_AHEAD_S} s ahead of the "
        "coordinator's clock: no coordinator can have issued it. Restart that reducer",
        value=str(term),
        reported_by=member.worker,
    )


# ------------------------------------------------------------------------- to the journal


def _prepare(core: CoreState, round_: StepRound) -> None:
    """Checks a complete round and gives its record to the journal."""
    # This is the last moment at which the step can still be stopped: once the journal has the
    # record, it may be durable at any time.
    if learning.begin_anew(core, round_):
        return
    defect = in_round(round_, core.layout)
    if defect is None:
        _note_compared(core, round_)  # Before a verdict: equal weights make witnesses.
        if verifying.settles(core, round_):
            return
        defect = spiking.judge(core, round_)
        if core.round is not round_:
            return  # It is void: the line has done something about a spike by itself.
    if defect is not None and defect.reason is HaltReason.REPLICA_DIVERGENCE:
        defect = learning.blamed(core, round_, defect)
    if defect is not None:
        core.stop_line(defect)
        return
    assert core.plan is not None
    seconds = core.now - round_.opened_at
    if round_.terms.attempt == 0:
        # Later ones are shorter: gradients are kept.
        core.rounds.kept.append(seconds)
    cursor = dealing.cursor_of(core, round_)
    if round_.end_of_data and core.plan.epoch_size is None:
        cursor = Cursor(cursor.epoch + 1, 0)
    stop = _stop_of_scripts(core, round_) or core.end_reached(round_.terms.step, cursor)
    stop = stop or (DRAINED if core.draining else "")
    stop = overlap.stops_after(core, round_, stop, owes=bool(cursor.owed))
    # After all checks: nothing is learnt from a step that halts the line.
    pacing = _learn(core, round_, seconds)
    slowness.committed(core, round_, seconds)
    record = Record(
        key=round_.key,
        parent=round_.terms.parent,
        kind=RecordKind.STEP,
        step=round_.terms.step,
        cursor=cursor,
        roster=round_.roster,
    )
    proved = verifying.proved(core, round_)
    # From here on the round can't be voided: it is a pending record.
    core.round = None
    left_out = {each.worker: each.left_out for each in core.members if each.left_out}
    result = round_.result(
        seconds=seconds, stop_reason=stop, late=left_out, trims=core.settings.policy.trims
    )
    core.save(
        PendingRecord(
            record=record,
            result=result,
            stop_reason=stop,
            pacing=pacing,
            standing={} if stop else standing.asked_in(round_),
            attempts=overlap.next_attempts(core, round_),
            proved=proved,
            comparison=round_.comparison,
        )
    )


def _note_compared(core: CoreState, round_: StepRound) -> None:
    """Notes whose weights a complete round has compared with another worker's: they are equal."""
    for base_hashed in (True, False):  # Each kind is compared within itself: see `divergence`.
        kind = {
            worker
            for worker, report in round_.in_rank_order
            if report.digest
            and report.digest_head == round_.terms.parent
            and report.digest_base_hashed is base_hashed
        }
        if len(kind) > 1:
            core.uncompared -= kind
            learning.compared(core, kind)
    if round_.terms.wants_digest:
        core.asked_for_digests = round_.roster


def _stop_of_scripts(core: CoreState, round_: StepRound) -> str:
    """Why a script ends the run with this round; empty if none wants that, or none may."""
    if core.settings.workers_may_stop:
        return round_.stop_reason
    for worker, report in round_.in_rank_order:
        if report.stop_reason and worker not in core.stops_refused:
            core.stops_refused.add(worker)
            core.emit(NoteStopRefused(worker, report.stop_reason))
    return ""


def _learn(core: CoreState, round_: StepRound, seconds: float) -> bytes:
    """Notes what each worker did in a complete round, and learns from it how fast they are.

    Returns:
        What is to be kept of that with the round's record.
    """
    readings, waits, contributions = [], [], []
    positions = round_.positions
    for rank, (worker, report) in enumerate(round_.in_rank_order):
        member, share = core.members.get(worker), sum(map(len, round_.shares[rank]))
        assert member is not None
        micro_batches = round_.micro_batches[rank] if round_.micro_batches else 0
        member.last_step = LastStep(
            report.samples, seconds, report.timings, share / positions, micro_batches
        )
        # More than it was assigned would look like speed.
        computed = min(report.timings.computed, round_.positions_of(rank))
        readings.append(reading_of(member, computed, report.timings))
        if report.samples:
            waits.append(report.timings.wait_s)
        if report.weight > 0:
            contributions.append(_contribution(report, core.settings.policy.max_grad_norm))
    assert core.attempts.window is not None
    assert core.plan is not None
    reported = WindowReport(
        readings=readings,
        wait_s=min(waits, default=0.0),
        loss=round_.loss if round_.weight > 0 else math.nan,
        contributions=contributions,
        mean_norm=round_.gradient_norm,
        at_s=core.now,
    )
    return core.pacing.learn(reported, core.attempts.window, core.plan)


def _contribution(report: Ready, limit: float | None) -> Contribution:
    """What a worker gave to the mean; the norm is NaN if it is not that of what was sent."""
    norm = report.own_gradient_norm
    if norm is None or (limit is not None and norm > limit):
        norm = math.nan
    return Contribution(report.samples, report.weight, norm)


# ----------------------------------------------------------------------- from the journal


def record_saved(core: CoreState, event: RecordSaved) -> None:
    """A record is durable: it becomes the head, and every worker that can apply it gets it."""
    pending = core.pending_record
    if pending is None or pending.record.key != event.key:
        return
    core.pending_record = None
    record = pending.record
    core.stop_reason = pending.stop_reason
    if pending.back_to is not None:
        # Every stream is closed: nobody hears the rest.
        lost_state.go_back(core, pending.back_to, pending.why_back)
    # The order of the rest matters. A worker can apply the record only while its own head is the
    # parent, so `able` is taken before `announce` changes heads. Scalar all-reduces are closed
    # before the head moves, because their answers name the old head.
    able = {each.worker: each for each in core.members.live() if core.can_apply(each, record)}
    if record.kind is not RecordKind.MARK:
        syncing.close_scalar_all_reduces(core)
        core.transfers.cancel_all()
    core.chain.append(record, pending.result)
    core.pacing.committed(pending.pacing, core.now - pending.given_at)
    verifying.committed(core, pending.proved)
    core.comparison = pending.comparison or core.comparison
    if pending.result is not None:
        _log_noise(core, record)
        core.detectors.committed(pending.result)
        core.last_roster, core.departed = record.roster, pending.departed
    late.recorded(core, record)
    # The counts are of the step after the head, so they change together with it.
    core.attempts = pending.attempts
    _renew_requests(core, record)
    learning.arrive(core, pending, able.values())
    standing.take(core, pending, able.values())
    if pending.answer is not None:
        core.emit(pending.answer)
    for member in able.values():
        core.announce(member, record, pending.result)
    learning.record_announced(core, pending, able)
    _tell_the_rest(core, pending, able)
    if not core.halt_announced:
        # The line was halted while the record was pending. Workers hear of the halt after the
        # record, since the record stands.
        core.announce_halt()


def _log_noise(core: CoreState, record: Record) -> None:
    """Keeps the noise scale as a script's scalar is kept, now and then: it changes slowly."""
    value = core.pacing.noise_scale
    if value is None or record.step % NOISE_LOGGED_EVERY:
        return
    if core.scalar_names.take(NOISE_SCALAR):
        # In the name of rank 0: it is the line's, and a curve is a mean over workers.
        core.emit(SaveScalars(record.roster[0], (Scalar(NOISE_SCALAR, record.step, value),)))


def _tell_the_rest(core: CoreState, pending: PendingRecord, able: Collection[int]) -> None:
    """Tells everybody that a halt is answered, and those left behind that the run is over."""
    for member in core.members.live():
        assert member.stream is not None
        if pending.resume is not None:
            core.emit(pending.resume(member.stream))
        if core.stop_reason and member.worker not in able:
            # It can't get the last weights any more, and nobody trains on.
            core.shut_down_member(member)


def _renew_requests(core: CoreState, record: Record) -> None:
    """Drops requests for work that a record fulfilled; a MARK keeps earlier ones valid."""
    mark = record.kind is RecordKind.MARK
    for member in core.members:
        if member.voided_attempt is not None:
            member.voided_attempt = None
        # The MARK that ends an epoch fulfils a request for just that.
        if member.wants_work:
            member.wants_work = mark and not member.leaves_epoch
        if member.leaves_epoch:
            member.leaves_epoch = False


def term_saved(core: CoreState, event: TermSaved) -> None:
    """A term is durable: its keys may be used."""
    # Another term may have been started meanwhile; then that one is still to be saved.
    if event.term == core.keys.term:
        core.keys.saved = True


def journal_failed(core: CoreState, event: JournalFailed) -> None:
    """The journal can't be written: the line halts, because nothing commits unrecorded."""
    halt, core.sought, core.going_back = core.halt, (), None
    if halt is not None and halt.reason is HaltReason.JOURNAL and core.pending_record is None:
        return  # It is halted for this already.
    core.stop_line(
        LineDefect(
            reason=HaltReason.JOURNAL,
            message=f"the journal can't be written: {event.message}",
        )
    )
