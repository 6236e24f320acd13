"""Training continues while workers die and join in the middle of steps; no position is lost."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load_file

from andon.protocol.order import Order
from andon.protocol.records import RecordKind
from andon.v1 import coordinator_pb2 as pb
from andon.v1.coordinator_pb2_grpc import CoordinatorStub
from andon_coordinator.core.step_results import StepResult
from andon_coordinator.transport.reader import JournalReader
from integration.harness import Service, Worker, await_exit, on_line, start_line, start_worker

pytestmark = pytest.mark.integration

STEP = 4
"""The step in which the faults occur: positions 36 to 48 of epoch 0."""
SPEC: dict[str, Any] = {"samples": 120, "batch": 12, "steps": 10, "lr": 0.05}


def paused(folder: Path, slot: int, step: int = STEP) -> dict[str, Any]:
    """Pauses one worker in the middle of one step, until its file exists."""
    return {"slot": slot, "step": step, "until": str(folder / f"go-{slot}")}


def await_exchanging(service: Service, *workers: int, step: int = STEP) -> None:
    """Waits until these workers have sent all gradients of the step and wait for the others."""

    def sent(line: pb.LineStatus) -> bool:
        waiting = {each.worker for each in line.workers if each.activity == pb.ACTIVITY_EXCHANGING}
        return line.step == step - 1 and waiting >= set(workers)

    service.await_status(sent)


def samples(*bounds: tuple[int, int], epoch: int = 0) -> list[int]:
    order = Order(0, epoch, SPEC["samples"])
    return [int(index) for start, stop in bounds for index in order.indices(start, stop)]


def bodies(worker: Worker, step: int = STEP) -> list[list[int]]:
    """The samples of each iteration of a worker's loop in a step."""
    return [indices for number, _rank, indices in worker.seen["indices"] if number == step]


def result_of(folder: Path, step: int = STEP) -> tuple[tuple[int, ...], StepResult]:
    """A committed step's roster and result; also checks the whole ledger."""
    roster, result = results_of(folder, SPEC["steps"])[step]
    assert result is not None
    return roster, result


def results_of(folder: Path, steps: int) -> dict[int, tuple[tuple[int, ...], StepResult | None]]:
    """Roster and result of each committed step; also checks the whole ledger."""
    with JournalReader(folder / "run" / "journal.sqlite") as journal:
        assert journal.ledger_faults() == []
        entries = {
            entry.record.step: entry
            for entry in journal.chain()
            if entry.record.kind is RecordKind.STEP
        }
    assert sorted(entries) == list(range(1, steps + 1))
    return {step: (entry.record.roster, entry.result) for step, entry in entries.items()}


def slowed(folder: Path, steps: int = 40) -> dict[str, Any]:
    """Has steps take a while from the one of the faults on, until `fast` exists."""
    return {"steps": steps, "slow": {"step": STEP, "until": str(folder / "fast")}}


def await_roster(service: Service, folder: Path, *workers: int) -> None:
    """Waits until these workers are on the roster, and lets them be fast."""

    def on_it(line: pb.LineStatus) -> bool:
        return workers == tuple(each.worker for each in line.workers if each.HasField("rank"))

    service.await_status(on_it)
    (folder / "fast").touch()


def last_of(folder: Path, steps: int) -> tuple[int, list[int]]:
    """The run's last step, and its samples."""
    assert results_of(folder, steps)
    epoch, start = divmod((steps - 1) * SPEC["batch"], SPEC["samples"])
    return steps, samples((start, start + SPEC["batch"]), epoch=epoch)


def positions_by_worker(result: StepResult) -> dict[int, list[tuple[int, int]]]:
    return {
        part.worker: [(each.start, each.stop) for each in part.positions]
        for part in result.contributions
    }


Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """The final weights of plain PyTorch on the same batches, without faults."""
    plain = start_worker(tmp_path_factory.mktemp("plain"), {**SPEC, "plain": True})
    assert plain.wait() == 0, plain.output
    return load_file(plain.out.with_suffix(".safetensors"))


def assert_close(worker: Worker, undisturbed: Weights) -> None:
    """Checks that a worker's final weights are within 1e-5 of the expected ones, by tensor."""
    for name, weights in load_file(worker.out.with_suffix(".safetensors")).items():
        difference = torch.linalg.vector_norm(weights - undisturbed[name])
        assert difference <= 1e-5 * torch.linalg.vector_norm(undisturbed[name]), name


