"""Workers that learn meet what happens to any line: deaths, halts, ends, restarts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from chaos.barrier import RECEIVING, order_stop
from chaos.judge import judge
from chaos.model import Task
from chaos.reducers import reduced_line
from chaos.rig import ChaosLine, await_until, chaos_line

pytestmark = pytest.mark.integration

LARGE = Task(blocks=(7, 64, 4_000_000), dataset=300)
"""A state that is on its way for a while: it takes more than the relay holds."""
LEARNING = "learning the line's state"
WAITS = {"ANDON_ON_HALT": "wait"}


def _learn(line: ChaosLine, slot: int, point: str = "") -> None:
    """Kills a worker and starts it again; returns once it learns, or stands at a point."""
    worker = line.workers[slot]
    worker.kill()
    others = [each.slot for each in line.living]
    line.await_progress(*others, steps=1)
    if point:
        worker.stop_at(point)
    told = len(line.said(slot, LEARNING))
    line.start_worker(slot)
    if point:
        worker.await_point(point)
    await_until(f"worker {slot} to learn", lambda: len(line.said(slot, LEARNING)) > told)


def test_nobody_waits_for_a_learner_that_stands_anywhere_in_a_step(tmp_path: Path) -> None:
    points = ("assigned", "after-blocks", "ready-sent", "before-apply")
    made_up = [0]
    with chaos_line(tmp_path, pace_s=0.002) as line:
        line.await_progress()
        for point in points:
            _learn(line, 1, point)
            line.await_progress(0, 2, steps=5)
            line.workers[1].go()
            line.await_progress()
            line.await_arrival()
            made_up.append(len(line.made_up(1)))
        line.finish()

    assert judge(line).roster() == (0, 1, 2)
    each = [after - before for before, after in pairwise(made_up)]
    assert min(each) >= 5, "it made up what the others did while it stood"


def test_a_donor_that_dies_while_its_state_is_on_its_way_is_replaced(tmp_path: Path) -> None:
    with chaos_line(tmp_path, task=LARGE) as line:
        line.await_progress()
        _learn(line, 1)
        line.workers[2].kill()
        line.await_progress(0, 1)
        line.await_arrival()
        line.finish()

    assert judge(line).roster() == (0, 1)


def test_learners_that_die_before_they_have_taken_the_state_keep_no_donor_busy(
    tmp_path: Path,
) -> None:
    with chaos_line(tmp_path, 2, pace_s=0.002) as line:
        worker = line.workers[1]
        line.await_progress()
        for _ in range(4):
            worker.kill()
            line.await_progress(0)
            order_stop(worker.folder, RECEIVING)
            line.start_worker(1)
            worker.await_point(RECEIVING)
        worker.kill()
        line.await_progress(0)
        line.start_worker(1)
        line.await_progress()
        line.await_arrival()
        line.finish()

    assert judge(line).roster() == (0, 1)
    assert "state_not_received" not in (tmp_path / "run.err").read_text()


def test_a_lone_survivor_gives_its_state_to_two_learners_and_trains_on(tmp_path: Path) -> None:
    with chaos_line(tmp_path, pace_s=0.002, numbers=3) as line:
        line.await_progress()
        line.workers[1].kill()
        line.workers[2].kill()
        line.await_progress(0)
        line.start_worker(1)
        line.start_worker(2)
        line.await_progress()
        line.await_arrival()
        line.finish()

    assert judge(line).roster() == (0, 1, 2)
    assert line.said(1, LEARNING)
    assert line.said(2, LEARNING)
    assert any(line.averaged(slot) for slot in line.workers), "nobody ever averaged a number"


@pytest.mark.parametrize("point", ["assigned", "ready-sent"])
def test_a_lone_survivor_that_dies_leaves_the_run_to_its_learner(
    tmp_path: Path, point: str
) -> None:
    """The learner has the state, and all that it needs to reach the line's head."""
    with chaos_line(tmp_path, 2, pace_s=0.002) as line:
        line.await_progress()
        _learn(line, 1, point)
        line.await_progress(0, steps=3)
        reached = line.workers[0].step
        line.workers[0].kill()
        line.workers[1].go()
        line.await_progress(1, steps=3)
        line.finish()

    verdict = judge(line)
    assert verdict.roster() == (1,)
    assert {*range(reached - 2, reached + 1)} <= set(line.made_up(1))


