"""What does `Line` cost a script that runs alone?

For each model two processes take turns on the same machine: one trains with plain PyTorch, one with
`Line` solo. Model, data, optimizer and batches are the same, and so is the loop, but for the lines
that `Line` changes. A pair is one block of steps of each, right after one another; which of the two
begins alternates. The figure is the median of the pairs' ratios, so that a machine whose speed
drifts shows in the spread.

    python benchmarks/overhead.py --json benchmarks/results/overhead.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import describe_machine

__all__ = ["WORKS", "Side", "Work", "measure"]

_REST_S = 0.05
"""Before each block: the other process's computing threads have stopped to spin by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is trained, and in what portions."""

    model: str
    batch: int
    block: int
    """Steps that are timed together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What one of the two processes is told."""

    model: str
    batch: int
    threads: int
    """Computing threads; 0: torch's own choice."""
    line: bool
    device: str = "cpu"


WORKS = (
    Work(model="mlp", batch=64, block=200),
    Work(model="gpt", batch=16, block=6),
    Work(model="resnet", batch=32, block=4),
)


def main() -> None:
    """Measures, and prints the figures."""
    options = _arguments()
    machine = {**describe_machine(), "threads": options.threads or "torch's own choice"}
    rows = []
    for work in WORKS:
        if work.model in options.models:
            rows.append(measure(work, options.pairs, threads=options.threads, block=options.block))
            print(json.dumps(rows[-1]), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


def measure(
    work: Work, pairs: int, *, threads: int, block: int | None = None, device: str = "cpu"
) -> dict[str, Any]:
    """Lets the two sides take turns; returns the medians, in seconds a step, and their ratio.

    `overhead` is what `Line` takes more than the plain script, as a part of the plain step: the
    median of the pairs; `cpu_overhead` is the same of processor time, which others on the machine
    disturb less. `added_us` is the overhead in microseconds a step. On a GPU `waits` says how
    often a step of each side waits for it, as PyTorch counts.

    Args:
        work: what is trained.
        pairs: how many blocks each side trains.
        threads: computing threads of each side; 0: torch's own choice.
        block: steps of a block; None: by the work.
        device: where both compute.
    """
    steps = block or work.block
    sides = [
        _start(Side(model=work.model, batch=work.batch, threads=threads, line=line, device=device))
        for line in (False, True)
    ]
    seconds: tuple[list[float], list[float]] = ([], [])
    worked: tuple[list[float], list[float]] = ([], [])
    try:
        for side in sides:
            _hear(side)
        for side in sides:
            _ask(side, "time", max(3, steps // 2))  # Warm: allocator, caches, optimizer state.
        for pair in range(pairs):
            for index in (0, 1) if pair % 2 else (1, 0):
                time.sleep(_REST_S)
                passed, processor = _ask(sides[index], "time", steps)
                seconds[index].append(passed / steps)
                worked[index].append(processor / steps)
        waits = [_ask(side, "waits", steps)[0] / steps for side in sides if device != "cpu"]
    finally:
        for side in sides:
            side.kill()
            side.communicate()
    ratios = [line / plain for plain, line in zip(*seconds, strict=True)]
    of_processor = [line / plain for plain, line in zip(*worked, strict=True)]
    overhead = statistics.median(ratios) - 1.0
    plain_s = statistics.median(seconds[0])
    return {
        "model": work.model,
        "batch": work.batch,
        "steps": steps,
        "pairs": pairs,
        "plain_s": round(plain_s, 7),
        "line_s": round(statistics.median(seconds[1]), 7),
        "overhead": round(overhead, 5),
        "spread": [round(min(ratios) - 1.0, 5), round(max(ratios) - 1.0, 5)],
        "cpu_overhead": round(statistics.median(of_processor) - 1.0, 5),
        "added_us": round(overhead * plain_s * 1e6, 1),
        **({"waits": waits} if waits else {}),
    }


def _start(side: Side) -> subprocess.Popen[str]:
    script = str(Path(__file__).with_name("overhead_worker.py"))
    return subprocess.Popen(
        [sys.executable, script, json.dumps(asdict(side))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _ask(side: subprocess.Popen[str], what: str, steps: int) -> list[float]:
    """Of so many steps the seconds, and those of the processor; or how often they wait."""
    assert side.stdin is not None
    side.stdin.write(f"{what} {steps}\n")
    side.stdin.flush()
    return [float(number) for number in _hear(side).split()]


def _hear(side: subprocess.Popen[str]) -> str:
    assert side.stdout is not None
    line = side.stdout.readline()
    if not line:
        raise RuntimeError("a side failed: see its output")
    return line


def _arguments() -> argparse.Namespace:
    models = [work.model for work in WORKS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--pairs", type=int, default=31, help="blocks of each side")
    parser.add_argument("--block", type=int, help="steps of a block; default: by the model")
    parser.add_argument("--threads", type=int, default=0, help="computing threads; 0: torch's own")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if options.pairs < 1 or (options.block is not None and options.block < 1):
        parser.error("--pairs and --block must be at least 1")
    return options


if __name__ == "__main__":
    main()
