"""How much of uneven workers' speed does each schedule use?

Three workers get equal shares of the processors. Extra work (not sleep) makes one of them three
times as slow and another 1.5 times. Half-way through the samples the slow one and the fast one
swap. Each schedule trains on the same number of samples, on a line of its own. The *ideal* is the
sum of the throughputs that the same three processes reach at the same time, each alone, without any
exchange: just before and just after the line, since the machine's own speed drifts. Time runs from
the first batch to the last commit, so it includes what a schedule needs to learn the speeds, and to
learn them again after the swap.

    python benchmarks/uneven.py --json benchmarks/results/uneven.json
    python benchmarks/uneven.py --schedules equal,balanced --batches 60 --repeats 1
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cpu_share import CpuShare, NoShares, equal_shares
from crew import Crew, Hand, Load, Seen
from machine import describe_machine
from schedules import chosen_from, write_rows
from service import serving

FACTORS = ((1.0, 3.0), (1.5, 1.5), (3.0, 1.0))
"""Each worker's work a sample, before and after the swap."""
_LOCAL = ("--schedule", "local", "--local-steps", "8", "--shares", "balanced")
SCHEDULES: dict[str, tuple[str, ...]] = {
    "equal": ("--schedule", "every-step"),
    "balanced": ("--schedule", "every-step", "--shares", "balanced"),
    "cadence": ("--schedule", "cadence"),
    "local-8": _LOCAL,
    "local-8-overlap": (*_LOCAL, "--overlap"),
}
"""The schedules' flags of `andon serve`."""
SELDOM = {"equal": 2}
"""What varies little and takes twice as long as the others is not repeated more often than this."""
SETTLING = (5, 8)
"""Windows at the beginning, and after the swap, in which a schedule may learn the speeds."""


def main() -> int:
    """Measures, and prints a row for each schedule."""
    options = _arguments()
    machine = describe_machine()
    load = Load(
        workers=len(FACTORS),
        layers=options.layers,
        width=options.width,
        context=options.context,
        batch=options.batch,
        samples=options.batches * options.batch * len(FACTORS),
    )
    try:
        with equal_shares(len(FACTORS), options.cores) as (shares, service, how):
            hands = [
                Hand(share=share, factors=factors)
                for share, factors in zip(shares, FACTORS, strict=True)
            ]
            with Crew(hands) as crew:
                bench = Bench(load=load, crew=crew, service=service, phase_s=options.phase_s)
                runs = []
                for number in range(options.repeats):
                    seldom = [name for name, most in SELDOM.items() if number >= most]
                    due = [name for name in options.schedules if name not in seldom]
                    runs.append(bench.train(due))
    except NoShares as error:
        print(f"uneven.py: {error}", file=sys.stderr)
        return 1
    rows = [_row(name, runs, load.samples) for name in options.schedules]
    rows.insert(0, _ideal_row(runs, load.samples))
    for row in rows:
        print(
            f"{row['schedule']:16}{row['seconds']:9.2f} s  of ideal {row['of_ideal']:.3f}", end=""
        )
        print(f"  {row['spread'][0]:.3f} to {row['spread'][1]:.3f}", end="")
        print(f"  settled {row['settled']:.3f}")
    if options.json:
        circumstances = _circumstances(options, load, how)
        write_rows(options.json, {**machine, **circumstances}, rows)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Runs the schedules, with the same workers under the same shares."""

    load: Load
    crew: Crew
    service: CpuShare
    phase_s: float
    """How long a phase alone lasts: two before the line, and two after it."""

    def train(self, schedules: Sequence[str]) -> dict[str, Seen]:
        """Trains once under each schedule."""
        runs = {}
        for name in schedules:
            seen = runs[name] = self._train_once(SCHEDULES[name])
            part = seen.ideal_s(self.load.samples) / seen.windows[-1].ended_s
            print(f"{name}: {part:.3f} of the ideal", file=sys.stderr, flush=True)
        return runs

    def _train_once(self, flags: Sequence[str]) -> Seen:
        workers = self.load.workers
        with TemporaryDirectory() as folder, serving(Path(folder), workers, flags) as served:
            self.service.enter(served.pid)
            return self.crew.work(self.load, served.address, served.run_id, self.phase_s)


# The figures


def _settled(seen: Seen, total: int) -> float:
    """As `of_ideal`, without the first windows and those after the swap; 0 if none is left."""
    ideal_s = seconds = 0.0
    done, after = sum(seen.windows[0].samples), 0
    for number, (last, window) in enumerate(pairwise(seen.windows), 1):
        samples = sum(window.samples)
        swapped = done + samples > total // 2
        after += swapped
        if after > SETTLING[1] if swapped else number >= SETTLING[0]:
            seconds += window.ended_s - last.ended_s
            ideal_s += samples / seen.rates[swapped]
        done += samples
    return ideal_s / seconds if seconds else 0.0


def _ideal_row(runs: Sequence[Mapping[str, Seen]], samples: int) -> dict[str, Any]:
    """The ideal itself, in the form of a schedule's row."""
    seconds = [seen.ideal_s(samples) for run in runs for seen in run.values()]
    middle = statistics.median(seconds)
    return {
        "schedule": "ideal",
        "seconds": round(middle, 3),
        "of_ideal": 1.0,
        "spread": [round(middle / max(seconds), 4), round(middle / min(seconds), 4)],
        "settled": 1.0,
    }


