"""Workers die at every point of a step, alone or in pairs, come back, and join in the middle."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon.v1 import coordinator_pb2 as pb
from chaos.judge import judge
from chaos.rig import chaos_line

pytestmark = pytest.mark.integration

STEP = 4
"""The step in which the fault occurs."""


def _killed_at(folder: Path, *points: str) -> list[list[tuple[int, ...]]]:
    """Kills worker 1 at each point of a step, and starts it again; the rosters of these steps.

    With each step comes the one after it.
    """
    steps = []
    with chaos_line(folder, pace_s=0.002) as line:
        worker = line.workers[1]
        for point in points:
            line.await_progress()
            worker.stop_at(point)
            steps.append(worker.await_point(point))
            worker.kill()
            line.await_progress(0, 2)
            line.start_worker(1)
            line.await_progress()
            line.await_arrival()
        line.finish()
    verdict = judge(line)
    return [[verdict.roster(step + more) for more in range(2)] for step in steps]


def test_f_dp_006_survivors_commit_without_a_worker_that_was_killed_before_its_averages(
    tmp_path: Path,
) -> None:
    rosters = _killed_at(tmp_path, "assigned", "before-blocks", "mid-blocks", "after-blocks")

    assert [of_step for of_step, _ in rosters] == [(0, 2)] * 4


def test_a_worker_killed_between_ready_and_commit_is_not_in_the_step(tmp_path: Path) -> None:
    stops = {1: ("ready-sent", STEP), 2: ("after-blocks", STEP)}
    with chaos_line(tmp_path, stops=stops) as line:
        line.workers[1].await_point("ready-sent")
        line.workers[2].await_point("after-blocks")
        line.await_status(
            "the coordinator to have worker 1's report",
            lambda status: status.workers[1].activity == pb.ACTIVITY_COMMITTING,
        )
        line.workers[1].kill()
        line.await_status("the coordinator to notice", lambda status: status.live == 2)
        line.workers[2].go()
        line.await_progress(0, 2)
        line.finish()

    verdict = judge(line)
    assert verdict.roster(STEP) == (0, 2)


def test_c_commit_001_a_worker_killed_once_the_step_is_committed_is_in_it(tmp_path: Path) -> None:
    rosters = _killed_at(tmp_path, "before-apply", "after-apply")

    assert rosters == [[(0, 1, 2), (0, 2)]] * 2


def test_two_workers_killed_in_one_attempt_leave_the_step_to_the_third(tmp_path: Path) -> None:
    stops = {1: ("mid-blocks", STEP), 2: ("after-blocks", STEP)}
    with chaos_line(tmp_path, stops=stops) as line:
        line.workers[1].await_point("mid-blocks")
        line.workers[2].await_point("after-blocks")
        line.workers[1].kill()
        line.workers[2].kill()
        line.await_progress(0)
        line.finish()

    verdict = judge(line)
    assert verdict.roster(STEP) == (0,)


def test_a_worker_killed_in_the_attempt_after_a_death_leaves_the_step_to_the_third(
    tmp_path: Path,
) -> None:
    stops = {1: ("before-blocks", STEP), 2: ("after-blocks", STEP)}
    with chaos_line(tmp_path, stops=stops) as line:
        line.workers[1].await_point("before-blocks")
        line.workers[2].await_point("after-blocks")
        line.workers[2].stop_at("mid-blocks", STEP)
        line.workers[1].kill()
        line.workers[2].go()
        assert line.workers[2].await_point("mid-blocks") == STEP
        line.workers[2].kill()
        line.await_progress(0)
        line.finish()

    verdict = judge(line)
    assert (verdict.roster(STEP), verdict.attempts[STEP]) == ((0,), 2)
