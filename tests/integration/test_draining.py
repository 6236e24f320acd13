"""`andon drain`: the current step is the last, and every worker ends well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from andon.v1 import coordinator_pb2 as pb
from andon_coordinator.transport.reader import JournalReader
from integration.fixtures.console import PROTOCOL_WORKER, andon, finish, lines_until, start_warm
from integration.harness import Service, await_exit, on_line, start_line, start_worker
from integration.harness import finish as ended

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

ENDLESS: dict[str, Any] = {"samples": 40, "batch": 8, "steps": 10**6}


def departures_of(service: Service) -> set[tuple[int, str]]:
    with JournalReader(service.journal) as journal:
        return {(gone.worker, gone.reason) for gone in journal.departures()}


def test_a_drained_line_commits_its_step_writes_a_checkpoint_and_is_complete(
    tmp_path: Path,
) -> None:
    keeps = {"ANDON_CHECKPOINT_EVERY": "1000000", "ANDON_RUN_DIR": str(tmp_path / "run")}

    spec = {**ENDLESS, "mean": True}
    with start_line(tmp_path, spec, 2, **keeps) as (service, workers):
        service.await_status(lambda line: line.step >= 3)
        code, output, errors = andon(tmp_path, "drain", "--address", service.address)
        seen = ended(workers)
        status = service.await_status(lambda line: line.state == pb.LINE_STATE_COMPLETE)
        _, shown, _ = andon(tmp_path, "status", "--address", service.address)

    assert (code, errors) == (0, "")
    assert output.endswith("; checkpoint; workers leave\n")
    assert (status.stop_reason, status.halt.id) == ("drained", 0)
    assert "COMPLETE (drained)" in shown
    assert len({each["digest"] for each in seen}) == 1
    assert [each["mean"] for each in seen] == [5 / 3] * 2, "its loop is over; it is not"
    assert departures_of(service) == {(0, "DRAINED"), (1, "DRAINED")}
    checkpoints = [folder.name for folder in (tmp_path / "run/checkpoints").iterdir()]
    assert checkpoints == [f"step-{status.step:08d}"]
    with JournalReader(service.journal) as journal:
        assert journal.results()[-1].stop_reason == "drained"
        assert journal.ledger_faults() == []


def test_a_drained_line_that_waits_for_a_worker_sends_the_others_home(tmp_path: Path) -> None:
    with Service(tmp_path / "run", 2) as service:
        worker = start_worker(tmp_path, ENDLESS, slot=0, **on_line(service, 0, 2))
        service.await_status(lambda line: line.live == 1)
        code, _, _ = andon(tmp_path, "drain", "--address", service.address)
        await_exit([worker])
        service.await_status(lambda line: line.state == pb.LINE_STATE_COMPLETE)

    assert code == 0
    assert departures_of(service) == {(0, "DRAINED")}


def test_a_halted_line_that_is_drained_ends_and_its_halt_stays_unanswered(tmp_path: Path) -> None:
    """A mean after the loop finds nobody to answer, and is the worker's own."""
    spec = {**ENDLESS, "bad_loss": {"slot": 0, "step": 4}, "mean": True}

    with start_line(tmp_path, spec, 2, ANDON_ON_HALT="wait") as (service, workers):
        service.await_halt()
        andon(tmp_path, "drain", "--address", service.address)
        seen = ended(workers)
        status = service.await_status(lambda line: line.state == pb.LINE_STATE_COMPLETE)

    assert status.step == 3
    assert sorted(each["mean"] for each in seen) == [1, 2]
    for worker in workers:
        assert "the run is over: drained while it had no step to finish" in worker.output
    with JournalReader(service.journal) as journal:
        assert [halt.answer for halt in journal.halts()] == [None]


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_script_by_hand_ends_after_a_drain_and_one_that_goes_on_in_words(
    tmp_path: Path, stubborn: bool
) -> None:
    spec = {"steps": 10**6, "stubborn": stubborn}

    with start_line(tmp_path, spec, 2, script="gan.py") as (service, workers):
        service.await_status(lambda line: line.step >= 2)
        if not stubborn:  # The other one waits in the middle of a step then.
            workers.pop().kill()
            service.await_status(lambda line: line.live == 1)
        andon(tmp_path, "drain", "--address", service.address)
        await_exit(workers, 1 if stubborn else 0)

    if not stubborn:
        assert workers[0].seen["stopped"] == "drained"
    for worker in workers if stubborn else ():
        assert "the run is over: drained. Nothing more is exchanged" in worker.output


def test_a_drained_run_succeeds_and_its_last_line_and_history_say_drained(tmp_path: Path) -> None:
    run = start_warm(
        tmp_path, "run", "--run-id", "7f3a", PROTOCOL_WORKER, "1000000", room="service"
    )
    try:
        lines_until(run, "[worker 0] step 2 ")
        code, output, _ = andon(tmp_path, "drain")
        run_code, rest, errors = finish(run)
    finally:
        run.kill()
    again, over, _ = andon(tmp_path, "history", "--format", "json")

    [past] = json.loads(over)
    assert (code, run_code, errors, again) == (0, 0, "", 0)
    assert output.startswith("finishing step ")
    assert f"drained: {past['steps']} steps" in rest
    assert past["state"] == "drained"
