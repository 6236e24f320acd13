"""Stating: names and values of all that decides the bits of this process's results.

What is stated is what a library's choice of kernels depends on. Two workers that state the same
compute the same bits, as far as we know; docs/guide/same-bits.md lists the names.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from andon.host.private_files import make_folder
from andon.protocol.arithmetic import Arithmetic, in_order
from andon_trainer.process.device import processor_in

__all__ = ["stated", "variables_in", "write_stated"]

_CPUINFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

_MODEL = ("cpu family", "model", "stepping", "CPU architecture", "CPU variant", "CPU revision")

_FLAGS = ("sse4_1", "sse4_2", "avx", "avx2", "fma", "fma4", "f16c", "asimd", "asimdhp", "asimddp",
          "bf16", "sve", "sve2", "i8mm")  # fmt: skip
_FLAG_FAMILIES = ("avx512", "avx_", "amx")
"""Instructions that libraries choose kernels by, also by how their names begin."""

_PREFIXES = ("MKL_", "OMP_", "KMP_", "GOMP_", "DNNL_", "ONEDNN_", "ATEN_", "OPENBLAS_", "BLIS_",
             "VECLIB_", "NPY_", "CUBLAS_", "CUDNN_", "NVIDIA_TF32", "TORCH_ALLOW_TF32",
             "TORCH_CUDNN_", "TORCH_MKLDNN", "TORCH_BLAS", "ROCBLAS_", "MIOPEN_",
             "GLIBC_TUNABLES")  # fmt: skip
_NO_MATTER = ("AFFINITY", "PLACES", "BIND", "WAIT", "BLOCKTIME", "SPINCOUNT", "VERBOSE", "DISPLAY",
              "STACKSIZE", "NUM_THREADS", "LOG", "CACHE_DIR", "DB_PATH", "WARNINGS")  # fmt: skip
"""Where threads run, and what is written of them, decides no bit; how many they are is stated."""

_MOST_BYTES = 200


def stated(
    device: torch.device,
    *,
    mkl_branch: int | None,
    denormals: bool,
    more: Mapping[str, str],
) -> Arithmetic:
    """What decides the bits of this process's results, by name.

    Args:
        device: what it computes on.
        mkl_branch: the branch of kernels that MKL is bound to; None: not known.
        denormals: whether numbers below the normal ones are kept.
        more: what else decides them.
    """
    items = {
        **more,
        **_processor(_text_of(_CPUINFO)),
        **_versions(),
        **_switches(),
        **_gpu(device),
        **variables_in(os.environ),
        "denormals": "kept" if denormals else "flushed",
        "mkl branch": "unknown" if mkl_branch is None else hex(mkl_branch),
        "threads": str(torch.get_num_threads()),
    }
    return in_order({name: _short(value) for name, value in items.items()})


def write_stated(run_dir: Path, arithmetic: Arithmetic) -> None:
    """Keeps what was stated in a run's folder, as `arithmetic.json`."""
    make_folder(run_dir)
    text = json.dumps(dict(arithmetic), indent=2) + "\n"
    (run_dir / "arithmetic.json").write_text(text, encoding="utf-8")


def variables_in(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that change what kernels compute."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_PREFIXES) and not any(each in name for each in _NO_MATTER)
    }


def _processor(cpuinfo: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        field, _, value = line.partition(":")
        fields.setdefault(field.strip(), value.strip())
    name = processor_in(cpuinfo) or platform.processor() or platform.machine()
    # A virtual machine may call all of a maker's processors by one name.
    numbers = [f"{field} {fields[field]}" for field in _MODEL if field in fields]
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    known = sorted(flag for flag in flags if flag in _FLAGS or flag.startswith(_FLAG_FAMILIES))
    return {
        "processor": f"{name} ({', '.join(numbers)})" if numbers else name,
        "processor caches": _caches(),
        "processor instructions": " ".join(known),
        "system": f"{platform.system()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip(),
    }


def _caches() -> str:
    """Sizes of the first core's caches: libraries cut their blocks by them."""
    found = []
    for index in sorted(_CACHES.glob("index*")):
        level, kind, size = (_text_of(index / each).strip() for each in ("level", "type", "size"))
        if kind != "Instruction" and size:
            found.append(f"L{level} {size}")
    return ", ".join(found)


def _versions() -> dict[str, str]:
    build = hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:12]
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "torch build": build,
        "torch kernels": torch.backends.cpu.get_cpu_capability(),
    }


def _switches() -> dict[str, str]:
    onednn = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled  # type: ignore[no-untyped-call]  # torch has no types here
    return {
        "deterministic": _word(torch.are_deterministic_algorithms_enabled()),
        "matmul precision": torch.get_float32_matmul_precision(),
        "onednn": _word(onednn),
    }


def _gpu(device: torch.device) -> dict[str, str]:
    """The GPU, its libraries and their switches; none on a CPU."""
    if device.type != "cuda":
        return {"gpu": "none" if device.type == "cpu" else device.type}
    facts = torch.cuda.get_device_properties(device)
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    reduced = (
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )
    cuda: Any = torch.backends.cuda  # torch has no types for these
    attention = {
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }
    versions: Any = cudnn, torch._C
    return {
        "gpu": f"{facts.name} ({facts.multi_processor_count} multiprocessors)",
        "cuda": str(torch.version.cuda or torch.version.hip),
        "cuda driver": str(versions[1]._cuda_getDriverVersion()),
        "cudnn": str(versions[0].version()),
        "cudnn benchmark": _word(cudnn.benchmark),
        "cudnn deterministic": _word(cudnn.deterministic),
        "gpu attention": " ".join(name for name, on in attention.items() if on),
        "gpu half sums": " ".join(map(_word, reduced)),
        "tf32 convolution": _word(cudnn.allow_tf32),
        "tf32 matmul": _word(matmul.allow_tf32),
    }


def _word(on: object) -> str:
    return "on" if on else "off"


def _short(text: str) -> str:
    """The text, if it can be stated; else its digest: two that differ must not look alike."""
    if len(text.encode(errors="replace")) <= _MOST_BYTES and text.isprintable():
        return text
    return f"sha256 {hashlib.sha256(text.encode(errors='replace')).hexdigest()[:16]}"


def _text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # Another system.
        return ""
