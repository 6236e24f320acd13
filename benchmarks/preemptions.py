"""What does a line keep of its speed on spot machines that go with and without notice?

Four small workers, whose computing is a timed wait, train on one host while a trace of preemptions
is played: with notice (SIGTERM, and the worker leaves in order) and without (SIGKILL). Traces are
made from a stated distribution, and are the same for both: exponential times between preemptions;
after each one, every other machine goes shortly after it with some probability (a burst);
log-normal times until the replacement. The time of the trace is shortened, so preemptions come far
more often for each step than on a cloud; a run without any says what the line itself costs here.

The *ideal* is what the machines that are there could compute, each at its own rate, without a line.
A preemption that would leave no worker is left out: then a run goes back to its checkpoint.

What a preemption costs depends on the length of a step, and not on the time between two: a
newcomer computes after one step and a half on average, since it hears rounds from the next one on,
gets its state in that, and is on the roster of the one after. So each row says what a preemption
costs: the time of one machine, beyond what a run without any loses.

    python benchmarks/preemptions.py --json benchmarks/results/preemptions.json
    python benchmarks/preemptions.py --seconds 20
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from local_run import commits_in, until
from machine import describe_machine
from schedules import write_rows
from service import Service, serving

from andon_coordinator.core.run_events import RunEventKind
from andon_coordinator.transport.reader import JournalReader

_WORKER = Path(__file__).with_name("preemptions_worker.py")
_WORKERS = 4
_SIGMA = 0.5
"""Of the logarithm of the time until a replacement comes."""
_BURST_S = 0.5
"""The mean time after which the others of a burst go."""
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, order=True)
class Preemption:
    """One machine goes, and another one takes its place."""

    at_s: float
    slot: int
    back_s: float


def trace_of(seed: int, options: argparse.Namespace) -> list[Preemption]:
    """The preemptions of a run, in order; at least one worker is there at any time."""
    drawn = random.Random(seed)
    wanted: list[Preemption] = []
    at = drawn.expovariate(1 / options.between_s)
    while at < options.seconds:
        first = drawn.randrange(_WORKERS)
        others = [each for each in range(_WORKERS) if each != first]
        gone = [(at, first)] + [
            (at + drawn.expovariate(1 / _BURST_S), each)
            for each in others
            if drawn.random() < options.burst
        ]
        for when, slot in gone:
            away = drawn.lognormvariate(math.log(options.replaced_s), _SIGMA)
            wanted.append(Preemption(when, slot, when + away))
        at += drawn.expovariate(1 / options.between_s)
    kept: list[Preemption] = []
    for each in sorted(wanted):
        away_now = {one.slot for one in kept if one.at_s <= each.at_s < one.back_s}
        if each.slot not in away_now and len(away_now) < _WORKERS - 1:
            kept.append(each)
    return kept


class Fleet:
    """The machines: processes that have loaded everything and wait until theirs is there."""

    def __init__(self, folder: Path, service: Service, options: argparse.Namespace) -> None:
        """Starts nothing yet."""
        self._folder, self._service, self._options = folder, service, options
        self._processes: list[subprocess.Popen[str]] = []
        self.there: list[list[float]] = []
        """Of each machine that came: since when, and until when it was there."""
        self._slots: dict[int, int] = {}

    def prepare(self) -> subprocess.Popen[str]:
        """A process that loads everything and waits."""
        number = len(self._processes)
        spec = {
            "address": self._service.address,
            "run_id": self._service.run_id,
            "batch": self._options.batch,
            "sample_s": self._options.sample_s,
            "counted": str(self._folder / f"computed-{number}"),
        }
        with (self._folder / f"worker-{number}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, str(_WORKER), json.dumps(spec)],
                stdin=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._processes.append(process)
        return process

    def bring(self, slot: int, process: subprocess.Popen[str]) -> None:
        """The machine of a slot is there."""
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        self._slots[slot] = self._processes.index(process)
        while len(self.there) <= self._slots[slot]:
            self.there.append([math.inf, math.inf])
        self.there[self._slots[slot]][0] = time.time()

    def take(self, slot: int, how: signal.Signals) -> None:
        """The machine of a slot goes."""
        number = self._slots[slot]
        self.there[number][1] = time.time()
        self._processes[number].send_signal(how)

    def computed(self) -> int:
        """The samples that all have computed."""
        return sum(path.stat().st_size for path in self._folder.glob("computed-*"))

    def end(self, *, patience_s: float = 0.0) -> list[int]:
        """Waits for all, and ends what is left; returns the exit codes."""
        until = time.monotonic() + patience_s
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return [process.returncode for process in self._processes]


def _play(
    trace: Sequence[Preemption], how: signal.Signals, options: argparse.Namespace
) -> dict[str, Any]:
    """Trains under a trace; returns the figures."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        flags = ("--price-per-hour", "1", "--shares", "balanced")
        service = stack.enter_context(serving(folder, _WORKERS, flags))
        fleet = Fleet(folder, service, options)
        stack.callback(fleet.end)
        for slot, process in enumerate([fleet.prepare() for _ in range(_WORKERS)]):
            fleet.bring(slot, process)
        journal = folder / "run" / "journal.sqlite"
        until(lambda: len(commits_in(journal)) >= 3, _PATIENCE_S)
        _follow(fleet, trace, how, options.seconds)
        drain = ["-m", "andon_cli", "drain", "--address", service.address]
        subprocess.run([sys.executable, *drain], check=True, capture_output=True)
        codes = fleet.end(patience_s=_PATIENCE_S)
        return _figures(journal, fleet, options) | {"exit_codes": sorted(set(codes))}


