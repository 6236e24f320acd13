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
from integration.harness import await_exit, start_line, start_line_with_host

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


def test_a_line_whose_loss_stays_a_spike_goes_back_to_a_checkpoint_by_itself(
    tmp_path: Path,
) -> None:
    """All samples are alike, so the steps after a checkpoint depend on nothing but its state.

    So they are those that came after it at first, to the bit, also in a host of two processes.
    """
    spec = {**SPEC, "steps": 24, "loud_at": 0, "clip": 1e9, "alike": True, "optimizer": "adamw"}
    spec |= {"ruin_at": 17}
    flags = ("--on-spike", "back", "--loss-spike", "20", "--grad-norm-spike", "1e9")
    files = {"ANDON_RUN_DIR": str(tmp_path / "run"), "ANDON_CHECKPOINT_EVERY": "6"}
    with start_line_with_host(
        tmp_path, (spec, spec), 1, *flags, script="train.py", **files
    ) as (service, workers):  # fmt: skip
        await_exit(workers)

    assert len({worker.seen["digest"] for worker in workers}) == 1
    with StepReader(service.journal) as journal:
        assert (journal.halts(), journal.steps()) == ([], 24)
        assert journal.ledger_faults() == []
        events, entries = journal.run_events(), journal.entries()
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
    assert [first for first, _ in again] == [second for _, second in again]
