"""Syncing: state transfers, scalar all-reduces and the comparison of last weights.

A worker that is behind gets the whole state (model, optimizer, sampler) of a worker in sync, by way
of a reducer. No round runs meanwhile (rule 10).

A scalar all-reduce averages one number over the workers outside any step. A worker whose loop is
over sends the digest of its weights with one, and waits for the answer before it leaves. So weights
that differ halt the line while every worker is still there to hear of it (rule 17). Digests that
workers leave with are compared once all have gone; that covers loops that end without the
all-reduce.
"""

from __future__ import annotations

import math
from dataclasses import replace

from andon.protocol.halts import HaltReason
from andon.protocol.records import Key
from andon_coordinator.core import departures, late, spares
from andon_coordinator.core.agreement import divergence
from andon_coordinator.core.defects import LineDefect
from andon_coordinator.core.effects import (
    NoteCaughtUp,
    SaveSteered,
    SendScalarAllReduceResult,
    SendTransfer,
)
from andon_coordinator.core.events import ScalarAllReduceArrived, StateReported
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.scalar_all_reduces import ScalarAllReduceMean, own_mean
from andon_coordinator.core.state import CoreState
from andon_coordinator.core.transfers import StateTransfers, TransferRole

__all__ = [
    "answer_alone",
    "answer_scalar_all_reduces",
    "awaiting_state",
    "begin_transfer",
    "begin_transfers",
    "close_scalar_all_reduces",
    "scalar_all_reduce_arrived",
    "state_reported",
]


# ------------------------------------------------------------------------------ transfers


def begin_transfers(core: CoreState) -> None:
    """Pairs each worker that is behind with one in sync; both must be waiting for the line.

    Donors must have asked for work. Joiners must have done so too, or be in their first join. A
    script in between may have changed a part of its state, such as a learning-rate scheduler after
    an evaluation. The state of such a donor would belong to no commit, and such a joiner would go
    on to change the state that it received.
    """
    chain, transfers = core.chain, core.transfers
    assert chain.head is not None
    waiting = awaiting_state(core)
    if not waiting:
        return
    donors = [
        each
        for each in core.members.in_sync(chain.head)
        # A worker that leaves its epoch asked for the epoch's end, and its script has that end
        # still to process.
        if each.wants_work and not each.leaves_epoch and not transfers.busy(each.worker)
    ]
    for donor, joiner in zip(donors, waiting, strict=False):
        begin_transfer(core, transfers, donor, joiner)


def begin_transfer(
    core: CoreState, among: StateTransfers, donor: LineMember, joiner: LineMember
) -> None:
    """Tells both ends that the head's state moves; `among` says whether rounds run meanwhile."""
    chain = core.chain
    assert chain.head is not None
    transfer = among.begin(
        chain.head,
        donor.worker,
        joiner.worker,
        term=core.keys.term,
        relay=core.reducers.addresses[0],
        now=core.now,
    )
    beside = among is core.snapshots
    # Before the first step everybody waits for everybody.
    trains = bool(core.last_roster) and late.taking_part(core) >= core.needed
    # The head is in use now. A worker that joins with a newer one comes too late to recover it.
    core.recovery_over = True
    ends = ((joiner, TransferRole.RECEIVE, donor), (donor, TransferRole.SEND, joiner))
    for member, role, peer in ends:
        assert member.stream is not None
        core.emit(
            SendTransfer(
                stream=member.stream,
                transfer_id=transfer.id,
                role=role,
                head=chain.head,
                step=chain.step,
                cursor=chain.cursor,
                peer=peer.worker,
                relay=transfer.relay,
                beside_training=beside,
                holds_up=trains and not beside,
            )
        )


def awaiting_state(core: CoreState) -> list[LineMember]:
    """The workers that are behind and may get the line's state now; spares, if one is missing."""
    chain, transfers = core.chain, core.transfers
    trains = late.taking_part(core) >= core.needed
    spare = spares.awaiting_state(core) if spares.lacks_worker(core) else []
    behind = [
        each
        for each in core.members.behind_accepting(chain.head)
        if not transfers.busy(each.worker)
        and transfers.may_begin(
            each.worker, each.request.node_id, chain.step, core.now, trains=trains
        )
    ]
    return behind + spare


