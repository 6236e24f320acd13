"""Operators: what people ask of the line: halt, go on, end, resume from an earlier record."""

from __future__ import annotations

from andon.protocol.halts import HaltAnswer, HaltEvidence, HaltReason
from andon.protocol.records import Cursor, PositionRange, Record
from andon.protocol.run_settings import RunPlan
from andon.protocol.shards import Ranges, cursor_after, merged, next_batch, subtract
from andon_coordinator.core import dealing, departures, lost_state
from andon_coordinator.core.defects import LineDefect
from andon_coordinator.core.effects import RefuseOperator, SaveAnswer, SaveTerm, SendResume
from andon_coordinator.core.events import CordPulled, DrainRequested, HaltCleared
from andon_coordinator.core.line_state import LineState, Trigger
from andon_coordinator.core.round import PendingRecord, StepRound
from andon_coordinator.core.state import CoreState
from andon_coordinator.core.step_results import Skip

__all__ = ["BY_ITSELF", "clear", "drain", "pull_cord", "roll_back", "skip_by_itself"]

BY_ITSELF = "--on-spike"
"""Who skipped samples, if no person did."""


def pull_cord(core: CoreState, event: CordPulled) -> None:
    """Halts the line because a person says so."""
    if core.line_state in (LineState.HALTED, LineState.COMPLETE):
        core.emit(RefuseOperator(f"the line is {core.line_state.name.lower()} already"))
        return
    who = event.operator or "an operator"
    why = f": {event.reason}" if event.reason else ""
    core.stop_line(LineDefect(reason=HaltReason.OPERATOR, message=f"{who} pulled the cord{why}"))


def drain(core: CoreState, event: DrainRequested) -> None:
    """Ends the run after the current step."""
    # Nothing else here: `go_on` runs after every event and does it.
    core.draining = core.draining or core.line_state is not LineState.COMPLETE


def clear(core: CoreState, event: HaltCleared) -> None:
    """Answers the present halt, if that is possible now."""
    halt = core.halt
    if core.line_state is not LineState.HALTED or halt is None:
        core.emit(RefuseOperator("the line is not halted"))
        return
    objection = _objection(core, halt, event)
    if objection:
        core.emit(RefuseOperator(objection))
        return
    # The consequence of an answer goes to the journal before the answer itself. A coordinator that
    # finds only the consequence asks for an answer again, or sees that the halt is older than the
    # last record. The other way round, it would believe that something was done which was not.
    answer = SaveAnswer(halt.id, event.answer, event.worker, event.operator)
    skipped = event.answer is HaltAnswer.SKIP
    if skipped:
        # Before the halt goes: its positions say what is to be skipped.
        _skip(core, event, answer)
    else:
        if event.answer is HaltAnswer.DROP:
            _drop(core, event)
        core.emit(answer)
    core.detectors.answered(halt, event.answer)
    if not skipped:
        # After a SKIP, workers hear of it once the MARK is durable; see `record_saved`.
        for member in core.members.live():
            assert member.stream is not None
            core.emit(SendResume(member.stream, halt.id, event.answer))
    core.accepts_older = halt.reason is HaltReason.STATE_LOST
    core.halt = None
    core.attempts.reset()
    core.enter(Trigger.ANSWERED)
    if not core.keys.saved and halt.reason is HaltReason.JOURNAL:
        core.emit(SaveTerm(core.keys.term))  # The journal dropped it when it failed.
    if halt.reason is HaltReason.STATE_LOST and core.bootstrap_again:
        lost_state.close_all(core, "the line is bootstrapped again", "bootstrapped again")


def roll_back(core: CoreState) -> None:
    """Makes the chosen record the head by a MARK, before any stream is open (rule 12).

    It also answers the halt that the run was in: the step is tried again.
    """
    chain, halt = core.chain, core.halt
    # Once: every event comes by here.
    core.roll_back_pending = False
    pending = PendingRecord(record=core.draw_mark(chain.cursor), rolls_back=True)
    if halt is not None:
        pending.answer = SaveAnswer(halt.id, HaltAnswer.RETRY, None, "andon run --resume")
        core.halt = None
    core.save(pending, note=f"resumed after step {chain.step}")


def _objection(core: CoreState, halt: HaltEvidence, event: HaltCleared) -> str:
    """Why an answer can't be given now; empty if it can."""
    if event.halt_id != halt.id:
        return f"the present halt is {halt.id}, not {event.halt_id}"
    if core.pending_record is not None:
        # The record decides where the line goes on, and workers have not heard of the halt yet.
        return "a record is being saved; answer again in a moment"
    if halt.reason is HaltReason.STATE_LOST and not core.members.in_sync(core.chain.head):
        return _objection_without_head(core, event)
    match event.answer:
        case HaltAnswer.SKIP if core.chain.head is None or core.stop_reason:
            return "there is no step whose samples could be skipped"
        case HaltAnswer.SKIP if not core.members.in_sync(core.chain.head):
            # A MARK that nobody can apply would leave nobody at the line's head.
            return (
                f"no worker holds the weights of step {core.chain.step}: wait for one, or try the "
                "step again, and the line goes on from a checkpoint that a worker has loaded"
            )
        case HaltAnswer.SKIP if not core.keys.saved:
            return "the coordinator's term is being saved; answer again in a moment"
        case HaltAnswer.DROP if event.worker is None:
            return "name the worker to drop"
        case HaltAnswer.DROP if core.members.get(event.worker or 0) is None:
            return f"there is no worker {event.worker}"
        case _:
            return ""


