"""What a round leaves over: windows that are computed ahead, and fragments of the model.

Theory of operation. A round deals two windows. Its *batch* is what its record will cover: each
worker sends the change that its share of these positions made to its weights. The window *ahead* is
computed while that travels, and becomes the batch of the next round. So the record of a round never
covers what was computed during it, and a position is in a record when its change is in the average.

What was computed and is in no record yet is called *the pipe*. The core does not depend on what a
worker has of it: an assignment says what the worker sends, and the worker computes whatever of it
is missing. Shares that were computed ahead are dealt to the same workers again only so that they
need not be computed twice. So a lost worker's part is dealt to the others like any free positions,
a restarted core simply deals, and a pipe that was dropped costs time and nothing else.

The pipe is emptied by a round that deals nothing ahead. That comes before whatever needs the line's
state in one piece: an epoch's end, a checkpoint, a transfer, the end of the run.

On a line of *fragments* a round exchanges a part of the model's blocks. What its positions changed
in the other blocks is left over in the workers' own weights until those blocks have their turn. The
same rounds that empty the pipe exchange the whole model, so nothing is left over after them. Which
fragment a round exchanges follows from its step's number, so a restarted core goes on as before.
"""

from __future__ import annotations

from collections.abc import Sequence

from andon.protocol.records import PositionRange, RecordKind
from andon.protocol.shards import next_batch, reassign
from andon_coordinator.core import dealing, late
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.round import AttemptCounts, StepRound
from andon_coordinator.core.state import CoreState

__all__ = ["deal_ahead", "lets_transfer", "micro_batches_ahead", "next_attempts", "stops_after"]


def deal_ahead(core: CoreState, batch: PositionRange, roster: Sequence[LineMember]) -> None:
    """Deals the window after `batch` to a roster, to be computed during the next round.

    It also decides which fragment of the model is exchanged. All attempts of one step have the same
    window and fragment, so that a void round costs nobody its work.
    """
    policy = core.settings.policy
    if not (policy.overlap or policy.in_fragments):
        return
    attempts = core.attempts
    if not attempts.tried:
        # Decided once a step: a later attempt must deal the same window, or what was computed is
        # lost.
        attempts.tried = True
        # If all of them gave notice nobody is left to bring it.
        leaves = all(member.notice for member in roster)
        after = None if leaves else dealing.cursor_behind(core, batch)
        if after is not None and policy.in_fragments:
            attempts.fragment = (core.chain.step + 1) % policy.fragments
        if after is not None and policy.overlap:
            assert core.plan is not None
            window = attempts.ahead_window = core.pacing.window(roster, core.plan)
            attempts.ahead_batch = next_batch(after, window.size, core.plan.epoch_size)
    if attempts.ahead_batch is None or attempts.ahead_window is None:
        return
    # One that gave notice leaves once this round is over. If all did since the first attempt at the
    # step, the window stays as it is: it takes them one more round.
    workers = [member.worker for member in roster if not member.notice]
    workers = workers or [member.worker for member in roster]
    kept = [attempts.ahead.get(worker, ()) for worker in workers]
    shares = reassign(attempts.ahead_batch, kept, attempts.ahead_window.split(workers))
    dealt = dict(zip(workers, shares, strict=True))
    attempts.ahead = {member.worker: dealt.get(member.worker, ()) for member in roster}


def micro_batches_ahead(core: CoreState) -> tuple[int, ...]:
    """How many local steps each rank makes of what it computes ahead; empty if there is none."""
    window, shares = core.attempts.ahead_window, tuple(core.attempts.ahead.values())
    return () if window is None else window.micro_batches(shares)


def lets_transfer(core: CoreState) -> bool:
    """Whether a state transfer may begin: the sender drops what it has in the pipe.

    Without overlap that is the window of a void round, and what is left over of fragments. If too
    few workers are in sync for a round, nothing else could ever empty the pipe.
    """
    if not core.settings.policy.local_steps:
        return True
    if not (core.attempts.assigned or _left_over(core)):
        return True
    return late.taking_part(core) < core.needed


def _left_over(core: CoreState) -> bool:
    """Whether workers may hold changes of blocks that the last step did not exchange."""
    record, left_over = core.chain.record, core.attempts.left_over
    if record is not None and record.kind is RecordKind.MARK:
        return False  # It drops whatever workers had, and no round has ended since.
    if left_over is None:
        # A restarted coordinator can't know, nor one that took the head over from a worker.
        return core.settings.policy.in_fragments and core.chain.step > 0
    return left_over


def stops_after(core: CoreState, round_: StepRound, stop: str, *, owes: bool) -> str:
    """Why the run is over after a complete round; empty as long as the pipe is not, or if the
    line `owes` something after it."""
    stop = core.stop_wanted or stop
    if not (round_.terms.leaves_over or owes):
        return stop
    # As long as this is set nothing is dealt ahead, and nothing may stay owed (`cursor_behind`), so
    # the next round empties the pipe, and exchanges the whole model.
    core.stop_wanted = stop
    return ""


def next_attempts(core: CoreState, round_: StepRound) -> AttemptCounts:
    """The counts of the step after a round's: its batch is what was computed ahead; with a quorum,
    late workers keep what they hold."""
    if core.settings.policy.quorum is not None:
        late_ones = [each.worker for each in core.members.late()]
        held = {each: core.attempts.assigned.get(each, ()) for each in late_ones}
        return AttemptCounts(assigned=held)
    left_over = round_.terms.fragment is not None
    if round_.terms.ahead_batch is None:
        return AttemptCounts(left_over=left_over)
    assigned = dict(zip(round_.roster, round_.ahead_shares, strict=True))
    window = core.attempts.ahead_window
    return AttemptCounts(window=window, assigned=assigned, left_over=left_over)
