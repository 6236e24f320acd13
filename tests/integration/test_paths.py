"""Each path that gradients take: the same bits, and a bad value that moves no weight anywhere."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from andon_coordinator.transport.reader import JournalReader
from chaos.rig import PATHS as OVER
from integration.harness import Service, finish, start_line, start_workers, wait_until

pytestmark = pytest.mark.integration

SPEC: dict[str, Any] = {"samples": 40, "batch": 8, "steps": 6}
PLACE = {"step": 7, "slot": 1, "parameter": "blocks.1.up.weight", "element": [3, 2]}
RING = ("--topology", "ring")
Digest = Callable[[int], str]


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """The folder for shared memory."""
    made = tmp_path / "shared"
    made.mkdir()
    return made


@pytest.fixture(scope="module")
def digest_after(tmp_path_factory: pytest.TempPathFactory) -> Digest:
    """The weights' digest after six undisturbed steps of so many workers, over gRPC."""

    @cache
    def digest(workers: int) -> str:
        folder = tmp_path_factory.mktemp("undisturbed")
        with start_line(folder, SPEC, workers, **OVER["wire"]) as (_, started):
            (digest,) = {each["digest"] for each in finish(started)}
        return str(digest)

    return digest


def taking(path: str, shared: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    """A service's flags, and the variables of the workers, for a path."""
    if path == "ring":
        return RING, {}
    return (), {"ANDON_SHARED_DIR": str(shared), **OVER[path]}


def moved(service: Service, path: str) -> float:
    """Bytes of averages that workers got over a path; above 0, all workers of it have joined."""
    return service.metric("andon_exchange_bytes_total", direction="down", path=path)


@pytest.mark.parametrize("path", ["tcp", "shared-memory", "ring"])
def test_f_dp_001_two_workers_train_to_the_bits_of_grpc(
    tmp_path: Path, shared: Path, digest_after: Digest, path: str
) -> None:
    flags, more = taking(path, shared)

    with start_line(tmp_path, SPEC, 2, *flags, **more) as (service, workers):
        seen = finish(workers)
        carried = {each for each in ("tcp", "shared-memory") if moved(service, each)}

    assert [each["digest"] for each in seen] == [digest_after(2)] * 2
    assert carried == {path} - {"ring"}
    assert list(shared.iterdir()) == []


def test_f_dp_001_workers_of_several_paths_in_one_round_have_the_bits_of_grpc(
    tmp_path: Path, shared: Path, digest_after: Digest
) -> None:
    each = [taking(path, shared)[1] for path in ("shared-memory", "wire", "tcp")]

    with (
        Service(tmp_path / "run", 3, shared_dir=str(shared)) as service,
        start_workers(tmp_path, service, SPEC, 3, each=each) as workers,
    ):
        seen = finish(workers)
        carried = [moved(service, path) > 0 for path in OVER]

    assert [each["digest"] for each in seen] == [digest_after(3)] * 3
    assert all(carried)


@pytest.mark.parametrize(
    ("path", "value", "workers"),
    [
        ("wire", "nan", 2),
        ("tcp", "-inf", 3),
        *(("shared-memory", "nan", 2), ("shared-memory", "-inf", 2)),
        ("ring", "nan", 3),
    ],
)
def test_f_dp_003_a_bad_value_is_told_to_every_worker_and_moves_no_weight(
    tmp_path: Path, shared: Path, digest_after: Digest, path: str, value: str, workers: int
) -> None:
    flags, more = taking(path, shared)
    spec = {**SPEC, "steps": 8, "poison": {**PLACE, "value": value}}

    with start_line(tmp_path, spec, workers, *flags, **more) as (_, started):
        seen = finish(started, expect_exit=3)

    for each in seen:
        (halt,) = each["halts"]
        assert (halt["reason"], halt["value"]) == ("non_finite_gradient", value)
        assert (halt["worker"], halt["step"]) == (1, 7)
        assert (halt["parameter"], halt["element"]) == ("blocks.1.up.weight", [3, 2])
        assert f"worker 1 sent {value} in blocks.1.up.weight[3, 2] (block " in halt["text"]
        assert each["step"] == 6
    (digest,) = {each["digest"] for each in seen}
    # Around a ring of three the sums have another order.
    assert path == "ring" or digest == digest_after(workers)
    with JournalReader(tmp_path / "run" / "journal.sqlite") as journal:
        assert journal.steps() == 6


def test_another_folder_is_reported_in_one_line_and_grpc_is_used(
    tmp_path: Path, shared: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with (
        Service(tmp_path / "run", 1, shared_dir=str(shared)) as service,
        start_workers(tmp_path, service, SPEC, 1, ANDON_SHARED_DIR=str(other)) as (worker,),
    ):
        finish([worker])
        carried = moved(service, "shared-memory")

    assert carried == 0
    assert worker.output.count("not over shared memory") == 1
    assert "set ANDON_SHARED_DIR alike" in worker.output
    assert "andon-" not in worker.output


@pytest.mark.parametrize("victims", ["service", "workers", "all"])
def test_processes_that_are_killed_leave_nothing_in_the_folder(
    tmp_path: Path, shared: Path, victims: str
) -> None:
    spec = {**SPEC, "steps": 100_000}
    with start_line(tmp_path, spec, 2, ANDON_SHARED_DIR=str(shared)) as (service, workers):
        wait_until(lambda: moved(service, "shared-memory") > 0)

        if victims != "workers":
            service.process.send_signal(signal.SIGKILL)
            service.process.wait()
        if victims != "service":
            for worker in workers:
                worker.kill()

        # The service notices a moment later that workers were killed.
        wait_until(lambda: not list(shared.iterdir()))


def test_what_a_killed_service_left_is_swept_by_the_next(tmp_path: Path, shared: Path) -> None:
    left = shared / "andon-0123456789abcdef"
    left.touch(mode=0o600)

    with Service(tmp_path / "run", 1, shared_dir=str(shared)):
        assert not left.exists()
