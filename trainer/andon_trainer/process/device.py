"""The device that a worker computes on, and what it tells the line about it (F-DP-004)."""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from andon_trainer.process.claims import claims_of_process
from andon_trainer.telemetry import GpuReading
from andon_trainer.timeline import Counters

__all__ = [
    "claimed_place",
    "counters_of",
    "describe",
    "device_for",
    "gpu_of",
    "identity_in",
    "pick_device",
    "processor_in",
]

log = logging.getLogger(__name__)


def device_for(local_rank: int, cuda_devices: int) -> torch.device:
    """This worker's GPU on its host, or the CPU; several workers may share a GPU."""
    if local_rank < 0:
        raise ValueError(f"LOCAL_RANK must be at least 0, not {local_rank}")
    if cuda_devices < 1:
        return torch.device("cpu")
    return torch.device("cuda", local_rank % cuda_devices)


def pick_device(
    local_rank: int | None, name: str = "", *, claims: Path | None = None
) -> torch.device:
    """The device to use: the named one, else CUDA by local rank, else the CPU.

    Without a local rank, and with several GPUs here, a worker claims the GPU that the fewest other
    workers of this host have.

    A CUDA device becomes the process's current device. If nothing was asked for by name and the GPU
    does not work, a warning is logged and the CPU is used.

    Args:
        local_rank: this worker's number on its host; None: no launcher gave it one.
        name: `cpu`, `cuda` or `cuda:1`; empty: the best that is there.
        claims: the folder in which workers of this host claim GPUs; None: they don't.

    Raises:
        ValueError: there is no such device, or it does not work.
    """
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not name:
        device = device_for(_number_here(local_rank, devices, claims), devices)
        trouble = _trouble(device)
        if trouble:
            log.warning("%s does not work, so this worker uses the CPU: %s", device, trouble)
            device = torch.device("cpu")
    else:
        device = _named(name, lambda: _number_here(local_rank, devices, claims), devices)
    if device.type == "cuda":
        # A script that writes "cuda" without a number means this device too.
        torch.cuda.set_device(device)
    return device


def describe(device: torch.device) -> tuple[str, str, int, int]:
    """Kind (`cpu`, `cuda`), the hardware's name, its memory in bytes, and its cores.

    Cores are those that this process may use, or a GPU's multiprocessors. A number that is not
    known is 0.
    """
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        cores = int(facts.multi_processor_count)
        return "cuda", str(facts.name), int(facts.total_memory), cores
    if device.type == "cpu":
        return "cpu", _processor(), _host_memory(), _usable_cores()
    return device.type, device.type, 0, 0


def counters_of(device: torch.device) -> tuple[Counters, tuple[str, ...]]:
    """What of a device can be sampled while it computes, and notes on what can't.

    On a GPU the memory that PyTorch uses, and its utilisation if NVIDIA's library for that
    (`pynvml`) is installed; on a CPU nothing, since the process says it all.
    """
    if device.type != "cuda":
        return dict, ()
    utilised = importlib.util.find_spec("pynvml") is not None

    def sample() -> dict[str, dict[str, float]]:
        memory = {"allocated_mib": torch.cuda.memory_allocated(device) / 2**20}
        found = {"gpu memory": memory}
        if utilised:
            found["gpu"] = {"percent": float(torch.cuda.utilization(device))}
        return found

    missing = "no GPU utilisation: pip install nvidia-ml-py to have it"
    return sample, () if utilised else (missing,)


def gpu_of(device: torch.device) -> Callable[[], GpuReading] | None:
    """Reads the memory and the utilisation of a GPU; None if the device is none."""
    if device.type != "cuda":
        return None
    total = int(torch.cuda.get_device_properties(device).total_memory)
    utilised = importlib.util.find_spec("pynvml") is not None

    def read() -> GpuReading:
        # PyTorch keeps these numbers itself: to read them, nothing waits for the GPU.
        memory = {
            "allocated": torch.cuda.memory_allocated(device),
            "peak": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "total": total,
        }
        return GpuReading(
            memory_bytes=memory, utilization=_utilization(device) if utilised else None
        )

    return read


