"""The device: CUDA by local rank, else the CPU, and a report of what is really used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from andon_trainer.process.claims import GpuClaims, claims_of_process
from andon_trainer.process.device import (
    claimed_place,
    counters_of,
    describe,
    device_for,
    identity_in,
    pick_device,
    processor_in,
)
from unit.andon_trainer.gpus import needs_cuda


@pytest.mark.parametrize(
    ("local_rank", "gpus", "expected"),
    [(0, 0, "cpu"), (3, 0, "cpu"), (0, 2, "cuda:0"), (1, 2, "cuda:1"), (2, 2, "cuda:0")],
)
def test_f_dp_004_a_worker_takes_the_gpu_of_its_local_rank_else_the_cpu(
    local_rank: int, gpus: int, expected: str
) -> None:
    assert device_for(local_rank, gpus) == torch.device(expected)


@pytest.fixture
def unclaimed() -> Iterator[None]:
    """This process has no GPU before the test, nor after it."""
    claims_of_process().release()
    yield
    claims_of_process().release()


@pytest.mark.usefixtures("unclaimed")
def test_without_a_local_rank_a_worker_takes_a_gpu_that_nobody_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = GpuClaims()
    other.claim(["GPU-0", "GPU-1"], tmp_path)

    assert claimed_place(["GPU-0", "GPU-1"], tmp_path) == 1
    assert caplog.messages == []


@pytest.mark.usefixtures("unclaimed")
def test_a_worker_that_shares_a_gpu_says_so_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = [GpuClaims() for _ in range(2)]
    for each in others:
        each.claim(["GPU-0", "GPU-1"], tmp_path)

    assert claimed_place(["GPU-0", "GPU-1"], tmp_path) == 0
    assert caplog.messages == [
        "all 2 GPUs here are taken: this worker uses cuda:0 together with 1 other"
    ]


@pytest.mark.usefixtures("unclaimed")
def test_a_worker_that_can_not_claim_a_gpu_says_what_to_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert claimed_place(["GPU-0", "GPU-1"], tmp_path / "nowhere") == 0

    (said,) = caplog.messages
    assert "No such file or directory" in said
    assert "LOCAL_RANK" in said


def test_a_gpu_is_called_what_the_hardware_calls_it_if_that_is_known() -> None:
    known = SimpleNamespace(uuid="ffc79498-8ff3-c2dc-3b0d-fafd804516ae")

    names = [identity_in(known, 3), identity_in(SimpleNamespace(), 3)]

    assert names == ["ffc79498-8ff3-c2dc-3b0d-fafd804516ae", "index-3"]


@needs_cuda
def test_this_hosts_gpus_have_names_of_their_own() -> None:
    count = torch.cuda.device_count()

    names = {identity_in(torch.cuda.get_device_properties(each), each) for each in range(count)}

    assert len(names) == count
    assert not any(name.startswith("index") for name in names)


@pytest.mark.usefixtures("unclaimed")
def test_a_local_rank_and_a_device_with_a_number_claim_nothing(tmp_path: Path) -> None:
    pick_device(0, claims=tmp_path)
    pick_device(None, "cpu", claims=tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_f_dp_004_the_report_is_of_the_device_that_is_used() -> None:
    device = pick_device(0)

    kind, name, memory, cores = describe(device)

    assert kind == device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert name
    assert memory > 2**28
    assert cores >= 1


@needs_cuda
def test_f_dp_004_the_picked_gpu_is_the_processs_current_one_and_named() -> None:
    device = pick_device(torch.cuda.device_count() - 1)

    assert device.index == torch.cuda.current_device()
    assert describe(device)[1] == torch.cuda.get_device_name(device)


def test_f_dp_004_the_cpu_is_used_if_it_is_asked_for() -> None:
    assert pick_device(0, "cpu") == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA devices")
def test_f_dp_004_a_named_gpu_that_is_not_here_is_refused() -> None:
    with pytest.raises(ValueError, match="sees 0 CUDA devices"):
        pick_device(0, "cuda:1")


def test_a_name_of_no_device_is_refused() -> None:
    with pytest.raises(ValueError, match="'gpu' is no device"):
        pick_device(0, "gpu")


def test_a_negative_local_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="LOCAL_RANK"):
        device_for(-1, 1)


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        (
            "processor\t: 0\nmodel\t\t: 2\nmodel name\t: AMD EPYC 9354\nmodel name\t: other",
            "AMD EPYC 9354",
        ),
        ("processor\t: 0\ncpu\t\t: POWER9, altivec supported\n", "POWER9, altivec supported"),
        ("processor: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n", "ARM 0x41/0xd0c"),
        ("processor\t: 0\nmodel name\t:\n", ""),
        ("", ""),
    ],
)
def test_a_processor_is_named_as_the_kernel_knows_it(cpuinfo: str, name: str) -> None:
    assert processor_in(cpuinfo) == name


def test_a_cpu_has_no_counters_beside_the_processs_own() -> None:
    sample, notes = counters_of(torch.device("cpu"))

    assert (sample(), notes) == ({}, ())


@needs_cuda
def test_a_gpus_memory_is_sampled_and_its_utilisation_if_the_library_is_there() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    kept = torch.zeros(2**20, device=device)

    sample, notes = counters_of(device)
    found = sample()

    assert found["gpu memory"]["allocated_mib"] >= kept.nbytes / 2**20
    assert ("gpu" in found) is not bool(notes)
