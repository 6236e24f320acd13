"""SIGTERM: a worker finishes its step and leaves, and the others continue."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from andon.host.manifest import checkpoints_in, step_of
from andon.protocol.records import RecordKind
from andon.v1 import coordinator_pb2 as pb
from andon_coordinator.transport.reader import JournalEntry, JournalReader, RecordedDeparture
from andon_server.crashes import CrashKind, read_crashes
from integration.fixtures.console import finish, lines_until, processes_of, start_warm, worker_of
from integration.harness import (
    SCRIPTS,
    Service,
    await_exit,
    on_line,
    start_line,
    start_worker,
    wait_until,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

SPEC: dict[str, Any] = {"samples": 40, "batch": 8, "steps": 12}
LOCAL = ("--schedule", "local", "--local-steps", "2")


def departures_of(service: Service, worker: int) -> list[RecordedDeparture]:
    with JournalReader(service.journal) as journal:
        return [gone for gone in journal.departures() if gone.worker == worker]


def steps_of(journal: Path) -> dict[int, JournalEntry]:
    with JournalReader(journal) as reader:
        assert reader.ledger_faults() == []
        return {e.record.step: e for e in reader.chain() if e.record.kind is RecordKind.STEP}


def test_a_worker_that_is_told_to_terminate_finishes_its_step_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    gate = tmp_path / "gate"
    spec = {**SPEC, "pauses": [{"slot": 1, "step": 5, "until": str(gate)}]}

    with start_line(tmp_path, spec, 2, "--min-workers", "1") as (service, workers):
        wait_until(gate.with_suffix(".here").exists)
        workers[1].process.send_signal(signal.SIGTERM)
        gate.touch()
        codes = [worker.wait() for worker in reversed(workers)]

    assert codes == [143, 0], workers[1].output + workers[0].output
    [gone] = departures_of(service, 1)
    assert (gone.reason, gone.message, gone.step) == ("INTERRUPTED", "notice: SIGTERM", 5)
    steps = steps_of(service.journal)
    assert [steps[step].record.roster for step in (4, 5, 6, 12)] == [(0, 1), (0, 1), (0,), (0,)]
    # It left between two steps: no round was void.
    assert {entry.result.attempt for entry in steps.values() if entry.result} == {0}
    assert workers[0].seen["step"] == 12


def test_a_worker_that_waits_for_the_others_leaves_at_once(tmp_path: Path) -> None:
    endless = {**SPEC, "steps": 10**6}

    with start_line(tmp_path, endless, 2, "--min-workers", "2") as (service, workers):
        service.await_status(lambda line: line.step >= 3)
        workers[0].process.kill()
        service.await_status(lambda line: line.state == pb.LINE_STATE_FORMING)
        workers[1].process.send_signal(signal.SIGTERM)
        code = workers[1].wait()

    assert code == 143, workers[1].output
    assert [gone.reason for gone in departures_of(service, 1)] == ["INTERRUPTED"]


def test_a_worker_of_a_halted_line_that_waits_for_the_answer_leaves_at_once(tmp_path: Path) -> None:
    spec = {**SPEC, "bad_loss": {"slot": 0, "step": 4}}

    with start_line(tmp_path, spec, 2, ANDON_ON_HALT="wait") as (service, workers):
        service.await_halt()
        workers[1].process.send_signal(signal.SIGTERM)
        code = workers[1].wait()
        state = service.status().state

    assert (code, state) == (143, pb.LINE_STATE_HALTED), workers[1].output
    assert [gone.reason for gone in departures_of(service, 1)] == ["INTERRUPTED"]


@pytest.mark.parametrize(("keeper", "flags"), [(0, ()), (0, LOCAL), (1, LOCAL)], ids=str)
def test_a_halted_line_that_is_taken_down_keeps_the_state_of_its_last_step(
    tmp_path: Path, keeper: int, flags: tuple[str, ...]
) -> None:
    model = {**SPEC, "batchnorm": True}
    spec = {**model, "bad_loss": {"slot": 1, "step": 4}}
    down, whole = tmp_path / "down", tmp_path / "whole"
    every = {"ANDON_CHECKPOINT_EVERY": "1000000", "ANDON_ON_HALT": "wait"}

    with start_line(down, spec, 2, *flags, **every, ANDON_RUN_DIR=str(down)) as (line, workers):
        line.await_halt()
        for slot in (1 - keeper, keeper):
            workers[slot].process.send_signal(signal.SIGTERM)
            await_exit([workers[slot]], 143)
        assert max(steps_of(line.journal)) == 3
    model["steps"] = 3
    with start_line(whole, model, 2, *flags, **every, ANDON_RUN_DIR=str(whole)) as (_, workers):
        await_exit(workers)

    [kept], [last] = checkpoints_in(down), checkpoints_in(whole)
    assert (step_of(kept), step_of(last)) == (3, 3)
    assert (kept / "model.safetensors").read_bytes() == (last / "model.safetensors").read_bytes()
    if not keeper:  # On a line of local steps each worker has an optimizer's state of its own.
        name = "optimizers.safetensors"
        assert (kept / name).read_bytes() == (last / name).read_bytes()


def test_a_worker_that_is_not_on_the_line_yet_ends_at_once(tmp_path: Path) -> None:
    with Service(tmp_path / "run", 2) as service:
        pass  # nothing listens at its address now
    worker = start_worker(tmp_path, SPEC, slot=0, **on_line(service, 0, 2))
    try:
        worker.await_output("waiting for a coordinator")
        worker.process.send_signal(signal.SIGTERM)
        code = worker.wait()
    finally:
        worker.kill()

    assert code == 143, worker.output


def test_workers_that_are_told_to_terminate_in_the_last_step_complete_the_run(
    tmp_path: Path,
) -> None:
    gate = tmp_path / "gate"
    spec = {**SPEC, "pauses": [{"slot": 0, "step": 12, "until": str(gate)}]}

    with start_line(tmp_path, spec, 2) as (service, workers):
        wait_until(gate.with_suffix(".here").exists)
        for worker in workers:
            worker.process.send_signal(signal.SIGTERM)
        service.await_status(lambda line: all(each.notice for each in line.workers))
        gate.touch()
        await_exit(workers)
        service.await_status(lambda line: line.state == pb.LINE_STATE_COMPLETE)

    gone = [each.reason for slot in (0, 1) for each in departures_of(service, slot)]
    assert gone == ["COMPLETE", "COMPLETE"]


@pytest.mark.parametrize("learns", [True, False])
def test_a_newcomer_gets_the_state_of_the_only_worker_which_was_told_to_terminate(
    tmp_path: Path, *, learns: bool
) -> None:
    gate = tmp_path / "gate"
    pauses = [{"slot": 0, "step": 4, "until": str(gate)}]
    spec = {**SPEC, "pauses": pauses, "transfers": not learns}

    with start_line(tmp_path, spec, 1, "--max-workers", "2") as (service, workers):
        wait_until(gate.with_suffix(".here").exists)
        workers.append(start_worker(tmp_path, spec, slot=1, **on_line(service, 1, 2)))
        service.await_status(lambda line: line.live == 2)
        workers[0].process.send_signal(signal.SIGTERM)
        gate.touch()
        codes = [worker.wait() for worker in workers]

    assert codes == [143, 0], workers[0].output + workers[1].output
    steps = steps_of(service.journal)
    assert [steps[step].record.roster for step in (4, 5, 12)] == [(0,), (1,), (1,)]
    assert {entry.result.attempt for entry in steps.values() if entry.result} == {0}


def test_run_passes_sigterm_on_every_worker_leaves_in_words_and_the_last_one_keeps_the_state(
    tmp_path: Path,
) -> None:
    (tmp_path / "spec.json").write_text(json.dumps({**SPEC, "steps": 10**6, "slot": 0}))
    script = (str(SCRIPTS / "train.py"), "spec.json", "out.json")
    flags = ("--workers", "2", "--run-id", "7f3a", "--checkpoint-every", "1000000")
    run = start_warm(tmp_path, "run", *flags, *script)
    try:
        lines_until(run, "step")
        run.send_signal(signal.SIGTERM)
        code, output, errors = finish(run)
    finally:
        run.kill()

    assert (code, errors) == (143, "")
    assert "stopped (terminated): " in output
    with JournalReader(tmp_path / "runs/7f3a/journal.sqlite") as journal:
        assert {gone.reason for gone in journal.departures()} == {"INTERRUPTED"}
        assert {gone.worker for gone in journal.departures()} == {0, 1}
        [kept] = checkpoints_in(tmp_path / "runs/7f3a")
        assert step_of(kept) == journal.chain()[-1].record.step > 0
        assert journal.ledger_faults() == []
    assert processes_of(tmp_path) == []


def test_a_run_that_one_worker_was_told_to_leave_completes(tmp_path: Path) -> None:
    gate, last = tmp_path / "gate", tmp_path / "last"
    pauses = [{"slot": 0, "step": step, "until": str(at)} for step, at in ((3, gate), (9, last))]
    (tmp_path / "spec.json").write_text(json.dumps({**SPEC, "slot": 0, "pauses": pauses}))
    script = (str(SCRIPTS / "train.py"), "spec.json", "out.json")
    flags = ("--workers", "2", "--min-workers", "1", "--run-id", "7f3a")
    run = start_warm(tmp_path, "run", *flags, *script)
    try:
        wait_until(gate.with_suffix(".here").exists)
        os.kill(worker_of(tmp_path, slot=1), signal.SIGTERM)
        gate.touch()
        lines_until(run, "worker 1 was told to terminate: the others go on without it")
        last.touch()
        code, output, errors = finish(run)
    finally:
        run.kill()

    assert (code, errors) == (0, ""), output
    assert "complete: 12 steps" in output
    [end] = read_crashes(tmp_path / "runs/7f3a")
    assert (end.name, end.kind, end.starts_again) == ("worker 1", CrashKind.NOTICE, False)
    assert end.text.startswith("its machine goes (SIGTERM)")
