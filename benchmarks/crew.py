"""A crew: worker processes that train the same model on a line, or each alone, under equal shares.

Alone they show what they could do at the same time if they exchanged nothing: the yardstick for
what they do on a line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cpu_share import CpuShare

__all__ = ["Crew", "Hand", "Load", "WorkerSpec", "windows_of"]

_PATIENCE_S = 1800


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the line trains."""

    workers: int
    layers: int
    width: int
    context: int
    batch: int
    """A worker's part of a batch, if the parts are equal."""
    samples: int
    """Of the whole line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec(Load):
    """The parameters of one worker process."""

    factors: tuple[float, float]
    """This worker's work a sample, in the first and in the second half of the samples."""
    on_link: bool
    """Whether the worker counts the bytes over its host's link."""
    address: str = ""
    """The line's; empty: the worker trains alone."""
    run_id: str = ""

    @classmethod
    def from_json(cls, text: str) -> WorkerSpec:
        """Reads what the crew wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "factors": tuple(fields["factors"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Hand:
    """One worker of a crew: its part of the processors, its speed and its host."""

    share: CpuShare
    factors: tuple[float, float] = (1.0, 1.0)
    """Its work a sample, in the first and in the second half of the samples."""
    inside: tuple[str, ...] = ()
    """The command prefix that runs a command on its host; empty: this machine itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """Workers that start anew for each measurement."""

    hands: Sequence[Hand]

    def alone(self, load: Load, phase_s: float) -> list[list[float]]:
        """Each worker's samples a second in two phases, while all train at once, each alone."""
        with self._processes(load) as processes:
            for process in processes:
                _hear(process)
            now = time.monotonic()
            for process in processes:
                _say(process, f"{now} {now + phase_s} {now + 2 * phase_s}")
            return [_output(process)["rates"] for process in processes]

    def train(self, load: Load, address: str, run_id: str) -> list[dict[str, Any]]:
        """Trains on a line; returns when each worker began, and its windows."""
        with self._processes(load, address, run_id) as processes:
            return [_output(process) for process in processes]

    @contextmanager
    def _processes(
        self, load: Load, address: str = "", run_id: str = ""
    ) -> Iterator[list[subprocess.Popen[str]]]:
        with ExitStack() as stack:
            processes = []
            for hand in self.hands:
                spec = WorkerSpec(
                    **asdict(load),
                    factors=hand.factors,
                    on_link=bool(hand.inside),
                    address=address,
                    run_id=run_id,
                )
                processes.append(stack.enter_context(_worker(hand, spec)))
            for hand, process in zip(self.hands, processes, strict=True):
                _hear(process)
                # From here: a worker on another host does not see the control groups.
                hand.share.enter(process.pid)
                _say(process, "begin")
            yield processes


@contextmanager
def _worker(hand: Hand, spec: WorkerSpec) -> Iterator[subprocess.Popen[str]]:
    script = str(Path(__file__).with_name("crew_worker.py"))
    process = subprocess.Popen(
        [*hand.inside, sys.executable, script, json.dumps(asdict(spec))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ANDON_INSECURE": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _hear(process: subprocess.Popen[str]) -> None:
    """Waits until a worker has said a line."""
    assert process.stdout is not None
    if not process.stdout.readline():
        raise RuntimeError("a worker did not start: see its output")


def _say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _output(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=_PATIENCE_S)
    if process.returncode:
        raise RuntimeError(f"a worker exited with code {process.returncode}: see its output")
    seen: dict[str, Any] = json.loads(output)
    return seen


def windows_of(seen: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The line's windows, of what each worker returned from `train`.

    `ended_s` is when a window was committed everywhere, since the first batch. The others are lists
    with a number for each worker: its samples, its micro-batches, and what its link carried so far.
    """
    began = min(each["began"] for each in seen)
    windows = []
    for window in zip(*(each["windows"] for each in seen), strict=True):
        times, samples, batches, carried = zip(*window, strict=True)
        ended_s = round(max(times) - began, 3)
        windows.append(
            {"ended_s": ended_s, "samples": samples, "micro_batches": batches, "carried": carried}
        )
    return windows
