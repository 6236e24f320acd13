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
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from machine import describe_machine

from andon_coordinator.core.run_events import RunEvent, RunEventKind
from andon_coordinator.transport.damage import JournalError
from andon_coordinator.transport.reader import JournalReader

_SCRIPT = Path(__file__).with_name("suspicion_worker.py")
_WORKERS = 3
_STEPS = 10
"""Steps on the roster in a row, after which a worker counts as there."""
_FROZEN_S = 4.5
"""More than a lease: so to be cut off is no mistake."""
_SETTLES_S = 20.0
"""Until then a worker is not known well enough to be suspected."""
_PATIENCE_S = 180.0
_BYTES_OF_STATE = 12
"""For each parameter: itself and two moments, in float32."""
_SUSPECTED = "it used to answer in"


@dataclass(frozen=True, slots=True)
class Line:
    """A run under `andon run`."""

    launcher: int
    folder: Path

    @property
    def journal(self) -> Path:
        """Where its records are."""
        return self.folder / "journal.sqlite"

    def workers(self) -> list[int]:
        """Its workers' processes."""
        children = Path(f"/proc/{self.launcher}/task/{self.launcher}/children").read_text()
        found = []
        for pid in map(int, children.split()):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            # The service's command line names the script, too.
            if command.split(b"\0")[-2].endswith(_SCRIPT.name.encode()):
                found.append(pid)
        return found

    def commits(self) -> list[tuple[float, int]]:
        """When each record was made durable, and how many workers it has."""
        with JournalReader(self.journal) as journal:
            return [(each.at_unix_s, len(each.record.roster)) for each in journal.chain()]

    def events(self, kind: RunEventKind, since: float = 0.0) -> list[RunEvent]:
        """What happened of a kind, after a time."""
        with JournalReader(self.journal) as journal:
            told = list(journal.run_events())
        return [each for each in told if each.kind is kind and each.at_unix_s > since]

    def has_begun(self) -> bool:
        """Whether it has a journal, and all of its tables are made."""
        if not self.journal.exists():
            return False
        try:
            self.commits()
        except JournalError:
            return False
        return True

    def is_whole(self, since: float = 0.0) -> bool:
        """Whether all workers have been on its last rosters."""
        last = [size for at, size in self.commits() if at > since][-_STEPS:]
        return len(last) == _STEPS and set(last) == {_WORKERS}


@contextmanager
def _running(options: argparse.Namespace, *, answers: bool) -> Iterator[Line]:
    width = round(math.sqrt(options.mb * 1e6 / _BYTES_OF_STATE))
    environment = {
        **os.environ,
        "SUSPICION_PACE_S": str(options.pace),
        "SUSPICION_WIDTH": str(width),
        "SUSPICION_HELD_S": str(options.held),
        "SUSPICION_LEASE_ALONE": "" if answers else "1",
    }
    command = [sys.executable, "-m", "andon_cli", "run", "--workers", str(_WORKERS)]
    command += ["--run-id", "7f3a", str(_SCRIPT)]
    with TemporaryDirectory() as folder, Path(folder, "out.txt").open("wb") as out:
        launcher = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out)
        try:
            yield Line(launcher.pid, Path(folder) / "runs/7f3a")
        finally:
            launcher.terminate()
            launcher.wait(_PATIENCE_S)
            if options.verbose:
                sys.stdout.write(Path(folder, "out.txt").read_text("utf-8", "replace"))


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError("the run does not go on: see its output")
        time.sleep(0.1)


def freeze(line: Line, chance: random.Random) -> dict[str, float]:
    """A worker is frozen: how long until the others commit."""
    frozen = chance.choice(line.workers())
    time.sleep(chance.random() * 0.2)
    struck_at = time.time()
    os.kill(frozen, signal.SIGSTOP)
    time.sleep(_FROZEN_S)
    os.kill(frozen, signal.SIGCONT)
    _until(lambda: line.is_whole(struck_at + _FROZEN_S))
    commits = line.commits()
    waits = [(at, at - earlier) for (earlier, _), (at, _) in pairwise(commits)]
    before = [wait for at, wait in waits if at <= struck_at][-40:]
    # The commit that comes just after the signal may be of a round that the frozen one had served.
    without = next(at for at, size in commits if at > struck_at and size < _WORKERS)
    return {"usual_step_s": statistics.median(before), "signal_to_commit_s": without - struck_at}


def soak(line: Line, since: float, minutes: float) -> dict[str, object]:
    """What happened while nobody was frozen."""
    commits = [each for each in line.commits() if each[0] > since]
    waits = [at - earlier for (earlier, _), (at, _) in pairwise(commits)]
    usual = statistics.median(waits)
    lost = line.events(RunEventKind.LOST, since)
    caught_up = line.events(RunEventKind.CAUGHT_UP, since)
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
            _until(line.has_begun)
            _until(line.is_whole)
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
