"""What does a small step cost: how many Python calls in the service, and how much processor time?

Workers without a model exchange a few KiB, so a step is nothing but its messages. The numbers of
calls in the service's event loop do not depend on the machine or its load. Each part's built-in
functions count as its own.

Processor time does depend on them, so it is compared with that of another version, in turns: both
lines are there from the beginning, and make some steps each, one after the other. The other
version is named by the Python of an environment in which it is installed.

    python benchmarks/small_steps.py
    python benchmarks/small_steps.py --by-function 40
    python benchmarks/small_steps.py --beside ../before/.venv/bin/python --pairs 61 --json F
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
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from machine import describe_machine
from paths import PATHS
from processor import processor_s
from service import serving

__all__: list[str] = []

_WARM_UP = 100
"""Steps before anything counts."""
_PATIENCE_S = 60.0
_PARTS = (
    ("andon_coordinator/transport", "coordinator's transport"),
    ("andon_coordinator/core", "coordinator's core"),
    ("andon_coordinator/telemetry", "observers: metrics, board, logs"),
    ("andon_reducer/transport", "reducer's transport"),
    ("andon_reducer/core", "reducer's core"),
    ("andon_reducer/telemetry", "observers: metrics, board, logs"),
    ("andon_server", "observers: metrics, board, logs"),
    ("prometheus_client", "observers: metrics, board, logs"),
    ("/logging/", "observers: metrics, board, logs"),
    ("andon/wire", "messages to values and back"),
    ("andon/protocol", "values of the protocol"),
    ("andon/", "values of the protocol"),
    ("asyncio/", "asyncio"),
    ("selectors.py", "asyncio"),
    ("<string>", "values made, hashed and compared"),
    ("dataclasses.py", "values made, hashed and compared"),
    ("enum.py", "values made, hashed and compared"),
    ("grpc", "gRPC"),
)
"""Part of a path, and what it belongs to; the first that fits counts."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line whose workers wait to be told how many steps to make."""

    service_pid: int
    workers: list[subprocess.Popen[str]]

    def step(self, steps: int) -> None:
        """Makes so many steps.

        Raises:
            RuntimeError: a worker ended; it has said why.
        """
        for worker in self.workers:
            assert worker.stdin is not None
            print(steps, file=worker.stdin, flush=True)
        for worker in self.workers:
            assert worker.stdout is not None
            if not worker.stdout.readline():
                raise RuntimeError("a worker ended: see its output")

    def spent_s(self) -> tuple[float, float]:
        """Processor time so far, of the service and of all workers."""
        service, *workers = (
            processor_s(pid) for pid in (self.service_pid, *(each.pid for each in self.workers))
        )
        spent = [each for each in workers if each is not None]
        if service is None or len(spent) < len(workers):
            raise RuntimeError("this system does not report the processor time of threads")
        return service, sum(spent)


@contextmanager
def line_of(options: argparse.Namespace, python: str, *script: str) -> Iterator[Line]:
    """A line of the version that `python` has, after some steps, until the context exits.

    `script` serves it, in place of the command.
    """
    program = (python, *(script or ("-m", "andon_cli")))
    with (
        TemporaryDirectory() as folder,
        serving(Path(folder), options.workers, program=program) as service,
    ):
        computes = str(Path(__file__).with_name("small_steps_worker.py"))
        workers = []
        try:
            for rank in range(options.workers):
                spec = {
                    "address": service.address, "run_id": service.run_id, "rank": rank,
                    "workers": options.workers, "kib": options.kib, "path": options.path,
                }  # fmt: skip
                command = [python, computes, json.dumps(spec)]
                workers.append(
                    subprocess.Popen(
                        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                    )
                )
            line = Line(service.pid, workers)
            line.step(_WARM_UP)
            yield line
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()


def calls_of(options: argparse.Namespace) -> list[tuple[str, int, str, int]]:
    """The calls of the service's event loop in the steps that count, by file, line and function."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "calls"
        os.environ["ANDON_CALLS"] = str(file)
        script = str(Path(__file__).with_name("small_steps_service.py"))
        with line_of(options, sys.executable, script) as line:
            os.kill(line.service_pid, signal.SIGUSR1)
            line.step(options.steps)
            os.kill(line.service_pid, signal.SIGUSR2)
            deadline = time.monotonic() + _PATIENCE_S
            while not file.exists():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the service counted nothing within {_PATIENCE_S:g} s")
                time.sleep(0.05)
            return [tuple(each) for each in json.loads(file.read_text())]


def count(options: argparse.Namespace) -> dict[str, float]:
    """Calls a step, by part; prints those of single functions, if asked for."""
    parts: Counter[str] = Counter()
    found = sorted(calls_of(options), key=lambda each: -each[3])
    for number, (file, line, name, calls) in enumerate(found):
        parts[next((part for path, part in _PARTS if path in file), "the rest")] += calls
        if number < options.by_function:
            place = "/".join(file.split("/")[-3:])
            print(f"{calls / options.steps:8.1f}  {place}:{line} {name}")
    all_parts = {"all": parts.total(), **dict(parts.most_common())}
    return {part: round(calls / options.steps, 1) for part, calls in all_parts.items()}


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Processor time a step beside that of the other version: medians of ratios, ours over it."""
    with line_of(options, sys.executable) as ours, line_of(options, options.beside) as theirs:
        turns = [
            (_spent(ours, options.steps), _spent(theirs, options.steps))
            for _ in range(options.pairs)
        ]
    figures: dict[str, Any] = {}
    for name, part in {"service": [0], "workers": [1], "all": [0, 1]}.items():
        mine, other = (
            [sum(turn[side][each] for each in part) for turn in turns] for side in (0, 1)
        )
        figures[name] = {
            "ms": round(statistics.median(mine) * 1e3, 3),
            "beside_ms": round(statistics.median(other) * 1e3, 3),
            "ratio": round(statistics.median(map(truediv, mine, other)), 3),
        }
    return figures


def _spent(line: Line, steps: int) -> tuple[float, float]:
    """Processor time a step, of the service and of the workers."""
    before = line.spent_s()
    line.step(steps)
    after = line.spent_s()
    return (after[0] - before[0]) / steps, (after[1] - before[1]) / steps


def main() -> None:
    """Counts, or compares."""
    options = _arguments()
    figures: dict[str, Any] = {
        "machine": describe_machine(),
        **{name: getattr(options, name) for name in ("workers", "kib", "path", "steps")},
    }
    if options.beside:
        figures |= {"pairs": options.pairs, "processor": compare(options)}
    else:
        figures["calls"] = count(options)
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kib", type=int, default=4, help="of float32")
    parser.add_argument("--path", choices=PATHS, default="shared-memory")
    parser.add_argument("--steps", type=int, default=200, help="that count; with --beside, a turn")
    parser.add_argument("--by-function", type=int, default=0, help="show so many functions, too")
    parser.add_argument("--beside", help="the Python of another version: compare processor time")
    parser.add_argument("--pairs", type=int, default=21, help="turns of each version")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
