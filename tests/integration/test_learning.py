"""A worker that comes to a running line gets its state while the line trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from integration.harness import Worker, on_line, start_line, start_worker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SPEC: dict[str, Any] = {"steps": 3000, "slow": [0, 1], "pace_s": 0.04, "stay": 6, "tarries": 4}
EPOCH = 5
"""Steps of an epoch."""
SCRIPT = "following.py"


def attended(worker: Worker) -> list[int]:
    """The steps that a worker made up, without being on the roster."""
    return [step for step, rank, workers in worker.seen["places"] if rank == workers]


def assert_alike(newcomer: Worker, member: Worker) -> None:
    """Checks that a newcomer's state was the member's after each step since it came."""
    mine, theirs = newcomer.seen, member.seen
    differ = [step for step, digest in mine["states"].items() if theirs["states"][step] != digest]
    assert differ == []
    assert mine["step"] == theirs["step"]
    came = mine["means"][0][0]
    assert mine["means"] == [each for each in theirs["means"] if each[0] >= came]


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="all-that-a-script-holds"),
        pytest.param({"gathers": True}, id="gathers-in-the-loop-body"),
    ],
)
def test_c_learn_001_a_learners_state_is_that_of_the_others_after_each_step(
    tmp_path: Path, members: int, more: dict[str, Any]
) -> None:
    spec = {**SPEC, **more}
    flags = ("--min-workers", "1", "--max-workers", "4")
    with start_line(tmp_path, spec, members, *flags, script=SCRIPT) as (service, workers):
        service.await_status(lambda line: line.step >= 4)
        newcomer = start_worker(tmp_path, spec, slot=3, script=SCRIPT, **on_line(service, 3, 4))
        workers.append(newcomer)
        codes = [worker.wait() for worker in workers]

    assert codes == [0] * (members + 1), newcomer.output
    # Some epochs, with all that is done between two.
    assert len(attended(newcomer)) > 2 * EPOCH
    for member in workers[:members]:
        assert_alike(newcomer, member)
