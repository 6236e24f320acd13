"""The same faults with PyTorch: workers and coordinator are killed while a real model trains."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from andon.v1 import coordinator_pb2 as pb
from andon_coordinator.core.step_results import StepContribution
from andon_coordinator.transport.reader import JournalReader
from chaos.rig import FLAGS, await_until
from integration.harness import Service, Worker, on_line, start_line, start_worker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

STEP, STEPS = 5, 12
SPEC: dict[str, Any] = {"samples": 100, "batch": 12, "steps": STEPS, "model_seed": 1}
REORDERED = 1e-5


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of one process that trains without a line."""
    worker = start_worker(tmp_path_factory.mktemp("alone"), {**SPEC, "plain": True})
    assert worker.wait() == 0, worker.output
    return worker.out.with_suffix(".safetensors")


def test_a_model_comes_out_the_same_though_worker_and_coordinator_were_killed(
    tmp_path: Path, alone: Path
) -> None:
    go = tmp_path / "go"
    spec = {**SPEC, "pauses": [{"slot": 0, "step": STEP, "until": str(go)}]}
    with start_line(tmp_path, spec, 2, *FLAGS) as (service, workers):
        service.await_status(_in_step)
        workers[1].process.send_signal(signal.SIGKILL)
        workers[1].wait()
        service.process.kill()
        service.process.wait()
        port = int(service.address.rpartition(":")[2])
        flags = (*FLAGS, "--run-id", service.run_id)
        with Service(tmp_path / "run", 2, *flags, port=port) as second:
            (tmp_path / "again").mkdir()
            again = start_worker(tmp_path / "again", spec, slot=1, **on_line(second, 1, 2))
            go.touch()
            try:
                codes = [workers[0].wait(), again.wait()]
            finally:
                again.kill()

    assert codes == [0, 0], workers[0].output + again.output
    _judge(tmp_path, [workers[0], again])
    _compare(workers[0], alone)


_LOCAL = ("--schedule", "local", "--local-steps", "4", "--outer", "nesterov")
_WINDOWS = {
    "cadence": ("--schedule", "cadence", "--max-anchor", "3", "--growth-cost", "1"),
    "local-overlapped": (
        *(*_LOCAL, "--overlap", "--overlap-steps", "1"),
        *("--fragments", "2", "--mix", "0.5"),
    ),
}


@pytest.mark.parametrize("flags", _WINDOWS.values(), ids=_WINDOWS)
def test_f_dp_001_all_hold_the_same_after_deaths_of_worker_and_coordinator_in_mid_window(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    died, held, go = STEP, STEP + 4, tmp_path / "go"
    spec = {**SPEC, "samples": 300, "optimizer": "adamw", "transfers": True}
    # A cadence may give a worker that is slow for a moment windows of one batch.
    second = {"batch": 2, "later": True}
    pauses = [
        {"slot": 1, "step": died, **second, "until": str(tmp_path / "never")},
        {"slot": 0, "step": held, **second, "until": str(go)},
    ]
    with start_line(tmp_path, {**spec, "pauses": pauses}, 3, *FLAGS, *flags) as (service, workers):
        _await(tmp_path / "never.here", workers[1])
        workers[1].process.send_signal(signal.SIGKILL)
        workers[1].wait()
        _await(tmp_path / "go.here", workers[0])
        (tmp_path / "again").mkdir()
        again = start_worker(tmp_path / "again", spec, slot=1, **on_line(service, 1, 3))
        service.await_status(lambda status: status.live == 3)
        service.process.kill()
        service.process.wait()
        port = int(service.address.rpartition(":")[2])
        more = (*FLAGS, *flags, "--run-id", service.run_id)
        with Service(tmp_path / "run", 3, *more, port=port):
            go.touch()
            survivors = [workers[0], again, workers[2]]
            try:
                codes = [worker.wait() for worker in survivors]
            finally:
                again.kill()

    assert codes == [0, 0, 0], "\n".join(worker.output for worker in survivors)
    _judge(tmp_path, survivors)
    workers_of = [[part.worker for part in parts] for parts in _contributions(tmp_path)]
    assert all(1 in contributed for contributed in workers_of[: died - 1])
    assert [0, 2] in workers_of[died - 1 :]
    assert workers_of[-1] == [0, 1, 2]


def _await(file: Path, worker: Worker) -> None:
    """Waits until a worker pauses."""

    def there() -> bool:
        assert worker.process.poll() is None, worker.process.output.read_text()
        return file.exists()

    await_until(f"{file.name}", there, poll_s=0.02)


def _in_step(status: pb.LineStatus) -> bool:
    """Whether the step with the pause is running, and all other workers wait for it."""
    waiting = [each for each in status.workers if each.activity == pb.ACTIVITY_EXCHANGING]
    return status.step == STEP - 1 and len(waiting) == len(status.workers) - 1


def _contributions(folder: Path) -> list[tuple[StepContribution, ...]]:
    with JournalReader(folder / "run" / "journal.sqlite") as journal:
        steps = [entry.result for entry in journal.chain() if entry.result is not None]
    return [result.contributions for result in steps]


def _judge(folder: Path, survivors: list[Worker]) -> None:
    """Checks what needs no second training: weights, ledger, rosters, and the run's end."""
    digests = {worker.seen["digest"] for worker in survivors}
    assert len(digests) == 1, "F-DP-001: the final weights differ"
    with JournalReader(folder / "run" / "journal.sqlite") as journal:
        assert journal.ledger_faults() == []
        assert journal.halts() == []
        assert journal.steps() == STEPS
        for entry in journal.chain():
            if entry.result is not None:
                givers = tuple(part.worker for part in entry.result.contributions)
                assert givers == entry.record.roster, "C-COMMIT-001"


def _compare(survivor: Worker, alone: Path) -> None:
    """Checks that the weights match an undisturbed process's, up to the order of float32 sums."""
    ours, wanted = load_file(survivor.out.with_suffix(".safetensors")), load_file(alone)
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_allclose(ours[name], tensor, rtol=0, atol=REORDERED, err_msg=name)
