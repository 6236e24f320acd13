"""Learning: a worker that is behind gets the line's state while the line trains.

Theory of operation. A transfer stops the line (rule 10). A worker that can learn needs none. It has
a *listening* stream at each reducer, so it hears the averages of every round, and keeps them. Then
it gets a *snapshot*: the state of one head, which a worker in sync copies as it waits for work, and
sends while it trains on. From that head the learner makes up the rounds by itself. Nobody waits
for it: it is on no roster, and `Members` counts it neither as in sync nor as behind.

    told to learn   `begin`: SendLearn, also while a round is open
    listening       `listening_reported`: it hears every round that opens from now on
    following       `begin_snapshots`: it is sent the state of the head, and then, in order, all
                    that happens after that head: rounds that it *attends*, records, numbers
    installed       `state_reported`: it has the state, and makes up what happened since
    in sync         `arrive` at a commit, or `admit` before a round

It arrives in one of two ways. If it holds the averages of the open round when that is committed,
and has asked for the step after it, it is on the next roster as everybody else (`arrive`). Or it
asks for work at the line's head when no round is open (`admit`); it may also wait there for what
only workers in sync bring about, such as a mean, while none of them is left (`admit_alone`). If a
round that it attends becomes void, it asks again: its script may stand anywhere in that round, and
nobody waits for that, unless the others are too few to go on. A learner that is one step behind,
or has just come to the head, and may be about to ask, gets one chance for that: the next round
opens a little later (`Learning.give_chance`), and the wait for each further chance is twice as many
steps.

A spare goes on learning after it has caught up, as long as the line has all its workers: `spares`.

Safety needs no new rule. What a learner says counts for no round: a round is complete without it,
and it is asked for work only once its head is the line's (rule 3). It applies a STEP only with all
averages of exactly that key, and at the parent (rule 7). Its weights are compared with the others'
in its first round, before that may move anything. If they differ, it learns anew, and the others
take over its samples: `begin_anew`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from andon.protocol.capabilities import LEARNING
from andon.protocol.records import RecordKind
from andon_coordinator.core import departures, evicting, late, spares, syncing
from andon_coordinator.core.agreement import apart
from andon_coordinator.core.defects import LineDefect
from andon_coordinator.core.effects import (
    NoteCaughtUp,
    SendCommitted,
    SendLearn,
)
from andon_coordinator.core.events import (
    FaultKind,
    FaultReported,
    ListeningReported,
    ScalarAllReduceArrived,
    StateReported,
    WorkerReady,
    WorkRequested,
)
from andon_coordinator.core.learner import Learning
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.round import PendingRecord, StepRound
from andon_coordinator.core.state import CoreState
from andon_coordinator.core.transfers import StateTransfer

__all__ = [
    "admit",
    "admit_alone",
    "arrive",
    "awaits_snapshot",
    "begin",
    "begin_anew",
    "begin_snapshots",
    "blamed",
    "compared",
    "fault",
    "listening_reported",
    "may_reach_head",
    "number_arrived",
    "ready",
    "record_announced",
    "release_if_short",
    "started_over",
    "state_reported",
    "work_requested",
    "worth_waiting",
]

_STEPS_TO_GAIN = 256
"""A learner that comes no nearer to the line for so many steps gets a transfer."""

_MOST_FAILURES = 2
"""A worker that failed to learn so often in a row gets a transfer."""

_SPARE_KEEPS_UP = 16
"""A spare that is at most so many steps behind the line keeps up with it."""


# ---------------------------------------------------------------------------- who may learn


def begin(core: CoreState) -> None:
    """Tells workers that are behind, and wait for the line, to learn, if they may."""
    if not _any_awaits_state(core) or not _trains_without(core):
        return
    # A spare whose place nobody needs has time: it goes on trying.
    waiting = [each for each in syncing.awaiting_state(core) if _can_learn(core, each)]
    if not spares.lacks_worker(core):
        waiting += spares.awaiting_state(core)
    for member in waiting:
        assert member.stream is not None
        member.learning = Learning(began_at=core.now)
        member.wants_work = False
        # The head is in use now, as with a transfer.
        core.recovery_over = True
        core.emit(SendLearn(member.stream, core.reducer_map))


def _any_awaits_state(core: CoreState) -> bool:
    behind = core.members.any_behind_accepting(core.chain.head)
    return behind or bool(core.members.spares())


def _can_learn(core: CoreState, member: LineMember) -> bool:
    setback = core.transfers.setbacks.get(member.worker)
    failures = 0 if setback is None else setback.failures
    return LEARNING in member.request.capabilities and failures < _MOST_FAILURES


def _trains_without(core: CoreState) -> bool:
    """Whether the line trains, and in a way that can be followed."""
    enough = late.taking_part(core) >= core.needed
    return enough and departures.can_be_followed(core)


def release_if_short(core: CoreState) -> bool:
    """Too few workers are in sync: learners without a state join again, and get a transfer.

    Returns:
        Whether there was one. It may have the state of a worker that is gone, and not have said so.
    """
    learners = core.members.learners()
    waiting = [each for each in learners if each.learning and not each.learning.installed]
    for member in waiting:
        # It is not at fault: no setback.
        departures.restart(core, member, "too few workers are in sync to train meanwhile")
    return bool(waiting)


def may_reach_head(core: CoreState) -> bool:
    """Whether a learner has a state, and perhaps all that it needs to reach the line's head."""
    return any(each.learning and each.learning.installed for each in core.members.learners())