def test_f_dp_006_f_dp_002_survivors_of_a_killed_worker_compute_its_positions_alone(
    tmp_path: Path,
    undisturbed: Weights,
) -> None:
    spec = {**SPEC, "pauses": [paused(tmp_path, 1)]}
    with start_line(tmp_path, spec, 3) as (service, workers):
        await_exchanging(service, 0, 2)
        workers[1].process.kill()
        await_exit([workers[0], workers[2]])

    roster, result = result_of(tmp_path)
    assert (roster, result.attempt, result.samples) == ((0, 2), 1, 12)
    assert positions_by_worker(result) == {0: [(36, 42)], 2: [(42, 48)]}
    assert bodies(workers[0]) == [samples((36, 40)), samples((40, 42))]
    assert bodies(workers[2]) == [samples((44, 48)), samples((42, 44))]
    assert workers[0].seen["digest"] == workers[2].seen["digest"]
    assert workers[0].seen["losses"] == workers[2].seen["losses"]
    assert_close(workers[0], undisturbed)


def test_f_dp_006_two_deaths_in_one_step_leave_the_survivor_with_the_whole_batch(
    tmp_path: Path,
    undisturbed: Weights,
) -> None:
    spec = {**SPEC, "micro": 2, "pauses": [paused(tmp_path, 1), paused(tmp_path, 2)]}
    with start_line(tmp_path, spec, 3) as (service, workers):
        await_exchanging(service, 0)
        for worker in workers[1:]:
            worker.process.kill()
        code = workers[0].wait()

    assert code == 0, workers[0].output
    roster, result = result_of(tmp_path)
    assert (roster, positions_by_worker(result)) == ((0,), {0: [(36, 48)]})
    # The order depends on whether both deaths were known before the next attempt.
    computed = sorted(chain.from_iterable(bodies(workers[0])))
    assert computed == sorted(samples((36, 48)))
    assert max(map(len, bodies(workers[0]))) == 2
    assert_close(workers[0], undisturbed)


def test_f_dp_006_with_loading_processes_the_missing_positions_are_loaded_as_asked(
    tmp_path: Path,
) -> None:
    spec = {**SPEC, "loader_processes": 1, "pauses": [paused(tmp_path, 1)]}
    with start_line(tmp_path, spec, 2) as (service, workers):
        await_exchanging(service, 0)
        workers[1].process.kill()
        code = workers[0].wait()

    assert code == 0, workers[0].output
    result_of(tmp_path)
    assert bodies(workers[0]) == [samples((36, 42)), samples((42, 48))]
    later = [bodies(workers[0], step) for step in range(STEP + 1, SPEC["steps"] + 1)]
    assert later == [[samples((12 * step, 12 * step + 12))] for step in range(4, 10)]


def test_c_commit_001_after_the_cord_the_same_gradients_are_sent_again(
    tmp_path: Path, undisturbed: Weights
) -> None:
    spec = {**SPEC, "pauses": [paused(tmp_path, 1)]}
    with start_line(tmp_path, spec, 2, ANDON_ON_HALT="wait") as (service, workers):
        await_exchanging(service, 0)
        with grpc.insecure_channel(service.address) as channel:
            CoordinatorStub(channel).PullCord(pb.PullCordRequest(operator="test"), timeout=10)
        halt = service.await_halt()
        (tmp_path / "go-1").touch()
        service.clear_halt(halt.id)
        await_exit(workers)

    _roster, result = result_of(tmp_path)
    assert (result.attempt, result.samples) == (1, 12)
    borrowed = samples((36, 38))
    assert bodies(workers[0]) == [samples((36, 42)), borrowed]
    assert bodies(workers[1]) == [samples((42, 48)), borrowed]
    assert workers[0].seen["digest"] == workers[1].seen["digest"]
    assert_close(workers[0], undisturbed)


def test_f_dp_003_after_a_nan_its_worker_alone_computes_anew(
    tmp_path: Path, undisturbed: Weights
) -> None:
    poison = {"slot": 1, "step": STEP, "parameter": "head.bias", "element": [2], "value": "nan"}
    spec = {**SPEC, "poison": poison, "pauses": [paused(tmp_path, 1)]}
    with start_line(tmp_path, spec, 2, ANDON_ON_HALT="wait") as (service, workers):
        await_exchanging(service, 0)
        (tmp_path / "go-1").touch()
        halt = service.await_halt()
        service.clear_halt(halt.id)
        await_exit(workers)

    assert bodies(workers[0]) == [samples((36, 42)), samples((36, 38))]
    assert bodies(workers[1]) == [samples((42, 48)), samples((42, 48))]
    result_of(tmp_path)
    assert_close(workers[0], undisturbed)


