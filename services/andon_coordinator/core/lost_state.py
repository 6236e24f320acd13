"""Lost state: everybody is here and nobody holds the line's head; how the line goes on (rule 12).

Theory of operation
===================

After a whole cluster lost power, the journal ends at step 150, and the workers come back with the
checkpoint of step 100. Nobody holds step 150 any more. The line then goes on from the newest record
of its history that a worker here holds, by a MARK whose parent is that record. The steps after it
stay in the journal, but are no part of the history; their positions are dealt again. A worker that
survived at an older record counts like one that loaded a checkpoint.

This gives steps up, so it happens only where nothing better can be expected:

- Nobody in sync is here, nobody is in grace, and as many workers as expected are.
- A coordinator that has used the head knows everybody who held it: they are lost. One that has just
  started does not. It waits for the workers of the last STEP, unless others have their slots, until
  the recovery window is over. So a service that is killed while its workers live goes on with them.
- A worker that survived at a record from before the newest known checkpoint does not count, until a
  person says so: nobody has tried to load that checkpoint. A worker that loaded an older one has.
- A halt stands until a person has answered it. Nothing here runs while the line is halted.

Only the journal knows which records are in the history: a worker's head may be of a history that
was rolled back. So the core asks (`FindAncestor`), and looks again at what holds when the answer
comes. Until the MARK is durable the head stays where it is. If the journal fails, or a worker
comes back that holds the head, nothing has happened. Once it is durable, every stream is closed
before anything is sent that follows from it: what workers were sent before belongs to the lost
steps. A worker that held them and comes back later is behind, and gets the state of the others.

If no such record is here, the line halts, as STATE_LOST.
"""

from __future__ import annotations

from andon.protocol.halts import HaltReason
from andon.protocol.records import Key, Record
from andon_coordinator.core import departures, learning, syncing
from andon_coordinator.core.defects import LineDefect
from andon_coordinator.core.effects import FindAncestor, NoteWentBack
from andon_coordinator.core.events import AncestorFound, FolderSearched
from andon_coordinator.core.line_state import LineState, Trigger
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.round import PendingRecord
from andon_coordinator.core.state import CoreState

__all__ = [
    "ancestor_found",
    "awaited",
    "close_all",
    "folder_searched",
    "go_back",
    "go_on_without_head",
    "heads_here",
    "is_lost",
    "remedy",
]

_MOST_NAMED = 5
"""So many damaged checkpoints are named in a halt."""


def is_lost(core: CoreState) -> bool:
    """Whether the line's head is held by nobody, and nobody who may hold it can be expected."""
    members, chain = core.members, core.chain
    if members.in_sync_count(chain.head) or members.any_in_grace:
        return False
    if any(each.head == chain.head for each in members.spares()):
        return False  # It takes part in nothing, and holds the head all the same.
    if members.live_count < core.expected or learning.may_reach_head(core):
        return False
    return not awaited(core)


def awaited(core: CoreState) -> list[int]:
    """Workers that may still come with the head, though this coordinator never saw them."""
    # Members of this coordinator that held the head are lost. Those of the one before it may be on
    # their way: a network takes its time, and each step that they hold is work.
    if core.recovery_over or _window_over(core):
        return []
    return sorted(set(core.last_roster) - {member.worker for member in core.members.live()})


def heads_here(core: CoreState) -> tuple[Key, ...]:
    """The different heads of the workers that are here, greatest first."""
    heads = {member.head for member in core.members.live() if member.head is not None}
    return tuple(sorted(heads, reverse=True))


def go_on_without_head(core: CoreState) -> None:
    """Asks the journal which of the heads here is in the history; halts if there is none to ask."""
    if core.sought:
        return  # The answer is on its way, and looks at everything again.
    core.enter(Trigger.FELL_SHORT)
    # Kept until the answer comes, which counts only if the heads are still the same.
    core.sought = heads_here(core)
    if core.sought:
        core.emit(FindAncestor(core.sought))
    else:
        _halt(core, "")


def ancestor_found(core: CoreState, event: AncestorFound) -> None:
    """Goes back to the record that the journal found, if the state is still lost."""
    if event.heads != core.sought:
        return
    # Whatever follows, this search is over, and `go_on` may begin another one.
    core.sought = ()
    idle = core.round is None and core.pending_record is None and core.keys.saved
    over = core.line_state in (LineState.HALTED, LineState.COMPLETE) or bool(core.stop_reason)
    # Somebody may have come or gone meanwhile; then `go_on` asks again if it has to.
    if not idle or over or not is_lost(core) or heads_here(core) != event.heads:
        return
    if event.record is None:
        bringer = _holders(core, event.heads[0])[0]
        _halt(
            core,
            f"; worker {bringer.worker} brought step {bringer.step} of another history: one that "
            "was rolled back, or another run's",
        )
    elif core.accepts_older or not _misses_checkpoint(core, event.record):
        _mark(core, event.record)
    else:
        who, step = _holders(core, event.record.key)[0].worker, event.record.step
        _halt(
            core,
            f"; worker {who} holds step {step}, from before the newest checkpoint. "
            f"`andon resume` goes on from step {step}",
        )


