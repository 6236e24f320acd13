"""Dealing: what a round takes, and which of it each rank gets.

A step takes a batch at the cursor, and all attempts at it take the same one. With a quorum
(`late`) a round's *work* is that batch and whatever is owed: positions before the cursor that no
record has. A worker *holds* what it was assigned last and no record covers; it has computed it, or
is about to. It keeps that, and gets nothing in addition, so that it is done at once. Those that
hold nothing get a part of a window each: of what is owed and held by nobody first, of the batch the
rest. So a batch is as large as those that are free, and empty if nobody is. Near an epoch's end a
part is what its worker computes until all are done.

Nobody writes down who holds what: an assignment is the only authority. A lost worker's positions
are free like any others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from andon.protocol.grains import Grains
from andon.protocol.records import Cursor, PositionRange
from andon.protocol.shards import (
    Ranges,
    Split,
    cursor_after,
    hand_out,
    merged,
    next_batch,
    reassign,
    subtract,
)
from andon_coordinator.core import syncing
from andon_coordinator.core.effects import NoteFewGrains
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.pacing import StepWindow
from andon_coordinator.core.quorum import done_in_s
from andon_coordinator.core.round import StepRound
from andon_coordinator.core.state import CoreState

__all__ = ["Dealt", "cursor_behind", "cursor_of", "deal", "note", "owing", "work_at"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """What a round takes, and each rank's share."""

    batch: PositionRange
    shares: tuple[Ranges, ...]
    grains: Grains | None = None
    """The batch's grains, if the plan has any."""
    whole: bool = True
    """Whether nothing may stay owed behind it, so that it takes everybody."""
    change_scale: float | None = None
    """What the mean change is multiplied with; None: the line has no quorum."""


def deal(core: CoreState, roster: Sequence[LineMember], window: StepWindow) -> Dealt:
    """What the next attempt takes of a window; with a quorum, for as long as nobody is awaited."""
    if core.settings.policy.quorum is not None or core.chain.cursor.owed:
        return _deal_work(core, roster, window)
    plan = core.plan
    assert plan is not None
    batch = next_batch(core.chain.cursor, window.size, plan.epoch_size)
    workers = [member.worker for member in roster]
    split = window.split(workers)
    # Each worker keeps the positions that it had in the last attempt, because it kept their
    # gradients. Only a lost worker's positions are computed again.
    kept = [core.attempts.assigned.get(worker, ()) for worker in workers]
    grains = Grains(batch, plan.grain) if plan.grain else None
    if grains is None:
        return Dealt(batch=batch, shares=reassign(batch, kept, split))
    if grains.count < len(workers) and core.few_grains != (grains.count, len(workers)):
        core.few_grains = grains.count, len(workers)
        core.emit(NoteFewGrains(*core.few_grains))
    dealt = grains.deal([grains.of(each) for each in kept], split)
    return Dealt(batch=batch, shares=tuple(map(grains.ranges, dealt)), grains=grains)


def note(core: CoreState, workers: Sequence[int], dealt: Dealt) -> None:
    """Notes what each worker has now, for the next attempt."""
    attempts = core.attempts
    shares = dict(zip(workers, dealt.shares, strict=True))
    late = (each.worker for each in core.members.late())
    attempts.assigned = {worker: attempts.assigned.get(worker, ()) for worker in late} | shares
    attempts.batch = dealt.batch


def owing(core: CoreState, window: StepWindow) -> dict[int, tuple[Ranges, int]]:
    """What each late worker owes, and in how many local steps, by its stream."""
    found = {}
    for member in core.members.late():
        assert member.stream is not None
        share = core.attempts.assigned.get(member.worker, ())
        (steps,) = window.micro_batches((share,)) or (0,)
        found[member.stream] = share, steps
    return found


def work_at(cursor: Cursor, batch: PositionRange) -> Ranges:
    """What a round of a batch at a cursor may cover: also what is owed."""
    return merged((*cursor.owed, batch))


def cursor_of(core: CoreState, round_: StepRound) -> Cursor:
    """The cursor of a complete round's record: what no share has is owed."""
    assert core.plan is not None
    chain, batch = core.chain, round_.terms.batch
    after = cursor_after(chain.cursor, batch, core.plan.epoch_size)
    if round_.change_scale is None:
        return after  # Its roster has all of it.
    covered = (part for share in round_.shares for part in share)
    owed = subtract(work_at(chain.cursor, batch), covered)
    if after.epoch != chain.cursor.epoch:
        assert not owed, "a round that ends its epoch takes everything"
        return after
    return Cursor(after.epoch, after.position, owed)


# --------------------------------------------------------------------------- with a quorum


