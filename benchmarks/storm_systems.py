"""Starts each system of the storm as its own documentation says, and keeps it going.

| system | set up after |
|---|---|
| andon | docs/checkpoints.md, "Restarts" |
| andon-spare | the same, and docs/places/spares.md |
| torchft | its README ("Lighthouse", "Running DDP"), train_ddp.py and torchft/torchx.py |
| ddp, ddp-often | torchrun's page in PyTorch's documentation, the tutorial of torchrun |
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from storm_task import Settings

__all__ = ["OFTEN_S", "SPARES", "SYSTEMS", "Program", "System", "is_alive", "started"]

_HERE = Path(__file__).parent
TORCHFT_PYTHON = Path(
    os.environ.get("STORM_TORCHFT_PYTHON", _HERE.parent / ".venv-torchft" / "bin" / "python")
)
_PR_SET_CHILD_SUBREAPER = 36
_MANY = "1000000"
"""Restarts: the storm never uses them up."""
CHECKPOINT_STEPS = "240"
"""Andon counts a checkpoint's interval in steps: about a minute of them."""
SPARES = {"andon-spare": 1}
"""Workers that a system has beyond its replicas."""
OFTEN_S = 5.0
"""Seconds between two checkpoints for a user of DDP who expects a storm."""


@dataclass(slots=True)
class Program:
    """A process that the harness starts, and starts again whenever it dies."""

    command: Sequence[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    again: bool = True
    """Whether it has a supervisor, which the harness stands for."""
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    def start(self) -> None:
        """Starts it. What it says is appended to its log."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                cwd=self.log.parent,
                env={**os.environ, **self.environment, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.starts += 1

    @property
    def pid(self) -> int | None:
        """Its process while that runs."""
        if self.process is None or self.process.poll() is not None:
            return None
        return self.process.pid

    @property
    def died(self) -> bool:
        """Whether it has ended other than by its own will."""
        return self.process is not None and self.process.poll() not in (None, 0)


@dataclass(slots=True)
class System:
    """A system that trains."""

    programs: list[Program]
    service: Callable[[], int | None]
    """Finds the process that a fault of the service strikes."""

    def tend(self) -> int:
        """Starts again what died, and returns how many that were. Orphans of the dead are ended."""
        known = {each.process.pid for each in self.programs if each.process is not None}
        dead = [each for each in self.programs if each.again and each.died]
        for orphan in set(_children(os.getpid())) - known:
            if dead:
                # A scheduler ends all processes of a job before it starts the job again.
                with suppress(ProcessLookupError):
                    os.kill(orphan, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(orphan, 0 if dead else os.WNOHANG)
        for program in dead:
            program.start()
        return len(dead)

    @property
    def over(self) -> bool:
        """Whether nothing of it runs any more, nor will."""
        return all(each.pid is None and not (each.again and each.died) for each in self.programs)


def _andon(settings: Settings, *, spares: int = 0) -> System:
    """`andon run` starts dead workers and a dead service again by itself."""
    folder = Path(settings.folder)
    command = [sys.executable, "-m", "andon_cli", "run", "--workers", str(settings.replicas)]
    command += ["--spares", str(spares)] if spares else []
    command += ["--restarts", _MANY, "--checkpoint-every", CHECKPOINT_STEPS, "--run-id", "storm"]
    command += [str(_HERE / "storm_andon.py"), settings.to_json()]

    def service() -> int | None:
        try:
            pid: int = json.loads((folder / "runs/storm/service.json").read_text())["pid"]
        except FileNotFoundError:
            return None
        return pid

    return System([Program(command, folder / "andon.log", again=False)], service)


def _torchft(settings: Settings, *, least: int = 1) -> System:
    """A lighthouse that wants `least` replicas, and a torchrun for each group of one worker."""
    folder = Path(settings.folder)
    port = _free_port()
    lighthouse = Program(
        [
            str(TORCHFT_PYTHON.with_name("torchft_lighthouse")),
            *(
                "--min_replicas",
                str(least),
                "--quorum_tick_ms",
                "100",
                "--join_timeout_ms",
                "10000",
            ),
            *("--bind", f"[::]:{port}"),
        ],
        folder / "lighthouse.log",
        {"RUST_BACKTRACE": "1"},
    )
    groups = [
        Program(
            [
                *(str(TORCHFT_PYTHON), "-m", "torch.distributed.run"),
                *(f"--master_port={_free_port()}", "--nnodes=1", "--nproc_per_node=1"),
                *(f"--max_restarts={_MANY}", str(_HERE / "storm_torchft.py"), settings.to_json()),
            ],
            folder / f"replica-{group}.log",
            {
                "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}",
                "REPLICA_GROUP_ID": str(group),
                "NUM_REPLICA_GROUPS": str(settings.replicas),
                # A manager waits for the lighthouse for a minute, and asks again each second. By
                # default it asks once, and its process ends.
                "TORCHFT_QUORUM_RETRIES": "60",
            },
        )
        for group in range(settings.replicas)
    ]
    return System([lighthouse, *groups], lambda: lighthouse.pid)


def _ddp(settings: Settings) -> System:
    """One torchrun, which starts all workers again when one dies; a supervisor of torchrun."""
    agent = Program(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1"),
            *(f"--nproc-per-node={settings.replicas}", f"--max-restarts={_MANY}"),
            *(str(_HERE / "storm_ddp.py"), settings.to_json()),
        ],
        Path(settings.folder) / "torchrun.log",
        # Workers that start again would find the addresses of the dead in a store that is shared
        # with the agent, as it is by default, and fail to connect, in PyTorch 2.13.
        {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )
    return System([agent], lambda: agent.pid)


SYSTEMS: dict[str, Callable[[Settings], System]] = {
    "andon": _andon,
    "andon-spare": lambda settings: _andon(settings, spares=SPARES["andon-spare"]),
    "torchft": _torchft,
    "torchft-majority": lambda settings: _torchft(settings, least=settings.replicas // 2 + 1),
    "ddp": _ddp,
    "ddp-often": lambda settings: _ddp(replace(settings, checkpoint_s=OFTEN_S)),
}


@contextmanager
def started(name: str, settings: Settings) -> Iterator[System]:
    """A system that trains until the context exits; then none of its processes is left."""
    # Orphans become ours, so that none is missed.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = set(_children(os.getpid()))
    system = SYSTEMS[name](settings)
    try:
        for program in system.programs:
            program.start()
        yield system
    finally:
        _end(system)
        _end_orphans(before)


def _end(system: System) -> None:
    """Asks every program to end, and kills what does not within some seconds."""
    for program in system.programs:
        if program.process is not None and program.process.poll() is None:
            program.process.terminate()
    for program in system.programs:
        if program.process is not None:
            try:
                program.process.wait(15)
            except subprocess.TimeoutExpired:
                program.process.kill()
                program.process.wait()


def _end_orphans(before: set[int]) -> None:
    while orphans := set(_children(os.getpid())) - before:
        for orphan in orphans:
            with suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(orphan, 0)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that is a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def _children(pid: int) -> list[int]:
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
