"""How soon do the others go on when a worker of another host is frozen, and is anybody wronged?

Three PyTorch workers of a run on this host, whose service can't look them up in its process table:
to it they are on another host. Each line exists twice, at the same time and under the same load:
one whose workers answer probes, so that they are suspected once they don't, and one whose workers
have only their lease.

First a worker of each line in turn gets a SIGSTOP, and a SIGCONT after more than a lease. The
figure is the time from the signal to the others' next commit. Then, for `--minutes`, nobody is
frozen: every worker that is suspected is wronged. What that costs is how long the others' commit
took then, and how long the worker was away.

    python benchmarks/suspicion.py --pairs 10 --minutes 10 --json benchmarks/results/suspicion.json

`--held 1` lets a call keep the interpreter's lock of worker 1 for a second in every 50th step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

from local_run import Run, events_in, is_whole, running, until, width_of
from machine import describe_machine

from andon_coordinator.core.run_events import RunEventKind

_SCRIPT = Path(__file__).with_name("suspicion_worker.py")
_WORKERS = 3
_STEPS = 10
"""Steps on the roster in a row, after which a worker counts as there."""
_FROZEN_S = 4.5
"""More than a lease: so to be cut off is no mistake."""
_SETTLES_S = 20.0
"""Until then a worker is not known well enough to be suspected."""
_SUSPECTED = "it used to answer in"


@contextmanager
def _running(options: argparse.Namespace, *, answers: bool) -> Iterator[Run]:
    environment = {
        "SUSPICION_PACE_S": str(options.pace),
        "SUSPICION_WIDTH": str(width_of(options.mb)),
        "SUSPICION_HELD_S": str(options.held),
        "SUSPICION_LEASE_ALONE": "" if answers else "1",
    }
    flags = "--workers", str(_WORKERS)
    with running(_SCRIPT, *flags, environment=environment, verbose=options.verbose) as run:
        yield run


def _until_whole(line: Run, since: float = 0.0) -> None:
    until(lambda: is_whole(line.commits(), since, _STEPS, _WORKERS))


def freeze(line: Run, chance: random.Random) -> dict[str, float]:
    """A worker is frozen: how long until the others commit."""
    frozen = chance.choice(line.workers())
    time.sleep(chance.random() * 0.2)
    struck_at = time.time()
    os.kill(frozen, signal.SIGSTOP)
    time.sleep(_FROZEN_S)
    os.kill(frozen, signal.SIGCONT)
    _until_whole(line, struck_at + _FROZEN_S)
    commits = line.commits()
    waits = [(at, at - earlier) for (earlier, _), (at, _) in pairwise(commits)]
    before = [wait for at, wait in waits if at <= struck_at][-40:]
    # The commit that comes just after the signal may be of a round that the frozen one had served.
    without = next(at for at, size in commits if at > struck_at and size < _WORKERS)
    return {"usual_step_s": statistics.median(before), "signal_to_commit_s": without - struck_at}


def soak(line: Run, since: float, minutes: float) -> dict[str, object]:
    """What happened while nobody was frozen."""
    commits = [each for each in line.commits() if each[0] > since]
    waits = [at - earlier for (earlier, _), (at, _) in pairwise(commits)]
    usual = statistics.median(waits)
    lost = events_in(line.journal, RunEventKind.LOST, since)
    caught_up = events_in(line.journal, RunEventKind.CAUGHT_UP, since)
    wronged = []
    for each in lost:
        at = each.at_unix_s
        later = [end for end, _ in commits if end > at]
        back = [end.at_unix_s for end in caught_up if end.at_unix_s > at]
        earlier = [end for end, _ in commits if end <= at]
        wronged.append(
            {
                "why": each.text,
                "worker": each.worker,
                "others_waited_s": round(later[0] - earlier[-1] - usual, 4) if later else None,
                "away_s": round(back[0] - at, 3) if back else None,
            }
        )
    return {
        "minutes": minutes,
        "steps": len(commits),
        "usual_step_s": round(usual, 4),
        "longest_step_s": round(max(waits), 4),
        "suspected": sum(_SUSPECTED in each.text for each in lost),
        "lost": len(lost),
        "wronged": wronged,
    }


def main() -> None:
    """Measures, and prints medians and worst."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=10.0, help="of state (default: 10)")
    parser.add_argument("--pace", type=float, default=0.1, help="seconds in a step (default: 0.1)")
    parser.add_argument("--pairs", type=int, default=10, help="freezes of each line (default: 10)")
    parser.add_argument("--minutes", type=float, default=0.0, help="without any (default: 0)")
    parser.add_argument("--held", type=float, default=0.0, help="seconds; see above (default: 0)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="print the runs' output")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    figures: dict[str, object] = {
        "machine": describe_machine(),
        "mb": options.mb,
        "pace_s": options.pace,
        "held_s": options.held,
        "frozen_s": _FROZEN_S,
    }
    chance = random.Random(options.seed)
    with ExitStack() as stack:
        lines = {
            way: stack.enter_context(_running(options, answers=way == "suspicion"))
            for way in ("suspicion", "lease")
        }
        for line in lines.values():
            _until_whole(line)
        time.sleep(_SETTLES_S if options.pairs else 0.0)
        found: dict[str, list[dict[str, float]]] = {way: [] for way in lines}
        load = [os.getloadavg()[0]]
        for _ in range(options.pairs):
            for way, line in lines.items():
                found[way].append(freeze(line, chance))
            load.append(os.getloadavg()[0])
        for way, rows in found.items():
            for name in rows[0] if rows else ():
                values = [row[name] for row in rows]
                middle, worst = statistics.median(values), max(values)
                print(f"{way:9} {name:20} median {middle:.3f}  worst {worst:.3f}", flush=True)
        figures["freezes"] = {
            way: [{name: round(value, 4) for name, value in row.items()} for row in rows]
            for way, rows in found.items()
        }
        if options.minutes:
            since = time.time()
            while time.time() < since + options.minutes * 60:
                time.sleep(15)
                load.append(os.getloadavg()[0])
            figures["soak"] = {
                way: soak(line, since, options.minutes) for way, line in lines.items()
            }
            print(json.dumps(figures["soak"], indent=1), flush=True)
    figures["load_average"] = round(statistics.fmean(load), 1)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
