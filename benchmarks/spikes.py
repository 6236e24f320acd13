"""Does a line deal with spikes by itself, rightly, and at what cost in loss?

Three workers train a small GPT on the demo's text and a CNN on digits under noise, with
`--on-spike skip` and nothing else set. Into one run spikes are planted: bad batches, whose loss and
gradients are large on all workers; wrong learning data of one worker; a scale error in one block of
one worker's gradients. Each batch is planted or not by its positions, so what the line does about
it can be told from the journal: the averaged gradient is limited in just the bad batches, and the
samples of just the others are left out. The same run without anything planted says what it costs;
and so that it says more than chance, the learning rate falls to nothing towards the end, as it does
where somebody wants a good model, and there are several seeds. A third run has nothing planted and
never gets the samples that the line should leave out: its loss is that of faultless decisions.
*As many* runs have more batches by as many as are left out: they train as many samples as the run
without spikes, as somebody does who trains for a number of samples, so they show what the spikes
themselves cost. Other runs without anything planted must have no intervention at all.

Further runs have one fault of one worker that lasts from some batch on, with `--on-spike drop`:
wrong labels, gradients that grow by 3 % of themselves with each batch, a small block whose gradient
is three times too large. The line should send just that worker away.

Others have their weights ruined in the middle, on all workers alike, with `--on-spike back` and
checkpoints: no batch is at fault, and none helps. The line should go back once, leave out what was
trained since, and end where the same run without that ends.

    python benchmarks/spikes.py --json benchmarks/results/spikes.json
    python benchmarks/spikes.py --tasks digits --batches 300 --planted 6 --clean 1
"""

from __future__ import annotations

import argparse
import enum
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Self

from machine import describe_machine
from schedules import write_rows
from service import serving

from andon_coordinator.core.run_events import RunEventKind
from andon_coordinator.transport.step_reader import StepReader

__all__ = ["LASTING", "LOUD", "SpikeKind", "SpikeSpec"]

LOUD = 30.0
"""How many times the usual a planted loss is."""
_WORKERS = 3
_CALM = 70
"""So many batches at the beginning have nothing: the line must learn what is usual."""
_FLAGS = ("--on-spike", "skip")
_TASKS = {"letters-64": 3e-3, "noisy-digits": 3e-3}
"""The tasks, and their learning rates."""


class SpikeKind(enum.Enum):
    """What is planted, and what the line should do: limit it, or leave the samples out."""

    BATCH = "batch"
    DATA = "data"
    BLOCK = "block"
    # These last from their batch on.
    LABELS = "labels"
    GROWS = "grows"
    SMALL_BLOCK = "small-block"
    # The weights themselves, on all workers: the line should go back.
    RUIN = "ruin"


LASTING = (SpikeKind.LABELS, SpikeKind.GROWS, SpikeKind.SMALL_BLOCK)
_WHOLE = ("noisy-digits",)
"""Models that travel as one block: none of it can be told from the rest."""


Plan = tuple[tuple[int, str, int], ...]
"""Batches, what is planted there, and in which rank; -1: in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeSpec:
    """The parameters of one worker process."""

    task: str
    seed: int
    batch: int
    batches: int
    learning_rate: float
    decays_over: int = 0
    """The steps in which the learning rate falls to 0, along a cosine; 0: it stays as it is."""
    left_out: tuple[int, ...] = ()
    """Batches that the data does not have."""
    planted: Plan = ()
    address: str = ""
    run_id: str = ""
    run_dir: str = ""
    checkpoint_every: int = 0

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what the benchmark wrote."""
        fields = json.loads(text)
        left_out, planted = tuple(fields["left_out"]), tuple(map(tuple, fields["planted"]))
        return cls(**{**fields, "left_out": left_out, "planted": planted})


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one run."""

    loss: float
    """On samples that nobody trained on."""
    limited: tuple[int, ...]
    """The batches whose gradient was scaled down."""
    skipped: tuple[int, ...]
    """The batches that were left out."""
    halts: int
    decisions: int
    dropped: tuple[tuple[int, int], ...]
    """The workers that were sent away, and in which steps."""
    back: tuple[int, ...]
    """The steps to which the line went back."""
    ledger_faults: int


def main() -> None:
    """Trains, and prints a row for each task."""
    options = _arguments()
    machine = describe_machine()
    facts = {"workers": _WORKERS, "batch": options.batch, "flags": list(_FLAGS), "loud": LOUD}
    rows: list[dict[str, Any]] = []
    for task in options.tasks:
        spec = SpikeSpec(
            task=task,
            seed=1,
            batch=options.batch,
            batches=options.batches,
            learning_rate=_TASKS[task],
        )
        lasting = replace(spec, batches=options.lasting_batches)
        clean = replace(spec, batches=options.clean_batches)
        parts = {
            "planted": partial(_planted, spec, options.planted, options.seeds),
            "as-many": partial(_as_many, spec, options.planted, options.seeds),
            "clean": partial(_clean, clean, options.clean),
            "lasting": partial(_lasting, lasting, options.lasting),
            "ruined": partial(_ruined, lasting, options.ruined),
        }
        for part in options.parts:
            rows.append(parts[part]())
            print(json.dumps(rows[-1]), flush=True)
            if options.json:  # After each: all of them take most of an hour.
                write_rows(options.json, {**machine, **facts}, rows)


def _planted(spec: SpikeSpec, count: int, seeds: int) -> dict[str, Any]:
    """Runs with spikes, each beside the same without any, and beside the best possible one."""
    runs = [_beside_each_other(replace(spec, seed=seed), count) for seed in range(1, seeds + 1)]
    best = fmean(run["loss_best"] / run["loss_without"] - 1 for run in runs)
    return {**_together(spec, "planted", runs), "relative_best": best}


def _as_many(spec: SpikeSpec, count: int, seeds: int) -> dict[str, Any]:
    """Runs with spikes, each beside the same without any that trains as many samples."""
    runs = []
    for seed in range(1, seeds + 1):
        calm = replace(spec, seed=seed, decays_over=spec.batches)
        planted = _plan(calm, count)
        longer = replace(calm, batches=spec.batches + len(_left_out(planted)), planted=planted)
        runs.append(_judged(longer, _run(calm), _run(longer)))
        print(json.dumps(runs[-1]), flush=True)
    return _together(spec, "as-many", runs)


def _together(spec: SpikeSpec, what: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of some runs with spikes, a seed each."""
    return {
        "task": spec.task,
        "what": what,
        "batches": spec.batches,
        "seeds": len(runs),
        **{name: sum(run[name] for run in runs) for name in _COUNTED},
        "relative": fmean(run["loss"] / run["loss_without"] - 1 for run in runs),
        "runs": runs,
    }


