"""A run under `andon run` on this host, as benchmarks start and watch one."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from andon_coordinator.core.run_events import RunEvent, RunEventKind
from andon_coordinator.transport.damage import JournalError
from andon_coordinator.transport.reader import JournalReader

__all__ = [
    "PATIENCE_S",
    "Commits",
    "Run",
    "commits_in",
    "events_in",
    "is_whole",
    "median_steps",
    "running",
    "until",
    "width_of",
]

PATIENCE_S = 180.0
_BYTES_OF_STATE = 12
"""For each parameter: itself and AdamW's two moments, in float32."""

Commits = list[tuple[float, int]]
"""When each record was made durable, and how many workers it has."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run under `andon run`."""

    launcher: int
    """Its process."""
    folder: Path
    script: Path

    @property
    def journal(self) -> Path:
        """Where its records are."""
        return self.folder / "journal.sqlite"

    def workers(self) -> list[int]:
        """Its workers' processes."""
        children = Path(f"/proc/{self.launcher}/task/{self.launcher}/children").read_text()
        found = []
        for pid in map(int, children.split()):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            # The service's command line names the script, too.
            if command.rstrip(b"\0").endswith(self.script.name.encode()):
                found.append(pid)
        return found

    def commits(self) -> Commits:
        """All records so far."""
        return commits_in(self.journal)


def commits_in(journal: Path) -> Commits:
    """All records of a journal; none if the service is about to write it."""
    try:
        with JournalReader(journal) as reader:
            return [(each.at_unix_s, len(each.record.roster)) for each in reader.chain()]
    except (JournalError, OSError):
        return []


def events_in(journal: Path, kind: RunEventKind, since: float = 0.0) -> list[RunEvent]:
    """What happened of a kind, after a time."""
    with JournalReader(journal) as reader:
        told = list(reader.run_events())
    return [each for each in told if each.kind is kind and each.at_unix_s > since]


def median_steps(commits: Commits) -> dict[int, float]:
    """The median time between two commits by as many workers, by their number."""
    waits: defaultdict[int, list[float]] = defaultdict(list)
    for (earlier, before), (at, size) in pairwise(commits):
        if before == size:
            waits[size].append(at - earlier)
    return {size: statistics.median(each) for size, each in waits.items()}


def is_whole(commits: Commits, since: float, steps: int, workers: int) -> bool:
    """Whether so many workers were on all of the last so many rosters, after a time."""
    last = [size for at, size in commits if at > since][-steps:]
    return len(last) == steps and set(last) == {workers}


def width_of(mb: float) -> int:
    """How wide a square layer is that has so much state under AdamW."""
    return round(math.sqrt(mb * 1e6 / _BYTES_OF_STATE))


@contextmanager
def running(
    script: Path, *flags: str, environment: Mapping[str, str], verbose: bool = False
) -> Iterator[Run]:
    """Starts a run of a script, and ends it.

    Args:
        script: of the workers.
        flags: of `andon run`.
        environment: in addition to that of this process.
        verbose: whether the run's output is printed at its end.
    """
    command = [sys.executable, "-m", "andon_cli", "run", "--run-id", "7f3a", *flags, str(script)]
    variables = {**os.environ, **environment}
    with TemporaryDirectory() as folder, Path(folder, "out.txt").open("wb") as out:
        launcher = subprocess.Popen(command, cwd=folder, env=variables, stdout=out, stderr=out)
        try:
            yield Run(launcher.pid, Path(folder) / "runs/7f3a", script)
        finally:
            launcher.terminate()
            launcher.wait(PATIENCE_S)
            if verbose:
                sys.stdout.write(Path(folder, "out.txt").read_text("utf-8", "replace"))


def until(holds: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Waits until something holds.

    Raises:
        TimeoutError: it did not for so long.
    """
    deadline = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError("the run does not go on: see its output")
        time.sleep(0.1)
