"""How long do the others stand still when a worker comes back, or is frozen?

PyTorch workers of one run on this host, three or `--workers`. One gets a real SIGKILL, and
`andon run` starts it again: it joins, and needs the line's state, which is as large as `--mb` says
(a layer and AdamW's moments). Or it gets a SIGSTOP, and a SIGCONT two seconds later. One after the
other, the workers

- learn while the others train, as they do for every user;
- learn, and their state passes the service as bytes, as on two hosts, and not through a file;
- get their state by a transfer, for which all wait.

All times are from the journal. A pause is how much longer than a usual step the longest wait for a
commit was: from the newcomer's Join, and the step that the death cost, until it has been on ten
rosters in a row; after a SIGSTOP, the time from the signal to the others' next commit. While a
worker is away each of the others has more samples, as it would without any newcomer: a step on the
way back is compared with the median step of as many workers.

A newcomer needs processor time and memory, which the others lack where cores are few, and where the
system has to get memory from somewhere, whatever the protocol does. So a control follows each
return: a process that has nothing to do with the line takes as much of both as the newcomer did,
with the state's file, and the longest wait meanwhile is `pause_of_control_s`. What a return costs
beyond that is the protocol's.

A round may open up to 0.04 s later for a newcomer that is nearly there: `line_waited_s` is the sum.
Of the time until a newcomer is back, `state_after_s` is the part until its script begins the first
step: until then its state was on the way. In the rest it made up what the others had done.

A row of figures is printed as soon as it is measured, and medians at the end. With 1 GB a step
takes two cores 2 s, and so this needs some minutes, and 10 GB of memory.

    python benchmarks/joining.py --mb 100 --pairs 5 --json benchmarks/results/joining.json
    python benchmarks/joining.py --mb 1000 --pairs 2 --faults kill --ways learning,bytes
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

from local_run import (
    PATIENCE_S,
    Commits,
    Run,
    events_in,
    is_whole,
    median_steps,
    running,
    until,
    width_of,
)
from machine import describe_machine

from andon_coordinator.core.run_events import RunEventKind

_SCRIPT = Path(__file__).with_name("joining_worker.py")
_SHARE = 4
"""Samples of a worker in a step; one that learns computes one."""
_STEPS = 10
"""Steps on the roster, after which a newcomer counts as there."""
_FROZEN_S = 2.0
_WAYS = {
    "learning": {},
    "bytes": {"JOINING_BYTES": "1"},
    "transfer": {"JOINING_TRANSFER": "1"},
}
"""What a worker of each is told."""
_BURN = """
import sys, time
taken = b"x" * int(sys.argv[2])
while time.process_time() < float(sys.argv[1]): pass
"""


@contextmanager
def _running(options: argparse.Namespace, way: str) -> Iterator[Run]:
    environment = {
        "JOINING_PACE_S": str(options.pace / _SHARE),
        "JOINING_BATCH": str(_SHARE * options.workers),
        "JOINING_WIDTH": str(width_of(options.mb)),
        "JOINING_NOTES": ".",
        **_WAYS[way],
    }
    flags = "--workers", str(options.workers), "--restarts", "100"
    with running(_SCRIPT, *flags, environment=environment, verbose=options.verbose) as run:
        yield run


def _begun_at(run: Run, worker: int) -> float:
    """When a worker's script began its first step."""
    return float((run.folder.parent.parent / f"begun-{worker}").read_text())


def _line_waited_s(run: Run, since: float) -> float:
    """How long rounds that could open were held back for the newcomer, by the journal."""
    (learnt,) = events_in(run.journal, RunEventKind.CAUGHT_UP, since)[:1] or (None,)
    found = re.search(r"waited ([0-9.]+) s", learnt.text) if learnt is not None else None
    return float(found.group(1)) if found else 0.0


def _processor_s(process: int) -> float:
    """The processor time that a process has taken."""
    numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


def _most_memory(process: int) -> int:
    """The most bytes that a process had in memory so far."""
    words = Path(f"/proc/{process}/status").read_text().split()
    return int(words[words.index("VmHWM:") + 1]) * 1024


def _is_whole(run: Run, options: argparse.Namespace, since: float = 0.0) -> bool:
    return is_whole(run.commits(), since, _STEPS, options.workers)


def _usual_step(commits: Commits, workers: int, struck_at: float) -> float:
    """The median time between commits of the whole line."""
    before = [each for each in commits if each[0] <= struck_at][-40:]
    return statistics.median(
        at - earlier for (earlier, _), (at, size) in pairwise(before) if size == workers
    )


def _until(holds: Callable[[], bool], options: argparse.Namespace) -> None:
    """Waits as long as steps of that size may take on a machine that does something else, too."""
    until(holds, patience_s=max(PATIENCE_S, options.mb))


