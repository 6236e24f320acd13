"""Halts with PyTorch: who is told, what each answer does, and that training goes on exactly."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from andon.protocol.halts import HaltAnswer, HaltReason
from andon.protocol.records import PositionRange
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import halt_pb2
from andon_coordinator.transport.reader import JournalReader
from integration.fixtures.console import andon
from integration.harness import Worker, finish, on_line, start_line, start_worker, train
from unit.andon_cli.trace_format import assert_valid, events_in

pytestmark = pytest.mark.integration

STEPS = 8
SPEC: dict[str, Any] = {"samples": 40, "batch": 8, "steps": STEPS, "micro": 2}
POISON = {"parameter": "blocks.1.up.weight", "element": [3, 2], "value": "nan"}


def poisoned(step: int, slot: int) -> dict[str, Any]:
    """A run in which one worker's gradient is NaN at one step, and correct when it is retried.

    Its scripts catch a halt and iterate again.
    """
    return {**SPEC, "poison": {**POISON, "step": step, "slot": slot}, "survive": True}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights' digest after a run without a halt."""
    seen = train(tmp_path_factory.mktemp("undisturbed"), SPEC, 2)
    return str(seen[0]["digest"])


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


def test_f_dp_003_a_nan_loss_is_told_to_every_worker(tmp_path: Path) -> None:
    seen = train(tmp_path, {**SPEC, "bad_loss": {"step": 3, "slot": 0}}, 2, expect_exit=3)

    for each in seen:
        (halt,) = each["halts"]
        assert (halt["reason"], halt["worker"], halt["step"]) == ("non_finite_loss", 0, 3)
        assert halt["value"] == "nan"
        assert each["step"] == 2


@pytest.mark.parametrize("on_halt", ["wait", "raise"])
def test_f_dp_003_a_halt_that_is_answered_retry_is_told_to_all_alike_and_costs_no_step(
    tmp_path: Path, undisturbed: str, on_halt: str
) -> None:
    with start_line(tmp_path, poisoned(4, 1), 2, ANDON_ON_HALT=on_halt) as (service, workers):
        shown = service.await_halt()
        service.clear_halt(shown.id)
        finish(workers)
        counted = service.scrape().shown("andon_jidoka_halts_total", "reason")

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
    assert {worker.seen["digest"] for worker in workers} == {undisturbed}


@pytest.mark.parametrize("on_halt", ["wait", "raise"])
def test_f_dp_002_skipped_samples_are_recorded_with_who_skipped_them_and_trained_by_nobody(
    tmp_path: Path, on_halt: str
) -> None:
    spec = {**poisoned(5, 0), "loader_processes": 1}
    more = {"ANDON_ON_HALT": on_halt, "ANDON_TRACE": str(tmp_path / "t.json")}

    # The last batch of epoch 0: the skip moves the line into the next epoch.
    with start_line(tmp_path, spec, 2, **more) as (service, workers):
        service.clear_halt(service.await_halt().id, pb.HALT_ANSWER_SKIP)
        finish(workers)

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
    # Workers without a launcher leave parts of a trace, which the command merges.
    code, table, errors = andon(tmp_path, "trace", "t.json.parts", "-o", "t.json")
    assert code == 0, errors
    assert "within" in table
    events = assert_valid(tmp_path / "t.json")
    for process in (1000, 1001):
        happened = [each["name"] for each in events_in(events, "i", process)]
        assert happened == ["joined", "round void", "halted", "resumed"]


def test_f_dp_002_a_dropped_worker_is_told_why_and_the_rest_train_on_all_samples(
    tmp_path: Path,
) -> None:
    with start_line(tmp_path, poisoned(4, 1), 3, ANDON_ON_HALT="wait") as (service, workers):
        service.clear_halt(service.await_halt().id, pb.HALT_ANSWER_DROP, worker=1)
        codes = [worker.wait() for worker in workers]

    assert codes == [0, 5, 0], workers[0].output
    assert "dropped after step 3: an operator dropped this worker" in workers[1].output
    assert "Traceback" not in workers[1].output
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


def test_f_dp_003_a_bad_value_computed_ahead_halts_the_line_though_its_averages_are_here(
    tmp_path: Path,
) -> None:
    """A worker that is the last one has its round's averages before the window ahead is done."""
    loss, gradient = (0, 3), (1, 5)
    pauses = [
        {"slot": slot, "step": step, "until": str(tmp_path / f"go-{step}")}
        for slot, step in (loss, gradient)
    ]
    spec = {
        **{**SPEC, "samples": 200, "micro": None, "pauses": pauses},
        "bad_loss": {"slot": loss[0], "step": loss[1]},
        "poison": {**POISON, "slot": gradient[0], "step": gradient[1]},
    }
    flags = ("--schedule", "local", "--local-steps", "2", "--overlap")
    halts = []

    with start_line(tmp_path, spec, 2, *flags, ANDON_ON_HALT="wait") as (service, workers):
        for slot, step in (loss, gradient):
            # The other worker has reported: the averages of all are at the reducer, or with them.
            service.await_waiting_for(f"worker {slot} to finish step {step}")
            (tmp_path / f"go-{step}").touch()
            halt = service.await_halt()
            service.clear_halt(halt.id)
            halts.append((halt.worker, halt.step, halt.reason))
        finish(workers)

    assert halts == [
        (*loss, halt_pb2.HALT_REASON_NON_FINITE_LOSS),
        (*gradient, halt_pb2.HALT_REASON_NON_FINITE_GRADIENT),
    ]
    assert len({worker.seen["digest"] for worker in workers}) == 1


def test_a_newcomer_to_a_halted_line_waits_for_the_answer_too(tmp_path: Path) -> None:
    of_both = {**SPEC, "micro": None, "steps": 40}
    # After the answer worker 0 is slow, until the newcomer has the state and is on a roster.
    spec = {
        **{**of_both, "slow": {"step": 5, "until": str(tmp_path / "both")}},
        "poison": {**POISON, "step": 5, "slot": 1},
    }
    with start_line(tmp_path, spec, 2, ANDON_ON_HALT="wait") as (service, workers):
        halt = service.await_halt()
        workers[1].process.kill()
        workers[1].wait()
        service.await_status(lambda line: line.live == 1)
        (tmp_path / "again").mkdir()
        again = start_worker(tmp_path / "again", of_both, slot=1, **on_line(service, 1, 2))
        service.await_status(lambda line: line.live == 2)
        service.clear_halt(halt.id)
        service.await_status(lambda line: line.participating == 2)
        (tmp_path / "both").touch()
        finish([workers[0], again])

    assert "Waiting for the operator" in again.output
    assert workers[0].seen["digest"] == again.seen["digest"]
