"""How a worker leaves (done, raised, interrupted, killed), and what the line learns of it."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from andon.v1 import coordinator_pb2 as pb
from andon_coordinator.transport.reader import JournalReader, RecordedDeparture
from integration.harness import Service, start_line, start_worker

pytestmark = pytest.mark.integration

SPEC: dict[str, Any] = {"samples": 40, "batch": 8, "steps": 8}
ENDLESS: dict[str, Any] = {**SPEC, "steps": 10**6}


def departure_of(folder: Path, worker: int) -> RecordedDeparture:
    with JournalReader(folder / "run" / "journal.sqlite") as journal:
        return next(gone for gone in journal.departures() if gone.worker == worker)


def test_f_dp_006_a_script_that_raises_says_so_before_it_leaves_and_the_others_train_on(
    tmp_path: Path,
) -> None:
    with start_line(tmp_path, {**SPEC, "raise_at": [1, 4]}, 2) as (_service, workers):
        codes = [worker.wait() for worker in workers]

    gone = departure_of(tmp_path, 1)
    assert codes == [0, 1], workers[0].output
    assert (gone.reason, gone.step, gone.message) == ("FAILED", 3, "a poison sample")
    with JournalReader(tmp_path / "run" / "journal.sqlite") as journal:
        assert journal.ledger_faults() == []
        assert journal.steps() == 8


def test_a_line_that_needs_all_its_workers_waits_when_one_ends_by_an_error_made_an_exit(
    tmp_path: Path,
) -> None:
    spec = {**SPEC, "exit_at": [1, 4]}
    with start_line(tmp_path, spec, 2, "--min-workers", "2") as (service, workers):
        code = workers[1].wait()
        status = service.await_status(lambda line: line.state == pb.LINE_STATE_FORMING)

    gone = departure_of(tmp_path, 1)
    assert (status.step, status.live) == (3, 1)
    assert (code, gone.reason, gone.message) == (1, "FAILED", "a poison sample")


def test_ctrl_c_leaves_the_line_with_a_message(tmp_path: Path) -> None:
    with start_line(tmp_path, ENDLESS, 2) as (service, workers):
        service.await_status(lambda line: line.step >= 3)
        workers[0].process.send_signal(signal.SIGINT)
        code = workers[0].wait()

    assert code == -signal.SIGINT
    assert departure_of(tmp_path, 0).reason == "INTERRUPTED"


def test_a_survivor_that_carries_hidden_state_begins_anew_with_the_rows_of_the_lost_worker(
    tmp_path: Path,
) -> None:
    spec = {"steps": 6, "dies": [1, 3]}
    with start_line(tmp_path, spec, 2, script="recurrent.py") as (_service, workers):
        codes = [worker.wait() for worker in workers]

    assert codes == [0, -signal.SIGKILL], workers[0].output
    assert workers[0].seen["step"] == 6
    bodies = [tuple(body) for body in workers[0].seen["bodies"]]
    carried, alone = bodies[:3], bodies[-3:]
    assert carried == [(1, 4, False), (2, 4, True), (3, 4, True)]
    assert alone == [(4, 8, False), (5, 8, True), (6, 8, True)]


def test_one_process_trains_on_one_line_after_another_with_the_same_objects(
    tmp_path: Path,
) -> None:
    folders = [tmp_path / str(number) for number in range(3)]
    with ExitStack() as stack:
        services = [stack.enter_context(Service(folder / "run", 1)) for folder in folders]
        spec = {"addresses": [service.address for service in services], "fails": 1}
        worker = start_worker(tmp_path, spec, script="cells.py")
        code = worker.wait()

    assert code == 0, worker.output
    assert (worker.seen["steps"], worker.seen["untouched"]) == ([8, -1, 8], True)
    gone = [departure_of(folder, 0) for folder in folders]
    assert [each.reason for each in gone] == ["COMPLETE", "FAILED", "COMPLETE"]
    assert gone[1].message == "in a cell"


def test_a_worker_that_was_stopped_at_the_runs_end_reads_in_its_folder_that_the_run_is_complete(
    tmp_path: Path,
) -> None:
    go = tmp_path / "go"
    spec = {**SPEC, "pauses": [{"slot": 1, "step": 3, "until": str(go)}]}
    more = {"ANDON_RUN_DIR": str(tmp_path / "run")}
    with start_line(tmp_path, spec, 2, "--until-complete", **more) as (service, workers):
        service.await_status(lambda line: line.step == 2)
        while not go.with_suffix(".here").exists():
            assert workers[1].process.poll() is None
            time.sleep(0.02)
        workers[1].process.send_signal(signal.SIGSTOP)
        first = workers[0].wait()
        # It waits for worker 1 for some seconds, and then ends without it.
        ended = service.process.wait(60)
        go.touch()
        workers[1].process.send_signal(signal.SIGCONT)
        second = workers[1].wait()

    assert (first, ended, second) == (0, 0, 0), workers[1].output
    assert "service.json says that the run is complete" in workers[1].output
    told = (tmp_path / "run.err").read_text() + (tmp_path / "run" / "service.log").read_text()
    assert "end_awaits_workers lost=1 joining=0" in told
    # On this host a stopped process is seen before its lease is over.
    assert departure_of(tmp_path, 1).message.startswith("its process has been stopped for ")
