"""How long does a line stop when a process dies, and what does the protection cost when none does?

It uses real processes and real signals: a service and three protocol workers, which use the
trainer's own code on the line and train a made-up model without PyTorch (tests/chaos/worker.py). A
worker runs up to a point of a step and is killed there. The time ends when every survivor has moved
its weights for the next commit. It has four parts: detection, reassignment, recomputation and
commit.

    python benchmarks/recovery.py --repeats 20 --json benchmarks/results/recovery.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # where the workers are

from machine import describe_machine
from recovery_faults import Recovery, kill_coordinator, kill_worker, rejoin, stop_worker

from chaos.model import Task
from chaos.rig import ChaosLine, chaos_line, events_of

PACE_S = 0.005
"""Compute time of one position: with four for each worker, a step takes about 25 ms."""
MIB = 2**18
"""Elements of float32 in a MiB."""
TAX_MIB, TAX_STEPS = 4, 40
_PATIENCE_S = 300.0
TAXED = {
    "plain": ("--digest-every", "0", "--journal-sync", "normal"),
    "digests": ("--digest-every", "1", "--journal-sync", "normal"),
    "journal_full": ("--digest-every", "0", "--journal-sync", "full"),
    "digests_and_journal_full": ("--digest-every", "1", "--journal-sync", "full"),
}
"""Options that cost time in each step. With all of them, a record survives a kill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The parsed arguments."""

    repeats: int
    liveness_s: float
    seed: int


def main() -> None:
    """Measures the requested figures, and prints a line for each."""
    arguments = _arguments()
    options = Options(repeats=arguments.repeats, liveness_s=arguments.liveness, seed=arguments.seed)
    figures: dict[str, Any] = {"machine": {**describe_machine(), **_circumstances(options)}}
    for name in arguments.only or MEASURES:
        figures[name] = MEASURES[name](options)
        print(f"{name}\n{_described(figures[name])}", flush=True)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure_sigkill(options: Options) -> dict[str, Any]:
    """From SIGKILL of one of three workers to the survivors' next commit."""
    return _measure_faults(options, kill_worker)


def measure_sigstop(options: Options) -> dict[str, Any]:
    """SIGSTOP of one of three workers: it is silent until its lease expires."""
    return _measure_faults(options, stop_worker)


def measure_coordinator(options: Options) -> dict[str, Any]:
    """SIGKILL of the service; another is started on its journal at once."""
    return _measure_faults(options, kill_coordinator)


def measure_join(options: Options) -> dict[str, Any]:
    """From a worker's Join on a line of two with a model of 100 MB, to its first step."""
    task = Task(blocks=_blocks(25_000_000), batch=3, dataset=300)
    with _line(options, "--digest-every", "100", task=task) as line:
        line.await_step(1)
        return _summary(rejoin(line, 2) for _ in range(options.repeats))


def measure_tax(options: Options) -> dict[str, Any]:
    """Seconds per step without faults: with and without digests and journal sync, alternately."""
    task = Task(blocks=_blocks(TAX_MIB * MIB), batch=3, dataset=300, steps=TAX_STEPS)
    seconds: dict[str, list[float]] = {name: [] for name in TAXED}
    for _ in range(options.repeats):
        for name, flags in TAXED.items():
            with _line(options, *flags, task=task, pace_s=0.0) as line:
                line.await_end()
                seconds[name].append(_step_s(line))
    plain = statistics.median(seconds["plain"])
    return {
        name: {
            "step_s": round(statistics.median(times), 6),
            "worst_s": round(max(times), 6),
            "ratio": round(statistics.median(times) / plain, 4),
        }
        for name, times in seconds.items()
    }


MEASURES: dict[str, Callable[[Options], dict[str, Any]]] = {
    "sigkill_to_commit_s": measure_sigkill,
    "sigstop_to_commit_s": measure_sigstop,
    "join_to_first_contribution_s": measure_join,
    "coordinator_kill_to_commit_s": measure_coordinator,
    "tax_when_nothing_fails": measure_tax,
}


@contextmanager
def _line(
    options: Options, *flags: str, task: Task | None = None, pace_s: float = PACE_S
) -> Iterator[ChaosLine]:
    """A line of three workers, in a temporary folder."""
    lease = ("--liveness", str(options.liveness_s))
    with (
        TemporaryDirectory() as folder,
        chaos_line(
            Path(folder),
            3,
            *lease,
            *flags,
            task=task,
            pace_s=pace_s,
            patience_s=_PATIENCE_S,
            measured=True,
        ) as line,
    ):
        yield line


def _measure_faults(
    options: Options, fault: Callable[[ChaosLine, random.Random], Recovery]
) -> dict[str, Any]:
    chance = random.Random(options.seed)
    with _line(options) as line:
        line.await_step(5)
        return _summary(fault(line, chance) for _ in range(options.repeats))


def _summary(recoveries: Iterable[Recovery]) -> dict[str, Any]:
    """Median and maximum of the total and of each part, and all repeats."""
    repeats = [recovery.parts for recovery in recoveries]
    return {
        part: {
            "median": round(statistics.median(each[part] for each in repeats), 6),
            "worst": round(max(each[part] for each in repeats), 6),
        }
        for part in repeats[0]
    } | {"repeats": [{part: round(s, 6) for part, s in each.items()} for each in repeats]}


def _step_s(line: ChaosLine) -> float:
    """The median time between two commits of a worker, after the first ten."""
    applied = [
        event["at"] for event in events_of(line.workers[0].log) if event["event"] == "applied"
    ][10:]
    steps: list[float] = [after - before for before, after in pairwise(applied)]
    return statistics.median(steps)


def _blocks(elements: int) -> tuple[int, ...]:
    """Blocks of 4 MiB, as benchmarks/exchange.py has them."""
    return tuple(min(4 * MIB, elements - at) for at in range(0, elements, 4 * MIB))


def _circumstances(options: Options) -> dict[str, object]:
    """The conditions of the measurement, apart from the machine."""
    return {
        "repeats": options.repeats,
        "liveness_s": options.liveness_s,
        "seed": options.seed,
        "notes": [
            "3 protocol workers without PyTorch on the host of the service, over loopback",
            f"a position pretends to take {PACE_S * 1e3:g} ms: a step is some 25 ms",
            "a kill comes before the step's averages, at a point that the seed draws",
            "the service that replaces a killed one is started at once, as a supervisor would",
        ],
    }


def _described(figure: dict[str, Any]) -> str:
    rows = []
    for part, values in figure.items():
        if isinstance(values, dict):
            numbers = "  ".join(f"{name} {value:8.4f}" for name, value in values.items())
            rows.append(f"  {part:28}{numbers}")
    return "\n".join(rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=10, help="of each (default: 10)")
    parser.add_argument("--liveness", type=float, default=3.0, help="the lease in seconds")
    parser.add_argument("--seed", type=int, default=1, help="of where workers are struck")
    parser.add_argument("--only", nargs="+", choices=MEASURES, help="some of the figures")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1, not {options.repeats}")
    return options


if __name__ == "__main__":
    main()
