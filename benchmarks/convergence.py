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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from machine import describe_machine
from schedules import chosen_from, write_rows
from service import serving

__all__ = ["EVALUATIONS", "Run", "Trainers", "WorkerSpec"]

FACTORS = (1.0, 1.5, 3.0)
"""Each worker's work a sample, under the schedules that react to it."""
TASKS = {"letters": 200, "digits": 300}
"""The tasks, and how many batches each is trained for."""
_LOCAL = ("--schedule", "local")
SCHEDULES: dict[str, tuple[str, ...]] = {
    "every-step": ("--schedule", "every-step"),
    "average-buffers": ("--schedule", "every-step", "--average-buffers"),
    "balanced": ("--schedule", "every-step", "--shares", "balanced"),
    "cadence": ("--schedule", "cadence"),
    "cadence-anchor-1": ("--schedule", "cadence", "--max-anchor", "1"),
    "cadence-sqrt": ("--schedule", "cadence", "--lr-scaling", "sqrt"),
    "local-8": (*_LOCAL, "--local-steps", "8"),
    "local-8-nesterov": (*_LOCAL, "--local-steps", "8", "--outer", "nesterov"),
    "local-8-overlap": (*_LOCAL, "--local-steps", "8", "--overlap"),
    "local-32": (*_LOCAL, "--local-steps", "32"),
}
"""The schedules' flags of `andon serve`."""
UNEVEN = ("balanced", "cadence", "cadence-anchor-1", "cadence-sqrt")
"""The schedules that react to the workers' speeds: under these the workers differ."""
SOLO = "solo"
EVALUATIONS = 12
"""Times that the loss is taken, about evenly, besides the end's."""


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
    feedback: bool = True
    """Whether what a narrow encoding loses is sent with the next gradient, as workers do."""
    address: str = ""
    """The line's; empty: the worker trains alone."""
    run_id: str = ""


def main() -> None:
    """Trains, and prints a row for each schedule and each task."""
    options = _arguments()
    machine = describe_machine()
    rows = []
    with Trainers(len(FACTORS)) as trainers:
        for task in options.tasks:
            batches = options.batches or TASKS[task]
            curves: dict[str, list[Run]] = {}
            for seed in range(1, options.seeds + 1):
                spec = WorkerSpec(
                    task=task, seed=seed, samples=batches * options.batch, batch=options.batch
                )
                curves.setdefault(SOLO, []).append(trainers.train([spec]))
                for name in options.schedules:
                    curves.setdefault(name, []).append(_line(trainers, spec, name))
            for name, seen in curves.items():
                rows.append(_row(task, name, seen, curves[SOLO]))
                print(_told(rows[-1]), flush=True)
    if options.json:
        write_rows(options.json, {**machine, **_circumstances(options)}, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one training with one seed saw."""

    curve: list[tuple[int, float]]
    """Losses on unseen samples, each after a number of samples."""
    steps: int
    """The line's commits."""


class Trainers:
    """Worker processes, each with its own imports done: they train one spec after another."""

    def __init__(self, count: int) -> None:
        """Starts the processes."""
        script = str(Path(__file__).with_name("convergence_worker.py"))
        self._processes = [
            subprocess.Popen(
                [sys.executable, script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for _ in range(count)
        ]

    def __enter__(self) -> Trainers:
        """These trainers."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.communicate()

    def train(self, specs: Sequence[WorkerSpec]) -> Run:
        """Trains each spec in a process; returns what the worker of rank 0 saw."""
        busy = self._processes[: len(specs)]
        for process, spec in zip(busy, specs, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(spec)) + "\n")
            process.stdin.flush()
        answers = [_answer(process) for process in busy]
        # Only rank 0 tells a curve.
        return max(answers, key=lambda answer: len(answer.curve))


def _answer(process: subprocess.Popen[str]) -> Run:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a worker failed: see its output")
    fields = json.loads(line)
    return Run(curve=[(at, loss) for at, loss in fields["curve"]], steps=fields["steps"])


def _line(trainers: Trainers, spec: WorkerSpec, name: str) -> Run:
    with (
        TemporaryDirectory() as folder,
        serving(Path(folder), len(FACTORS), SCHEDULES[name]) as served,
    ):
        specs = [
            replace(
                spec,
                address=served.address,
                run_id=served.run_id,
                factor=factor if name in UNEVEN else 1.0,
            )
            for factor in FACTORS
        ]
        return trainers.train(specs)


def _row(task: str, schedule: str, seen: list[Run], solo: list[Run]) -> dict[str, Any]:
    """One schedule of one task: the final losses of all seeds, and how far they are from solo's."""
    ends = [run.curve[-1][1] for run in seen]
    away = [end - alone.curve[-1][1] for end, alone in zip(ends, solo, strict=True)]
    return {
        "task": task,
        "schedule": schedule,
        "samples": seen[0].curve[-1][0],
        "commits": round(statistics.mean(run.steps for run in seen), 1),
        "loss": round(statistics.mean(ends), 4),
        "from_solo": round(statistics.mean(away), 4),
        "from_solo_spread": [round(min(away), 4), round(max(away), 4)],
        "curves": [[(samples, round(loss, 4)) for samples, loss in run.curve] for run in seen],
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
            f"{len(FACTORS)} workers, one thread each; work a sample under {', '.join(UNEVEN)}: "
            f"{FACTORS}",
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
