"""Describes the machine of a measurement, for its JSON file."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

__all__ = ["describe_machine"]

_PACKAGES = ("grpcio", "protobuf", "numpy", "torch")


def describe_machine() -> dict[str, object]:
    """Processor, cores, memory, system and versions."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: version(name) for name in _PACKAGES},
        "load_before": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
