"""What does each schedule cost in loss, after the same number of samples as one process?

Three workers train a small model under each schedule; one process trains the same model on the same
samples in the same order, with the same batches and the same learning rate. The loss is that of
samples that nobody has trained on. Two models: the demo's GPT, smaller, on its text, and a CNN with
BatchNorm on scikit-learn's digits. Losses are compared at equal *samples*, not at equal time: what
a schedule gains in speed is not in these figures.

    python benchmarks/convergence.py --json benchmarks/results/convergence.json
    python benchmarks/convergence.py --tasks digits --schedules every-step --seeds 1

With `--merge` the rows take the place of their like in the JSON, and the others stay; one process
is not trained again where the JSON has it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from machine import describe_machine
from prometheus_client.parser import text_string_to_metric_families
from schedules import chosen_from, merged_rows, write_rows
from service import serving

__all__ = ["EVALUATIONS", "Run", "Trainers", "WorkerSpec"]

FACTORS = (1.0, 1.5, 3.0)
"""Each worker's work a sample, under the schedules that react to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is trained, and how: alike under all schedules."""

    task: str
    """What convergence_worker.py calls it."""
    model: str
    batches: int
    """By default."""
    batch: int = 48
    """Samples, of the whole line."""
    learning_rate: float
    """Of AdamW, at its greatest."""
    warm_up: float = 0.0
    """The part of the samples over which the rate rises; a cosine takes it to 0 after that. With 0
    the rate is constant."""


TASKS = {
    "letters": Training(task="letters-64", model="gpt", batches=200, learning_rate=3e-3),
    "digits": Training(task="digits", model="cnn", batches=300, learning_rate=1e-3),
    "letters-long": Training(
        task="letters-32",
        model="gpt",
        batches=4000,
        batch=24,
        learning_rate=1.6e-2,
        warm_up=0.1,
    ),
    "digits-long": Training(
        task="noisy-digits",
        model="cnn",
        batches=6000,
        learning_rate=1e-2,
        warm_up=0.1,
    ),
}
"""What is trained, by the name of `--tasks`."""


WEIGHT_DECAY = 0.01
"""AdamW's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSpec:
    """What plain_diloco.py trains by."""

    local_steps: int
    rate: float = 1.0
    momentum: float = 0.0
    """Of the outer optimizer."""
    workers: int = len(FACTORS)
    longest: int | None = None
    """The most local steps of a window, if `local_steps` is for the highest learning rate, and
    windows grow as it falls; None: all are alike."""
    phases: tuple[tuple[float, int], ...] = ()
    """The local steps of windows that begin before a part of the samples, in the place of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What is compared with one process that steps on every batch."""

    flags: tuple[str, ...] = ()
    """Of `andon serve`."""
    uneven: bool = False
    """Whether it reacts to the workers' speeds: under these the workers differ."""
    optimizer: str = "adamw"
    shared_momentum: bool = False
    """Whether a window begins with the momentum of the last one's mean change."""
    weight_decay: float = WEIGHT_DECAY
    rates: tuple[tuple[str, float], ...] = ()
    """Its own best learning rates by task, of 1, 2 and 4 times one process's."""
    plain: PlainSpec | None = None
    """What plain_diloco.py trains by; no line then."""
    models: tuple[str, ...] = ()
    """Those that have enough blocks for it; empty: all."""