# ------------------------------------------------------------------------------- snapshots


def listening_reported(core: CoreState, member: LineMember, _event: ListeningReported) -> None:
    """A learner, or a late worker, hears the averages of every round that opens from now on."""
    learning = member.learning
    if learning is not None:
        if learning.late and not learning.listening:
            core.late_answers_s.append(core.now - learning.began_at)
        learning.listening = True


def awaits_snapshot(core: CoreState) -> bool:
    """Whether a learner listens and is sent no state yet."""
    return bool(_awaiting_snapshot(core))


def _awaiting_snapshot(core: CoreState) -> list[LineMember]:
    return [
        each
        for each in core.members.learners()
        if each.learning is not None and each.learning.listening and not each.learning.follows
    ]


def begin_snapshots(core: CoreState) -> None:
    """Sends learners the state of the head, as the next round opens; everybody asked for work."""
    waiting = _awaiting_snapshot(core)
    if not waiting:
        return
    in_sync = core.members.in_sync(core.chain.head)
    donors = [each for each in in_sync if not core.snapshots.busy(each.worker)]
    for donor, learner in zip(donors, waiting, strict=False):
        assert learner.learning is not None
        learner.learning.follow(core.chain.step)
        # Before the assignments of the round that opens now: its parent is the head of the state.
        syncing.begin_transfer(core, core.snapshots, donor, learner)


def state_reported(core: CoreState, member: LineMember, event: StateReported) -> None:
    """One end of a snapshot's way, or of a transfer, is done."""
    transfer = core.snapshots.get(event.transfer_id)
    if transfer is None:
        syncing.state_reported(core, member, event)
        return
    if member.worker not in (transfer.donor, transfer.joiner):
        return
    if not event.failure and member.worker == transfer.donor:
        return  # What counts is what the learner holds.
    learner = core.members.get(transfer.joiner)
    core.snapshots.end(transfer)
    if learner is None or learner.learning is None:
        return
    if not event.failure and event.head == transfer.head:
        learner.learning.installed = True
        core.note_source(learner, transfer.donor)
        learner.head, learner.held, learner.doubted = transfer.head, None, None
        learner.step = learner.learning.first_step
        learner.learning.reached(transfer.head, core.chain.step)
        return
    # It still listens, and gets the state of a later head from the next round on.
    learner.learning.stop_following()
    core.note_setback(transfer, learner, event.failure or "it reported another head")
    _give_up_after_failures(core, learner)


