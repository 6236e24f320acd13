"""Lost state: when nobody is expected with the head any more, and what people are told.

How the line goes on is in the transcripts `line-went-back*.txt`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from andon.protocol.records import Cursor, Key, Record, RecordKind
from andon.protocol.run_settings import RunPlan
from andon_coordinator.core import events as on
from andon_coordinator.core import lost_state
from andon_coordinator.core.chain import Chain
from andon_coordinator.core.checkpoints import RunCheckpoints
from andon_coordinator.core.events import Checkpoint, CheckpointPlan, JoinRequest
from andon_coordinator.core.settings import JournalledCheckpoint, LineSettings
from andon_coordinator.core.state import CoreState
from scenarios.line_bench import Bench

STEP_1 = Key(1, 2)


@pytest.fixture
def bench() -> Bench:
    """Workers 0 and 1 made three steps, and the coordinator starts again."""
    bench = Bench(LineSettings(run_id="7f3a", expect_workers=2), RunPlan(global_batch=4))
    initial = Record(Key(1, 1), None, RecordKind.INITIAL, 0, Cursor(0, 0), (0,))
    bench.journal.records = [(initial, None)]
    for step in (1, 2, 3):
        record = Record(
            Key(1, step + 1), Key(1, step), RecordKind.STEP, step, Cursor(0, 4 * step), (0, 1)
        )
        bench.journal.records.append((record, None))
    bench.restart()
    return bench


def core_of(bench: Bench) -> CoreState:
    return bench.line._core


def bring(bench: Bench, slot: int, head: Key | None, step: int = 0) -> None:
    """A new process joins in a slot, with a checkpoint or without."""
    fresh = bench.request(slot, 100 + slot)
    cursor = Cursor(0, 4 * step)
    request = on.JoinRequest(
        run_id=fresh.run_id,
        incarnation=fresh.incarnation,
        layout=fresh.layout,
        plan=fresh.plan,
        launch_slot=slot,
        head=head,
        step=step,
        cursor=cursor,
    )
    bench.join(f"w{slot}", request)


def test_the_workers_of_the_last_step_are_awaited_until_others_have_their_slots(
    bench: Bench,
) -> None:
    core = core_of(bench)
    awaited = [lost_state.awaited(core)]
    for slot in (2, 0, 1):
        bring(bench, slot, STEP_1, 1)
        awaited.append(lost_state.awaited(core))

    assert awaited == [[0, 1], [0, 1], [1], []]


def test_the_status_says_who_may_still_come_with_the_head(bench: Bench) -> None:
    bring(bench, 0, STEP_1, 1)
    bring(bench, 2, STEP_1, 1)

    status = bench.line.status(bench.now)

    assert status.waiting_for == "worker 1 to come back with the weights of step 3"


def test_a_dropped_worker_stays_barred_when_the_line_goes_back_by_itself(bench: Bench) -> None:
    bench.journal.barred = {100}
    bench.restart()
    bring(bench, 2, STEP_1, 1)
    bring(bench, 1, STEP_1, 1)
    bench.now += bench.settings.recovery_window_s
    bench.send(on.TimePassed())
    bench.send(on.AncestorFound(*bench.journal.find_ancestor()))
    bench.send(on.RecordSaved(bench.journal.save_record()))
    after_going_back = set(bench.journal.barred)

    bench.restart(roll_back_to=STEP_1)
    bring(bench, 0, STEP_1, 1)
    bench.send(on.RecordSaved(bench.journal.save_record()))

    assert (after_going_back, bench.journal.barred) == ({100}, set())
    assert {each.worker for each in core_of(bench).members} == {0}


def test_a_line_that_went_back_does_not_take_a_later_checkpoint_for_its_last() -> None:
    later = RunCheckpoints(step=6, folder="step-6", reported=9, overdue=9)
    both = RunCheckpoints()
    for step in (2, 6):
        written = Checkpoint(step, f"step-{step}", Key(1, step))
        both.note_written(0, written, 6, joined_to_write(7, keep=3))

    later.went_back(3)
    both.went_back(3)

    assert (later.step, later.folder, later.reported, later.overdue) == (0, "", 3, 0)
    assert (both.step, both.folder, [each.step for each in both.known]) == (2, "step-2", [2])


def test_a_checkpoint_has_proved_good_once_the_step_after_it_was_made() -> None:
    checkpoints = RunCheckpoints()
    for step in (2, 4, 6, 8):
        written = Checkpoint(step, f"step-{step}", Key(1, step))
        checkpoints.note_written(0, written, step, joined_to_write(step, keep=3))

    found = [checkpoints.proved_before(step, lambda each: each.process != 6) for step in (10, 9, 5)]

    # The one of step 2 is not kept any more.
    assert [each and each.step for each in found] == [8, 4, None]


def test_a_checkpoint_is_on_the_host_that_wrote_it_whoever_has_its_slot_now() -> None:
    noted = [
        JournalledCheckpoint(0, "on a (CPU)", Checkpoint(step, f"/runs/{step}", Key(1, step)))
        for step in (2, 4)
    ]
    checkpoints = RunCheckpoints(journalled=noted)
    newest = Checkpoint(6, "/runs/6", Key(1, 6))

    elsewhere, there = (replace(joined_to_write(7, keep=3), node_id=host) for host in "ba")
    checkpoints.note_written(0, newest, 4, elsewhere)
    before = list(checkpoints.known)
    checkpoints.note_written(1, newest, 4, there)

    assert before == []
    assert [(each.step, each.host) for each in checkpoints.known] == [(2, "a"), (4, "a")]


def joined_to_write(incarnation: int, keep: int) -> JoinRequest:
    bench = Bench(LineSettings(run_id="7f3a"), RunPlan(global_batch=4, dataset_size=8))
    plan = CheckpointPlan(2, "/runs", keep)
    return replace(bench.request(0, incarnation), checkpoints=plan)


def test_a_chain_that_went_back_keeps_requests_of_the_older_head_only() -> None:
    old = Record(STEP_1, Key(1, 1), RecordKind.STEP, 1, Cursor(0, 4), (0,))
    lost = Record(Key(1, 3), STEP_1, RecordKind.STEP, 2, Cursor(0, 8), (0,))
    mark = Record(Key(2, 1), STEP_1, RecordKind.MARK, 1, Cursor(0, 4), ())
    chain = Chain(lost)

    chain.go_back(old)
    chain.append(mark, None)

    assert (chain.head, chain.step, chain.cursor) == (mark.key, 1, Cursor(0, 4))
    assert chain.request_heads == {STEP_1, mark.key}