def test_f_dp_002_a_newcomer_joins_in_the_middle_and_takes_part(tmp_path: Path) -> None:
    spec = {**SPEC, **slowed(tmp_path), "pauses": [paused(tmp_path, 1)]}
    plain = start_worker(tmp_path, {**spec, "plain": True}, slot=9)
    with start_line(tmp_path, spec, 3) as (service, workers):
        await_exchanging(service, 0, 2)
        workers[1].process.kill()
        service.await_status(lambda line: line.live == 2 and line.step > STEP)
        (tmp_path / "later").mkdir()
        newcomer = start_worker(
            tmp_path / "later", {**spec, "pauses": []}, slot=1, **on_line(service, 1, 3)
        )
        try:
            await_roster(service, tmp_path, 0, 1, 2)
            codes = [workers[0].wait(), workers[2].wait(), newcomer.wait()]
        finally:
            newcomer.kill()

    assert codes == [0, 0, 0], newcomer.output
    assert plain.wait() == 0, plain.output
    assert results_of(tmp_path, spec["steps"])[STEP][0] == (0, 2)
    late, batch = last_of(tmp_path, spec["steps"])
    assert bodies(newcomer, late) == [batch[4:8]]
    digests = {worker.seen["digest"] for worker in (workers[0], workers[2], newcomer)}
    assert len(digests) == 1
    assert_close(newcomer, load_file(plain.out.with_suffix(".safetensors")))


def test_averaged_statistics_are_equal_also_on_a_worker_that_came_while_a_step_was_void(
    tmp_path: Path,
) -> None:
    spec = {**SPEC, "batchnorm": True, "pauses": [paused(tmp_path, 1)]}
    flags = ("--average-buffers", "--max-workers", "4")
    with start_line(tmp_path, spec, 3, *flags) as (service, workers):
        await_exchanging(service, 0, 2)
        newcomer = start_worker(tmp_path, spec, slot=3, **on_line(service, 3, 4))
        try:
            service.await_status(lambda line: line.live == 4)
            workers[1].process.kill()
            codes = [worker.wait() for worker in (workers[0], workers[2], newcomer)]
        finally:
            newcomer.kill()

    assert codes == [0, 0, 0], newcomer.output
    assert result_of(tmp_path)[1].attempt > 0
    first, *others = (load_file(tmp_path / f"out-{slot}.safetensors") for slot in (0, 2, 3))
    assert first["batchnorm.running_var"].std() > 0
    for other in others:
        assert all(other[name].equal(first[name]) for name in first)


def test_f_dp_002_a_running_line_of_two_grows_to_four_and_gives_each_worker_its_slot(
    tmp_path: Path,
) -> None:
    spec = {**SPEC, **slowed(tmp_path), "pauses": [paused(tmp_path, 0)]}
    workers: list[Worker] = []

    def start(*processes: int) -> None:
        # As containers of one service: none knows its number, nor how many there are.
        where = {"ANDON_ADDRESS": service.address, "ANDON_RUN_ID": service.run_id}
        workers.extend(start_worker(tmp_path, spec, slot=process, **where) for process in processes)

    with Service(tmp_path / "run", 2, "--max-workers", "4") as service:
        try:
            start(0, 1)
            service.await_status(
                lambda line: (
                    line.step == STEP - 1
                    and any(each.activity == pb.ACTIVITY_EXCHANGING for each in line.workers)
                )
            )
            start(2, 3)
            service.await_status(lambda line: line.live == 4)
            (tmp_path / "go-0").touch()
            await_roster(service, tmp_path, 0, 1, 2, 3)
            codes = [worker.wait() for worker in workers]
            # As a container that is started again, once the run is complete.
            start(4)
            late = workers.pop()
            codes.append(late.wait())
        finally:
            for worker in workers:
                worker.kill()

    assert codes == [0, 0, 0, 0, 0], workers[-1].output
    assert late.output == (
        f"run {service.run_id} is over after step {spec['steps']}: nothing is left to do, and "
        "another run needs another name\n"
    )
    assert results_of(tmp_path, spec["steps"])[STEP][0] == (0, 1)
    step, batch = last_of(tmp_path, spec["steps"])
    shares = [bodies(worker, step)[0] for worker in workers]
    assert sorted(chain.from_iterable(shares)) == sorted(batch)
    assert len({worker.seen["digest"] for worker in workers}) == 1


def test_below_min_workers_the_line_waits_for_one_and_goes_on(tmp_path: Path) -> None:
    spec = {**SPEC, "pauses": [paused(tmp_path, 1)]}
    with start_line(tmp_path, spec, 2, "--min-workers", "2") as (service, workers):
        await_exchanging(service, 0)
        workers[1].process.kill()
        waiting = service.await_status(lambda line: line.state == pb.LINE_STATE_FORMING)
        (tmp_path / "later").mkdir()
        again = start_worker(tmp_path / "later", SPEC, slot=1, **on_line(service, 1, 2))
        try:
            codes = [workers[0].wait(), again.wait()]
        finally:
            again.kill()

    assert (waiting.step, waiting.live) == (STEP - 1, 1)
    assert codes == [0, 0], again.output
    roster, _result = result_of(tmp_path)
    assert roster == (0, 1)
    assert bodies(workers[0]) == [samples((36, 42)), samples((36, 38))]
    assert bodies(again) == [samples((42, 48))]
    assert workers[0].seen["digest"] == again.seen["digest"]