def go_back(core: CoreState, record: Record, why: str = "") -> None:
    """The MARK is durable: the head moves to its parent, and every stream is closed.

    Args:
        core: the state.
        record: the parent.
        why: the spike for which the line goes back; empty: nobody held its head.
    """
    assert core.chain.head is not None
    syncing.close_scalar_all_reduces(core)
    core.transfers.cancel_all()
    core.snapshots.cancel_all()
    holders = tuple(member.worker for member in _holders(core, record.key))
    # Before the head moves: it names the step that is given up.
    core.emit(NoteWentBack(record.step, core.chain.step, holders, why))
    core.accepts_older = False
    # A worker that was away, and has a head up to this one, is merely behind.
    core.abandoned = max(core.chain.head, core.abandoned or core.chain.head)
    core.chain.go_back(record)
    core.checkpoints.went_back(record.step)
    core.last_roster, core.departed = (), {}
    # Last here, and before `record_saved` sends anything that follows from the MARK.
    close_all(core, f"the line goes on from step {record.step}", "the line went back")


def folder_searched(core: CoreState, event: FolderSearched) -> None:
    """Notes what the service found in the run's folder, for the words of a halt."""
    checkpoints = core.checkpoints
    checkpoints.searched, checkpoints.found = True, event.step
    checkpoints.run_dir, checkpoints.damaged = event.folder, event.damaged


def close_all(core: CoreState, message: str, why: str) -> None:
    """Closes every stream, before anything of another history is sent (rule 12).

    What workers hold or were sent belongs to the lost history; joining again discards it.
    """
    grace_s = core.settings.liveness.lease_s
    for member in core.members.live():
        departures.cut_off(core, member, f"{message}: join again", why, grace_s=grace_s)


def remedy(core: CoreState) -> str:
    """What a person can do about lost state: one sentence."""
    checkpoints, run_id = core.checkpoints, core.settings.run_id
    if core.chain.step == 0:
        return "Nothing is lost with it: `andon resume` takes new initial weights"
    if checkpoints.step:
        where = f"A checkpoint of step {checkpoints.step} is at {checkpoints.folder}"
    elif checkpoints.found is not None:
        where = f"A whole checkpoint of step {checkpoints.found} is in {checkpoints.run_dir}"
        if checkpoints.damaged:
            where += f" (newer ones are damaged: {_first_of(checkpoints.damaged)})"
    elif checkpoints.damaged:
        return (
            f"No checkpoint of this history in {checkpoints.run_dir} is whole: "
            f"{_first_of(checkpoints.damaged)}. Restore one from a copy, bring back a worker that "
            "holds the weights, or start a new run"
        )
    elif checkpoints.searched:
        return (
            f"There is no checkpoint of this history in {checkpoints.run_dir}: bring back a worker "
            "that holds the weights, or a folder of checkpoints, or start a new run"
        )
    else:
        where = "If the run has a checkpoint"
    return (
        f"{where}: start the workers with ANDON_RESUME=latest, then call `andon resume`; or end "
        f"the run and call `andon run --resume {run_id}`"
    )


def _first_of(damaged: tuple[str, ...]) -> str:
    """What is wrong with each of the newest; the log has all of them."""
    named = "; ".join(damaged[:_MOST_NAMED])
    more = len(damaged) - _MOST_NAMED
    return f"{named}; and {more} more" if more > 0 else named


def _mark(core: CoreState, back_to: Record) -> None:
    lost = core.chain.step
    record = core.draw_mark(back_to.cursor, after=back_to)
    pending = PendingRecord(
        record=record,
        stop_reason=core.end_reached(record.step, record.cursor),
        rolls_back=True,
        back_to=back_to,
    )
    core.save(pending, note=f"went on after step {back_to.step}: nobody held step {lost}")


def _halt(core: CoreState, found: str) -> None:
    what = f"no worker holds the weights of step {core.chain.step}"
    if not found and core.chain.step:
        found = ", and none has loaded a checkpoint"
    core.stop_line(
        LineDefect(reason=HaltReason.STATE_LOST, message=f"{what}{found}. {remedy(core)}")
    )


def _misses_checkpoint(core: CoreState, record: Record) -> bool:
    """Whether a checkpoint is known that is newer than a record, and no worker looked for it."""
    known = max(core.checkpoints.step, core.checkpoints.found or 0)
    # A process that joins for the first time has seen no term. With a head, it loaded a checkpoint.
    loaded = any(each.request.greatest_term == 0 for each in _holders(core, record.key))
    return record.step < known and not loaded


def _holders(core: CoreState, head: Key) -> list[LineMember]:
    return [each for each in core.members.live() if each.head == head]


def _window_over(core: CoreState) -> bool:
    window = core.settings.recovery_window_s
    return core.first_join_at is not None and core.now - core.first_join_at >= window
