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
from integration.harness import await_exit, start_line

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


@pytest.mark.parametrize(
    ("policy", "flags", "skipped"),
    [("limit", ("--grad-norm-spike", "20"), []), ("skip", ("--grad-norm-spike", "1e9"), [144])],
)
def test_a_line_deals_with_a_spike_by_itself(
    tmp_path: Path, policy: str, flags: tuple[str, ...], skipped: list[int]
) -> None:
    flags = (*flags, "--on-spike", policy, "--loss-spike", "20")
    with start_line(tmp_path, {**SPEC, "loud_once": True}, 2, *flags) as (service, workers):
        await_exit(workers)

    assert len({worker.seen["digest"] for worker in workers}) == 1
    with StepReader(service.journal) as journal:
        assert journal.halts() == []
        assert [each.positions.start for each in journal.skips()] == skipped
        results, events = journal.results(), journal.run_events()
        assert journal.ledger_faults() == []
    [told] = [each.text for each in events if each.kind is RunEventKind.SPIKE]
    assert told.startswith(f"{policy}: the loss ")
    usual = statistics.median(each.gradient_norm for each in results if each.gradient_norm)
    scales = {at: each.gradient_scale for at, each in enumerate(results) if each.gradient_scale < 1}
    if policy == "limit":
        [(at, scale)] = scales.items()
        assert at == 18
        assert scale * (results[at].gradient_norm or 0.0) == pytest.approx(usual, rel=0.2)
    else:
        assert scales == {}