def _row(schedule: str, runs: Sequence[Mapping[str, Seen]], samples: int) -> dict[str, Any]:
    """Medians over the repetitions; the windows are those of the median run."""
    seen = sorted(
        (run[schedule] for run in runs if schedule in run),
        key=lambda each: _of_ideal(each, samples),
    )
    parts = [_of_ideal(each, samples) for each in seen]
    return {
        "schedule": schedule,
        "seconds": round(statistics.median(each.windows[-1].ended_s for each in seen), 3),
        "of_ideal": round(statistics.median(parts), 4),
        "spread": [round(parts[0], 4), round(parts[-1], 4)],
        "repeats": len(seen),
        "settled": round(statistics.median(_settled(each, samples) for each in seen), 4),
        "windows": [
            {
                "ended_s": window.ended_s,
                "samples": window.samples,
                "micro_batches": window.micro_batches,
            }
            for window in seen[len(seen) // 2].windows
        ],
    }


def _of_ideal(seen: Seen, samples: int) -> float:
    return seen.ideal_s(samples) / seen.windows[-1].ended_s


def _circumstances(options: argparse.Namespace, load: Load, how: str) -> dict[str, object]:
    """The conditions of the measurement, apart from the machine."""
    return {
        "load_after": round(os.getloadavg()[0], 2),
        "repeats": options.repeats,
        "samples": load.samples,
        "batch": load.batch * load.workers,
        "model": {"layers": load.layers, "width": load.width, "context": load.context},
        "flags": {name: SCHEDULES[name] for name in options.schedules},
        "settling_windows": SETTLING,
        "notes": [
            f"{load.workers} workers with equal shares of the processors: {how}",
            f"work a sample, before and after the swap: {FACTORS}",
            "the service is outside the shares; a worker's communication is inside its own",
            "seconds run from the first batch to the last commit; of_ideal is over them the time "
            "that the same processes would have taken, each alone, just before and just after",
            "settled leaves out the first windows and those after the swap",
        ],
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", type=int, default=240, help="the samples, in whole batches")
    parser.add_argument("--batch", type=int, default=32, help="a worker's part of a batch")
    parser.add_argument("--cores", type=float, default=0.5, help="a worker's part of a core")
    parser.add_argument(
        "--phase-s", type=float, default=5, help="a phase alone: two before, two after"
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--context", type=int, default=128, help="letters of a sample")
    parser.add_argument(
        "--schedules",
        type=chosen_from(SCHEDULES),
        default=list(SCHEDULES),
        help=f"of: {','.join(SCHEDULES)} (default: all)",
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    for name in ("repeats", "batches", "batch", "cores", "phase_s", "layers", "width", "context"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    return options


if __name__ == "__main__":
    sys.exit(main())
