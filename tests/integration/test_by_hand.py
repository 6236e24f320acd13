"""A GAN on real processes: two models and two optimizers, with manual steps."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load_file

from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon_coordinator.transport.reader import JournalReader
from integration.harness import Service, Worker, on_line, start_worker

pytestmark = pytest.mark.integration

SCRIPT = "gan.py"
SPEC: dict[str, Any] = {"steps": 12}


def start(service: Service, folder: Path, slot: int, workers: int, **spec: Any) -> Worker:
    where = on_line(service, slot, workers)
    return start_worker(folder, {**SPEC, **spec}, slot=slot, script=SCRIPT, **where)


def run(folder: Path, workers: int = 2, *, expect_exit: int = 0, **spec: Any) -> list[Worker]:
    folder.mkdir(exist_ok=True)
    with Service(folder / "run", workers) as service:
        started = [start(service, folder, slot, workers, **spec) for slot in range(workers)]
        try:
            for worker in started:
                code = worker.wait()
                assert code == expect_exit, worker.output
        finally:
            for worker in started:
                worker.kill()
    return started


def alone(folder: Path, **spec: Any) -> Worker:
    folder.mkdir()
    worker = start_worker(folder, {**SPEC, **spec}, script=SCRIPT)
    assert worker.wait() == 0, worker.output
    return worker


def weights(worker: Worker) -> dict[str, torch.Tensor]:
    tensors = load_file(worker.out.with_suffix(".safetensors"))
    return {name: tensor for name, tensor in tensors.items() if "layers" in name or name[0] == "0"}


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The weights' digest after each step of an undisturbed run of two workers."""
    worker, other = run(tmp_path_factory.mktemp("clean"))
    assert worker.seen["digests"] == other.seen["digests"]
    return list(worker.seen["digests"])


def test_a_gan_on_two_workers_is_the_gan_of_one_process(tmp_path: Path) -> None:
    plain = alone(tmp_path / "plain", plain=True)

    started = run(tmp_path / "line", 2, drift=True)

    seen = [worker.seen for worker in started]
    assert len({each["digest"] for each in seen}) == 1
    assert len({each["buffers"] for each in seen}) == 1
    assert "nan" in seen[0]["buffers"]
    assert [each["step"] for each in seen] == [12, 12]
    assert [each["told"] for each in seen] == [[[0, step] for step in range(1, 13)]] * 2
    for name, expected in weights(plain).items():
        error = (weights(started[0])[name] - expected).norm() / expected.norm()
        assert error <= 1e-5, name
    with JournalReader(tmp_path / "line" / "run" / "journal.sqlite") as journal:
        assert journal.steps() == 12
        assert journal.ledger_faults() == []


def test_the_same_script_alone_computes_the_same_bits_as_pytorch_alone(tmp_path: Path) -> None:
    plain = alone(tmp_path / "plain", plain=True)

    solo = alone(tmp_path / "solo")

    assert solo.seen["digest"] == plain.seen["digest"]
    assert solo.seen["step"] == 12
    assert solo.seen["stopped"] == "steps"


def test_f_dp_003_a_nan_in_the_second_model_stops_all_workers(
    tmp_path: Path, digests: list[str]
) -> None:
    started = run(tmp_path / "halted", expect_exit=3, poison={"slot": 1, "step": 5})

    for worker in started:
        ((reason, who, step, parameter, text),) = worker.seen["halts"]
        assert (reason, who, step) == ("non_finite_gradient", 1, 5)
        assert parameter == "1.layers.0.weight"
        assert "worker 1 sent nan in 1.layers.0.weight[2, 1] (block " in text
        assert " says " not in text, "the service's own reducer saw it"
        assert worker.seen["step"] == 4
        assert worker.seen["digest"] == digests[3]


def test_a_script_that_catches_the_halt_computes_the_step_again(
    tmp_path: Path, digests: list[str]
) -> None:
    spec = {"poison": {"slot": 1, "step": 5}, "survive": True}

    with Service(tmp_path / "run", 2) as service:
        started = [start(service, tmp_path, slot, 2, **spec) for slot in range(2)]
        try:
            halted = service.await_status(lambda line: line.state == pb.LINE_STATE_HALTED)
            service.clear_halt(halted.halt.id, pb.HALT_ANSWER_RETRY)
            codes = [worker.wait() for worker in started]
        finally:
            for worker in started:
                worker.kill()

    assert codes == [0, 0], started[0].output
    assert [len(worker.seen["halts"]) for worker in started] == [1, 1]
    assert [worker.seen["digest"] for worker in started] == [digests[-1]] * 2


