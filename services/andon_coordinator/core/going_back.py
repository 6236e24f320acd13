"""Going back: for a spike that stays, the line goes back to a checkpoint and leaves samples out.

Theory of operation
===================

A loss that is a spike whatever the samples are says that the weights are at fault. The line then
gives them up, as a person would by `andon run --resume`, and goes on with other samples
(`--on-spike back`, decided in `spikes`). All workers that train hold the weights that are given up,
so what `lost_state` waits for is not awaited here. The order is this:

    decided     the round is void, and the journal looks for the checkpoint's record (`begin`).
                No round opens meanwhile
    found       a MARK with that record as its parent goes to the journal (`ancestor_found`). Its
                cursor is behind all that was trained or tried since the record, and it skips that:
                nothing is trained twice, and each position is in one record of the history
    durable     the head moves, and every stream is closed (`lost_state.go_back`). All workers join
                again, and are behind
    restored    the worker that wrote the checkpoint loads it, as a transfer to itself (`restores`).
                If it is gone, another one on its host that has the same folder does. Then that one
                is in sync, and the others get its state as newcomers do

Up to the MARK nothing has happened: if the line is halted, or its head moves, the step is tried
again. After it, the record says all: a coordinator that starts again finds a MARK at the head whose
parent is a checkpoint's, and lets a worker load it that reports such a checkpoint. A new process
that has loaded it before it joined gets the MARK, as after any roll-back.
"""

from __future__ import annotations

from dataclasses import replace

from andon.protocol.capabilities import BACK
from andon.protocol.records import Cursor, Key, PositionRange, RecordKind
from andon.protocol.shards import cursor_after
from andon_coordinator.core import lost_state, operators
from andon_coordinator.core.checkpoints import KnownCheckpoint
from andon_coordinator.core.comparison import Comparison
from andon_coordinator.core.defects import LineDefect
from andon_coordinator.core.effects import FindAncestor, SendTransfer
from andon_coordinator.core.events import AncestorFound, Checkpoint
from andon_coordinator.core.line_state import LineState
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.round import PendingRecord, StepRound
from andon_coordinator.core.state import CoreState, GoingBack
from andon_coordinator.core.step_results import Skip
from andon_coordinator.core.transfers import TransferRole

__all__ = ["ancestor_found", "begin", "checkpoint_before", "left_out", "restores"]


def checkpoint_before(core: CoreState, step: int) -> KnownCheckpoint | None:
    """The last good checkpoint from before a step that a worker here can load; None: none is."""
    if core.settings.policy.quorum is not None or core.chain.cursor.owed:
        return None  # What is owed is of windows from before and after the checkpoint.
    return core.checkpoints.proved_before(step, lambda each: _holder(core, each) is not None)


def begin(
    core: CoreState, round_: StepRound, checkpoint: KnownCheckpoint, defect: LineDefect, why: str
) -> None:
    """Asks the journal for a checkpoint's record.

    Args:
        core: the state; the round is void.
        round_: the round that had the spike.
        checkpoint: what `checkpoint_before` gave.
        defect: the spike.
        why: what was decided about it.
    """
    assert core.chain.head is not None
    core.going_back = GoingBack(
        defect=defect,
        why=why,
        checkpoint=checkpoint,
        head=core.chain.head,
        batch=round_.terms.batch,
    )
    core.emit(FindAncestor((checkpoint.head,)))


def ancestor_found(core: CoreState, event: AncestorFound) -> None:
    """Goes back to the checkpoint's record; or the search was for lost state."""
    going = core.going_back
    if going is None or event.heads != (going.checkpoint.head,):
        lost_state.ancestor_found(core, event)
        return
    core.going_back = None
    idle = core.round is None and core.pending_record is None and core.keys.saved
    over = core.line_state is LineState.COMPLETE or bool(core.stop_reason)
    if not idle or over or core.chain.head != going.head:
        return  # The step is tried again.
    why_not = _mark(core, going, event)
    if why_not:
        message = f"{going.defect.message}; the line can't go back for it: {why_not}"
        core.stop_line(replace(going.defect, message=message))


