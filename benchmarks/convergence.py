"""What does each schedule cost in loss, after the same number of samples as one process?

Three workers of uneven speed train a small model under each schedule; one process trains the same
model on the same samples in the same order, with the same batches and the same learning rate. The
loss is that of samples that nobody has trained on. Two models: the demo's GPT, smaller, on its
text, and a CNN with BatchNorm on scikit-learn's digits. Losses are compared at equal *samples*, not
at equal time: what a schedule gains in speed is not in these figures.

    python benchmarks/convergence.py --json benchmarks/results/convergence.json
    python benchmarks/convergence.py --tasks digits --schedules every-step --seeds 1
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from machine import describe_machine
from schedules import chosen_from, write_rows
from service import serving

__all__ = ["EVALUATIONS", "WorkerSpec"]

FACTORS = (1.0, 1.5, 3.0)
"""Each worker's work a sample: what cadence and balanced shares react to."""
TASKS = {"letters": 300, "digits": 300}
"""The tasks, and how many batches each is trained for."""
SCHEDULES: dict[str, tuple[str, ...]] = {
    "every-step": (),
}
"""The schedules' flags of `andon serve`."""
SOLO = "solo"
EVALUATIONS = 12
"""Times that the loss is taken, about evenly, besides the end's."""
_PATIENCE_S = 1800


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The parameters of one worker process."""

    task: str
    seed: int
    samples: int
    """Of the whole line."""
    batch: int
    """Of the whole line."""
    factor: float = 1.0
    """This worker's work a sample."""
    address: str = ""
    """The line's; empty: the worker trains alone."""
    run_id: str = ""


def main() -> None:
    """Trains, and prints a row for each schedule and each task."""
    options = _arguments()
    machine = describe_machine()
    rows = []
    for task in options.tasks:
        batches = options.batches or TASKS[task]
        curves: dict[str, list[Curve]] = {}
        for seed in range(1, options.seeds + 1):
            spec = WorkerSpec(
                task=task, seed=seed, samples=batches * options.batch, batch=options.batch
            )
            curves.setdefault(SOLO, []).append(_solo(spec))
            for name in options.schedules:
                curves.setdefault(name, []).append(_line(spec, SCHEDULES[name]))
        for name, seen in curves.items():
            rows.append(_row(task, name, seen, curves[SOLO]))
            print(_told(rows[-1]), flush=True)
    if options.json:
        write_rows(options.json, {**machine, **_circumstances(options)}, rows)


Curve = list[tuple[int, float]]
"""Losses on unseen samples, each after a number of samples."""


def _solo(spec: WorkerSpec) -> Curve:
    return max(_run([spec]))


def _line(spec: WorkerSpec, flags: Sequence[str]) -> Curve:
    with (
        TemporaryDirectory() as folder,
        serving(Path(folder), len(FACTORS), flags) as served,
    ):
        line = {"address": served.address, "run_id": served.run_id}
        specs = [WorkerSpec(**{**asdict(spec), **line, "factor": factor}) for factor in FACTORS]
        # Only rank 0 tells anything.
        return max(_run(specs))


def _run(specs: Sequence[WorkerSpec]) -> list[Curve]:
    """Runs a process for each spec; returns their output. At an error, all of them are killed."""
    script = str(Path(__file__).with_name("convergence_worker.py"))
    processes = [
        subprocess.Popen(
            [sys.executable, script, json.dumps(asdict(spec))],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for spec in specs
    ]
    try:
        outputs = [process.communicate(timeout=_PATIENCE_S)[0] for process in processes]
        if any(process.returncode for process in processes):
            raise RuntimeError("a worker failed: see its output")
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [[(samples, loss) for samples, loss in json.loads(output)] for output in outputs]


def _row(task: str, schedule: str, seen: list[Curve], solo: list[Curve]) -> dict[str, Any]:
    """One schedule of one task: the final losses of all seeds, and how far they are from solo's."""
    ends = [curve[-1][1] for curve in seen]
    away = [end - alone[-1][1] for end, alone in zip(ends, solo, strict=True)]
    return {
        "task": task,
        "schedule": schedule,
        "samples": seen[0][-1][0],
        "loss": round(statistics.mean(ends), 4),
        "from_solo": round(statistics.mean(away), 4),
        "from_solo_spread": [round(min(away), 4), round(max(away), 4)],
        "curves": [[(samples, round(loss, 4)) for samples, loss in curve] for curve in seen],
    }


def _told(row: dict[str, Any]) -> str:
    low, high = row["from_solo_spread"]
    return (
        f"{row['task']:9}{row['schedule']:20}loss {row['loss']:.4f}"
        f"  from solo {row['from_solo']:+.4f} ({low:+.4f} to {high:+.4f})"
    )


def _circumstances(options: argparse.Namespace) -> dict[str, object]:
    """The conditions of the measurement, apart from the machine."""
    return {
        "seeds": options.seeds,
        "batch": options.batch,
        "flags": {name: SCHEDULES[name] for name in options.schedules},
        "notes": [
            f"{len(FACTORS)} workers; work a sample: {FACTORS}; one thread each",
            "AdamW at a constant rate, gradients clipped to a norm of 1",
            "letters: the GPT of examples/shakespeare.py with 2 layers of width 64",
            "digits: 2 convolutions with BatchNorm and a linear layer",
            "curves: a list for each seed, of samples and the loss on unseen samples; rank 0's",
        ],
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=48, help="samples in a batch of the line")
    parser.add_argument("--batches", type=int, help="the samples, in batches (default: by task)")
    parser.add_argument("--tasks", type=chosen_from(TASKS), default=list(TASKS))
    parser.add_argument(
        "--schedules",
        type=chosen_from(SCHEDULES),
        default=list(SCHEDULES),
        help=f"of: {','.join(SCHEDULES)} (default: all)",
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if min(options.seeds, options.batch, options.batches or 1) < 1:
        parser.error("--seeds, --batch and --batches must be at least 1")
    return options


if __name__ == "__main__":
    main()