def test_f_dp_006_a_worker_that_is_killed_and_comes_back_costs_one_attempt(
    tmp_path: Path, digests: list[str]
) -> None:
    lingers = tmp_path / "lingers"

    with Service(tmp_path / "run", 2, "--min-workers", "2") as service:
        survivor = start(service, tmp_path, 0, 2)
        killed = start(service, tmp_path, 1, 2, linger=[1, 6], lingers=str(lingers))
        started = [survivor, killed]
        try:
            until = time.monotonic() + 60
            while not lingers.exists():
                assert time.monotonic() < until
                time.sleep(0.02)
            killed.kill()
            started.append(start(service, tmp_path, 1, 2))
            codes = [started[0].wait(), started[2].wait()]
        finally:
            for worker in started:
                worker.kill()

    again = started[2]
    assert codes == [0, 0], survivor.output + again.output
    assert survivor.seen["again"] == [[6, 6, 2]]
    assert again.seen["joined_at"] == 5
    assert again.seen["committed"] == [[step, 1, 2] for step in range(6, 13)]
    assert survivor.seen["digest"] == again.seen["digest"] == digests[-1]


def drop(service: Service, halt_id: int, worker: int) -> None:
    with grpc.insecure_channel(service.address) as channel:
        request = pb.ClearHaltRequest(
            halt_id=halt_id, answer=pb.HALT_ANSWER_DROP, worker=worker, operator="test"
        )
        CoordinatorStub(channel).ClearHalt(request, timeout=10)


def test_the_line_goes_on_with_fewer_workers_and_they_are_told(tmp_path: Path) -> None:
    spec = {"poison": {"slot": 1, "step": 6}, "survive": True}

    with Service(tmp_path / "run", 3) as service:
        started = [start(service, tmp_path, slot, 3, **spec) for slot in range(3)]
        try:
            halted = service.await_status(lambda line: line.state == pb.LINE_STATE_HALTED)
            drop(service, halted.halt.id, 1)
            codes = [worker.wait() for worker in started]
        finally:
            for worker in started:
                worker.kill()

    first, _dropped, last = started
    assert codes == [0, 5, 0], first.output + last.output
    # After the halt they still computed their shares of three.
    assert first.seen["again"] == last.seen["again"] == [[6, 6, 2]]
    assert last.seen["committed"] == [
        *([step, 2, 3] for step in range(1, 6)),
        *([step, 1, 2] for step in range(6, 13)),
    ]
    assert first.seen["digest"] == last.seen["digest"]


def test_workers_without_a_given_number_learn_it_at_the_first_step(
    tmp_path: Path,
) -> None:

    with Service(tmp_path / "run", 2) as service:
        where = {"ANDON_ADDRESS": service.address, "ANDON_RUN_ID": service.run_id}
        started = [
            start_worker(tmp_path, SPEC, slot=slot, script=SCRIPT, **where) for slot in range(2)
        ]
        try:
            codes = [worker.wait() for worker in started]
        finally:
            for worker in started:
                worker.kill()

    assert codes == [0, 0], started[0].output
    for worker in started:
        assert worker.seen["again"] == [[1, 1, 2]]
        assert len(worker.seen["committed"]) == 12
    assert started[0].seen["digest"] == started[1].seen["digest"]
    assert sorted(worker.seen["committed"][0] for worker in started) == [[1, 0, 2], [1, 1, 2]]


def test_calls_that_do_not_pair_stop_the_line_and_say_what_was_called(tmp_path: Path) -> None:
    started = run(tmp_path, expect_exit=3, mispair=[1, 3])

    for worker in started:
        ((reason, _who, step, _parameter, text),) = worker.seen["halts"]
        assert (reason, step) == ("protocol_violation", 3)
        assert "rank 1 called barrier as call 5 of the step" in text


def test_stop_busy_mean_and_split_go_with_steps_by_hand(tmp_path: Path) -> None:
    upload = tmp_path / "upload"

    with Service(tmp_path / "run", 2) as service:
        started = [
            start(service, tmp_path, slot, 2, stop_at=[1, 3], upload=str(upload))
            for slot in range(2)
        ]
        try:
            service.await_status(
                lambda line: (
                    [each.detail for each in line.workers if each.detail == "upload"]
                    == ["upload"] * 2
                )
            )
            upload.touch()
            codes = [worker.wait() for worker in started]
        finally:
            for worker in started:
                worker.kill()

    assert codes == [0, 0], started[0].output
    seen = [worker.seen for worker in started]
    assert [(each["step"], each["stopped"]) for each in seen] == [(4, "enough")] * 2
    assert [each["mean"] for each in seen] == [(1 * 1 + 2 * 2) / 3] * 2
    assert seen[0]["split"] + seen[1]["split"] == list(range(7))
