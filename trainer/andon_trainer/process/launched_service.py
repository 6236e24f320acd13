"""The service that rank 0 of a launch starts: which run it goes on with, and its command line."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andon.host.manifest import newest_whole
from andon.host.tls import address_of
from andon_trainer.config import LineConfig
from andon_trainer.errors import JoinRefused, LineLost
from andon_trainer.launchers import LaunchStore
from andon_trainer.line_options import flags_of

__all__ = [
    "Served",
    "command_of",
    "in_the_clear",
    "over",
    "serve",
    "served_before",
    "service_address",
    "to_go_on_with",
]

_FREED_TIMEOUT_S = 30
"""How long the service of an earlier start may take to end."""
_RUNS = Path("runs")
"""Where `andon serve` keeps the runs that get no folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Where rank 0 serves a run, or served it before."""

    port: int
    run_id: str
    run_dir: str
    """Absolute."""


def over(served: Served) -> str:
    """Why a run that is over is not served, and what to do."""
    return (
        f"run {served.run_id} in {served.run_dir} is over: nothing is left to do, and another run "
        "needs another name (torchrun's --rdzv-id, or ANDON_RUN_ID) and another folder"
    )


def to_go_on_with(left: Served | None, config: LineConfig, launch: LaunchStore) -> Served | None:
    """The run that this start goes on with; None: it begins a new one.

    Args:
        left: what the rank 0 of an earlier start left in the store, if anything.
        config: rank 0's.
        launch: rank 0's place.
    """
    named = config.run_id or launch.run_name or config.run_dir
    if left is None or named or not launch.one_host:
        return left or served_before(config, launch)
    # All of its workers have ended with the start, so that only a checkpoint has its state. Nobody
    # named the run, so nobody misses it.
    return left if newest_whole(Path(left.run_dir)) is not None else None


def served_before(config: LineConfig, launch: LaunchStore) -> Served | None:
    """What the folder of the run says that this launch names; None if it is a new run."""
    name = config.run_id or launch.run_name
    folder = config.run_dir or (_RUNS / name if name else None)
    service = {} if folder is None else _service_of(folder)
    if folder is None or "run_id" not in service:
        return None
    port = int(service["address"].rpartition(":")[2])
    # Another id than the folder's is the service's to refuse.
    return Served(port=port, run_id=name or service["run_id"], run_dir=str(folder.absolute()))


def _service_of(folder: Path) -> dict[str, Any]:
    """What a service wrote to the folder of its run; empty if it is not there, or no such thing."""
    try:
        found = json.loads((folder / "service.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _await_end(folder: Path) -> None:
    """Waits until the service of an earlier start has ended, which it does with its parent.

    Until then it holds the journal and the port.

    Raises:
        LineLost: it does not end.
    """
    pid = _service_of(folder).get("pid", 0)
    deadline = time.monotonic() + _FREED_TIMEOUT_S
    while _is_service(pid):
        if time.monotonic() > deadline:
            raise LineLost(
                f"the service of an earlier start (process {pid}) has not ended for "
                f"{_FREED_TIMEOUT_S} s: end it",
                address="",
                last_step=0,
            )
        time.sleep(0.05)


def _is_service(pid: int) -> bool:
    """Whether a process exists here and is one that `_serve` started."""
    try:
        return b"andon_cli\0serve" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def command_of(config: LineConfig, launch: LaunchStore, before: Served | None) -> list[str]:
    """The command line of the service that rank 0 starts.

    Args:
        config: rank 0's.
        launch: rank 0's place.
        before: what the rank 0 of an earlier start served.
    """
    everywhere = "[::]" if ":" in launch.host else "0.0.0.0"
    port = launch.service_port
    if before is not None and not port and _is_free(before.port):
        port = before.port
    command = [
        *(sys.executable, "-m", "andon_cli", "serve"),
        *("--bind", "127.0.0.1" if launch.one_host else everywhere, "--port", str(port)),
        *("--metrics-port", "0", "--workers", str(launch.world_size)),
        # With the parent's pid the service ends even if this process is killed.
        *("--announce", "--until-complete", "--parent-pid", str(os.getpid())),
    ]
    if not launch.one_host:
        command += ["--advertise", launch.host]
    run_id = before.run_id if before else config.run_id or launch.run_name
    if run_id:
        command += ["--run-id", run_id]
    folder = before.run_dir if before else config.run_dir
    if folder is not None:
        command += ["--run-dir", str(folder)]
    if config.tls is not None:
        command += ["--tls", str(config.tls)]
    if config.insecure:
        command.append("--insecure")
    return [*command, *flags_of(config.line_options)]


def _is_free(port: int) -> bool:
    """Whether a TCP port can be listened on, on all interfaces."""
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def serve(
    config: LineConfig, launch: LaunchStore, before: Served | None
) -> tuple[Served, subprocess.Popen[str]]:
    """Starts the service that goes on with `before`, or begins a new run.

    Raises:
        JoinRefused: the run is over.
        LineLost: the service ended before it served.
    """
    if before is not None:
        _await_end(Path(before.run_dir))
    environment = dict(os.environ)
    if config.token:  # It may be an argument of the script's.
        environment.pop("ANDON_TOKEN_FILE", None)
        environment["ANDON_TOKEN"] = config.token.decode()
    service = subprocess.Popen(
        command_of(config, launch, before),
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        # torchrun ends a worker by a signal to its group. The service must outlive this process,
        # which wants to leave the line; it ends with its parent.
        process_group=0,
    )
    assert service.stdout is not None
    line = service.stdout.readline()  # `--announce` prints one line once it serves.
    if not line:
        if (code := service.wait()) == 0 and before is not None:
            raise JoinRefused("complete", over(before))
        raise LineLost(
            f"`andon serve` ended with exit code {code} before it served; its output says why",
            address="",
            last_step=0,
        )
    announced = json.loads(line)
    served = Served(
        port=int(announced["address"].rpartition(":")[2]),
        run_id=announced["run_id"],
        run_dir=str(Path(announced["journal"]).resolve().parent),
    )
    return served, service


def service_address(launch: LaunchStore, port: int) -> str:
    """Where this process reaches the service: at the host where it reached the store."""
    if launch.one_host:
        return f"127.0.0.1:{port}"
    return address_of(launch.host, port)


def in_the_clear(config: LineConfig, launch: LaunchStore, what: str) -> JoinRefused | None:
    """The refusal to serve beyond this host what nobody wants to be encrypted or not.

    `what` says what spans several hosts, and what rank 0 serves.
    """
    if launch.one_host or config.tls is not None or config.insecure:
        return None
    return JoinRefused.in_the_clear(f"{what} at {launch.host}")
