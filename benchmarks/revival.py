"""How long does a run stand still when its service is killed and `andon run` starts it again?

The service of a run of two PyTorch workers gets a real SIGKILL, again and again. In turns a standby
takes its place, as it does for every user, and a service that has to load its modules first: then
the standby was killed a moment before. The time is that between two commits in the journal.

    python benchmarks/revival.py --pairs 10 --json benchmarks/results/revival.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from machine import describe_machine

from andon_coordinator.transport.reader import JournalReader

_SCRIPT = Path(__file__).with_name("revival_worker.py")
_STEPS = 40
"""Committed steps between two kills: the follower has seen them, and a standby is there."""
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Run:
    """A run under `andon run`."""

    launcher: int
    """Its process."""
    folder: Path

    @property
    def service(self) -> int:
        """The process of its service."""
        pid: int = json.loads((self.folder / "service.json").read_text())["pid"]
        return pid

    @property
    def standby(self) -> int | None:
        """The process that stands by and is idle; None while there is none."""
        children = Path(f"/proc/{self.launcher}/task/{self.launcher}/children").read_text()
        for pid in map(int, children.split()):
            named = b"launching.standby" in Path(f"/proc/{pid}/cmdline").read_bytes()
            # It sleeps in a read of its stdin once it has loaded everything.
            if named and pid != self.service and _waits(pid):
                return pid
        return None

    def commits(self) -> list[float]:
        """When each step was committed, in seconds of the system's clock."""
        with JournalReader(self.folder / "journal.sqlite") as journal:
            return [each.at_unix_s for each in journal.chain()]


def _waits(pid: int) -> bool:
    """Whether a process has slept for a moment."""
    used = [_processor_ticks(pid)]
    time.sleep(0.3)
    return used == [_processor_ticks(pid)]


def _processor_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@contextmanager
def _running() -> Iterator[Run]:
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "andon_cli", "run", "--workers", "2", "--run-id", "7f3a"]
        launcher = subprocess.Popen([*command, str(_SCRIPT)], cwd=folder, stdout=subprocess.DEVNULL)
        try:
            yield Run(launcher.pid, Path(folder) / "runs/7f3a")
        finally:
            launcher.terminate()
            launcher.wait(_PATIENCE_S)


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError("the run does not go on: see its terminal above")
        time.sleep(0.05)


def _standstill(run: Run, *, standby: bool) -> float:
    """Seconds between the last commit before a SIGKILL of the service and the first after it."""
    _until((run.folder / "journal.sqlite").exists)
    before = len(run.commits())
    _until(lambda: len(run.commits()) > before + _STEPS and run.standby is not None)
    idle = run.standby
    if not standby and idle is not None:
        os.kill(idle, signal.SIGKILL)
    service, struck_at = run.service, time.time()
    os.kill(service, signal.SIGKILL)
    _until(lambda: run.service != service and run.commits()[-1] > struck_at)
    commits = run.commits()
    return max(after - at for at, after in pairwise(commits) if after > struck_at)


def main() -> None:
    """Measures, and prints medians and worst."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5, help="kills of each kind (default: 5)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    machine = describe_machine()
    found: dict[str, list[float]] = {"standby_s": [], "no_standby_s": []}
    with _running() as run:
        for _ in range(options.pairs):
            found["standby_s"].append(_standstill(run, standby=True))
            found["no_standby_s"].append(_standstill(run, standby=False))
    for name, seconds in found.items():
        print(f"{name:13} median {statistics.median(seconds):.3f}  worst {max(seconds):.3f}")
    if options.json is not None:
        rounded = {name: [round(each, 4) for each in times] for name, times in found.items()}
        figures = {"machine": machine, "pairs": options.pairs, **rounded}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