def state_reported(core: CoreState, member: LineMember, event: StateReported) -> None:
    """One end of a transfer is done; the joiner counts once it reports the head (rule 10)."""
    transfer = core.transfers.get(event.transfer_id)
    # The transfer may have been cancelled while the report was on its way.
    if transfer is None or member.worker not in (transfer.donor, transfer.joiner):
        return
    joiner = core.members.get(transfer.joiner)
    assert joiner is not None, "a lost worker's transfers are cancelled"
    if not event.failure and member is not joiner:
        return  # The donor sent everything. What counts is what the joiner holds.
    # Before either end is released, which would cancel it once more.
    core.transfers.end(transfer)
    if event.failure and transfer.donor == transfer.joiner:
        core.stop_line(_not_loaded(core, transfer.joiner, event.failure))
        return
    if not event.failure and event.head == transfer.head:
        joiner.head = transfer.head
        joiner.step = core.chain.step
        joiner.held = joiner.doubted = None
        joiner.accepts_state = joiner.spare = False
        # The donor gave the digest of what it sent, so it proves nothing of the weights. Those are
        # compared with everybody's in the next round, before its gradients may move anything.
        core.note_uncompared(joiner.worker)
        if transfer.donor != transfer.joiner:
            core.note_source(joiner, transfer.donor)
        core.transfers.setbacks.pop(joiner.worker, None)
        if core.last_roster:  # Before the first step everybody waits for everybody.
            took_s = core.now - transfer.began_at
            core.emit(NoteCaughtUp(joiner.worker, took_s, took_s, learnt=False))
        _send_missed_mark(core, joiner)
        return
    core.note_setback(transfer, joiner, event.failure or "it reported another head")
    if event.failure:
        departures.release(core, transfer.donor if member is joiner else transfer.joiner)


def _not_loaded(core: CoreState, worker: int, why: str) -> LineDefect:
    """A checkpoint to which the line went back is damaged, or is not there any more."""
    run = core.settings.run_id
    return LineDefect(
        reason=HaltReason.STATE_LOST,
        message=f"the line went back to step {core.chain.step}, and worker {worker} could not load "
        f"its checkpoint: {why}. `andon resume` lets it try again; or end the run and call `andon "
        f"run --resume {run} --resume-step STEP` with an earlier one",
        worker=worker,
    )


def _send_missed_mark(core: CoreState, joiner: LineMember) -> None:
    """Sends a MARK that was committed during the transfer; it moved no weights."""
    record = core.chain.record
    if joiner.head != core.chain.head and record is not None and core.can_apply(joiner, record):
        core.announce(joiner, record, core.chain.result)


# --------------------------------------------------------------------- scalar all-reduces


def scalar_all_reduce_arrived(
    core: CoreState, member: LineMember, event: ScalarAllReduceArrived
) -> None:
    """A worker has a number to average; with its last weights, these are compared too."""
    round_ = core.round
    if round_ is not None and round_.has(member.worker, event.stream) and not member.wants_work:
        # Its round was opened by standing requests, and its script is not there yet. Those of the
        # others may be: they would give no number, and nobody would know. Now they ask for work.
        why = f"worker {member.worker} averages a number before step {round_.terms.step}"
        # Before the number is taken: the others ask again, which says that they give none.
        core.withdraw(why)
    _give_number(core, member, event)
    # A worker that was just cut off for a bad weight has no stream any more.
    if event.digest and member.stream is not None:
        member.last_weights = event
        _compare_last_weights(core)