def kill(run: Run, chance: random.Random, options: argparse.Namespace) -> dict[str, float]:
    """A worker dies and comes back: what its death costs the others, and its return."""
    struck_at, before = time.time(), set(run.workers())
    os.kill(chance.choice(sorted(before)), signal.SIGKILL)
    _until(lambda: bool(events_in(run.journal, RunEventKind.JOINED, struck_at)), options)
    joined_at = events_in(run.journal, RunEventKind.JOINED, struck_at)[0].at_unix_s
    (newcomer,) = set(run.workers()) - before
    taken_s, memory = _processor_s(newcomer), _most_memory(newcomer)
    _until(lambda: _is_whole(run, options, joined_at), options)
    taken_s = _processor_s(newcomer) - taken_s
    # Its state lies in a file, too, while it comes.
    memory = _most_memory(newcomer) - memory + int(options.mb * 1e6)
    commits = run.commits()
    waits = [(at, at - earlier, size) for (earlier, _), (at, size) in pairwise(commits)]
    usual = _usual_step(commits, options.workers, struck_at)
    first_back = next(at for at, size in commits if at > joined_at and size == options.workers)
    alike = median_steps(commits)
    # The newcomer may be there before the others have made the step that the death cost.
    died_at, death_s = next((at, wait) for at, wait, _ in waits if at > struck_at)
    pause_s = max(
        wait - alike.get(size, usual) for at, wait, size in waits if at > max(died_at, joined_at)
    )
    print(
        f"  back after {first_back - joined_at:.1f} s, a pause of {pause_s:.3f} s over steps of "
        f"{usual:.2f} s; now the control takes {taken_s:.1f} s of a processor, and "
        f"{memory / 1e6:.0f} MB of memory",
        flush=True,
    )
    burning_at = time.time()
    subprocess.run([sys.executable, "-c", _BURN, str(taken_s), str(memory)], check=True)
    burnt_at = time.time()
    _until(lambda: run.commits()[-1][0] > burnt_at, options)
    slow = [at - earlier for (earlier, _), (at, _) in pairwise(run.commits()) if at > burning_at]
    return {
        "usual_step_s": usual,
        "pause_of_death_s": death_s - usual,
        "pause_of_return_s": pause_s,
        "pause_of_control_s": max(slow) - usual,
        "line_waited_s": _line_waited_s(run, joined_at),
        "newcomer_processor_s": taken_s,
        "newcomer_memory_mb": memory / 1e6,
        "state_after_s": _begun_at(run, newcomer) - joined_at,
        "back_after_s": first_back - joined_at,
    }


def freeze(run: Run, chance: random.Random, options: argparse.Namespace) -> dict[str, float]:
    """A worker is frozen for two seconds: how long until the others commit, and its return."""
    frozen = chance.choice(run.workers())
    time.sleep(chance.random() * 0.2)
    struck_at = time.time()
    os.kill(frozen, signal.SIGSTOP)
    time.sleep(_FROZEN_S)
    os.kill(frozen, signal.SIGCONT)
    # Without learning the others may wait for all of its lease.
    _until(lambda: any(at > struck_at + 0.05 for at, _ in run.commits()[-5:]), options)
    _until(lambda: _is_whole(run, options, struck_at + _FROZEN_S), options)
    commits = run.commits()
    waits = [(at, at - earlier) for (earlier, _), (at, _) in pairwise(commits)]
    usual = _usual_step(commits, options.workers, struck_at)
    back_at = struck_at + _FROZEN_S
    return {
        "usual_step_s": usual,
        "signal_to_commit_s": max(
            wait for at, wait in waits if at > struck_at and at < back_at + 2
        ),
        "pause_of_return_s": max(wait for at, wait in waits if at > back_at + wait) - usual,
    }


def main() -> None:
    """Measures, and prints medians and worst."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=100.0, help="of state (default: 100)")
    parser.add_argument("--workers", type=int, default=3, help="of the line (default: 3)")
    parser.add_argument("--pace", type=float, default=0.1, help="seconds in a step (default: 0.1)")
    parser.add_argument("--pairs", type=int, default=5, help="faults of each kind (default: 5)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ways", default=",".join(_WAYS), help="of getting the state (all)")
    parser.add_argument("--faults", default="kill,freeze", help="(default: kill,freeze)")
    parser.add_argument("--verbose", action="store_true", help="print the runs' output")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    figures: dict[str, object] = {
        "machine": describe_machine(),
        "mb": options.mb,
        "workers": options.workers,
        "pace_s": options.pace,
        "pairs": options.pairs,
    }
    faults = {"kill": kill, "freeze": freeze}
    for way in options.ways.split(","):
        chance = random.Random(options.seed)
        found: dict[str, list[dict[str, float]]] = {each: [] for each in options.faults.split(",")}
        with _running(options, way) as run:
            print(f"{way:9} waits until the line trains", flush=True)
            _until(partial(_is_whole, run, options), options)
            for _ in range(options.pairs):
                for fault, rows in found.items():
                    rows.append(faults[fault](run, chance, options))
                    row = "  ".join(f"{name} {value:.3f}" for name, value in rows[-1].items())
                    print(f"{way:9} {fault:7} {row}", flush=True)
        for fault, rows in found.items():
            for name in rows[0]:
                values = [row[name] for row in rows]
                print(
                    f"{way:9} {fault:7} {name:20} median {statistics.median(values):.3f}  "
                    f"worst {max(values):.3f}",
                    flush=True,
                )
        figures[way] = {
            fault: [{name: round(value, 4) for name, value in row.items()} for row in rows]
            for fault, rows in found.items()
        }
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
