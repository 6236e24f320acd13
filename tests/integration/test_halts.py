"""A bad value on one worker stops all workers before any weights move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from andon.v1 import coordinator_pb2 as pb
from andon.v1 import halt_pb2
from andon_coordinator.transport.reader import JournalReader
from integration.harness import Service, on_line, start_line, start_worker, train

pytestmark = pytest.mark.integration

POISON = {"step": 5, "slot": 1, "parameter": "blocks.1.up.weight", "element": [3, 2]}
SPEC: dict[str, Any] = {"samples": 40, "batch": 8, "steps": 8}


def digest_after(folder: Path, steps: int) -> str:
    folder.mkdir()
    seen = train(folder, {**SPEC, "steps": steps}, 2)
    return str(seen[0]["digest"])


@pytest.mark.parametrize(("value", "workers"), [("nan", 2), ("-inf", 3)])
def test_f_dp_003_a_planted_value_is_told_to_every_worker(
    tmp_path: Path, value: str, workers: int
) -> None:
    spec = {**SPEC, "poison": {**POISON, "value": value}}

    seen = train(tmp_path, spec, workers, expect_exit=3)

    for each in seen:
        (halt,) = each["halts"]
        assert halt["reason"] == "non_finite_gradient"
        assert (halt["worker"], halt["step"]) == (1, 5)
        assert (halt["parameter"], halt["element"]) == ("blocks.1.up.weight", [3, 2])
        assert halt["value"] == value
        assert f"worker 1 sent {value} in blocks.1.up.weight[3, 2] (block " in halt["text"]
        assert each["step"] == 4
    with JournalReader(tmp_path / "run" / "journal.sqlite") as journal:
        (halted,) = journal.halts()
        assert journal.steps() == 4
        assert halted.evidence.parameter == "blocks.1.up.weight"


def test_f_dp_003_weights_are_those_of_the_step_before_on_all_workers(tmp_path: Path) -> None:
    expected = digest_after(tmp_path / "clean", 4)

    seen = train(tmp_path, {**SPEC, "poison": {**POISON, "value": "nan"}}, 2, expect_exit=3)

    assert [each["digest"] for each in seen] == [expected] * 2


def test_f_dp_003_a_nan_loss_is_told_to_every_worker(tmp_path: Path) -> None:
    spec = {**SPEC, "bad_loss": {"step": 3, "slot": 0}}

    seen = train(tmp_path, spec, 2, expect_exit=3)

    for each in seen:
        (halt,) = each["halts"]
        assert (halt["reason"], halt["worker"], halt["step"]) == ("non_finite_loss", 0, 3)
        assert halt["value"] == "nan"
        assert each["step"] == 2


def test_a_waiting_line_continues_after_the_answer_as_if_undisturbed(
    tmp_path: Path,
) -> None:
    expected = digest_after(tmp_path / "clean", 8)
    spec = {**SPEC, "poison": {**POISON, "value": "nan"}}

    with start_line(tmp_path, spec, 2, ANDON_ON_HALT="wait") as (service, workers):
        halted = service.await_status(lambda line: line.state == pb.LINE_STATE_HALTED)
        service.clear_halt(halted.halt.id, pb.HALT_ANSWER_RETRY)
        codes = [worker.wait() for worker in workers]

    assert codes == [0, 0], workers[0].output
    assert (halted.halt.worker, halted.halt.step, halted.step) == (1, 5, 4)
    assert "worker 1 sent nan in blocks.1.up.weight[3, 2]" in workers[0].output
    assert [worker.seen["digest"] for worker in workers] == [expected] * 2


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
        **{**SPEC, "samples": 200, "pauses": pauses},
        "bad_loss": {"slot": loss[0], "step": loss[1]},
        "poison": {**POISON, "slot": gradient[0], "step": gradient[1], "value": "nan"},
    }
    flags = ("--schedule", "local", "--local-steps", "2", "--overlap")
    halts = []

    with start_line(tmp_path, spec, 2, *flags, ANDON_ON_HALT="wait") as (service, workers):
        for slot, step in (loss, gradient):
            # The other worker has reported: the averages of all are at the reducer, or with them.
            _await_last(service, f"worker {slot} to finish step {step}")
            (tmp_path / f"go-{step}").touch()
            line = service.await_status(lambda line: line.state == pb.LINE_STATE_HALTED)
            service.clear_halt(line.halt.id, pb.HALT_ANSWER_RETRY)
            halts.append((line.halt.worker, line.halt.step, line.halt.reason))
        codes = [worker.wait() for worker in workers]

    assert codes == [0, 0], workers[0].output
    assert halts == [
        (*loss, halt_pb2.HALT_REASON_NON_FINITE_LOSS),
        (*gradient, halt_pb2.HALT_REASON_NON_FINITE_GRADIENT),
    ]
    assert len({worker.seen["digest"] for worker in workers}) == 1


def _await_last(service: Service, waiting_for: str) -> None:
    service.await_status(lambda line: line.waiting_for == waiting_for)


def test_a_script_that_catches_the_halt_goes_on_at_the_right_sample(tmp_path: Path) -> None:
    expected = digest_after(tmp_path / "clean", 8)
    spec = {**SPEC, "bad_loss": {"step": 6, "slot": 1}, "survive": True, "micro": 2}

    with start_line(tmp_path, spec, 2) as (service, workers):
        halted = service.await_status(lambda line: line.state == pb.LINE_STATE_HALTED)
        service.clear_halt(halted.halt.id, pb.HALT_ANSWER_RETRY)
        codes = [worker.wait() for worker in workers]

    assert codes == [0, 0], workers[0].output
    seen = [worker.seen for worker in workers]
    assert [len(each["halts"]) for each in seen] == [1, 1]
    assert [each["step"] for each in seen] == [8, 8]
    assert len({each["digest"] for each in seen}) == 1
    assert seen[0]["digest"] == digest_of_micro(tmp_path / "micro") != expected


def digest_of_micro(folder: Path) -> str:
    folder.mkdir()
    return str(train(folder, {**SPEC, "micro": 2}, 2)[0]["digest"])


def test_a_newcomer_to_a_halted_line_waits_for_the_answer_too(tmp_path: Path) -> None:
    spec = {**SPEC, "poison": {**POISON, "value": "nan"}}

    with start_line(tmp_path, spec, 2, ANDON_ON_HALT="wait") as (service, workers):
        halted = service.await_status(lambda line: line.state == pb.LINE_STATE_HALTED)
        workers[1].process.kill()
        workers[1].wait()
        (tmp_path / "again").mkdir()
        again = start_worker(tmp_path / "again", SPEC, slot=1, **on_line(service, 1, 2))
        service.await_status(lambda line: line.live == 1)
        service.await_status(lambda line: line.live == 2)
        service.clear_halt(halted.halt.id, pb.HALT_ANSWER_RETRY)
        codes = [workers[0].wait(), again.wait()]

    assert codes == [0, 0], again.output
    assert "Waiting for the operator" in again.output
    assert workers[0].seen["digest"] == again.seen["digest"]
