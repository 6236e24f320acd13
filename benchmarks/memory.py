"""Does memory stay flat? How much does an exchange take, as a multiple of the model's size?

A service and its workers exchange made-up gradients for many steps over one path. The benchmark
reads the resident memory of each process every few steps, once all workers have completed the step.
A worker itself holds two models: the gradients that it sends, and the averages that it receives.
Anything beyond that and its libraries belongs to the exchange.

    python benchmarks/memory.py --json benchmarks/results/memory.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from machine import describe_machine, resident_mib
from paths import PATHS
from protocol_worker import ProtocolWorker, block_sizes
from service import serving

_MIB = 2**20
_SKIP = 10
"""The run is divided into this many parts. The first fills caches, so the slope leaves it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The parameters of one worker process."""

    address: str
    run_id: str
    rank: int
    workers: int
    mib: int
    path: str


def main() -> None:
    """Measures, and prints a table."""
    options = _arguments()
    machine = describe_machine()
    figures = measure(options)
    print(f"{'':12}{'idle':>8}{'first':>8}{'last':>8}{'most':>8}  MiB   models   MiB/1000 steps")
    for who in ("service", "worker"):
        row = figures[who]
        print(
            f"{who:12}{row['idle_mib']:8.0f}{row['first_mib']:8.0f}{row['last_mib']:8.0f}"
            f"{row['most_mib']:8.0f}{row['models']:13.2f}{row['slope_mib_per_1000_steps']:15.1f}"
        )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, **figures}, indent=2) + "\n")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the steps; returns the memory of the service and worker 0, in MiB."""
    context = multiprocessing.get_context("spawn")
    flags = [] if options.encoding == "float32" else ["--encoding", options.encoding]
    flags += PATHS[options.path].flags
    with (
        TemporaryDirectory() as folder,
        serving(Path(folder), options.workers, flags) as service,
    ):
        idle_mib = resident_mib(service.pid)
        ends = []
        for rank in range(options.workers):
            end, other = context.Pipe()
            spec = WorkerSpec(
                address=service.address,
                run_id=service.run_id,
                rank=rank,
                workers=options.workers,
                mib=options.mib,
                path=options.path,
            )
            process = context.Process(target=_work, args=(spec, other), daemon=True)
            process.start()
            ends.append((end, process.pid))
        worker_idle_mib = max(end.recv() for end, _ in ends)
        seen: dict[str, list[float]] = {"service": [], "worker": []}
        for _ in range(0, options.steps, options.every):
            for end, _ in ends:
                end.send(options.every)
            for end, _ in ends:
                end.recv()
            seen["service"].append(resident_mib(service.pid))
            seen["worker"].append(max(resident_mib(pid or 0) for _, pid in ends))
        for end, _ in ends:
            end.send(0)
    return {
        "path": options.path,
        "workers": options.workers,
        "mib": options.mib,
        "encoding": options.encoding,
        "steps": options.steps,
        "service": _row(seen["service"], idle_mib, options),
        "worker": _row(seen["worker"], worker_idle_mib, options),
    }


def _row(seen: list[float], idle_mib: float, options: argparse.Namespace) -> dict[str, Any]:
    """`models` is the peak above idle, divided by the model's size."""
    settled = seen[len(seen) // _SKIP :]
    steps = options.every * np.arange(len(settled))
    slope = float(np.polyfit(steps, settled, 1)[0]) if len(settled) > 1 else 0.0
    return {
        "idle_mib": round(idle_mib, 1),
        "first_mib": round(seen[0], 1),
        "last_mib": round(seen[-1], 1),
        "most_mib": round(max(seen), 1),
        "models": round((max(seen) - idle_mib) / options.mib, 2),
        "slope_mib_per_1000_steps": round(1000 * slope, 2),
        "seen_mib": [round(each, 1) for each in seen],
    }


def _work(spec: WorkerSpec, orders: Connection) -> None:
    """A worker: runs as many steps as each order says, until an order says 0."""
    own = multiprocessing.current_process().pid
    assert own is not None
    orders.send(resident_mib(own))
    sizes = block_sizes(spec.mib)
    gradient = np.random.default_rng(spec.rank).standard_normal(sum(sizes), dtype=np.float32)
    blocks = np.split(gradient, np.cumsum(sizes)[:-1])
    with ProtocolWorker(
        spec.address, spec.run_id, spec.rank, spec.mib, spec.workers, way=PATHS[spec.path]
    ) as worker:
        while steps := orders.recv():
            for _ in range(steps):
                if not worker.step(blocks):
                    sys.exit("the service ended during the benchmark: see its log")
            orders.send(worker.steps)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", choices=list(PATHS), default="wire")
    parser.add_argument("--encoding", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mib", type=int, default=64, help="the model's size")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=20, help="steps between two readings")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    for name in ("workers", "mib", "steps", "every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(options, name)}")
    return options


if __name__ == "__main__":
    main()
