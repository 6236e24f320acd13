"""A real SLURM of one node, with its own munge, for tests: started, used by sbatch, and ended."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from integration.harness import clean_environment

__all__ = ["Slurm", "missing"]

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
_PATIENCE_S = 100.0
_CONF = """
ClusterName=tests
SlurmctldHost={node}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/builtin
SelectType=select/linear
ReturnToService=2
KillWait=10
SlurmdParameters=config_overrides
NodeName={node} NodeAddr=127.0.0.1 CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
"""Two workers of a test are not bound to cores, and the node may have fewer than it says."""


def missing() -> str:
    """What keeps SLURM from running here; empty if nothing does."""
    if os.geteuid() != 0:
        return "needs root, to run a SLURM of its own"
    absent = [program for program in _PROGRAMS if shutil.which(program, path=_path()) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install slurm-wlm munge"
    return ""


class Slurm:
    """Its three daemons, in a folder. A context manager: at the end nothing of it is left."""

    def __init__(self, folder: Path) -> None:
        """Writes its configuration; ports are free ones."""
        self._folder = folder
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        node = socket.gethostname().partition(".")[0]
        controller, daemon = _free_ports(2)
        text = _CONF.format(node=node, folder=folder, controller=controller, daemon=daemon)
        (folder / "slurm.conf").write_text(text, "utf-8")
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Starts it, and waits until its node takes jobs."""
        folder, conf = self._folder, str(self._folder / "slurm.conf")
        with ExitStack() as undo:
            self._start("munged", "--foreground", "--force", "--key-file", f"{folder}/munge.key",
                        "--socket", f"{folder}/munge.socket", "--pid-file", f"{folder}/munge.pid",
                        "--log-file", f"{folder}/munge.log", "--seed-file", f"{folder}/munge.seed",
                        undo=undo)  # fmt: skip
            self.wait((folder / "munge.socket").exists, "munged did not open its socket")
            self._start("slurmctld", "-D", "-c", "-f", conf, undo=undo)
            self._start("slurmd", "-D", "-f", conf, undo=undo)
            self.wait(
                lambda: self.run("sinfo", "-h", "-o", "%t", check=False).strip() == "idle",
                "the node did not become idle",
            )
            self._stack = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Cancels every job, and ends the daemons."""
        with self._stack:
            self.run("scancel", "--full", "--signal=KILL", "--state=RUNNING", check=False)
            self.run("scancel", "--user=root", check=False)
            self.wait(
                lambda: not self.run("squeue", "-h", check=False).strip(), "a job did not end"
            )

    def run(self, *command: str, check: bool = True) -> str:
        """Runs a command of SLURM's; what it printed."""
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            cwd=self._folder,
            env=self._environment(),
            timeout=_PATIENCE_S,
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says of a job."""
        words = self.run("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, condition: Callable[[], bool], fault: str) -> None:
        """Waits until the condition holds."""
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"{fault}:\n{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        """The ends of all logs."""
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text('utf-8')[-3000:]}" for log in logs)

    def _start(self, *command: str, undo: ExitStack) -> None:
        with (self._folder / f"{command[0]}.output.log").open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env=self._environment()
            )
        undo.callback(_end, process)

    def _environment(self) -> dict[str, str]:
        conf = str(self._folder / "slurm.conf")
        return clean_environment(PATH=_path(), SLURM_CONF=conf)


def _path() -> str:
    """Where programs are: this environment's first, and those of daemons, too."""
    return os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin", "/sbin"]
    )


def _free_ports(count: int) -> Sequence[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
