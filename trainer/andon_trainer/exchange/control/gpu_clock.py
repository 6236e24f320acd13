"""The GPU's clock, and why it is low, by NVIDIA's library (`pynvml`), if it is installed."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any

__all__ = ["GpuClock", "read_gpu"]

_REASONS = (
    (0x04, "power limit"),
    (0x08, "hardware slowdown"),
    (0x20, "thermal"),
    (0x40, "hardware thermal"),
    (0x80, "power brake"),
    (0x02, "set clocks"),
    (0x10, "another GPU's clock"),
)
"""Bits of NVML's throttle reasons. That a GPU is idle is none."""
_SM = 1
"""NVML's number of the clock of the multiprocessors."""


@dataclass(frozen=True, slots=True)
class GpuClock:
    """A GPU's clock now."""

    mhz: float
    most_mhz: float
    throttled: str
    """Why it is lower than it could be; empty: nothing holds it back."""


def read_gpu(library: Any = None) -> GpuClock | None:
    """The clock of the GPU that this process uses; None: it uses none, or nobody can tell.

    Args:
        library: NVML's functions, by pynvml's names; None: the library itself, if it is there.
    """
    try:
        nvml = importlib.import_module("pynvml") if library is None else library
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        try:
            device = _device_of_process(nvml)
            if device is None:
                return None
            bits = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device))
            return GpuClock(
                mhz=float(nvml.nvmlDeviceGetClockInfo(device, _SM)),
                most_mhz=float(nvml.nvmlDeviceGetMaxClockInfo(device, _SM)),
                throttled=", ".join(name for bit, name in _REASONS if bits & bit),
            )
        finally:
            nvml.nvmlShutdown()
    except Exception:  # Of a driver that is missing or too old: each has errors of its own.
        return None


def _device_of_process(nvml: Any) -> Any:
    devices = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    for device in devices:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(device)
        if any(each.pid == os.getpid() for each in processes):
            return device
    return None
