"""Who takes which GPU, where no launcher says it: made-up GPUs, and real locks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from andon_trainer.process.claims import GpuClaims

GPUS = ("GPU-0000", "GPU-1111", "GPU-2222")


def claimed(folder: Path, workers: int, gpus: tuple[str, ...] = GPUS) -> list[GpuClaims]:
    """Claims of so many workers, each made after the one before."""
    claims = [GpuClaims() for _ in range(workers)]
    for each in claims:
        each.claim(gpus, folder)
    return claims


def test_each_worker_takes_a_gpu_of_its_own(tmp_path: Path) -> None:
    workers = [GpuClaims() for _ in GPUS]

    places = [worker.claim(GPUS, tmp_path) for worker in workers]

    assert places == [(0, 0), (1, 0), (2, 0)]


def test_containers_that_number_the_gpus_differently_still_take_different_ones(
    tmp_path: Path,
) -> None:
    first, second = GpuClaims(), GpuClaims()

    first.claim(GPUS, tmp_path)
    place, others = second.claim(GPUS[::-1][1:], tmp_path)

    assert (GPUS[::-1][1:][place], others) == ("GPU-1111", 0)


def test_once_all_are_taken_the_gpu_with_the_fewest_workers_is_shared(tmp_path: Path) -> None:
    workers = claimed(tmp_path, 5)  # On 0, 1, 2, 0, 1.
    newcomer = GpuClaims()

    place = newcomer.claim(GPUS, tmp_path)

    assert place == (2, 1)
    assert len(workers) == 5


def test_the_first_workers_end_leaves_a_gpu_that_still_counts_the_second(tmp_path: Path) -> None:
    workers = claimed(tmp_path, 4)  # On 0, 1, 2, 0.
    workers[0].release()
    workers[2].release()
    newcomer, latecomer = GpuClaims(), GpuClaims()

    places = [newcomer.claim(GPUS, tmp_path), latecomer.claim(GPUS, tmp_path)]

    assert places == [(2, 0), (0, 1)]


def test_a_process_keeps_the_gpu_that_it_has(tmp_path: Path) -> None:
    worker, other = claimed(tmp_path, 2)

    assert [worker.claim(GPUS, tmp_path), other.claim(GPUS, tmp_path)] == [(0, 0), (1, 0)]


def test_a_process_that_sees_its_gpu_no_more_claims_another(tmp_path: Path) -> None:
    worker, _other = claimed(tmp_path, 2)

    assert worker.claim(GPUS[1:], tmp_path) == (1, 0)
    assert GpuClaims().claim(GPUS, tmp_path) == (0, 0)


HOLDS = """\
import fcntl, os, sys
held = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(held, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_the_kernel_gives_back_what_a_killed_process_had(tmp_path: Path) -> None:
    claimed(tmp_path, 1)[0].release()
    other = subprocess.Popen(
        [sys.executable, "-S", "-c", HOLDS, str(tmp_path / "andon-gpu-GPU-0000.0")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with other:
        assert other.stdout is not None
        other.stdout.readline()
        while_it_lives = GpuClaims().claim(GPUS, tmp_path)
        other.kill()

    assert while_it_lives == (1, 0)
    assert GpuClaims().claim(GPUS, tmp_path) == (0, 0)


def test_more_workers_than_can_be_counted_still_get_a_gpu(tmp_path: Path) -> None:
    workers = claimed(tmp_path, 70, GPUS[:1])

    assert GpuClaims().claim(GPUS[:1], tmp_path) == (0, 64)
    assert len(workers) == 70


def test_another_user_may_lock_the_files_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        GpuClaims().claim(GPUS, tmp_path)
    finally:
        os.umask(before)

    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o644}


def test_a_link_that_somebody_left_there_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.touch()
    (tmp_path / "andon-gpus.lock").symlink_to(elsewhere)

    with pytest.raises(OSError, match="symbolic links"):
        GpuClaims().claim(GPUS, tmp_path)


def test_a_folder_that_is_not_there_can_not_hold_claims(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        GpuClaims().claim(GPUS, tmp_path / "nowhere")