_COUNTED = ("planted", "right", "beside", "halts", "ledger_faults", "interventions_without")
"""What is added up over the seeds."""


def _beside_each_other(spec: SpikeSpec, count: int) -> dict[str, Any]:
    planted = _plan(spec, count)
    others = _left_out(planted)
    calm = _run(replace(spec, decays_over=spec.batches))
    shorter = replace(spec, decays_over=spec.batches - len(others))
    stormy, best = replace(shorter, planted=planted), _run(replace(shorter, left_out=others))
    run = _judged(stormy, calm, _run(stormy))
    run["loss_best"] = best.loss
    run["interventions_without"] += best.decisions + best.halts
    print(json.dumps(run), flush=True)
    return run


def _left_out(planted: Plan) -> tuple[int, ...]:
    """The batches that the line should leave out."""
    return tuple(batch for batch, kind, _ in planted if kind != SpikeKind.BATCH.value)


def _judged(spec: SpikeSpec, calm: Outcome, stormy: Outcome) -> dict[str, Any]:
    """What the line did about the spikes of `spec`, beside a run without any."""
    others = {*_left_out(spec.planted)}
    bad = {batch for batch, *_ in spec.planted} - others
    return {
        "seed": spec.seed,
        "planted": len(spec.planted),
        "right": len(bad & {*stormy.limited}) + len(others & {*stormy.skipped}),
        "beside": len({*stormy.limited} - bad) + len({*stormy.skipped} - others),
        "halts": stormy.halts,
        "loss": stormy.loss,
        "loss_without": calm.loss,
        "ledger_faults": stormy.ledger_faults,
        "interventions_without": calm.decisions + calm.halts,
    }