def answer_scalar_all_reduces(core: CoreState) -> None:
    """Answers each one for which no worker in sync is awaited any more."""
    if not core.scalar_all_reduces.any_open:
        return
    head = core.chain.head
    # After a restart, workers come back one by one and give their numbers again. Until the expected
    # ones were here, an answer would leave some out. At the end of a run they need not come back.
    gathered = core.workers_ready_once or bool(core.stop_reason)
    if not gathered or core.members.any_in_grace:
        return
    if not core.scalar_all_reduces.may_settle(core.members.idle_count(head)):
        return
    members = core.members.in_sync(head)
    if not members:
        return
    awaited = {member.worker for member in members if not member.wants_work}
    # Learners' scripts make the same calls, some steps later.
    hear = [*members, *core.members.following()]
    for mean in core.scalar_all_reduces.settle(awaited):
        _keep_for_audits(core, mean)
        for member in hear:
            _answer(core, member, head, mean)


def _keep_for_audits(core: CoreState, mean: ScalarAllReduceMean) -> None:
    """Has the journal keep an answer, on a line whose steps can be recomputed."""
    if core.plan is not None and core.plan.grain:
        kept = core.scalar_all_reduces.keep(mean)
        if kept is not None:
            core.emit(SaveSteered(core.chain.step, *kept))


def answer_alone(
    core: CoreState, member: LineMember, event: ScalarAllReduceArrived, *, lost: bool = False
) -> None:
    """Gives a worker its own number back: it takes part in no scalar all-reduce of the line.

    If those that took part are `lost`, the answer says that it is of none of them.
    """
    mean = own_mean(event.sequence, (event.value, event.weight, event.data))
    _answer(core, member, event.head, replace(mean, contributors=0) if lost else mean)


def close_scalar_all_reduces(core: CoreState) -> None:
    """Answers workers that still wait: the weights are about to move, and leave them behind.

    This runs before the head moves, because an answer names the head that its request named.
    """
    for mean, givers in core.scalar_all_reduces.close():
        for member in core.members.live():
            if member.worker in givers:
                _answer(core, member, core.chain.head, mean)


def _give_number(core: CoreState, member: LineMember, event: ScalarAllReduceArrived) -> None:
    weight, head = event.weight, event.head
    part = event.value, weight, event.data
    if not (math.isfinite(weight) and weight >= 0):
        text = f"a scalar all-reduce's weight must be finite and at least 0, not {weight}"
        departures.cut_off(core, member, text, text, grace_s=core.settings.rejoin_grace_s)
        return
    away = member.spare or member.head != core.chain.head
    if away or head is None or head not in core.chain.request_heads:
        # The worker is behind, so nobody else takes part in this scalar all-reduce. Its script must
        # not hang, so it gets its own number back. Once it asks for work it gets the line's state,
        # which replaces everything that its script derived from the answer.
        answer_alone(core, member, event)
        return
    mean = core.scalar_all_reduces.give(member.worker, event.sequence, part)
    if mean is not None:
        _answer(core, member, core.chain.head, mean)


def _answer(
    core: CoreState, member: LineMember, head: Key | None, mean: ScalarAllReduceMean
) -> None:
    assert member.stream is not None
    core.emit(
        SendScalarAllReduceResult(
            member.stream,
            head,
            mean.sequence,
            mean.value,
            mean.weight,
            mean.contributors,
            mean.data,
        )
    )


def _compare_last_weights(core: CoreState) -> None:
    """Compares the last weights once every worker has reported them, or has left."""
    head = core.chain.head
    if core.final_weights_compared or core.members.any_in_grace:
        return
    if core.members.unreported_count(head):
        return
    given = {
        each.worker: each.last_weights
        for each in core.members.in_sync(head)
        if not each.wants_work and each.last_weights is not None
    }
    defect = divergence(
        {worker: weights.digest for worker, weights in given.items()},
        core.chain.step,
        {worker: weights.digest_prefixes for worker, weights in given.items()},
        core.layout,
        {worker for worker, weights in given.items() if weights.digest_base_hashed},
    )
    if defect is not None:
        # A person who answers this halt accepts the weights. They must not halt the line again
        # when workers leave with them.
        core.final_weights_compared = True
        core.stop_line(defect)