def started_over(core: CoreState, member: LineMember) -> None:
    """A process that learnt joins again: it could not go on with what it had."""
    # A worker ends its stream before it opens another. That may be seen after the Join, or before.
    learning, member.gave_up = member.learning or member.gave_up, None
    if learning is not None and learning.listening and not learning.late:
        tried = _try_of(core, member, learning)
        core.note_setback(tried, member, "it lost what it listened to")


def _try_of(core: CoreState, member: LineMember, learning: Learning) -> StateTransfer:
    assert core.chain.head is not None
    return StateTransfer(0, core.chain.head, member.worker, member.worker, "", learning.began_at)


def _give_up_after_failures(core: CoreState, learner: LineMember) -> None:
    setback = core.transfers.setbacks.get(learner.worker)
    if setback is not None and setback.failures >= _MOST_FAILURES:
        departures.restart(core, learner, "it did not get the state while the line trained")


# ------------------------------------------------------------------- what a learner reports


def work_requested(core: CoreState, member: LineMember, event: WorkRequested) -> None:
    """A learner is at a head, and its script waits."""
    learning, chain = member.learning, core.chain
    assert learning is not None
    if core.stop_reason:
        core.shut_down_member(member)
        return
    learning.waits_for = event if event.leaves_epoch else None
    # A wish to leave the epoch does not count; the learner hears of the MARK that ends it.
    if not learning.installed or event.head is None or event.leaves_epoch:
        return
    member.head, member.held = event.head, None
    member.wants_work = event.head in chain.request_heads
    learning.heard_void = event.voided
    learning.waits_at(event.head, core.now)
    learning.reached(event.head, chain.step)


def ready(core: CoreState, member: LineMember, event: WorkerReady) -> None:
    """A learner holds the averages of a round: of the present one, it can apply the record."""
    learning, key = member.learning, event.ready.key
    assert learning is not None
    if not learning.installed:
        return
    pending, round_ = core.pending_record, core.round
    if round_ is not None and round_.key == key:
        parent = round_.terms.parent
    elif pending is not None and pending.record.key == key:
        parent = pending.record.parent
    else:
        return  # It makes up an older one.
    # Taken away again if the round becomes void, as a member's.
    member.head, member.held = parent, key
    learning.next = event.ready.next


def fault(_core: CoreState, member: LineMember, event: FaultReported) -> None:
    """A learner takes part in no round, so nothing that it saw voids one, or halts the line."""
    if event.fault.kind is FaultKind.SCRIPT_RAISED:
        member.raised = event.fault.error_type or event.fault.message
        member.wants_work = False  # It is about to leave.


def number_arrived(core: CoreState, member: LineMember, event: ScalarAllReduceArrived) -> None:
    """A learner has a number to average; if it follows, it hears what the others averaged."""
    learning = member.learning
    assert learning is not None
    if learning.follows:
        learning.waits_for = event
    else:
        syncing.answer_alone(core, member, event)


# --------------------------------------------------------------------------------- arriving


def arrive(core: CoreState, pending: PendingRecord, able: Iterable[LineMember]) -> None:
    """At a commit: learners that can apply it, and asked for the step after it, are in sync.

    This runs before the record is announced, and before its standing requests are taken.
    """
    if not _goes_straight_on(core, pending):
        return
    able = list(able)
    in_sync = sum(each.learning is None and not each.spare for each in able)
    for member in able:
        learning = member.learning
        if learning is None or learning.next is None or member.stream is None:
            continue
        if member.spare and not spares.takes_place(core, member, in_sync):
            continue
        in_sync += 1
        pending.standing[member.stream] = learning.next
        _let_in(core, member)


