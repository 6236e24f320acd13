"""Answers to a halt: retry the step, skip its samples, or drop a worker."""

from __future__ import annotations

import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from andon.protocol.halts import HaltAnswer, HaltReason
from andon.protocol.records import PositionRange
from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon.v1.halt_pb2 import HaltEvidence
from andon_coordinator.transport.reader import JournalReader
from integration.harness import Service, Worker, start_line

pytestmark = pytest.mark.integration

STEPS = 8
SPEC: dict[str, Any] = {"samples": 40, "batch": 8, "steps": STEPS}
POISON = {"parameter": "blocks.1.up.weight", "element": [3, 2], "value": "nan"}


def poisoned(step: int, slot: int) -> dict[str, Any]:
    """A run in which one worker's gradient is NaN at one step, and correct when it is retried.

    Its scripts catch a halt and iterate again.
    """
    return {**SPEC, "poison": {**POISON, "step": step, "slot": slot}, "survive": True}


def await_halt(service: Service) -> HaltEvidence:
    return service.await_status(lambda line: line.state == pb.LINE_STATE_HALTED).halt


def answer(service: Service, halt: HaltEvidence, **how: Any) -> None:
    with grpc.insecure_channel(service.address) as channel:
        request = pb.ClearHaltRequest(halt_id=halt.id, operator="ann", **how)
        CoordinatorStub(channel).ClearHalt(request, timeout=10)


def halts_counted(service: Service) -> dict[str, float]:
    """The nonzero values of `andon_jidoka_halts_total`, by reason."""
    with urllib.request.urlopen(service.metrics_url, timeout=10) as scraped:
        text = scraped.read().decode()
    return {
        sample.labels["reason"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "andon_jidoka_halts_total" and sample.value
    }


def indices_of(workers: list[Worker]) -> dict[int, list[int]]:
    """The samples that the workers computed in each step, in worker order.

    They include those of void attempts: a worker keeps its positions in the next attempt.
    """
    computed: dict[tuple[int, int], set[int]] = defaultdict(set)
    for slot, worker in enumerate(workers):
        for step, _rank, indices in worker.seen["indices"]:
            computed[step, slot] |= set(indices)
    steps = {step for step, _slot in computed}
    return {
        step: sorted(index for (at, _), part in computed.items() if at == step for index in part)
        for step in steps
    }


@pytest.mark.parametrize("on_halt", ["wait", "raise"])
def test_f_dp_003_a_halt_that_is_answered_retry_is_told_to_all_alike_and_costs_no_step(
    tmp_path: Path, on_halt: str
) -> None:
    with start_line(tmp_path, poisoned(4, 1), 2, ANDON_ON_HALT=on_halt) as (service, workers):
        shown = await_halt(service)
        answer(service, shown, answer=pb.HALT_ANSWER_RETRY)
        codes = [worker.wait() for worker in workers]
        counted = halts_counted(service)

    assert codes == [0, 0], workers[0].output
    assert counted == {"non_finite_gradient": 1}
    evidence: dict[str, Any] = {
        "reason": "non_finite_gradient",
        "worker": 1,
        "step": 4,
        "block": shown.block,
        "parameter": "blocks.1.up.weight",
        "element": [3, 2],
        "value": "nan",
        "text": "halted at step 4 (epoch 0, positions 24 to 31): "
        f"{shown.message}. No weight moved.",
    }
    told = [worker.seen["halts"] for worker in workers]
    assert told == ([[], []] if on_halt == "wait" else [[evidence]] * 2)
    for worker in workers:
        assert on_halt == "raise" or evidence["text"] in worker.output
    with JournalReader(service.journal) as journal:
        (halt,) = journal.halts()
        kept = halt.evidence
        assert (journal.steps(), journal.samples(), journal.ledger_faults()) == (8, 64, [])
    assert (halt.answer, halt.worker, halt.operator) == (HaltAnswer.RETRY, None, "ann")
    assert kept.reason is HaltReason.NON_FINITE_GRADIENT
    for place in (shown, kept):
        assert (place.worker, place.step, place.block) == (1, 4, evidence["block"])
        assert (place.parameter, list(place.element)) == ("blocks.1.up.weight", [3, 2])
        assert (place.value, place.message) == ("nan", shown.message)
    assert len({worker.seen["digest"] for worker in workers}) == 1


def test_f_dp_002_skipped_samples_are_recorded_with_who_skipped_them_and_trained_by_nobody(
    tmp_path: Path,
) -> None:
    spec = {**poisoned(5, 0), "loader_processes": 1}

    # The last batch of epoch 0: the skip moves the line into the next epoch.
    with start_line(tmp_path, spec, 2, ANDON_ON_HALT="raise") as (service, workers):
        answer(service, await_halt(service), answer=pb.HALT_ANSWER_SKIP)
        codes = [worker.wait() for worker in workers]

    assert codes == [0, 0], workers[0].output
    assert [worker.seen["step"] for worker in workers] == [STEPS, STEPS]
    assert len({worker.seen["digest"] for worker in workers}) == 1
    with JournalReader(service.journal) as journal:
        (mark,) = [entry for entry in journal.chain() if entry.skipped is not None]
        (halt,) = journal.halts()
        assert journal.ledger_faults() == []
        assert journal.samples() == 8 * STEPS
    assert mark.skipped is not None
    assert (mark.skipped.epoch, mark.skipped.positions) == (0, PositionRange(32, 40))
    assert (mark.skipped.halt_id, mark.skipped.operator) == (halt.evidence.id, "ann")
    assert (halt.answer, halt.operator) == (HaltAnswer.SKIP, "ann")
    assert mark.note == "skipped positions 32 to 40 of epoch 0"
    trained = indices_of(workers)
    assert sorted(trained) == list(range(1, STEPS + 1))
    first_epoch = [index for step in range(1, 5) for index in trained[step]]
    assert len(set(first_epoch)) == 32


def test_f_dp_002_a_dropped_worker_is_told_why_and_the_rest_train_on_all_samples(
    tmp_path: Path,
) -> None:
    with start_line(tmp_path, poisoned(4, 1), 3, ANDON_ON_HALT="wait") as (service, workers):
        answer(service, await_halt(service), answer=pb.HALT_ANSWER_DROP, worker=1)
        codes = [worker.wait() for worker in workers]

    assert codes == [0, 5, 0], workers[0].output
    assert "dropped after step 3: an operator dropped this worker" in workers[1].output
    rest = [workers[0], workers[2]]
    assert [worker.seen["step"] for worker in rest] == [STEPS, STEPS]
    assert len({worker.seen["digest"] for worker in rest}) == 1
    with JournalReader(service.journal) as journal:
        (halt,) = journal.halts()
        gone = [(d.reason, d.message) for d in journal.departures() if d.worker == 1]
        assert (journal.steps(), journal.samples()) == (STEPS, 8 * STEPS)
        assert journal.ledger_faults() == []
    assert (halt.answer, halt.worker, halt.operator) == (HaltAnswer.DROP, 1, "ann")
    assert gone == [("DROPPED", "dropped by an operator")]
    trained = indices_of(rest)
    assert [len(trained[step]) for step in range(4, STEPS + 1)] == [8] * 5