def test_too_few_workers_in_sync_wait_for_a_learner_and_give_it_a_transfer(
    tmp_path: Path,
) -> None:
    with chaos_line(tmp_path, 3, "--min-workers", "2", task=LARGE) as line:
        line.await_progress()
        _learn(line, 1)
        line.workers[2].kill()
        line.await_progress(0, 1)
        line.finish()

    assert judge(line).roster() == (0, 1)


def test_a_halt_that_is_answered_while_a_worker_learns_costs_it_nothing(tmp_path: Path) -> None:
    points = ("assigned", "ready-sent", "before-apply")
    with chaos_line(tmp_path, pace_s=0.002, variables=WAITS) as line:
        line.await_progress()
        for point in points:
            _learn(line, 1, point)
            line.await_progress(0, 2, steps=2)
            line.service.pull_cord()
            halt = line.service.await_halt()
            line.workers[1].go()
            line.service.clear_halt(halt.id)
            line.await_progress()
            line.await_arrival()
        line.finish()

    assert judge(line, cord=True).roster() == (0, 1, 2)
    assert line.installs(1) == 1 + len(points), "it went on with the state that it had"


@pytest.mark.parametrize("point", ["assigned", "ready-sent"])
def test_a_run_that_ends_while_a_worker_learns_ends_for_it_too(tmp_path: Path, point: str) -> None:
    with chaos_line(tmp_path, pace_s=0.002) as line:
        line.await_progress()
        _learn(line, 1, point)
        line.await_progress(0, 2, steps=3)
        (tmp_path / "finish").touch()
        line.await_status("the run to end", lambda status: status.live <= 1)
        line.workers[1].go()
        line.await_end()

    verdict = judge(line, left_behind=True)
    assert verdict.roster() == (0, 2)


def test_a_coordinator_that_restarts_while_a_worker_learns_lets_it_go_on(tmp_path: Path) -> None:
    with chaos_line(tmp_path, pace_s=0.002) as line:
        line.await_progress()
        _learn(line, 1, "assigned")
        line.kill_coordinator()
        line.restart_coordinator()
        line.workers[1].go()
        line.await_progress()
        line.await_arrival()
        line.finish()

    assert judge(line).roster() == (0, 1, 2)


@pytest.mark.parametrize("change", ["one more", "one less"])
def test_a_learner_begins_again_when_the_map_of_reducers_changes(
    tmp_path: Path, change: str
) -> None:
    with reduced_line(tmp_path, 2, pace_s=0.002) as reduced:
        line, (first, second) = reduced.line, reduced.reducers
        line.await_progress()
        _learn(line, 1, "assigned")
        if change == "one more":
            reduced.await_reducers(first, second, reduced.start_reducer())
        else:
            first.close()
            reduced.await_reducers(second)
        line.await_progress(0, 2)
        line.workers[1].go()
        line.await_progress()
        line.await_arrival()
        line.finish()

    assert judge(line).roster() == (0, 1, 2)
    assert len(line.said(1, LEARNING)) > 1


def test_what_a_learner_leaves_in_shared_memory_is_nothing(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    variables = {"ANDON_SHARED_DIR": str(shared)}
    with chaos_line(tmp_path, pace_s=0.002, variables=variables) as line:
        line.await_progress()
        untouched = shared.stat().st_mtime_ns
        _learn(line, 1, "after-blocks")
        line.workers[1].kill()
        line.start_worker(1)
        line.await_progress()
        line.await_arrival()
        line.finish()
        line.service.stop()

    judge(line)
    assert shared.stat().st_mtime_ns > untouched
    assert list(shared.iterdir()) == []