def _goes_straight_on(core: CoreState, pending: PendingRecord) -> bool:
    """Whether the line's next step comes at once.

    At an epoch's end scripts evaluate: what a learner would give there counts for nothing.
    """
    result = pending.result
    return result is not None and core.chain.cursor.epoch == result.epoch and not core.stop_reason


def admit(core: CoreState) -> None:
    """No round is open: learners at the line's head that asked for work are in sync."""
    head = core.chain.head
    for member in core.members.learners():
        assert member.learning is not None
        here = member.learning.installed and member.head == head and member.wants_work
        # Its request led to a round that is void now. Its script may stand anywhere in it, so it
        # asks again, and meanwhile the others go on, if they are enough.
        if member.learning.in_void_round and late.taking_part(core) >= core.needed:
            continue
        if here and (not member.spare or spares.takes_place(core, member)):
            _let_in(core, member)
    spares.call_in(core)


def admit_alone(core: CoreState) -> list[tuple[LineMember, ScalarAllReduceArrived | WorkRequested]]:
    """Lets learners in that wait at the line's head for the others, of whom nobody is left.

    Returns:
        Those that are in sync now, and what each waits for.
    """
    head, learners = core.chain.head, core.members.learners()
    if not learners or head is None:
        return []
    if core.members.in_sync_count(head) or core.members.any_in_grace:
        return []
    found = []
    for member in learners:
        learning = member.learning
        assert learning is not None
        waits_for = learning.waits_for
        if waits_for is None or not learning.installed or waits_for.head != head:
            continue
        # At the run's end it takes nobody's place.
        if member.spare and not (core.stop_reason or spares.takes_place(core, member)):
            continue
        member.head, member.held = head, None
        _let_in(core, member)
        found.append((member, waits_for))
    return found


def worth_waiting(core: CoreState) -> bool:
    """Whether the next round opens a little later, for a learner that is one step behind."""
    waits = False
    # Those that stand move their weights now, and wait only after that.
    all_wait = not core.members.idle_count(core.chain.head)
    for member in core.members.learners():
        learning = member.learning
        assert learning is not None
        if learning.late:
            continue  # `late` knows how long to wait for it.
        if member.spare and not spares.takes_place(core, member):
            learning.end_wait(core.now)
            continue
        if member.spare and learning.installed and member.head == core.chain.head:
            # It was in the round that is void now, as the others were, and asks again as they do.
            learning.give_chance(core.chain.step)
        if learning.chance_s is None:
            continue
        if not all_wait or learning.holds_up(core.now):
            waits = True
        else:
            learning.was_late(core.chain.step, core.now)
    return waits


def record_announced(core: CoreState, pending: PendingRecord, able: Iterable[int]) -> None:
    """A record is the head: learners that follow get it, whether they can apply it yet or not."""
    record, done = pending.record, frozenset(able)
    for member in core.members.following():
        learning = member.learning
        assert learning is not None
        assert member.stream is not None
        learning.behind.append(record.key)
        learning.voided = None  # Whoever comes to the new head has heard of what was void before.
        step_s = 0.0 if pending.result is None else pending.result.seconds
        unwanted = member.spare and not spares.takes_place(core, member)
        if member.worker in done:
            learning.reached(record.key, core.chain.step)
            if member.spare:
                # It has caught up: what went wrong before is over.
                core.transfers.setbacks.pop(member.worker, None)
            if not (learning.late or unwanted) and _goes_straight_on(core, pending):
                # It did not ask for the next step yet: in its first one, no worker knows whether
                # its script goes straight on.
                learning.give_chance(core.chain.step, step_s)
            continue
        core.emit(
            SendCommitted(member.stream, record, pending.result, core.stop_reason, core.pacing.kept)
        )
        if record.kind is not RecordKind.STEP or learning.late:
            continue
        one_behind = learning.installed and member.head == record.parent and not unwanted
        if one_behind and learning.may_be_near(core.chain.step, core.now, step_s):
            learning.give_chance(core.chain.step, step_s)
        if _keeps_up(core, member):
            learning.gained_at = core.chain.step
        if learning.installed and core.chain.step - learning.gained_at > _STEPS_TO_GAIN:
            _give_up(core, member)