def _plan(spec: SpikeSpec, count: int) -> Plan:
    """Where what is planted."""
    dice = random.Random(spec.seed)
    room = (spec.batches - _CALM) // count
    if room < 3:
        sys.exit(f"{count} spikes need at least {_CALM + 3 * count} batches: raise --batches")
    kinds = [SpikeKind.BATCH] * (count - 2 * (count // 4))
    kinds += [SpikeKind.DATA, SpikeKind.BLOCK] * (count // 4)
    dice.shuffle(kinds)
    return tuple(
        (
            _CALM + room * at + dice.randrange(room - 1),
            kind.value,
            -1 if kind is SpikeKind.BATCH else dice.randrange(_WORKERS),
        )
        for at, kind in enumerate(kinds)
    )


def _clean(spec: SpikeSpec, runs: int) -> dict[str, Any]:
    """Runs without anything planted."""
    seen = [_run(replace(spec, seed=seed)) for seed in range(1, runs + 1)]
    return {
        "task": spec.task,
        "what": "clean",
        "batches": spec.batches,
        "runs": runs,
        "interventions": sum(each.decisions + each.halts for each in seen),
    }


def _lasting(spec: SpikeSpec, runs: int) -> dict[str, Any]:
    """Runs with a fault of one worker that lasts."""
    right, delays, others = 0, list[int](), 0
    kinds = LASTING[:-1] if spec.task in _WHOLE else LASTING
    for seed in range(runs):
        begins, kind = spec.batches // 2, kinds[seed % len(kinds)]
        planted = ((begins, kind.value, seed % _WORKERS),)
        seen = _run(
            replace(spec, seed=1 + seed, planted=planted),
            ("--on-spike", "drop", "--min-workers", str(_WORKERS - 1)),
        )
        found = [step - begins for worker, step in seen.dropped if worker == seed % _WORKERS]
        right += bool(found) and found[0] > 0
        delays += found
        others += seen.decisions + seen.halts - len(found)
    return {
        "task": spec.task,
        "what": "lasting",
        "batches": spec.batches,
        "runs": runs,
        "right": right,
        "beside": others,
        "found_after": sorted(delays),
    }


def _ruined(spec: SpikeSpec, runs: int) -> dict[str, Any]:
    """Runs whose weights are ruined once, each beside the same run in which they are not."""
    right, beside, faults, relative = 0, 0, 0, list[float]()
    every = 20
    for seed in range(1, runs + 1):
        # Anywhere between two checkpoints.
        at = spec.batches // 2 + 7 * seed % every
        kept = replace(spec, seed=seed, checkpoint_every=every)
        calm = _run(kept, ("--on-spike", "back"))
        planted = ((at, SpikeKind.RUIN.value, -1),)
        seen = _run(replace(kept, planted=planted), ("--on-spike", "back"))
        right += len(seen.back) == 1 and at - every - 1 <= seen.back[0] <= at
        beside += calm.decisions + calm.halts + seen.halts + max(0, len(seen.back) - 1)
        faults += seen.ledger_faults
        relative.append(seen.loss / calm.loss - 1)
    return {
        "task": spec.task,
        "what": "ruined",
        "batches": spec.batches,
        "checkpoint_every": every,
        "runs": runs,
        "right": right,
        "beside": beside,
        "ledger_faults": faults,
        "relative": relative,
    }


def _run(spec: SpikeSpec, flags: Sequence[str] = _FLAGS) -> Outcome:
    """Trains on a line of its own."""
    worker = str(Path(__file__).with_name("spikes_worker.py"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ANDON_ON_HALT": "raise"}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        service = stack.enter_context(serving(Path(folder), _WORKERS, flags))
        here = replace(spec, address=service.address, run_id=service.run_id)
        if spec.checkpoint_every:
            here = replace(here, run_dir=str(Path(folder) / "run"))
        told = json.dumps(asdict(here))
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, worker],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
            )
            for _ in range(_WORKERS)
        ]
        answers = [_answer(process, told) for process in _all_begin(processes, told)]
        with StepReader(Path(folder) / "run" / "journal.sqlite") as journal:
            results = journal.results()
            events = journal.run_events()
            return Outcome(
                loss=next((each["loss"] for each in answers if "loss" in each), math.nan),
                limited=tuple(
                    each.batch.start // spec.batch for each in results if each.gradient_scale < 1
                ),
                skipped=tuple(each.positions.start // spec.batch for each in journal.skips()),
                halts=len(journal.halts()),
                decisions=sum(each.kind is RunEventKind.SPIKE for each in events),
                dropped=tuple(
                    (each.worker, each.step or 0)
                    for each in events
                    if each.kind is RunEventKind.SPIKE
                    and each.text.startswith("drop:")
                    and each.worker is not None
                ),
                back=tuple(
                    each.step or 0 for each in events if each.kind is RunEventKind.WENT_BACK
                ),
                ledger_faults=len(journal.ledger_faults()),
            )


def _all_begin(
    processes: Sequence[subprocess.Popen[str]], told: str
) -> Sequence[subprocess.Popen[str]]:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(told + "\n")
        process.stdin.close()
    return processes


def _answer(process: subprocess.Popen[str], told: str) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a worker failed: {told}")
    answer: dict[str, Any] = json.loads(line)
    return answer


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=list(_TASKS))
    parser.add_argument(
        "--parts",
        type=lambda text: text.split(","),
        default=["planted", "as-many", "clean", "lasting", "ruined"],
    )
    parser.add_argument("--batch", type=int, default=48, help="samples of a batch")
    parser.add_argument("--batches", type=int, default=1800, help="of the run with spikes")
    parser.add_argument("--planted", type=int, default=50, help="spikes of each task")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each task with spikes")
    parser.add_argument("--clean", type=int, default=10, help="runs of each task without spikes")
    parser.add_argument("--clean-batches", type=int, default=200)
    parser.add_argument("--lasting", type=int, default=6, help="runs of each with a lasting fault")
    parser.add_argument("--lasting-batches", type=int, default=260)
    parser.add_argument("--ruined", type=int, default=3, help="runs of each with ruined weights")
    parser.add_argument("--json", type=Path, help="write machine and rows to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
