"""Devices: what the driver's word and PyTorch's word come to."""

from __future__ import annotations

import pytest

from andon_cli.commands.doctor.devices import judge_devices

H200 = "NVIDIA H200"
ERROR = "Traceback\nImportError: libcudart.so.12"


@pytest.mark.parametrize(
    ("driver", "torch", "error", "told"),
    [
        ([], [], "", "warn  no CUDA device: workers run on the CPU"),
        ([H200, H200], [H200, H200], "", "ok    2 CUDA devices: 2 x NVIDIA H200"),
        ([H200], [], "", "warn  the driver lists NVIDIA H200, and PyTorch 2.13 can't use it: "),
        ([], None, ERROR, "fail  PyTorch is installed and does not work (ImportError: libcuda"),
        ([H200], None, "", "ok    NVIDIA H200, according to the driver; PyTorch is not installed"),
    ],
    ids=["none", "equal", "unfit", "broken", "no PyTorch"],
)  # fmt: skip
def test_devices_are_judged_by_the_drivers_word_and_pytorchs(
    driver: list[str], torch: list[str] | None, error: str, told: str
) -> None:
    [finding] = judge_devices(driver, torch, error, "2.13")

    assert str(finding).startswith(told)
