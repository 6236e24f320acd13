"""Devices: what the driver's word and PyTorch's word come to."""

from __future__ import annotations

from andon_cli.commands.doctor.devices import judge_devices

H200 = "NVIDIA H200"


def test_without_any_device_workers_run_on_the_cpu() -> None:
    [finding] = judge_devices([], [], "", "2.13.0+cpu")

    assert str(finding) == "warn  no CUDA device: workers run on the CPU"


def test_equal_devices_are_counted() -> None:
    [finding] = judge_devices([H200, H200], [H200, H200], "", "2.13.0")

    assert str(finding) == "ok    2 CUDA devices: 2 x NVIDIA H200"


def test_a_pytorch_that_can_not_use_the_drivers_device_is_told_by_its_version() -> None:
    [finding] = judge_devices([H200], [], "", "2.13.0+cpu")

    assert finding.level == "warn"
    assert "PyTorch 2.13.0+cpu can't use it" in finding.fact


def test_a_pytorch_that_does_not_load_fails_with_its_last_word() -> None:
    [finding] = judge_devices([], None, "Traceback\nImportError: libcudart.so.12")

    assert finding.level == "fail"
    assert "(ImportError: libcudart.so.12)" in finding.fact


def test_a_service_without_pytorch_has_the_drivers_word() -> None:
    [finding] = judge_devices([H200], None, "")

    assert (finding.level, finding.fact) == (
        "ok", "NVIDIA H200, according to the driver; PyTorch is not installed",
    )  # fmt: skip