def _objection_without_head(core: CoreState, event: HaltCleared) -> str:
    """Why a line can't go on whose head nobody holds.

    It can, if the operator answers RETRY, from an older record that a worker has brought meanwhile.
    At step 0 it can go on from new initial weights: nothing was trained yet.
    """
    live = core.members.live()
    fresh = any(member.head is None for member in live) and all(each.step == 0 for each in live)
    if event.answer is HaltAnswer.RETRY and core.chain.step == 0 and fresh:
        core.bootstrap_again = True
        return ""
    if event.answer is HaltAnswer.RETRY and lost_state.heads_here(core):
        return ""  # If none of them is in the history, the line halts again.
    what = f"no worker holds the weights of step {core.chain.step}"
    return f"{what}: bring one back that does. {lost_state.remedy(core)}"


def _skip(core: CoreState, event: HaltCleared, answer: SaveAnswer) -> None:
    """Moves the cursor past the batch with a MARK; the line resumes once that is durable."""
    chain, plan = core.chain, core.plan
    assert plan is not None
    batch, skipped = _halted_batch(core, plan), None
    if core.settings.policy.quorum is not None or chain.cursor.owed:
        batch, skipped = _halted_work(core, batch)
    record = _mark_past(core, batch, skipped)
    skip = Skip(chain.cursor.epoch, batch, event.halt_id, event.operator, skipped)
    pending = PendingRecord(
        record=record,
        stop_reason=core.end_reached(record.step, record.cursor),
        answer=answer,
        resume=lambda stream: SendResume(stream, event.halt_id, HaltAnswer.SKIP),
    )
    ranges = (batch,) if skipped is None else skipped
    which = ", ".join(f"{each.start} to {each.stop}" for each in ranges) or "none"
    note = f"skipped positions {which} of epoch {skip.epoch}"
    core.save(pending, note=note, skipped=skip)


def skip_by_itself(core: CoreState, round_: StepRound, why: str) -> None:
    """Leaves out what a round's roster had, without a halt: nobody was asked.

    Args:
        core: the state; the round is void.
        round_: the round.
        why: for the journal.
    """
    cursor, batch = core.chain.cursor, round_.terms.batch
    skipped = None
    if core.settings.policy.quorum is not None or cursor.owed:
        skipped = merged(part for share in round_.shares for part in share)
    record = _mark_past(core, batch, skipped)
    stop = core.end_reached(record.step, record.cursor)
    skip = Skip(cursor.epoch, batch, 0, BY_ITSELF, skipped)
    core.save(PendingRecord(record=record, stop_reason=stop), note=why, skipped=skip)


def _mark_past(core: CoreState, batch: PositionRange, skipped: Ranges | None) -> Record:
    """The MARK that leaves a batch out, or of it and of what is owed just `skipped`."""
    before, plan = core.chain.cursor, core.plan
    assert plan is not None
    cursor = cursor_after(before, batch, plan.epoch_size)
    if skipped is not None and cursor.epoch == before.epoch:
        owed = subtract(dealing.work_at(before, batch), skipped)
        cursor = Cursor(cursor.epoch, cursor.position, owed)
    return core.draw_mark(cursor)


def _halted_work(core: CoreState, halted: PositionRange) -> tuple[PositionRange, Ranges]:
    """The batch of a halted round, and what of it and of what is owed its roster had.

    Args:
        core: the state; the line has a quorum, or had one.
        halted: the batch as far as the halt says.
    """
    cursor, batch, assigned = core.chain.cursor, core.attempts.batch, core.attempts.assigned
    assert core.plan is not None
    assert core.halt is not None
    if batch is None or cursor_after(cursor, batch, core.plan.epoch_size).epoch != cursor.epoch:
        # Nobody here knows what the halted round had; and nothing stays owed behind an epoch.
        batch = halted if batch is None else batch
        return batch, dealing.work_at(cursor, batch)
    late = {member.worker for member in core.members.late()}
    if core.halt.worker in late:
        return batch, assigned.get(core.halt.worker, ())
    return batch, merged(
        part for worker, share in assigned.items() if worker not in late for part in share
    )


def _halted_batch(core: CoreState, plan: RunPlan) -> PositionRange:
    """The positions of the step that halted, or of the next one if none was open."""
    chain, window = core.chain, core.attempts.window
    size = plan.global_batch if window is None else window.size
    halted = core.halt.positions if core.halt is not None else None
    if core.halt is not None and halted:
        # A coordinator that started since knows the step's size from nowhere else.
        here = (core.halt.epoch, halted.start) == (chain.cursor.epoch, chain.cursor.position)
        size = len(halted) if here else size
    # Never beyond the epoch, whatever evidence a worker brought.
    return next_batch(chain.cursor, size, plan.epoch_size)


def _drop(core: CoreState, event: HaltCleared) -> None:
    assert event.worker is not None
    member = core.members.get(event.worker)
    assert member is not None
    departures.drop(core, member, "dropped by an operator", "an operator dropped this worker")