def _deal_work(core: CoreState, roster: Sequence[LineMember], window: StepWindow) -> Dealt:
    cursor, late = core.chain.cursor, core.members.late()
    held = {each.worker: core.attempts.assigned.get(each.worker, ()) for each in (*roster, *late)}
    batch = core.attempts.batch
    if batch is None:
        batch = _new_batch(core, roster, window, held)
    work = work_at(cursor, batch)
    quorum = core.settings.policy.quorum is not None
    # Something may be owed from when the run was served with a quorum.
    whole = not quorum or cursor_behind(core, batch) is None
    free = subtract(work, (part for ranges in held.values() for part in ranges))
    kept = [held[each.worker] for each in roster]
    takers = [rank for rank, ranges in enumerate(kept) if not ranges]
    if whole and not takers:
        takers = list(range(len(roster)))
    shares = list(kept)
    if takers:
        who = [roster[rank] for rank in takers]
        last = _last_parts(core, who, window, held, batch.stop, sum(map(len, free)))
        split = Split(last or window.split([each.worker for each in who]).targets)
        handed = hand_out(free, [kept[rank] for rank in takers], split)
        for rank, share in zip(takers, handed, strict=True):
            shares[rank] = share
    covered = sum(len(part) for share in shares for part in share)
    # At an epoch's end less than a window may be left, and that is a whole one then.
    fewest = min(window.size, sum(map(len, work))) if whole else window.size
    scale = None if not quorum else covered / fewest if covered else 1.0
    return Dealt(batch=batch, shares=tuple(shares), whole=whole, change_scale=scale)


def _new_batch(
    core: CoreState, roster: Sequence[LineMember], window: StepWindow, held: dict[int, Ranges]
) -> PositionRange:
    """The batch of a step's first attempt: as much as those take that hold nothing."""
    assert core.plan is not None
    cursor = core.chain.cursor
    takers = [each for each in roster if not held[each.worker]]
    free = subtract(cursor.owed, (part for ranges in held.values() for part in ranges))
    owed = sum(map(len, free))
    last = _last_parts(core, takers, window, held, cursor.position, owed)
    if last:
        takes = sum(last)
    else:
        targets = _targets(window, held)
        fresh = sum(targets[each.worker] for each in takers)
        takes = -(-window.size * fresh // sum(targets.values()))
    takes -= owed
    if last and core.plan.epoch_size is not None and core.members.late():
        # The step that ends the epoch waits for those that are late, so it is a small one.
        small = core.plan.epoch_size - cursor.position - window.unit
        takes = min(takes, small) if small > 0 else takes
    if takes <= 0:
        return PositionRange(cursor.position, cursor.position)
    return next_batch(cursor, takes, core.plan.epoch_size)


def _targets(window: StepWindow, workers: Iterable[int]) -> dict[int, int]:
    """How the parts of a window compare."""
    everybody = sorted(workers)
    return dict(zip(everybody, window.split(everybody).targets_of(len(everybody)), strict=True))


def _last_parts(
    core: CoreState,
    takers: Sequence[LineMember],
    window: StepWindow,
    workers: Iterable[int],
    position: int,
    free: int,
) -> tuple[int, ...]:
    """How much each of `takers` gets near the epoch's end, at least a local step; empty: as usual.

    Args:
        core: the state.
        takers: those that hold nothing.
        window: the step's.
        workers: all that take part in it.
        position: nobody was assigned what lies behind it.
        free: positions before it that nobody holds.
    """
    assert core.plan is not None
    if core.plan.epoch_size is None or not window.unit:
        return ()
    members = filter(None, map(core.members.get, workers))
    paces = [each.pace for each in members]
    seconds = done_in_s(core.plan.epoch_size - position + free, paces, core.now)
    if seconds is None:
        return ()
    targets, parts, near = _targets(window, workers), [], False
    for each in takers:
        assert each.pace.position_s is not None
        usual = max(1, window.size * targets[each.worker] // sum(targets.values()))
        steps = max(1, round(seconds / each.pace.position_s / window.unit))
        near = near or steps * window.unit < usual
        parts.append(min(usual, steps * window.unit))
    return tuple(parts) if near else ()


def cursor_behind(core: CoreState, batch: PositionRange) -> Cursor | None:
    """Where the line goes on behind the step with `batch`, if that may leave something undone.

    None: something needs the line in one piece, so nothing may be computed ahead, or stay owed.
    """
    chain, plan, step = core.chain, core.plan, core.chain.step + 1
    assert plan is not None
    after = cursor_after(chain.cursor, batch, plan.epoch_size)
    # A stream of unknown length may end within any share. What lies behind its end is nothing, and
    # owed by nobody.
    if plan.epoch_size is None or after.epoch != chain.cursor.epoch:
        return None
    if core.draining or core.stop_wanted or core.end_reached(step, after):
        return None
    if core.checkpoints.is_due_after(step) or syncing.awaiting_state(core):
        return None
    return after