def _keeps_up(core: CoreState, member: LineMember) -> bool:
    """Whether a spare is near enough, while nobody needs it in sync."""
    assert member.learning is not None
    near = len(member.learning.behind) <= _SPARE_KEEPS_UP
    return member.spare and near and not spares.takes_place(core, member)


def _give_up(core: CoreState, member: LineMember) -> None:
    """A learner is no faster than the line: it gets a transfer."""
    learning = member.learning
    assert learning is not None
    why = f"it came no nearer to the line for {_STEPS_TO_GAIN} steps"
    tried = _try_of(core, member, learning)
    for _ in range(_MOST_FAILURES):
        core.note_setback(tried, member, why)
    departures.restart(core, member, why)


def _let_in(core: CoreState, member: LineMember) -> None:
    learning = member.learning
    assert learning is not None
    member.learning, member.spare, member.step = None, False, core.chain.step
    if learning.late:
        late.came_back(core, member)  # Its weights were its own all the time.
        return
    evicting.came_back(core, member)
    member.unproven = True
    learning.end_wait(core.now)
    took_s = core.now - learning.began_at
    core.emit(NoteCaughtUp(member.worker, took_s, learning.waited_s, learnt=True))
    # Nobody has compared its weights; the next round does, before they may move.
    core.note_uncompared(member.worker)
    core.transfers.setbacks.pop(member.worker, None)


# ---------------------------------------------------------------------- the first comparison


def begin_anew(core: CoreState, round_: StepRound) -> bool:
    """Makes workers learn anew whose weights differ in their first round; False: none has to."""
    odd = _apart(core, round_)
    if not odd or any(_differed(core, each) for each in odd):
        return False
    for member in odd:
        why = f"its weights differ from the others' after step {core.chain.step}"
        message = f"{why}, though it has learnt them: join again, to learn them anew"
        member.doubted = round_.terms.parent
        core.differed[member.worker] = member.request.node_id
        # This voids the round, whose averages have its gradient in them. Nobody waits for it to
        # come back, and no sample made its weights differ.
        departures.cut_off(core, member, message, why, grace_s=0.0, crash=False)
    return True


def blamed(core: CoreState, round_: StepRound, defect: LineDefect) -> LineDefect:
    """A defect of different weights, with the worker that learnt twice, or who gave it them."""
    twice = [each.worker for each in _apart(core, round_) if _differed(core, each)]
    if not twice:
        odd = None if defect.worker is None else core.members.get(defect.worker)
        giver = None if odd is None else odd.weights_from
        if giver is None:
            return defect
        told = f"it got them from worker {giver}, so that worker may have given others than its own"
        return replace(defect, message=f"{defect.message}: {told}")
    which = f"worker {twice[0]} has learnt them twice in a row, and they differed both times"
    return replace(defect, worker=twice[0], message=f"{defect.message}: {which}")


def _apart(core: CoreState, round_: StepRound) -> list[LineMember]:
    """Workers whose weights are compared for the first time since they learnt, and differ."""
    unproven = {each.worker: each for each in core.members if each.unproven}
    return [unproven[worker] for worker in apart(round_, unproven)] if unproven else []


def _differed(core: CoreState, member: LineMember) -> bool:
    return core.differed.get(member.worker) == member.request.node_id


def compared(core: CoreState, workers: Collection[int]) -> None:
    """The weights of these workers are equal."""
    for worker in workers:
        core.differed.pop(worker, None)
        member = core.members.get(worker)
        if member is not None:
            member.unproven = False
            if any(other not in (worker, member.weights_from) for other in workers):
                member.weights_from = None
