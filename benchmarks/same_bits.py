"""What do the same bits on any number of workers cost a step?

Two lines of one machine train the same model with equal micro-batches, one with `same_bits` and
one without. They take turns, a block of steps each; which of the two begins alternates. A block
takes as long as its slowest worker. The figure is the median of the pairs' ratios. Without workers
a script that runs alone is measured. The memory is the most that a worker ever had, with what it
maps of shared memory.

With `--verify 1.0` both lines have `same_bits`, and one of them computes all steps twice. With
`--processes 2` each worker is a host, whose two processes average by DistributedDataParallel.

    python benchmarks/same_bits.py --json benchmarks/results/same-bits.json
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from machine import describe_machine
from paths import PATHS
from service import serving

__all__ = ["measure"]

_NAMES = ("without", "with")
WARM_UP = 1
"""Pairs that are not counted."""


class Side:
    """The workers of one line, or a script that runs alone."""

    def __init__(self, workers: list[subprocess.Popen[str]]) -> None:
        """They wait for the first block."""
        self._workers = workers

    def block(self) -> dict[str, float]:
        """Runs a block of steps: its time, the processor time of all workers, and the memory."""
        for each in self._workers:
            assert each.stdin is not None
            each.stdin.write("go\n")
            each.stdin.flush()
        took = [json.loads(self._line(each)) for each in self._workers]
        return {
            "wall_s": max(each["wall_s"] for each in took),
            "processor_s": sum(each["processor_s"] for each in took),
            "peak_mib": max(each["peak_mib"] for each in took),
        }

    @staticmethod
    def _line(worker: subprocess.Popen[str]) -> str:
        assert worker.stdout is not None
        line = worker.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with code {worker.wait()}")
        return line


@contextmanager
def _side(folder: Path, spec: dict[str, Any], workers: int, path: str) -> Iterator[Side]:
    with ExitStack() as stack:
        where = {"address": "", "run_id": "", "shared_dir": ""}
        if workers:
            flags = ["--same-bits"] if spec["same_bits"] else []
            flags += ["--verify", str(spec["verify"])] if spec["verify"] else []
            line = stack.enter_context(serving(folder, workers, [*PATHS[path].flags, *flags]))
            shared = PATHS[path].shared_dir
            where = {
                "address": line.address,
                "run_id": line.run_id,
                "shared_dir": str(shared) if shared else "",
            }
        started = [
            stack.enter_context(_worker({**spec, **where}, variables))
            for _ in range(max(1, workers))
            for variables in _host(spec["processes"])
        ]
        yield Side(started)


def _host(processes: int) -> list[dict[str, str]]:
    """The variables that torchrun gives each process of a host; none if it is one."""
    if processes == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(processes)}
    return [{**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


@contextmanager
def _worker(spec: dict[str, Any], variables: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    program = Path(__file__).with_name("same_bits_worker.py")
    process = subprocess.Popen(
        [sys.executable, str(program), json.dumps(spec)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def measure(workers: int, path: str, options: argparse.Namespace) -> dict[str, Any]:
    """Both lines by turns; `ratio` is the time with `same_bits` over that without."""
    spec = {
        "layers": options.layers,
        "width": options.width,
        "context": options.context,
        "micro": options.micro,
        "batch": options.micro * options.grains * max(1, workers) * options.processes,
        "processes": options.processes,
        "block": options.block,
        "verify": options.verify,
    }
    pairs: list[dict[str, dict[str, float]]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        sides = {}
        for name in _NAMES:
            (folder / name).mkdir()
            counts = name == "with"
            mine = {**spec, "same_bits": counts or options.verify > 0}
            mine["verify"] = options.verify if counts else 0.0
            sides[name] = stack.enter_context(_side(folder / name, mine, workers, path))
        for number in range(WARM_UP + options.pairs):
            order = _NAMES if number % 2 else _NAMES[::-1]
            pairs.append({name: sides[name].block() for name in order})
    counted = pairs[WARM_UP:]

    def ratios_of(figure: str) -> list[float]:
        return sorted(each["with"][figure] / each["without"][figure] for each in counted)

    ratios = ratios_of("wall_s")
    return {
        "workers": workers,
        "path": path if workers else "alone",
        **spec,
        **{
            f"{name}_step_s": statistics.median(each[name]["wall_s"] for each in counted)
            / options.block
            for name in _NAMES
        },
        **{f"{name}_peak_mib": counted[-1][name]["peak_mib"] for name in _NAMES},
        "ratio": statistics.median(ratios),
        "spread": [ratios[0], ratios[-1]],
        "processor_ratio": statistics.median(ratios_of("processor_s")),
    }


def main() -> None:
    """Measures each number of workers on each path, and prints a row for it."""
    options = _arguments()
    machine = describe_machine()
    rows = []
    print(
        f"{'workers':>7} {'path':14}{'without':>12}{'with':>12}{'ratio':>8}{'CPU':>8}"
        f"{'MiB':>7}{'MiB':>7}  pairs"
    )
    for workers in options.workers:
        for path in options.paths if workers else options.paths[:1]:
            row = measure(workers, path, options)
            rows.append(row)
            low, high = row["spread"]
            print(
                f"{workers:7} {row['path']:14}{row['without_step_s'] * 1e3:9.1f} ms"
                f"{row['with_step_s'] * 1e3:9.1f} ms{row['ratio']:8.3f}"
                f"{row['processor_ratio']:8.3f}{row['without_peak_mib']:7.0f}"
                f"{row['with_peak_mib']:7.0f}  {low:.2f} to {high:.2f}",
                flush=True,
            )
    if options.json:
        notes = ["the service and all workers of both lines on one host", *options.note]
        figures = {"machine": {**machine, "notes": notes}, "rows": rows}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 2, 3, 4], metavar="N")
    parser.add_argument(
        "--paths", nargs="+", choices=["shared-memory", "tcp", "wire"],
        default=["shared-memory", "tcp"], metavar="PATH",
    )  # fmt: skip
    parser.add_argument("--processes", type=int, default=1, help="of each worker")
    parser.add_argument("--grains", type=int, default=4, help="a process's in a step")
    parser.add_argument("--micro", type=int, default=4, help="samples of a grain")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--block", type=int, default=4, help="steps that are timed together")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument(
        "--verify", type=float, default=0.0, metavar="PART", help="measure --verify PART"
    )
    parser.add_argument("--note", action="append", default=[], help="goes into the JSON")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