def restores(core: CoreState) -> bool:
    """Whether the line waits for a worker to load the checkpoint that it went back to.

    The worker is told once its script waits for the line.
    """
    record, head = core.chain.record, core.chain.head
    if record is None or record.kind is not RecordKind.MARK or record.parent is None:
        return False
    if core.members.in_sync_count(head):
        return False
    known = next((each for each in core.checkpoints.known if each.head == record.parent), None)
    holder = None if known is None else _holder(core, known)
    if known is None or holder is None:
        # After a restart nobody has said yet what it has: workers do when they ask for work.
        return core.abandoned is not None and any(
            _can_load(each) and not each.accepts_state for each in core.members.live()
        )
    if holder.accepts_state and not core.transfers.busy(holder.worker):
        _have_it_loaded(core, holder, known, record.parent)
    return True


def left_out(
    before: Cursor, after: Cursor, epoch_size: int | None
) -> list[tuple[int, PositionRange]] | None:
    """The positions from one cursor up to another, by epoch.

    Returns:
        None: an epoch of unknown length has ended between the two.
    """
    found = []
    for epoch in range(before.epoch, after.epoch + 1):
        start = before.position if epoch == before.epoch else 0
        stop = after.position if epoch == after.epoch else epoch_size
        if stop is None:
            return None
        if start < stop:
            found.append((epoch, PositionRange(start, stop)))
    return found


def _mark(core: CoreState, going: GoingBack, event: AncestorFound) -> str:
    """Gives the MARK to the journal; returns why that can't be, or "" if it is done."""
    back_to, plan = event.record, core.plan
    if back_to is None:
        return f"the checkpoint {going.checkpoint.folder} is not of this history"
    assert plan is not None
    cursor = cursor_after(core.chain.cursor, going.batch, plan.epoch_size)
    parts = None if back_to.cursor.owed else left_out(back_to.cursor, cursor, plan.epoch_size)
    if parts is None:
        return "an epoch whose length nobody knows has ended since its checkpoint"
    if core.end_reached(back_to.step, cursor):
        return "no samples of the run would be left after that"
    *earlier, (epoch, positions) = parts
    skip = Skip(epoch, positions, 0, operators.BY_ITSELF, earlier=tuple(earlier))
    # What workers were like when they trained what is given up says nothing any more.
    fresh = Comparison(core.comparison.factor)
    pending = PendingRecord(
        record=core.draw_mark(cursor, after=back_to),
        rolls_back=True,
        back_to=back_to,
        why_back=going.defect.message,
        comparison=fresh,
    )
    core.save(pending, note=going.why, skipped=skip)
    return ""


def _have_it_loaded(
    core: CoreState, member: LineMember, known: KnownCheckpoint, parent: Key
) -> None:
    chain = core.chain
    assert chain.head is not None
    assert member.stream is not None
    # Its bytes pass no reducer, so the loss of one does not end it.
    transfer = core.transfers.begin(
        chain.head,
        member.worker,
        member.worker,
        term=core.keys.term,
        relay=known.folder,
        now=core.now,
    )
    core.recovery_over = True
    core.emit(
        SendTransfer(
            stream=member.stream,
            transfer_id=transfer.id,
            role=TransferRole.RECEIVE,
            head=chain.head,
            step=chain.step,
            cursor=chain.cursor,
            peer=member.worker,
            checkpoint=Checkpoint(known.step, known.folder, parent),
        )
    )


def _holder(core: CoreState, known: KnownCheckpoint) -> LineMember | None:
    """The worker that loads a checkpoint: its writer, or one that has the same folder."""
    writer = core.members.of_incarnation(known.process)
    if writer is not None and writer.stream is not None and _can_load(writer):
        return writer
    return next((each for each in core.members.live() if _sees(each, known)), None)


def _sees(member: LineMember, known: KnownCheckpoint) -> bool:
    """Whether a member's own checkpoints are in the same folder of the same host."""
    plan = member.request.checkpoints
    here = plan is not None and plan.folder == known.place
    return here and member.request.node_id == known.host and _can_load(member)


def _can_load(member: LineMember) -> bool:
    return BACK in member.request.capabilities and member.request.checkpoints is not None