_TWICE = 1.85
"""How often weight decay counts with a shared momentum and 16 local steps: see that example."""
_LOCAL = ("--schedule", "local", "--local-steps")
_INT4 = ("--encoding", "int4")
_FASTER = (("letters-long", 3.2e-2),)
_INT2 = ("--encoding", "int2")
_TOPK = ("--encoding", "topk", "--topk-kept")
_LATE = ("--overlap", "--overlap-steps")
_FRAGMENTS = (*_LOCAL, "16", *_INT4, "--fragments", "4")
_CADENCE = ("--schedule", "cadence")
SCHEDULES = {
    "every-step": Schedule(flags=("--schedule", "every-step")),
    "average-buffers": Schedule(flags=("--schedule", "every-step", "--average-buffers")),
    "balanced": Schedule(flags=("--schedule", "every-step", "--shares", "balanced"), uneven=True),
    "cadence": Schedule(flags=_CADENCE, uneven=True),
    "cadence-sqrt": Schedule(flags=(*_CADENCE, "--lr-scaling", "sqrt"), uneven=True),
    "cadence-linear": Schedule(flags=(*_CADENCE, "--lr-scaling", "linear"), uneven=True),
    "cadence-any-cost": Schedule(flags=(*_CADENCE, "--growth-cost", "1"), uneven=True),
    "local-8": Schedule(flags=(*_LOCAL, "8")),
    "local-8-nesterov": Schedule(flags=(*_LOCAL, "8", "--outer", "nesterov")),
    "local-8-overlap": Schedule(flags=(*_LOCAL, "8", "--overlap")),
    "local-32": Schedule(flags=(*_LOCAL, "32")),
    "local-8-quorum": Schedule(flags=(*_LOCAL, "8", "--quorum", "0.6"), uneven=True, rates=_FASTER),
    "async-8": Schedule(
        flags=("--schedule", "async", "--local-steps", "8"), uneven=True, rates=_FASTER
    ),
    "local-16-int4": Schedule(flags=(*_LOCAL, "16", *_INT4), rates=_FASTER),
    "local-16-int4-quorum": Schedule(
        flags=(*_LOCAL, "16", *_INT4, "--quorum", "0.6"), uneven=True, rates=_FASTER
    ),
    "async-16-int4": Schedule(
        flags=("--schedule", "async", "--local-steps", "16", *_INT4), uneven=True, rates=_FASTER
    ),
    "local-5-topk-8": Schedule(flags=(*_LOCAL, "5", *_TOPK, "8"), rates=_FASTER),
    "local-5-topk-7": Schedule(flags=(*_LOCAL, "5", *_TOPK, "7"), rates=_FASTER),
    "local-16-int4-shared": Schedule(
        flags=(*_LOCAL, "16", *_INT4), shared_momentum=True, rates=_FASTER
    ),
    "local-16": Schedule(flags=(*_LOCAL, "16"), rates=_FASTER),
    "local-16-int4-overlap": Schedule(flags=(*_LOCAL, "16", *_INT4, "--overlap"), rates=_FASTER),
    "local-16-int4-overlap-1-shared": Schedule(
        flags=(*_LOCAL, "16", *_INT4, *_LATE, "1"), shared_momentum=True, rates=_FASTER
    ),
    "local-16-int4-overlap-2-shared": Schedule(
        flags=(*_LOCAL, "16", *_INT4, *_LATE, "2"), shared_momentum=True, rates=_FASTER
    ),
    "local-16-int4-overlap-4-shared": Schedule(
        flags=(*_LOCAL, "16", *_INT4, *_LATE, "4"), shared_momentum=True, rates=_FASTER
    ),
    "local-5-topk-7-shared": Schedule(
        flags=(*_LOCAL, "5", *_TOPK, "7"), shared_momentum=True, rates=_FASTER
    ),
    "local-5-topk-7-overlap-1": Schedule(
        flags=(*_LOCAL, "5", *_TOPK, "7", *_LATE, "1"), rates=_FASTER
    ),
    "local-13-int2-shared": Schedule(
        flags=(*_LOCAL, "13", *_INT2), shared_momentum=True, rates=_FASTER
    ),
    "local-13-int2-overlap-2-shared": Schedule(
        flags=(*_LOCAL, "13", *_INT2, *_LATE, "2"), shared_momentum=True, rates=_FASTER
    ),
    "local-16-int2-overlap-1-shared": Schedule(
        flags=(*_LOCAL, "16", *_INT2, *_LATE, "1"), shared_momentum=True, rates=_FASTER
    ),
    "local-16-int2-overlap-2-shared": Schedule(
        flags=(*_LOCAL, "16", *_INT2, *_LATE, "2"), shared_momentum=True, rates=_FASTER
    ),
    "local-16-int4-overlap-mix": Schedule(
        flags=(*_LOCAL, "16", *_INT4, "--overlap", "--mix", "0.5"), rates=_FASTER
    ),
    "fragments-16-4-int4": Schedule(flags=_FRAGMENTS, rates=_FASTER, models=("gpt",)),
    "fragments-16-4-int4-shared": Schedule(
        flags=_FRAGMENTS, shared_momentum=True, rates=_FASTER, models=("gpt",)
    ),
    "fragments-16-4-int4-overlap-shared": Schedule(
        flags=(*_FRAGMENTS, "--overlap"), shared_momentum=True, rates=_FASTER, models=("gpt",)
    ),
    "fragments-16-4-int4-overlap-1-shared": Schedule(
        flags=(*_FRAGMENTS, *_LATE, "1"), shared_momentum=True, rates=_FASTER, models=("gpt",)
    ),
    "fragments-16-4-int4-overlap": Schedule(
        flags=(*_FRAGMENTS, "--overlap"), rates=_FASTER, models=("gpt",)
    ),
    "fragments-16-4-int4-overlap-mix": Schedule(
        flags=(*_FRAGMENTS, "--overlap", "--mix", "0.5"), rates=_FASTER, models=("gpt",)
    ),
    "local-16-int4-muon": Schedule(flags=(*_LOCAL, "16", *_INT4), optimizer="muon"),
    "every-step-muon": Schedule(plain=PlainSpec(local_steps=1, workers=1), optimizer="muon"),
    "plain-16": Schedule(plain=PlainSpec(local_steps=16), rates=_FASTER),
    "plain-16-shared": Schedule(
        plain=PlainSpec(local_steps=16), shared_momentum=True, rates=_FASTER
    ),
    "plain-16-shared-once": Schedule(
        plain=PlainSpec(local_steps=16),
        shared_momentum=True,
        weight_decay=WEIGHT_DECAY / _TWICE,
        rates=_FASTER,
    ),
    "plain-16-decay": Schedule(
        plain=PlainSpec(local_steps=16), weight_decay=WEIGHT_DECAY * _TWICE, rates=_FASTER
    ),
    "plain-grow": Schedule(plain=PlainSpec(local_steps=8, longest=64), rates=_FASTER),
    "plain-grow-shared": Schedule(
        plain=PlainSpec(local_steps=8, longest=64), shared_momentum=True, rates=_FASTER
    ),
    "plain-phases-shared": Schedule(
        plain=PlainSpec(local_steps=16, phases=((0.4, 10), (0.65, 20), (0.85, 32), (1.0, 64))),
        shared_momentum=True,
        rates=_FASTER,
    ),
    "plain-16-muon": Schedule(plain=PlainSpec(local_steps=16), optimizer="muon"),
    "plain-8": Schedule(plain=PlainSpec(local_steps=8)),
    "plain-8-nesterov": Schedule(plain=PlainSpec(local_steps=8, rate=0.7, momentum=0.9)),
}
"""What is compared, by the name of `--schedules`."""
SOLO = "solo"
"""One process: what the schedules are compared with."""
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
    learning_rate: float = 3e-3
    warm_up: float = 0.0
    """As in `Training`."""
    factor: float = 1.0
    """This worker's work a sample."""
    optimizer: str = "adamw"
    shared_momentum: bool = False
    """As in `Schedule`."""
    weight_decay: float = WEIGHT_DECAY
    plain: dict[str, Any] | None = None
    """The fields of a `PlainSpec`, if this process trains for all workers, without Andon."""
    feedback: bool = True
    """Whether what a narrow encoding loses is sent with the next gradient, as workers do."""
    address: str = ""
    """The line's; empty: the worker trains alone."""
    run_id: str = ""


