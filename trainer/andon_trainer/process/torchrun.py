"""Under torchrun: rank 0 starts the service and publishes its address in torchrun's store."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it by a star

from andon_trainer.config import LineConfig, TorchrunStore
from andon_trainer.errors import LineLost

__all__ = ["locate"]

_ADDRESS_KEY = "andon/address"
_STORE_TIMEOUT = timedelta(seconds=300)
_END_TIMEOUT_S = 5


def locate(config: LineConfig) -> LineConfig:
    """The configuration with the line's address, found by way of torchrun's store.

    Rank 0 starts `andon serve` as a child process, which ends with the run. A configuration that
    has an address, or is not torchrun's, is returned as it is.

    Raises:
        LineLost: the service could not be started.
    """
    launch = config.torchrun
    if launch is None or config.address:
        return config
    hosts = launch.rank == 0 and not launch.hosted_by_agent
    store = TCPStore(
        launch.host, launch.port, launch.world_size, is_master=hosts, timeout=_STORE_TIMEOUT
    )
    if launch.rank == 0:
        store.set(_ADDRESS_KEY, json.dumps(_serve(config, launch)))
    # Waits until rank 0 has set it.
    found = json.loads(store.get(_ADDRESS_KEY))
    located = replace(
        config,
        address=found["address"],
        run_id=found["run_id"],
        run_dir=Path(found["run_dir"]),
        torchrun=None,
    )
    if hosts:
        # The store dies with this object, and other ranks may not have read it yet.
        atexit.register(lambda: store)
    return located


def _serve(config: LineConfig, launch: TorchrunStore) -> dict[str, str]:
    """Starts the service; returns its address, run id and folder."""
    command = [
        *(sys.executable, "-m", "andon_cli", "serve", "--bind", "127.0.0.1", "--port", "0"),
        *("--metrics-port", "0", "--workers", str(launch.world_size)),
        # With the parent's pid the service ends even if this process is killed.
        *("--announce", "--until-complete", "--parent-pid", str(os.getpid())),
    ]
    if config.run_dir is not None:
        command += ["--run-dir", str(config.run_dir)]
    service = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert service.stdout is not None
    line = service.stdout.readline()  # `--announce` prints one line once it serves.
    if not line:
        raise LineLost(
            f"`andon serve` ended with exit code {service.wait()} before it served; "
            "its output says why",
            address="",
            last_step=0,
        )
    announced = json.loads(line)
    atexit.register(_end, service)
    return {
        "address": announced["address"],
        "run_id": announced["run_id"],
        "run_dir": str(Path(announced["journal"]).resolve().parent),
    }


def _end(service: subprocess.Popen[str]) -> None:
    """Waits for the service, which ends by itself once the line is complete; else terminates it."""
    try:
        service.wait(timeout=_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        service.terminate()
        service.wait()
