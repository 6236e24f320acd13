"""`andon doctor`: runs one check after another, and shows each result at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from andon.host.errors import ExitCode
from andon.host.shared_dir import DEFAULT_SHARED_DIR
from andon_cli.commands.doctor.devices import check_devices
from andon_cli.commands.doctor.findings import Finding, findings_json, healthy
from andon_cli.commands.doctor.host import (
    check_clock,
    check_folder,
    check_ports,
    check_privacy,
    check_shared_memory,
    check_windows,
)
from andon_cli.commands.doctor.packages import check_mean, check_packages
from andon_cli.commands.doctor.reach import check_access, check_line
from andon_cli.commands.doctor.trial import check_trial
from andon_cli.questions import DoctorConfig
from andon_server.runs import RUNS

__all__ = ["examine"]


async def examine(config: DoctorConfig) -> int:
    """Checks what a run needs. Returns 0 if nothing failed, else 1."""
    findings = []
    async with aclosing(_findings(config)) as found:
        async for finding in found:
            findings.append(finding)
            if config.format != "json":
                print(finding, flush=True)
    if config.format == "json":
        print(findings_json(findings))
    return ExitCode.COMPLETE if healthy(findings) else ExitCode.FAILED


async def _findings(config: DoctorConfig) -> AsyncGenerator[Finding]:
    # PyTorch takes seconds to load, so the other checks run meanwhile.
    devices = asyncio.create_task(check_devices())
    try:
        ports = [
            ("the line's", config.port, "--port"),
            ("its metrics'", config.metrics_port, "--metrics-port"),
        ]
        for finding in (
            *check_packages(),
            check_mean(),
            *(check_ports(ports) if not config.address else ()),
            *check_folder(RUNS),
            *check_privacy(RUNS),
            *check_shared_memory(config.shared_dir or DEFAULT_SHARED_DIR),
            *check_clock(RUNS),
            *(check_windows() if config.address else ()),
            *check_access(config.access),
        ):
            yield finding
        if config.address:
            line = check_line(config.address, config.access)
        else:
            line = check_trial(config.access)
        for finding in await line:
            yield finding
        for finding in await devices:
            yield finding
    finally:
        devices.cancel()
        # Cancel the process that loads PyTorch here. If it hung, asyncio would wait for it at exit.
        await asyncio.gather(devices, return_exceptions=True)
