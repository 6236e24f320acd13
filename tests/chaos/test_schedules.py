"""Faults in the middle of a window, under every schedule.

Between two exchanges a worker may have computed for a long time. What is lost with it, and what the
others keep, is told here for each schedule by one line that lives through all faults in turn.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from chaos.judge import Verdict, judge
from chaos.model import Task
from chaos.rig import ChaosLine, chaos_line, events_of
from chaos.schedules import SCHEDULES, LineSchedule

pytestmark = pytest.mark.integration

PACE_S = 0.002
TASK = Task(dataset=500)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_f_dp_006_faults_in_the_middle_of_a_window_cost_only_what_was_lost(
    tmp_path: Path, schedule: LineSchedule
) -> None:
    with chaos_line(tmp_path, schedule=schedule, task=TASK, pace_s=PACE_S) as line:
        line.slow_down(0)
        line.await_progress(steps=3)
        killed = _kill_in_the_middle(line)
        joined = _join_in_the_middle(line)
        again = _kill_the_coordinator_in_the_middle(line)
        frozen = _freeze_in_the_middle(line)
        line.finish()

    verdict = judge(line)
    assert verdict.roster(killed) == (0, 2)
    assert verdict.roster(joined) == (0, 2)
    assert verdict.attempts[joined] == 0
    assert verdict.roster(again) == (0, 1, 2)
    assert verdict.roster(frozen) == (1, 2)
    assert line.installs(0) == 2, "it came back behind, and was brought in sync"
    assert verdict.roster() == (0, 1, 2)
    assert schedule.even or len(verdict.divisions) > 1, "nobody's share ever moved"
    # The survivors computed what the dead one had, and nothing of their own a second time. A new
    # coordinator deals the same shares again, so everybody goes on with what it has; but for what
    # was dealt ahead by speeds that were measured before the last record.
    assert _computed(line, verdict, killed) == _dealt(verdict, killed)
    if schedule.even or not schedule.overlap:
        assert _computed(line, verdict, again) == _dealt(verdict, again)


def _kill_in_the_middle(line: ChaosLine) -> int:
    worker = line.workers[1]
    worker.stop_at("mid-compute", worker.step + 1)
    step = worker.await_point("mid-compute")
    worker.kill()
    line.await_progress(0, 2)
    return step


def _join_in_the_middle(line: ChaosLine) -> int:
    """Starts worker 1 again while another one stands in the middle of a window."""
    holding = line.workers[2]
    holding.stop_at("mid-compute")
    step = holding.await_point("mid-compute")
    line.start_worker(1)
    line.await_roster(3)
    holding.go()
    line.await_progress()
    line.await_arrival()
    return step


def _kill_the_coordinator_in_the_middle(line: ChaosLine) -> int:
    worker = line.workers[1]
    worker.stop_at("mid-compute")
    step = worker.await_point("mid-compute")
    line.kill_coordinator()
    line.restart_coordinator()
    worker.go()
    line.await_progress()
    return step


def _freeze_in_the_middle(line: ChaosLine) -> int:
    """Stops worker 0 until it is lost; it comes back behind, and gets the line's state."""
    worker = line.workers[0]
    worker.stop_at("mid-compute")
    step = worker.await_point("mid-compute")
    worker.signal(signal.SIGSTOP)
    worker.go()
    line.await_progress(1, 2)
    worker.signal(signal.SIGCONT)
    line.await_progress()
    line.await_arrival()
    return step


def _computed(line: ChaosLine, verdict: Verdict, step: int) -> dict[int, int]:
    """How many positions of a step each worker of its record computed, over all attempts."""
    result = verdict.result(step)
    batch = range(result.batch.start, result.batch.stop)
    computed = dict.fromkeys(verdict.roster(step), 0)
    for slot in computed:
        events = events_of(line.workers[slot].log)
        epochs = {tuple(e["key"]): e["epoch"] for e in events if e["event"] == "assigned"}
        for event in events:
            in_epoch = "parts" in event and epochs[tuple(event["key"])] == result.epoch
            for part in event["parts"] if in_epoch else []:
                computed[slot] += sum(at in batch for at in part)
    return computed


def _dealt(verdict: Verdict, step: int) -> dict[int, int]:
    """How many positions each worker has in a step's record."""
    result = verdict.result(step)
    return {part.worker: part.samples for part in result.contributions}