def main() -> None:
    """Trains, and prints a row for each schedule and each task."""
    options = _arguments()
    machine = describe_machine()
    before = json.loads(options.json.read_text())["rows"] if options.merge else []
    rows = []
    with Trainers(len(FACTORS)) as trainers:
        for name in options.tasks:
            for row in _task_rows(trainers, name, options, before):
                rows.append(row)
                print(_told(row), flush=True)
                if options.json:  # After each row: some take minutes.
                    merged = merged_rows(before, rows, ("task", "schedule"))
                    write_rows(options.json, {**machine, **_circumstances()}, merged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one training with one seed saw."""

    curve: list[tuple[int, float]]
    """Losses on unseen samples, each after a number of samples."""
    steps: int
    """The line's commits."""
    parameters: int = 0
    """The model's."""
    moved_bytes: float = 0.0
    """That workers and reducer exchanged."""


class Trainers:
    """Worker processes, each with its own imports done: they train one spec after another."""

    def __init__(self, count: int) -> None:
        """Starts the processes."""
        script = str(Path(__file__).with_name("convergence_worker.py"))
        # Without shared memory, whose traffic is float32 whatever the encoding.
        settings = {"OMP_NUM_THREADS": "1", "ANDON_SHARED_DIR": "off"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **settings},
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
        # Only rank 0 tells a curve.
        return max(self._train(specs), key=lambda answer: len(answer.curve))

    def train_apart(self, specs: Sequence[WorkerSpec]) -> list[Run]:
        """Trains each spec alone, as many at a time as there are processes."""
        count = len(self._processes)
        parts = [specs[first : first + count] for first in range(0, len(specs), count)]
        return [run for part in parts for run in self._train(part)]

    def _train(self, specs: Sequence[WorkerSpec]) -> list[Run]:
        busy = self._processes[: len(specs)]
        for process, spec in zip(busy, specs, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(spec)) + "\n")
            process.stdin.flush()
        return [_answer(process) for process in busy]


