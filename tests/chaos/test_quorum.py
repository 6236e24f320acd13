"""Windows with a quorum: a straggler stalls nobody, and nobody's samples are lost.

`ANDON_STORMS` is the number of seeds; without it there is one short storm.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chaos.judge import Verdict, judge
from chaos.model import Task
from chaos.owed import most_left_out
from chaos.rig import ChaosLine, chaos_line, events_of
from chaos.schedules import WITH_QUORUM, LineSchedule
from chaos.storm import WILD, plan_storm, strike_unevenly

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

QUORUM, ASYNC = WITH_QUORUM
LONG = "ANDON_STORMS" in os.environ
SEEDS = range(1, 1 + int(os.environ.get("ANDON_STORMS", "1")))
FAULTS = 30 if LONG else 4
PACE_S = 0.002
LARGE = Task(dataset=5000)
"""No epoch ends, which all workers wait for."""


def _stand_still(line: ChaosLine, slot: int, *others: int, records: int = 1) -> int:
    """Makes a worker stop in the middle of a share, so that the others go on without it."""
    worker = line.workers[slot]
    worker.stop_at("mid-compute")
    step = worker.await_point("mid-compute")
    line.await_progress(*others, steps=records)
    return step


def test_f_dp_006_who_stands_still_in_a_window_stalls_nobody_and_loses_nobodys_samples(
    tmp_path: Path,
) -> None:
    with chaos_line(tmp_path, schedule=QUORUM, task=LARGE, pace_s=PACE_S) as line:
        line.await_progress()
        stood = _stand_still(line, 1, 0, 2, records=4)
        line.workers[1].go()
        line.await_progress()
        line.await_arrival()
        restarted = _stand_still(line, 2, 0, 1)
        line.kill_coordinator()
        line.restart_coordinator()
        line.workers[2].go()
        line.await_progress()
        line.await_arrival()
        killed = _stand_still(line, 0, 1, 2)
        line.workers[0].kill()
        line.await_progress(1, 2)
        line.finish()

    verdict = judge(line)
    logs = {slot: events_of(worker.log) for slot, worker in line.workers.items()}
    assert [verdict.roster(stood + more) for more in range(4)] == [(0, 2)] * 4
    assert len(line.made_up(1)) >= 4, "it took the averages of each, and got no state"
    assert line.installs(1) == 1
    assert _covered_by(line, verdict, 1, stood) == {1}, "it has sent what it owed"
    assert most_left_out(logs) <= 8
    assert _covered_by(line, verdict, 2, restarted) <= {0, 1, 2}
    assert _covered_by(line, verdict, 0, killed) <= {1, 2}, "the others have computed it"


def _covered_by(line: ChaosLine, verdict: Verdict, slot: int, step: int) -> set[int]:
    """The workers in whose records the positions are that a worker had, or owed, in a step."""
    events = [each for each in events_of(line.workers[slot].log) if each.get("step") == step]
    # It may have been late already, by the load of its host.
    dealt = [each for each in events if each["event"] in ("assigned", "attending")]
    mine = {at for start, stop in dealt[0]["positions"] for at in range(start, stop)}
    assert mine
    return {
        part.worker
        for entry in verdict.chain
        if entry.result is not None and entry.result.epoch == dealt[0]["epoch"]
        for part in entry.result.contributions
        for each in part.positions
        if mine & set(range(each.start, each.stop))
    }


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("schedule", WITH_QUORUM if LONG else [ASYNC], ids=lambda each: each.name)
def test_a_storm_on_a_line_with_a_quorum_leaves_the_weights_that_the_journal_asks_for(
    tmp_path: Path, schedule: LineSchedule, seed: int
) -> None:
    task = Task(dataset=300)
    with chaos_line(tmp_path, schedule=schedule, task=task, pace_s=PACE_S) as line:
        strike_unevenly(line, plan_storm(seed, FAULTS, WILD))
        line.await_progress()
        line.finish()

    verdict = judge(line)
    assert any(len(entry.record.roster) < 3 for entry in verdict.chain)
