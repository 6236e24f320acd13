"""Describes the machine of a measurement, for its JSON file, and a process's memory."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

from andon.host.memory import resident_bytes

__all__ = ["describe_machine", "resident_mib"]

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


def resident_mib(pid: int) -> float:
    """A process's resident memory now.

    Raises:
        OSError: the process is gone, or this system is not Linux.
    """
    found = resident_bytes(pid)
    if found is None:
        raise ProcessLookupError(f"no memory of process {pid}")
    return found / 2**20


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