def _answer(process: subprocess.Popen[str]) -> Run:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a worker failed: see its output")
    fields = json.loads(line)
    return Run(**{**fields, "curve": [(at, loss) for at, loss in fields["curve"]]})


def _task_rows(
    trainers: Trainers, name: str, options: argparse.Namespace, before: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The rows of one task: one process, then each schedule."""
    training = TASKS[name]
    batch = options.batch or training.batch
    specs = [
        WorkerSpec(
            task=training.task,
            seed=seed,
            samples=(options.batches or training.batches) * batch,
            batch=batch,
            learning_rate=training.learning_rate,
            warm_up=training.warm_up,
        )
        for seed in range(1, options.seeds + 1)
    ]
    alone = _known(before, name, specs)
    if alone is None:
        alone = _row(name, SOLO, specs, trainers.train_apart(specs))
    yield _compared(alone, alone)
    for schedule in options.schedules:
        how = SCHEDULES[schedule]
        if how.models and training.model not in how.models:
            continue
        rate = dict(how.rates).get(name, training.learning_rate)
        tuned = [
            replace(
                spec,
                learning_rate=rate,
                optimizer=how.optimizer,
                shared_momentum=how.shared_momentum,
                weight_decay=how.weight_decay,
            )
            for spec in specs
        ]
        if how.plain is None:
            runs = [_line_told(trainers, spec, schedule) for spec in tuned]
        else:
            runs = _plain(trainers, tuned, how.plain)
        yield _compared(_row(name, schedule, tuned, runs), alone)


def _plain(trainers: Trainers, specs: list[WorkerSpec], plain: PlainSpec) -> list[Run]:
    """Without Andon: what it would send is each worker's float32 change and their mean."""
    runs = trainers.train_apart([replace(spec, plain=asdict(plain)) for spec in specs])
    return [
        replace(run, moved_bytes=2 * 4 * run.parameters * len(FACTORS) * run.steps) for run in runs
    ]


def _line_told(trainers: Trainers, spec: WorkerSpec, schedule: str) -> Run:
    """As `_line`. One seed takes minutes, and if a later one fails there is no row."""
    run = _line(trainers, spec, SCHEDULES[schedule])
    print(f"{spec.task} {schedule}: seed {spec.seed} ends at {run.curve[-1][1]:.4f}", flush=True)
    return run


def _line(trainers: Trainers, spec: WorkerSpec, schedule: Schedule) -> Run:
    with (
        TemporaryDirectory() as folder,
        serving(Path(folder), len(FACTORS), schedule.flags) as served,
    ):
        joins = replace(spec, address=served.address, run_id=served.run_id)
        specs = [replace(joins, factor=factor if schedule.uneven else 1.0) for factor in FACTORS]
        run = trainers.train(specs)
        return replace(run, moved_bytes=_moved_bytes(served.metrics_url))


def _moved_bytes(metrics_url: str) -> float:
    """Bytes of chunks to and from all workers, without the state with which they began."""
    with urllib.request.urlopen(metrics_url) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    count = {"andon_exchange_bytes_total": 1, "andon_state_transfer_bytes_total": -2}  # there, back
    return sum(
        count.get(sample.name, 0) * sample.value for family in families for sample in family.samples
    )


def _known(
    before: list[dict[str, Any]], task: str, specs: list[WorkerSpec]
) -> dict[str, Any] | None:
    """The row of one process that was written before, if it is of the same runs."""
    for row in before:
        named = (row["task"], row["schedule"]) == (task, SOLO)
        if named and (row["samples"], row["seeds"]) == (specs[0].samples, len(specs)):
            return row
    return None


def _row(task: str, schedule: str, specs: list[WorkerSpec], runs: list[Run]) -> dict[str, Any]:
    """One schedule of one task: the final losses of all seeds, and what it sent."""
    ends = [run.curve[-1][1] for run in runs]
    moved = [run.moved_bytes for run in runs]
    batches = specs[0].samples / specs[0].batch
    # Each worker's float32 gradient and average, every step.
    at_most = 2 * 4 * runs[0].parameters * len(FACTORS) * batches
    return {
        "task": task,
        "model": TASKS[task].model,
        "schedule": schedule,
        "seeds": len(runs),
        "samples": specs[0].samples,
        "learning_rate": specs[0].learning_rate,
        "commits": round(statistics.mean(run.steps for run in runs), 1),
        "bytes_ratio": round(at_most / statistics.mean(moved), 1) if all(moved) else None,
        "loss": round(statistics.mean(ends), 4),
        "losses": [round(end, 5) for end in ends],
        "curves": [[(samples, round(loss, 4)) for samples, loss in run.curve] for run in runs],
    }


def _compared(row: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """The row with how far its losses are from those of one process with the same seeds."""
    pairs = list(zip(row["losses"], alone["losses"], strict=False))  # of the seeds of both
    away = [end - other for end, other in pairs]
    over = [end / other - 1 for end, other in pairs]
    compared = {
        "from_solo": round(statistics.mean(away), 4),
        "from_solo_spread": [round(min(away), 4), round(max(away), 4)],
        "loss_over_synchronous": round(statistics.mean(over), 5),
        "loss_over_synchronous_spread": [round(min(over), 5), round(max(over), 5)],
    }
    return {**row, **compared, "curves": row["curves"]}


def _told(row: dict[str, Any]) -> str:
    low, high = (100 * each for each in row["loss_over_synchronous_spread"])
    fewer = f"  {row['bytes_ratio']:.1f} times fewer bytes" if row["bytes_ratio"] else ""
    return (
        f"{row['task']:14}{row['schedule']:26}loss {row['loss']:.4f}"
        f"  from solo {row['from_solo']:+.4f}"
        f"  {100 * row['loss_over_synchronous']:+.2f} % ({low:+.2f} to {high:+.2f}){fewer}"
    )


def _circumstances() -> dict[str, object]:
    """The conditions of the measurement, apart from the machine."""
    uneven = [name for name, schedule in SCHEDULES.items() if schedule.uneven]
    return {
        "tasks": {name: asdict(training) for name, training in TASKS.items()},
        "flags": {name: " ".join(schedule.flags) for name, schedule in SCHEDULES.items()},
        "notes": [
            f"{len(FACTORS)} workers, one thread each; work a sample under {', '.join(uneven)}: "
            f"{FACTORS}",
            "AdamW unless the name says muon, gradients clipped to a norm of 1",
            "*-long: each schedule has its best learning rate of a grid of factors of 2",
            "gpt: the GPT of examples/shakespeare.py with 2 layers of width 64",
            "fragments: of the gpt alone; the cnn's layers are one block",
            "cnn: 2 convolutions with BatchNorm and a linear layer",
            "bytes_ratio: those of float32 gradients and averages every step, over those sent, "
            "without the state in which workers begin",
            "loss_over_synchronous: loss / loss of one process - 1, mean over the seeds; then the "
            "extremes",
            "curves: a list for each seed, of samples and the loss on unseen samples; rank 0's",
        ],
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, help="samples in a batch (default: by task)")
    parser.add_argument("--batches", type=int, help="the samples, in batches (default: by task)")
    parser.add_argument("--tasks", type=chosen_from(TASKS), default=list(TASKS))
    parser.add_argument(
        "--schedules",
        type=chosen_from(SCHEDULES),
        default=list(SCHEDULES),
        help=f"of: {','.join(SCHEDULES)} (default: all)",
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--merge", action="store_true", help="keep the JSON's other rows")
    options = parser.parse_args()
    if min(options.seeds, options.batch or 1, options.batches or 1) < 1:
        parser.error("--seeds, --batch and --batches must be at least 1")
    if options.merge and not (options.json and options.json.exists()):
        parser.error("--merge needs --json with a file that exists")
    return options


if __name__ == "__main__":
    main()
