"""Devices: what workers would compute on, as the driver and PyTorch see it.

The console never imports PyTorch: a process of its own does, as a worker would.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from importlib.util import find_spec

from andon_cli.commands.doctor.findings import Finding, fail, ok, warn

__all__ = ["check_devices", "judge_devices"]

_ASK_TORCH = """\
import json, torch
usable = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__,
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count() * usable)],
    "sum": torch.ones(8, device="cuda" if usable else "cpu").sum().item(),
}))
"""
_ASK_DRIVER = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
_PATIENCE_S = 90.0
"""Loading PyTorch from a slow disk can take this long."""


async def check_devices() -> list[Finding]:
    """Asks the driver and PyTorch, and adds up a few numbers on the device."""
    driver = await _output_of(*_ASK_DRIVER)
    names = [line.strip() for line in driver[1].splitlines()] if driver[0] == 0 else []
    if find_spec("torch") is None:
        return judge_devices(names, None, "")
    code, output = await _output_of(sys.executable, "-c", _ASK_TORCH)
    try:
        answer = json.loads(output.splitlines()[-1]) if code == 0 else None
    except (ValueError, IndexError):
        answer = None
    if answer is None:
        return judge_devices(names, None, output.strip() or f"exit code {code}")
    return judge_devices(names, answer["devices"], "", str(answer["version"]))


def judge_devices(
    driver: Sequence[str], torch: Sequence[str] | None, failure: str, version: str = ""
) -> list[Finding]:
    """What the answers mean for workers.

    Args:
        driver: the GPUs that the driver lists.
        torch: those that PyTorch can use; None if it was not asked or did not answer.
        failure: what it said instead; empty if it is not installed.
        version: PyTorch's version.
    """
    check = "devices"
    if torch is None and failure:
        last = failure.splitlines()[-1]
        return [
            fail(
                check,
                f"PyTorch is installed and does not work ({last})",
                "install it again; `python -c 'import torch'` shows the whole error",
            )
        ]
    if torch:
        return [ok(check, f"{len(torch)} CUDA device{'s' * (len(torch) > 1)}: {_listed(torch)}")]
    if driver and torch is not None:
        return [
            warn(
                check,
                f"the driver lists {_listed(driver)}, and PyTorch {version} can't use it",
                "workers run on the CPU; install a build of PyTorch for this driver's CUDA",
            )
        ]
    if driver:
        return [ok(check, f"{_listed(driver)}, according to the driver; PyTorch is not installed")]
    return [warn(check, "no CUDA device", "workers run on the CPU")]


def _listed(names: Sequence[str]) -> str:
    counted = [(name, list(names).count(name)) for name in dict.fromkeys(names)]
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counted)


async def _output_of(*command: str) -> tuple[int, str]:
    """The exit code and output of a command; 127 if it does not exist, 124 if it hangs."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=DEVNULL, stdout=PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except OSError:
        return 127, ""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            output, _ = await process.communicate()
    except TimeoutError:
        return 124, f"no answer within {_PATIENCE_S:.0f} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, output.decode(errors="replace")
