"""What does `Line` cost a script that runs alone?

For each model two processes take turns on the same machine: one trains with plain PyTorch, one with
`Line` solo. Model, data, optimizer and batches are the same, and so is the loop, but for the lines
that `Line` changes. A pair is one block of steps of each, right after one another; which of the two
begins alternates. After some pairs two new processes go on. The figure is the median of the pairs'
ratios, so that a machine whose speed drifts shows in the spread.

    python benchmarks/overhead.py --json benchmarks/results/overhead.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from machine import describe_machine

__all__ = ["WORKS", "Effort", "Side", "Work", "measure"]

_ALLOCATOR = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(2**32))
"""glibc keeps the memory that was freed. Else it may give activations back to the system in each
step, and get them again page by page; whether it does depends on the last few bytes of the heap,
and is worth more than what is measured here."""
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
class Effort:
    """How often it is measured."""

    rounds: int = 5
    """Pairs of processes: where a process has its memory makes it a percent faster or slower."""
    pairs: int = 9
    """Of blocks, in each round."""
    block: int | None = None
    """Steps of a block; None: by the work."""


class _Block(NamedTuple):
    """What a block took."""

    seconds: float
    processor_s: float


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
    Work(model="resnet", batch=128, block=3),
)


def main() -> None:
    """Measures, and prints the figures."""
    options = _arguments()
    machine = {**describe_machine(), "threads": options.threads or "torch's own choice"}
    rows = []
    for work in WORKS:
        if work.model in options.models:
            effort = Effort(rounds=options.rounds, pairs=options.pairs, block=options.block)
            rows.append(measure(work, effort, threads=options.threads))
            print(json.dumps(rows[-1]), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


def measure(work: Work, effort: Effort, *, threads: int = 0, device: str = "cpu") -> dict[str, Any]:
    """Lets the two sides take turns; returns the medians, in seconds a step, and their ratio.

    `overhead` is what `Line` takes more than the plain script, as a part of the plain step: the
    median of the pairs; `cpu_overhead` is the same of processor time, which others on the machine
    disturb less. `added_us` is the overhead in microseconds a step. On a GPU `waits` says how often
    a step of each side waits for it, as PyTorch counts.

    Args:
        work: what is trained.
        effort: how often.
        threads: computing threads of each side; 0: torch's own choice.
        device: where both compute.
    """
    steps = effort.block or work.block
    sides = [
        Side(model=work.model, batch=work.batch, threads=threads, line=line, device=device)
        for line in (False, True)
    ]
    rounds = [_round(sides, steps, effort.pairs) for _ in range(effort.rounds)]
    blocks = [pair for pairs, _ in rounds for pair in pairs]
    ratios = [line.seconds / plain.seconds for plain, line in blocks]
    of_processor = [line.processor_s / plain.processor_s for plain, line in blocks]
    overhead = statistics.median(ratios) - 1.0
    plain_s = statistics.median(plain.seconds for plain, _ in blocks) / steps
    line_s = statistics.median(line.seconds for _, line in blocks) / steps
    return {
        "model": work.model,
        "batch": work.batch,
        "steps": steps,
        "pairs": len(blocks),
        "plain_s": round(plain_s, 7),
        "line_s": round(line_s, 7),
        "overhead": round(overhead, 5),
        "spread": [round(min(ratios) - 1.0, 5), round(max(ratios) - 1.0, 5)],
        "cpu_overhead": round(statistics.median(of_processor) - 1.0, 5),
        "added_us": round(overhead * plain_s * 1e6, 1),
        **({"waits": rounds[-1][1]} if device != "cpu" else {}),
    }


def _round(
    told: list[Side], steps: int, pairs: int
) -> tuple[list[tuple[_Block, _Block]], list[float]]:
    """Pairs of blocks of two new processes, and how often a step of each waits for the GPU."""
    sides = [_start(side) for side in told]
    blocks = []
    try:
        for side in sides:
            _hear(side)
        for side in sides:
            _ask(side, "time", max(3, steps // 2))  # Warm: allocator, caches, optimizer state.
        for pair in range(pairs):
            found = {}
            for index in (0, 1) if pair % 2 else (1, 0):
                time.sleep(_REST_S)
                found[index] = _Block(*_ask(sides[index], "time", steps))
            blocks.append((found[0], found[1]))
        on_gpu = told[0].device != "cpu"
        waits = [_ask(side, "waits", steps)[0] / steps for side in sides if on_gpu]
    finally:
        for side in sides:
            side.kill()
            side.communicate()
    return blocks, waits


def _start(side: Side) -> subprocess.Popen[str]:
    script = str(Path(__file__).with_name("overhead_worker.py"))
    return subprocess.Popen(
        [sys.executable, script, json.dumps(asdict(side))],
        env={**os.environ, **_ALLOCATOR},
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
    parser.add_argument("--rounds", type=int, default=5, help="pairs of processes")
    parser.add_argument("--pairs", type=int, default=9, help="blocks of each side in a round")
    parser.add_argument("--block", type=int, help="steps of a block; default: by the model")
    parser.add_argument("--threads", type=int, default=0, help="computing threads; 0: torch's own")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if min(options.rounds, options.pairs, options.block or 1) < 1:
        parser.error("--rounds, --pairs and --block must be at least 1")
    return options


if __name__ == "__main__":
    main()