def _utilization(device: torch.device) -> float | None:
    """How busy a GPU is, from 0 to 1; None if NVIDIA's library does not say."""
    try:
        return torch.cuda.utilization(device) / 100
    except Exception as error:  # the boundary to a library that raises what it likes
        log.debug("no GPU utilisation: %s", error)
        return None


def _number_here(local_rank: int | None, cuda_devices: int, claims: Path | None) -> int:
    """The local rank, or if there is none the place of the GPU that this worker claims."""
    if local_rank is not None:
        return local_rank
    if cuda_devices < 2 or claims is None:
        return 0
    facts = [torch.cuda.get_device_properties(index) for index in range(cuda_devices)]
    return claimed_place([identity_in(each, index) for index, each in enumerate(facts)], claims)


def claimed_place(gpus: Sequence[str], folder: Path) -> int:
    """The place in `gpus` of the one that this worker claims; 0 if it can't claim any."""
    try:
        place, others = claims_of_process().claim(gpus, folder)
    except OSError as error:
        log.warning(
            "%d GPUs are here, and this worker can't claim one in %s (%s), so it uses cuda:0: set "
            "ANDON_SHARED_DIR to a folder that the workers of this host share, or LOCAL_RANK",
            *(len(gpus), folder, error.strerror),
        )
        return 0
    if others:
        log.warning(
            "all %d GPUs here are taken: this worker uses cuda:%d together with %d other%s",
            *(len(gpus), place, others, "" if others == 1 else "s"),
        )
    return place


def identity_in(facts: object, index: int) -> str:
    """What the hardware calls a GPU, by PyTorch's `facts` on the one that it calls `index` here.

    It is the same in every process and container of this host. The oldest releases of PyTorch that
    are supported do not tell it: then the GPU is known by its index.
    """
    uuid = getattr(facts, "uuid", None)
    return f"index-{index}" if uuid is None else str(uuid)


def _named(name: str, number_here: Callable[[], int], cuda_devices: int) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"{name!r} is no device: give cpu, cuda or cuda:N") from None
    if device.type == "cuda" and device.index is None and cuda_devices:
        device = device_for(number_here(), cuda_devices)
    if device.type == "cuda" and (device.index or 0) >= cuda_devices:
        raise ValueError(
            f"device {name} was asked for, and PyTorch sees {cuda_devices} CUDA devices here; "
            "leave the device out to use what there is"
        )
    trouble = _trouble(device)
    if trouble:
        raise ValueError(f"device {name} was asked for, and does not work: {trouble}")
    return device


def _trouble(device: torch.device) -> str:
    """Why the device can't compute; empty if it can."""
    # A GPU may be listed and still fail: an old driver, a build of torch for other GPUs.
    try:
        torch.zeros(1, device=device).add_(1).item()
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        return str(error).strip().partition("\n")[0]
    return ""


def processor_in(cpuinfo: str) -> str:
    """The processor's model by Linux's `/proc/cpuinfo`; empty if it is not there."""
    found: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        field, _, value = line.partition(":")
        found.setdefault(field.strip(), value.strip())
    # x86 and some ARM, MIPS, POWER; then what the other ARM have instead of a name.
    for field in ("model name", "cpu model", "cpu"):
        if found.get(field):
            return found[field]
    maker, part = found.get("CPU implementer"), found.get("CPU part")
    return f"ARM {maker}/{part}" if maker and part else ""


def _processor() -> str:
    name = ""
    with suppress(OSError):
        name = processor_in(Path("/proc/cpuinfo").read_text("utf-8", "replace"))
    if sys.platform == "darwin":
        with suppress(OSError, subprocess.SubprocessError):
            asked = ("sysctl", "-n", "machdep.cpu.brand_string")
            told = subprocess.run(asked, capture_output=True, text=True, timeout=5, check=True)
            name = told.stdout.strip()
    return name or platform.processor() or platform.machine() or "cpu"


def _usable_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # Not Linux.
        return os.cpu_count() or 0


def _host_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
