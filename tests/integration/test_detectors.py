"""Detectors on a real line: a spike halts before any weight moves, and a person accepts it."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from andon.v1 import halt_pb2
from andon_coordinator.core.run_events import RunEventKind
from andon_coordinator.transport.reader import JournalReader
from andon_coordinator.transport.step_reader import StepReader
from integration.harness import Service, await_exit, start_line, start_line_with_host

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SPEC: dict[str, Any] = {"samples": 400, "batch": 8, "steps": 20, "clip": 1.0, "loud_at": 19}


def test_a_loss_spike_halts_every_worker_before_its_weights_move(tmp_path: Path) -> None:
    with start_line(tmp_path, SPEC, 2, "--loss-spike", "20") as (service, workers):
        await_exit(workers, 3)

    [mine], [theirs] = (worker.seen["halts"] for worker in workers)
    assert mine == theirs
    assert (mine["reason"], mine["step"], mine["worker"]) == ("loss_spike", 19, None)
    assert "20 deviations over the median" in mine["text"]
    assert {worker.seen["step"] for worker in workers} == {18}
    assert len({worker.seen["digest"] for worker in workers}) == 1
    with JournalReader(service.journal) as journal:
        assert journal.steps() == 18
        # The norm was not requested, so no worker computed it.
        assert {result.gradient_norm for result in journal.results()} == {None}


def test_a_gradient_norm_spike_that_is_accepted_is_committed(tmp_path: Path) -> None:
    flags = ("--grad-norm-spike", "20")
    with start_line(tmp_path, SPEC, 2, *flags, ANDON_ON_HALT="wait") as (service, workers):
        halt = service.await_halt()
        service.clear_halt(halt.id)
        await_exit(workers)

    assert halt.reason == halt_pb2.HALT_REASON_GRADIENT_NORM_SPIKE
    assert len({worker.seen["digest"] for worker in workers}) == 1
    with JournalReader(service.journal) as journal:
        norms = [result.gradient_norm for result in journal.results()]
        assert len(journal.halts()) == 1
    assert len(norms) == 20
    assert norms[18] == float(halt.value)
    usual = [norm for step, norm in enumerate(norms) if norm is not None and step != 18]
    assert len(usual) == 19
    assert norms[18] > 100 * max(usual)


def test_a_line_limits_a_spike_of_the_gradients_norm_by_itself(tmp_path: Path) -> None:
    flags = ("--on-spike", "limit", "--loss-spike", "20", "--grad-norm-spike", "20")
    with start_line(tmp_path, {**SPEC, "loud_once": True}, 2, *flags) as (service, workers):
        await_exit(workers)

    assert len({worker.seen["digest"] for worker in workers}) == 1
    with StepReader(service.journal) as journal:
        assert journal.halts() == []
        assert journal.skips() == []
        results, events = journal.results(), journal.run_events()
        assert journal.ledger_faults() == []
    [told] = [each.text for each in events if each.kind is RunEventKind.SPIKE]
    assert told.startswith("limit: the loss ")
    usual = statistics.median(each.gradient_norm for each in results if each.gradient_norm)
    scales = {at: each.gradient_scale for at, each in enumerate(results) if each.gradient_scale < 1}
    [(at, scale)] = scales.items()
    assert at == 18
    assert scale * (results[at].gradient_norm or 0.0) == pytest.approx(usual, rel=0.2)


GOES_BACK = {**SPEC, "loud_at": 0, "clip": 1e9, "alike": True, "optimizer": "adamw"}
"""All samples are alike, so the steps after a checkpoint depend on nothing but its state."""
BACK = ("--on-spike", "back", "--loss-spike", "20", "--grad-norm-spike", "1e9")


def losses_twice(journal: Path, steps: int) -> list[list[float]]:
    """The losses of each step that was made before the line went back, and once more after it."""
    with StepReader(journal) as reader:
        assert (reader.halts(), reader.steps()) == ([], steps)
        assert reader.ledger_faults() == []
        events, entries = reader.run_events(), reader.entries()
    told = [each.text for each in events if each.kind is RunEventKind.SPIKE]
    assert [each.partition(":")[0] for each in told] == ["skip"] * 3 + ["back"]
    [back] = [each for each in events if each.kind is RunEventKind.WENT_BACK]
    # The last one that was whole by then, and after which a step was committed.
    assert back.step in (6, 12)
    seen: dict[int, list[float]] = {}
    for entry in entries:
        if entry.result is not None and entry.record.step > back.step:
            seen.setdefault(entry.record.step, []).append(entry.result.loss)
    again = [losses for losses in seen.values() if len(losses) == 2]
    assert len(again) >= 4
    return again


def test_a_line_whose_loss_stays_a_spike_goes_back_to_a_checkpoint_by_itself(
    tmp_path: Path,
) -> None:
    """The steps are those that came after the checkpoint at first, to the bit.

    With fragments that overlap each worker has weights of its own beside the line's. Nobody learns:
    while one worker trains alone its steps are others.
    """
    spec = {**GOES_BACK, "steps": 24, "ruin_at": 19, "transfers": True}
    flags = (*BACK, "--schedule", "local", "--local-steps", "2", "--overlap", "--fragments", "2")
    files = {"ANDON_RUN_DIR": str(tmp_path / "run"), "ANDON_CHECKPOINT_EVERY": "6"}
    with start_line(tmp_path, spec, 2, *flags, "--outer", "nesterov", **files) as (
        service,
        workers,
    ):
        await_exit(workers)

    assert len({worker.seen["digest"] for worker in workers}) == 1
    again = losses_twice(service.journal, 24)
    assert [first for first, _ in again] == [second for _, second in again]


def test_a_line_goes_back_though_its_service_and_a_worker_are_killed_meanwhile(
    tmp_path: Path,
) -> None:
    """The service as a host of two processes loads the checkpoint, the worker as it gets the state.

    The host trains on alone.
    """
    spec = {**GOES_BACK, "steps": 18, "ruin_at": 17, "transfers": True}
    spec |= {"gate": str(tmp_path / "gate-")}
    files = {"ANDON_RUN_DIR": str(tmp_path / "run"), "ANDON_CHECKPOINT_EVERY": "6"}
    with start_line_with_host(
        tmp_path, (spec, spec), 1, *BACK, script="train.py", **files
    ) as (service, (*host, other)):  # fmt: skip
        host[0].await_true((tmp_path / "gate-0.here").exists)
        service.process.kill()
        for slot in range(2):
            (tmp_path / f"gate-{slot}").touch()
        port = int(service.address.rpartition(":")[2])
        with Service(tmp_path / "run", 2, *BACK, "--run-id", service.run_id, port=port) as again:
            other.await_true((tmp_path / "gate-2.here").exists)
            other.kill()
            await_exit(host)

    assert len({process.seen["digest"] for process in host}) == 1
    for first, second in losses_twice(again.journal, 18):
        assert second == pytest.approx(first, rel=1e-5)  # One mean is of two workers.