def _follow(fleet: Fleet, trace: Sequence[Preemption], how: signal.Signals, seconds: float) -> None:
    """Plays a trace in real time."""
    began = time.monotonic()
    due = [(each.at_s, each.slot, "goes") for each in trace]
    due += [(each.back_s, each.slot, "comes") for each in trace if each.back_s < seconds]
    waiting: dict[int, subprocess.Popen[str]] = {}
    for at, slot, what in sorted(due):
        time.sleep(max(0.0, began + at - time.monotonic()))
        if what == "goes":
            fleet.take(slot, how)
            waiting[slot] = fleet.prepare()
        else:
            fleet.bring(slot, waiting.pop(slot))
    time.sleep(max(0.0, began + seconds - time.monotonic()))


def _figures(journal: Path, fleet: Fleet, options: argparse.Namespace) -> dict[str, Any]:
    with JournalReader(journal) as reader:
        steps = [each for each in reader.chain() if each.result is not None]
        faults = reader.ledger_faults()
        events = reader.run_events()
        hours = sum(reader.machine_time().seconds(steps[-1].at_unix_s).values()) / 3600
    # The first three steps are not counted: the workers come together then.
    began, ended = steps[2].at_unix_s, steps[-1].at_unix_s
    committed = sum(each.result.samples for each in steps if each.result is not None)
    counted = sum(each.result.samples for each in steps[3:] if each.result is not None)
    there_s = sum(max(0.0, min(until, ended) - max(since, began)) for since, until in fleet.there)
    kinds = [each.kind for each in events]
    return {
        "steps": len(steps),
        "seconds": round(ended - began, 2),
        "of_ideal": round(counted * options.sample_s / there_s, 4),
        "there_s": round(there_s, 2),
        "machine_hours": round(hours, 4),
        "computed_again": fleet.computed() - committed,
        "attempts_again": kinds.count(RunEventKind.ATTEMPT),
        "lost": kinds.count(RunEventKind.LOST),
        "notices": kinds.count(RunEventKind.NOTICE),
        "ledger_faults": len(faults),
    }


def _cost(row: dict[str, Any], calm: dict[str, Any]) -> float:
    """The time of one machine that a preemption took, in seconds."""
    lost = (calm["of_ideal"] - row["of_ideal"]) * row["there_s"]
    return round(float(lost / row["preemptions"]), 2)


def main() -> int:
    """Measures, and prints a row for each seed and way."""
    options = _arguments()
    machine = describe_machine()
    rows = []
    for seed in options.seeds:
        trace, calm = trace_of(seed, options), dict[str, Any]()
        for name, how, played in (
            ("none", signal.SIGTERM, []),
            ("notice", signal.SIGTERM, trace),
            ("kill", signal.SIGKILL, trace),
        ):
            row = {"seed": seed, "how": name, "preemptions": len(played)}
            row |= _play(played, how, options)
            calm = row if not played else calm
            if played:
                row["machine_s_a_preemption"] = _cost(row, calm)
            rows.append(row)
            print(json.dumps(row), flush=True)
    if options.json:
        about = {
            "load_after": round(os.getloadavg()[0], 2),
            "workers": _WORKERS,
            "trace": {
                "between_s": options.between_s,
                "burst": options.burst,
                "burst_mean_s": _BURST_S,
                "replaced_median_s": options.replaced_s,
                "replaced_sigma": _SIGMA,
            },
            "batch": options.batch,
            "sample_s": options.sample_s,
            "traces": {
                str(seed): list(map(asdict, trace_of(seed, options))) for seed in options.seeds
            },
            "notes": [
                "computing is a timed wait, so only the line's own work takes processor time",
                "a replacement's process has loaded everything before its machine is there",
                "of_ideal is committed samples over those that the machines could compute while "
                "they were there, each until its SIGTERM or SIGKILL",
            ],
        }
        write_rows(options.json, {**machine, **about}, rows)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=45.0, help="the length of a trace")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--between-s", type=float, default=12.0, help="between preemptions, mean")
    parser.add_argument("--burst", type=float, default=0.2, help="that another one goes, too")
    parser.add_argument("--replaced-s", type=float, default=6.0, help="median")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--sample-s", type=float, default=0.0125, help="a sample's time")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
