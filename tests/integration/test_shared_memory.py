"""Shared memory between real processes: the same bits as over the wire, and no files remain."""

from __future__ import annotations

import re
import signal
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from integration.harness import Service, Worker, on_line, start_line, start_worker, train

pytestmark = pytest.mark.integration

SPEC: dict[str, Any] = {"samples": 40, "batch": 8, "steps": 6}
PATIENCE_S = 60


def shared_bytes(service: Service) -> float:
    """Bytes of averages that workers read from shared memory; above 0, all have mapped it."""
    with urllib.request.urlopen(service.metrics_url, timeout=10) as answer:
        text = answer.read().decode()
    pattern = r'^andon_exchange_bytes_total\{direction="down",path="shared-memory"\} (\S+)$'
    return sum(map(float, re.findall(pattern, text, re.MULTILINE)))


def finished(service: Service, workers: list[Worker]) -> tuple[list[str], float]:
    """Digests of the workers that exited successfully, and the bytes over shared memory."""
    for worker in workers:
        assert worker.wait() == 0, worker.output
    return [str(worker.seen["digest"]) for worker in workers], shared_bytes(service)


def digest_over(folder: Path, shared_dir: str) -> str:
    folder.mkdir()
    first, second = train(folder, SPEC, 2, ANDON_SHARED_DIR=shared_dir)
    assert first["digest"] == second["digest"]
    return str(first["digest"])


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(0.02)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder for shared memory."""
    made = tmp_path / "shared"
    made.mkdir()
    return made


def test_f_dp_001_training_over_shared_memory_gives_the_bits_of_the_wire(
    tmp_path: Path, folder: Path
) -> None:
    expected = digest_over(tmp_path / "wire", "off")

    with start_line(tmp_path, SPEC, 2, ANDON_SHARED_DIR=str(folder)) as (service, workers):
        digests, moved = finished(service, workers)

    assert digests == [expected] * 2
    assert moved > 0
    assert list(folder.iterdir()) == []


def test_f_dp_001_workers_of_both_paths_in_one_round_have_the_bits_of_the_wire(
    tmp_path: Path, folder: Path
) -> None:
    (tmp_path / "wire").mkdir()
    expected = [each["digest"] for each in train(tmp_path / "wire", SPEC, 3)]

    with ExitStack() as stack:
        service = stack.enter_context(Service(tmp_path / "run", 3, shared_dir=str(folder)))
        workers = [
            start_worker(
                tmp_path,
                SPEC,
                slot=slot,
                **{
                    **on_line(service, slot, 3),
                    "ANDON_SHARED_DIR": "off" if slot == 1 else str(folder),
                },
            )
            for slot in range(3)
        ]
        for worker in workers:
            stack.callback(worker.kill)
        digests, moved = finished(service, workers)

    assert digests == expected
    assert moved > 0


def test_another_folder_is_reported_in_one_line_and_the_wire_is_used(
    tmp_path: Path, folder: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with Service(tmp_path / "run", 1, shared_dir=str(folder)) as service:
        environment = {**on_line(service, 0, 1), "ANDON_SHARED_DIR": str(other)}
        worker = start_worker(tmp_path, SPEC, slot=0, **environment)
        _, moved = finished(service, [worker])

    assert moved == 0
    assert worker.output.count("not over shared memory") == 1
    assert "set ANDON_SHARED_DIR alike" in worker.output
    assert "andon-" not in worker.output


@pytest.mark.parametrize("value", ["nan", "-inf"])
def test_f_dp_003_the_reducer_names_rank_and_element(
    tmp_path: Path, folder: Path, value: str
) -> None:
    planted = {"step": 3, "slot": 1, "parameter": "blocks.1.up.weight", "element": [3, 2]}
    spec = {**SPEC, "poison": {**planted, "value": value}}

    seen = train(tmp_path, spec, 2, expect_exit=3, ANDON_SHARED_DIR=str(folder))

    for each in seen:
        (halt,) = each["halts"]
        assert (halt["reason"], halt["worker"]) == ("non_finite_gradient", 1)
        assert (halt["parameter"], halt["element"]) == ("blocks.1.up.weight", [3, 2])
        assert (halt["value"], each["step"]) == (value, 2)


@pytest.mark.parametrize("victims", ["service", "workers", "all"])
def test_processes_that_are_killed_leave_nothing_in_the_folder(
    tmp_path: Path, folder: Path, victims: str
) -> None:
    spec = {**SPEC, "steps": 100_000}
    with start_line(tmp_path, spec, 2, ANDON_SHARED_DIR=str(folder)) as (service, workers):
        wait_until(lambda: shared_bytes(service) > 0)

        if victims != "workers":
            service.process.send_signal(signal.SIGKILL)
            service.process.wait()
        if victims != "service":
            for worker in workers:
                worker.kill()

        # The service notices a moment later that workers were killed.
        wait_until(lambda: not list(folder.iterdir()))


def test_what_a_killed_service_left_is_swept_by_the_next(tmp_path: Path, folder: Path) -> None:
    left = folder / "andon-0123456789abcdef"
    left.touch(mode=0o600)

    with Service(tmp_path / "run", 1, shared_dir=str(folder)):
        assert not left.exists()


def test_a_worker_that_is_killed_is_replaced_over_shared_memory(
    tmp_path: Path, folder: Path
) -> None:
    spec = {**SPEC, "steps": 40}
    with start_line(tmp_path, spec, 2, ANDON_SHARED_DIR=str(folder)) as (service, workers):
        wait_until(lambda: shared_bytes(service) > 0)
        workers[1].kill()
        before = shared_bytes(service)

        assert workers[0].wait() == 0, workers[0].output

        assert workers[0].seen["step"] == 40
        assert shared_bytes(service) > before
    assert list(folder.iterdir()) == []
