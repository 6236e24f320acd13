"""How much of its speed does a line with stragglers use, if windows wait for all, or for a quorum?

Three workers get equal shares of the processors. One takes three times as long for each sample, and
another stands still for 5 s in every minute. Each schedule trains on the same number of samples, on
a line of its own. The *ideal* is the sum of the throughputs that the same three processes reach at
the same time, each alone, without any exchange, just before and just after the line; that of the
worker that stands still is what it reaches in the time in which it does not. A machine whose speed
drifts moves this figure. *Computing* compares processor time instead: how much of it the training
threads spent on batches in a second of the line, over a second of each alone.

    python benchmarks/stragglers.py --json benchmarks/results/stragglers.json
    python benchmarks/stragglers.py --schedules local,quorum --windows 20 --each-s 12 --stall-s 1
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cpu_share import NoShares, equal_shares
from crew import Crew, Hand, Load, Seen
from machine import describe_machine
from schedules import chosen_from, write_rows
from service import serving

SLOW = 3.0
"""How many times longer the slow worker takes for a sample."""
_LOCAL = ("--schedule", "local", "--local-steps")
_QUORUM, _ANY = ("--quorum", "0.6"), ("--quorum", "0.3")
SCHEDULES: dict[str, tuple[str, ...]] = {
    "local": _LOCAL,
    "local-balanced": ("--shares", "balanced", *_LOCAL),
    "quorum": (*_QUORUM, *_LOCAL),
    "quorum-balanced": (*_QUORUM, "--shares", "balanced", *_LOCAL),
    "quorum-of-one": (*_ANY, *_LOCAL),
    "quorum-of-one-balanced": (*_ANY, "--shares", "balanced", *_LOCAL),
    "async": ("--schedule", "async", "--local-steps"),
}
"""The schedules' flags of `andon serve`; the number of local steps follows."""


def main() -> int:
    """Measures, and prints a row for each schedule."""
    options = _arguments()
    machine = describe_machine()
    workers = 3
    samples = options.windows * options.local_steps * options.batch * workers
    load = Load(
        workers=workers,
        layers=options.layers,
        width=options.width,
        context=options.context,
        batch=options.batch,
        samples=samples,
    )
    stall = (options.stall_s, options.each_s)
    try:
        with equal_shares(workers, options.cores) as (shares, service, how):
            hands = [
                Hand(share=shares[0]),
                Hand(share=shares[1], stall=stall),
                Hand(share=shares[2], factors=(SLOW, SLOW)),
            ]
            runs: dict[str, list[Seen]] = {name: [] for name in options.schedules}
            with Crew(hands) as crew:
                for _ in range(options.repeats):
                    for name in options.schedules:
                        flags = (*SCHEDULES[name], str(options.local_steps))
                        with (
                            TemporaryDirectory() as folder,
                            serving(Path(folder), workers, flags) as served,
                        ):
                            service.enter(served.pid)
                            seen = crew.work(load, served.address, served.run_id, options.phase_s)
                        runs[name].append(seen)
                        text = f"{name}: {_of_ideal(seen, samples):.3f}"
                        text += f", computing {seen.computing():.3f}"
                        print(text, file=sys.stderr, flush=True)
    except NoShares as error:
        print(f"stragglers.py: {error}", file=sys.stderr)
        return 1
    rows = [_row(name, seen, samples) for name, seen in runs.items()]
    for row in rows:
        low, high = row["spread"]
        print(
            f"{row['schedule']:16}{row['seconds']:9.2f} s  of ideal {row['of_ideal']:.3f}", end=""
        )
        print(f"  {low:.3f} to {high:.3f}  computing {row['computing']:.3f}", end="")
        print(f"  {row['records']} records")
    if options.json:
        write_rows(options.json, {**machine, **_circumstances(options, load, how)}, rows)
    return 0


def _of_ideal(seen: Seen, samples: int) -> float:
    return seen.ideal_s(samples) / seen.windows[-1].ended_s


def _row(schedule: str, runs: Sequence[Seen], samples: int) -> dict[str, Any]:
    """Medians over the repetitions."""
    parts = sorted(_of_ideal(each, samples) for each in runs)
    return {
        "schedule": schedule,
        "seconds": round(statistics.median(each.windows[-1].ended_s for each in runs), 3),
        "of_ideal": round(statistics.median(parts), 4),
        "spread": [round(parts[0], 4), round(parts[-1], 4)],
        "computing": round(statistics.median(each.computing() for each in runs), 4),
        "repeats": len(runs),
        "records": len(runs[0].windows),
    }


def _circumstances(options: argparse.Namespace, load: Load, how: str) -> dict[str, object]:
    """The conditions of the measurement, apart from the machine."""
    return {
        "load_after": round(os.getloadavg()[0], 2),
        "repeats": options.repeats,
        "samples": load.samples,
        "batch": load.batch * load.workers,
        "local_steps": options.local_steps,
        "model": {"layers": load.layers, "width": load.width, "context": load.context},
        "flags": {name: SCHEDULES[name] for name in options.schedules},
        "notes": [
            f"{load.workers} workers with equal shares of the processors: {how}",
            f"one takes {SLOW:g} times as long for a sample, another stands still for "
            f"{options.stall_s:g} s in every {options.each_s:g} s",
            "seconds run from the first batch to the last commit; of_ideal is over them the time "
            "that the same processes would have taken, each alone, just before and just after",
            "computing: the processor time that the training threads spent on batches in a second, "
            "without what exchanges, over what they spend alone; the time of stalls is left out",
        ],
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--windows", type=int, default=120, help="the samples, in whole windows")
    parser.add_argument("--local-steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32, help="a worker's part of a local step")
    parser.add_argument("--stall-s", type=float, default=5.0, help="how long one stands still")
    parser.add_argument("--each-s", type=float, default=60.0, help="in every so many seconds")
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
    if options.stall_s >= options.each_s:
        parser.error("--stall-s must be below --each-s")
    return options


if __name__ == "__main__":
    sys.exit(main())
