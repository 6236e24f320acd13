"""A spare follows the line, and takes the place of a worker that is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from andon.protocol.records import RecordKind
from andon.v1 import coordinator_pb2 as pb
from andon_coordinator.transport.reader import JournalReader
from integration.fixtures.console import finish, lines_until, start_warm, worker_of
from integration.harness import SCRIPTS, Service, Worker, on_line, start_line, start_worker
from integration.test_learning import SCRIPT

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SPEC: dict[str, Any] = {"steps": 3000, "slow": [0, 1, 2], "pace_s": 0.04, "stay": 6, "tarries": 0}
SPARE = 3


def rosters(run_dir: Path) -> list[tuple[int, ...]]:
    """The rosters of all steps, in order; also checks that every sample counts once."""
    with JournalReader(run_dir / "journal.sqlite") as journal:
        assert journal.ledger_faults() == []
        return [
            each.record.roster for each in journal.chain() if each.record.kind is RecordKind.STEP
        ]


def alike(spare: Worker, member: Worker) -> None:
    """Checks that the spare's state was a member's after each step."""
    mine, theirs = spare.seen["states"], member.seen["states"]
    assert len(mine) > 14
    assert [step for step in mine if mine[step] != theirs[step]] == []
    assert spare.seen["step"] == member.seen["step"]


def await_spare(service: Service) -> pb.WorkerStatus:
    """Waits until the spare has caught up, and some more steps."""

    def ready(line: pb.LineStatus) -> bool:
        return any(each.worker == SPARE and each.detail == "spare: ready" for each in line.workers)

    since = service.await_status(ready).step
    line = service.await_status(lambda line: line.step >= since + 8 and ready(line))
    return next(each for each in line.workers if each.worker == SPARE)


def test_a_spare_takes_the_place_of_a_killed_worker_in_the_next_step(tmp_path: Path) -> None:
    flags = ("--min-workers", "1", "--max-workers", "4")
    with start_line(tmp_path, SPEC, 3, *flags, script=SCRIPT) as (service, workers):
        where = on_line(service, SPARE, 3)
        spare = start_worker(tmp_path, SPEC, slot=SPARE, script=SCRIPT, ANDON_SPARE="1", **where)
        workers.append(spare)
        seen = await_spare(service)
        workers[1].kill()
        codes = [each.wait() for each in (workers[0], workers[2], spare)]

    assert codes == [0, 0, 0], spare.output
    assert seen.live
    assert not seen.HasField("rank")
    found = rosters(tmp_path / "run")
    lost = next(index for index, roster in enumerate(found) if roster != (0, 1, 2))
    # The record of the step in which it was killed may have been on its way.
    assert lost >= 8
    # The next step has the spare, and so have all after it. If its request for work comes too late,
    # as on a busy machine, it gets its next chance a few steps later.
    taken = found.index((0, 2, SPARE))
    assert set(found[lost:taken]) <= {(0, 2)}
    assert taken - lost < 8
    assert set(found[taken:]) == {(0, 2, SPARE)}
    assert sum(rank == size for _, rank, size in spare.seen["places"]) >= 8
    for member in (workers[0], workers[2]):
        alike(spare, member)


def test_a_spare_that_is_there_first_makes_nobody_wait(tmp_path: Path) -> None:
    spec = {**SPEC, "steps": 30}
    with start_line(tmp_path, spec, 1, "--max-workers", "4", script=SCRIPT) as (_, workers):
        assert workers[0].wait() == 0
    # With a spare the same line does the same, whoever comes first.
    folder = tmp_path / "second"
    folder.mkdir()
    with Service(folder / "run", 1, "--max-workers", "4") as service:
        where = on_line(service, SPARE, 1)
        spare = start_worker(folder, spec, slot=SPARE, script=SCRIPT, ANDON_SPARE="1", **where)
        try:
            service.await_status(lambda line: line.live == 1)
            assert service.status().waiting_for == "1 worker, 0 of them here"
            worker = start_worker(folder, spec, slot=0, script=SCRIPT, **on_line(service, 0, 1))
            assert worker.wait() == 0, worker.output
            assert spare.wait() == 0, spare.output
        finally:
            spare.kill()

    assert set(rosters(folder / "run")) == {(0,)}
    assert worker.seen["states"][str(30)] == workers[0].seen["states"][str(30)]


def test_andon_run_starts_spares_and_a_dead_worker_again_as_one(tmp_path: Path) -> None:
    process = start_warm(
        tmp_path,
        *("run", "--workers", "2", "--min-workers", "2", "--spares", "1", "--run-id", "7f3a"),
        *("--report", "r.json"),
        *(str(SCRIPTS / "resumable.py"), str(tmp_path), "9", "--hold-at", "4", "--slot", "1"),
    )
    lines_until(process, "holding at step 4")
    os.kill(worker_of(tmp_path, slot=1), signal.SIGKILL)
    code, output, errors = finish(process)

    assert code == 0, output + errors
    assert "worker 1 was killed by SIGKILL: it starts again at once (restart 1 of 3)" in output
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["steps"], report["complete"]) == (9, True)
    # The spare itself may be on its way when the run ends.
    assert {"0", "2"} <= set(report["digests"])
    assert len(set(report["digests"].values())) == 1
    found = rosters(tmp_path / "runs" / "7f3a")
    # Worker 1 is a spare now, and the place is taken.
    assert set(found[:3]) == {(0, 1)}
    assert set(found[4:]) == {(0, 2)}
