"""Does a line say rightly who is slow, in what, in which line of code, and how soon?

Workers train a small model on one host, and one of them stands still for two seconds again and
again, each time in another way: a data loader that sleeps, in the worker or in a process of its
own, a lock, a call that keeps Python's
interpreter lock, a hook of backward, a hook of the optimizer, an upload between steps, pages that
are not in memory, other programs on its core, a thin link. What the service says of each is
compared with what was planted: the worker, the phase, the line of code (marked in
`stalls_worker.py`), and the cause.

Stand-ins, as no machine can be asked for the thing itself: `pipe` is a read that comes late, in
place of a slow disk; `faults` are page faults on a file, in place of swap; `clock` is a forward
that sleeps under a stand-in for NVIDIA's library, in place of a GPU that is throttled.

    python benchmarks/stalls.py --json benchmarks/results/stalls.json
    python benchmarks/stalls.py --kinds data lock --each 2

`link` needs root: it makes network namespaces.
"""

from __future__ import annotations

import argparse
import enum
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from hosts_network import Network, NoNetwork, network
from machine import describe_machine
from schedules import write_rows
from service import Service, serving

from andon.protocol.slowness import CodeLine, Explanation, ProcessFacts, Slowness, SlowPhase
from andon_coordinator.core.slow_cause import SlowCause, cause_of

__all__ = ["StallKind", "StallSpec"]

_WORKER = Path(__file__).with_name("stalls_worker.py")
_FAST_MBIT, _THIN_MBIT = 1000.0, 1.0
_CALM, _APART = 25, 16
"""Steps before the first stall, and from one to the next."""
_WITHIN_S = 5.0
_COUNTS = ("stalls", "told", "culprit", "phase", "line", "cause", "right", "within_5_s")
_FIRST = ("nice", "-n", "-10") if os.geteuid() == 0 else ()
"""Workers and what is planted beside them run before whatever else this machine does."""


class StallKind(enum.Enum):
    """What is planted."""

    DATA = "data"
    LOADER = "loader"
    PIPE = "pipe"
    LOCK = "lock"
    GIL = "gil"
    HOOK = "hook"
    OPTIMIZER = "optimizer"
    SCRIPT = "script"
    FAULTS = "faults"
    CLOCK = "clock"
    NEIGHBOUR = "neighbour"
    LINK = "link"


_APART_KINDS = {StallKind.LOADER, StallKind.LINK}
"""Each of these has runs of its own: with a loading process, and with a network."""
_STAND_INS = {StallKind.PIPE, StallKind.FAULTS, StallKind.CLOCK}
_EXPECTED = {
    StallKind.DATA: (SlowPhase.DATA, SlowCause.SCRIPT),
    StallKind.LOADER: (SlowPhase.DATA, SlowCause.SCRIPT),
    StallKind.PIPE: (SlowPhase.DATA, SlowCause.SCRIPT),
    StallKind.LOCK: (SlowPhase.FORWARD, SlowCause.SCRIPT),
    StallKind.GIL: (SlowPhase.SCRIPT, SlowCause.LOCK),
    StallKind.HOOK: (SlowPhase.BACKWARD, SlowCause.SCRIPT),
    StallKind.OPTIMIZER: (SlowPhase.OPTIMIZER, SlowCause.SCRIPT),
    StallKind.SCRIPT: (SlowPhase.SCRIPT, SlowCause.SCRIPT),
    StallKind.FAULTS: (SlowPhase.FORWARD, SlowCause.MEMORY),
    StallKind.CLOCK: (SlowPhase.FORWARD, SlowCause.GPU),
    StallKind.NEIGHBOUR: (SlowPhase.FORWARD, SlowCause.NEIGHBOUR),
    StallKind.LINK: (SlowPhase.EXCHANGE, SlowCause.NETWORK),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StallSpec:
    """The parameters of one worker process."""

    slot: int
    workers: int
    steps: int
    batch: int
    width: int
    calm_s: float
    """How long a step lasts at least."""
    stall_s: float
    planted: dict[int, tuple[str, int]] = field(default_factory=dict)
    """By step: what, and for whom."""
    loading: int = 0
    """Loading processes."""
    address: str = ""
    run_id: str = ""

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what the benchmark wrote."""
        fields = json.loads(text)
        planted = {int(step): tuple(each) for step, each in fields["planted"].items()}
        return cls(**{**fields, "planted": planted})


@dataclass(slots=True, kw_only=True)
class Begun:
    """A stall that a worker began, and what the service said of it."""

    worker: int
    step: int
    kind: StallKind
    at: float
    told: list[Slowness] = field(default_factory=list)

    def verdict(self, lines: set[int] | None) -> dict[str, Any]:
        """What of it was right; `lines` are those of the marked code."""
        phase, cause = _EXPECTED[self.kind]
        first = self.told[0] if self.told else None
        found = (
            None
            if first is None or first.facts is None
            else cause_of(Explanation(0, first.phase, "", first.stacks, first.facts))
        )
        # Where the network is slow, no line of the script is guilty.
        guilty = first is not None and (
            lines is None or (first.guilty is not None and first.guilty.line in lines)
        )
        return {
            "told": first is not None,
            "culprit": {each.worker for each in self.told} == {self.worker},
            "phase": first is not None and first.phase is phase,
            "line": guilty,
            "cause": found is cause,
            "after_s": None if first is None else round(first.at_unix_s - self.at, 3),
            "said": "" if first is None else first.text,
            "was": "" if first is None else f"{first.phase.label} {first.guilty}",
        }


class Watcher:
    """Follows a line's status, as `andon status --watch` tells it, on a thread of its own."""

    def __init__(self, service: Service, inside: Sequence[str]) -> None:
        """Begins at once."""
        self._seen: set[tuple[int, float]] = set()
        self.found: list[Slowness] = []
        command = [*inside, sys.executable, "-m", "andon_cli", "status", "--watch"]
        command += ["--format", "json", "--address", service.address]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def close(self) -> None:
        """Ends it."""
        self._process.terminate()
        self._process.wait(10)
        self._thread.join(10)

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            for worker in json.loads(text).get("workers", ()):
                slow = worker["slowness"]
                if slow is None or (slow["worker"], slow["at_unix_s"]) in self._seen:
                    continue
                self._seen.add((slow["worker"], slow["at_unix_s"]))
                self.found.append(_slowness_of(slow))


def _slowness_of(said: dict[str, Any]) -> Slowness:
    """A slowness without its stacks, from JSON."""
    guilty, facts = said["guilty"], said["facts"]
    return Slowness(
        worker=said["worker"],
        step=said["step"],
        phase=next(each for each in SlowPhase if each.label == said["phase"]),
        late_s=said["late_s"],
        text=said["text"],
        guilty=None if guilty is None else CodeLine(**guilty),
        at_unix_s=said["at_unix_s"],
        facts=None if facts is None else ProcessFacts(**facts),
    )


def main() -> int:
    """Runs the benchmark. Returns the exit code."""
    options = _arguments()
    machine = describe_machine()
    lines = _marked_lines()
    before = json.loads(options.json.read_text())["rows"] if options.more else []
    found: list[Begun] = []
    kinds = [StallKind(each) for each in options.kinds]
    together = [each for each in kinds if each not in _APART_KINDS]
    for group in (together, *([each] for each in kinds if each in _APART_KINDS)):
        for plan in _plans(group, options):
            try:
                found += _run(plan, options, group[0])
            except NoNetwork as error:
                print(f"stalls.py: no thin links: {error}", file=sys.stderr)
                break
            rows = [_row(kind, found, lines) for kind in kinds]
            _print(rows)
            # After each: a run that is cut short has figures, too.
            if options.json:
                write_rows(
                    options.json,
                    {**machine, **_conditions(options)},
                    _together(before, rows),
                )
    return 0


def _conditions(options: argparse.Namespace) -> dict[str, object]:
    """The circumstances, apart from the machine."""
    return {
        "workers": options.workers,
        "stall_s": options.stall_s,
        "calm_step_s": options.calm_s,
        "load_after": round(os.getloadavg()[0], 2),
        "stand_ins": sorted(each.value for each in _STAND_INS),
    }


def _plans(
    kinds: Sequence[StallKind], options: argparse.Namespace
) -> Iterator[dict[int, tuple[str, int]]]:
    """The stalls of each run, by step."""
    drawn = random.Random(options.seed)
    wanted = [kind for kind in kinds for _ in range(options.each)]
    drawn.shuffle(wanted)
    for start in range(0, len(wanted), options.a_run):
        part = wanted[start : start + options.a_run]
        yield {
            _CALM + _APART * at: (kind.value, drawn.randrange(options.workers))
            for at, kind in enumerate(part)
        }


def _run(
    plan: dict[int, tuple[str, int]], options: argparse.Namespace, kind: StallKind
) -> list[Begun]:
    """One run of the line with these stalls, of which `kind` is one."""
    links = kind is StallKind.LINK
    loading = int(kind is StallKind.LOADER)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        hosts = stack.enter_context(network(1 + options.workers, _FAST_MBIT)) if links else None
        flags = ("--liveness", "10", *options.flag)
        served = stack.enter_context(
            serving(
                folder,
                options.workers,
                flags,
                inside=hosts.inside(0) if hosts else (),
                bind=hosts.address(0) if hosts else "127.0.0.1",
            )
        )
        watcher = Watcher(served, hosts.inside(0) if hosts else ())
        begun: list[Begun] = []
        spec = StallSpec(
            slot=0,
            workers=options.workers,
            steps=max(plan) + _APART,
            batch=4 * options.workers,
            width=700 if hosts else 64,
            calm_s=options.calm_s,
            stall_s=options.stall_s,
            planted=plan,
            loading=loading,
            address=served.address,
            run_id=served.run_id,
        )
        processes = [_start(replace(spec, slot=slot), hosts) for slot in range(options.workers)]
        threads = [
            threading.Thread(target=_listen, args=(slot, process, begun, options, hosts))
            for slot, process in enumerate(processes)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        codes = [process.wait(60) for process in processes]
        watcher.close()
        if any(codes):
            raise RuntimeError(f"workers ended with {codes}")
        told = watcher.found
    begun.sort(key=lambda each: each.at)
    ends = [*(each.at for each in begun[1:]), float("inf")]
    for each, end in zip(begun, ends, strict=True):
        each.told = [slow for slow in told if each.at <= slow.at_unix_s < end]
    return begun


def _start(spec: StallSpec, hosts: Network | None) -> subprocess.Popen[str]:
    """A worker, on its own core if there are enough, and on its own host if there are hosts."""
    slot = spec.slot
    core = slot % (os.cpu_count() or 1)
    inside = hosts.inside(1 + slot) if hosts else []
    process = subprocess.Popen(
        [*inside, *_FIRST, "taskset", "-c", str(core), sys.executable, str(_WORKER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RANK": str(slot),
            # Hosts of a simulated network have one memory, and would use it.
            **({"ANDON_SHARED_DIR": "off"} if hosts else {}),
        },
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(asdict(spec)) + "\n")
    process.stdin.flush()
    return process


def _listen(
    slot: int,
    process: subprocess.Popen[str],
    begun: list[Begun],
    options: argparse.Namespace,
    hosts: Network | None,
) -> None:
    """Notes the stalls of a worker, and makes those that it can't make by itself."""
    assert process.stdout is not None
    assert process.stdin is not None
    for text in process.stdout:
        if not text.startswith("{"):
            continue  # What a script prints.
        said = json.loads(text)
        kind = StallKind(said["kind"])
        begun.append(Begun(worker=said["worker"], step=said["step"], kind=kind, at=said["at"]))
        if kind is StallKind.LINK:
            assert hosts is not None
            hosts.limit(1 + slot, _THIN_MBIT)
            threading.Timer(options.stall_s, hosts.limit, (1 + slot, _FAST_MBIT)).start()
        elif kind is StallKind.NEIGHBOUR:
            threading.Thread(target=_be_busy, args=(slot, options.stall_s)).start()
            time.sleep(0.1)
        else:
            continue
        process.stdin.write("\n")
        process.stdin.flush()


def _be_busy(slot: int, seconds: float) -> None:
    """Other programs on the core of a worker."""
    core = str(slot % (os.cpu_count() or 1))
    spin = f"import time\nend = time.time() + {seconds}\nwhile time.time() < end: pass"
    command = [*_FIRST, "taskset", "-c", core, sys.executable, "-c", spin]
    for each in [subprocess.Popen(command) for _ in range(5)]:
        each.wait()


def _marked_lines() -> dict[StallKind, set[int]]:
    """The lines of code in which workers stand still."""
    found: dict[StallKind, set[int]] = {}
    for number, line in enumerate(_WORKER.read_text().splitlines(), 1):
        if "# stall: " in line:
            kind = StallKind(line.rpartition("# stall: ")[2])
            found.setdefault(kind, set()).add(number)
    return found


def _row(
    kind: StallKind, found: Sequence[Begun], lines: dict[StallKind, set[int]]
) -> dict[str, Any]:
    """All stalls of one kind."""
    verdicts = [each.verdict(lines.get(kind)) for each in found if each.kind is kind]
    after = sorted(each["after_s"] for each in verdicts if each["after_s"] is not None)
    counts = {
        name: sum(each[name] for each in verdicts)
        for name in ("told", "culprit", "phase", "line", "cause")
    }
    right = sum(_is_right(each) for each in verdicts)
    wrong = [f"{each['was']}: {each['said']}" for each in verdicts if not _is_right(each)]
    return {
        "kind": kind.value,
        "stand_in": kind in _STAND_INS,
        "stalls": len(verdicts),
        **counts,
        "right": right,
        "within_5_s": sum(each <= _WITHIN_S for each in after),
        "after_s": None if not after else round(statistics.median(after), 2),
        "latest_s": None if not after else round(after[-1], 2),
        "times_s": after,
        "wrong": wrong[:5],
    }


def _together(before: Sequence[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of two runs of this benchmark, added by kind."""
    added = {row["kind"]: row for row in before}
    for row in rows:
        if not row["stalls"]:
            continue
        old = added.setdefault(row["kind"], row)
        if old is row:
            continue
        for name in _COUNTS:
            row[name] += old[name]
        row["times_s"] = sorted([*old["times_s"], *row["times_s"]])
        row["after_s"] = round(statistics.median(row["times_s"] or [0.0]), 2)
        row["latest_s"] = max(row["times_s"], default=None)
        row["wrong"] = [*old["wrong"], *row["wrong"]][:5]
        added[row["kind"]] = row
    return list(added.values())


def _is_right(verdict: dict[str, Any]) -> bool:
    """Whether culprit, phase and line are right."""
    return all(verdict[name] for name in ("told", "culprit", "phase", "line"))


def _print(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        if row["stalls"]:
            print(f"{row['kind']:10}{row['right']:4} of {row['stalls']:3}  {row}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", default=[each.value for each in StallKind])
    parser.add_argument("--each", type=int, default=19, help="stalls of each kind")
    parser.add_argument("--a-run", type=int, default=25, help="stalls in one run of the line")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--stall-s", type=float, default=2.0)
    parser.add_argument("--calm-s", type=float, default=0.05, help="a step lasts at least so long")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--flag", action="append", default=[], help="of `andon serve`")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--more", action="store_true", help="add to what is in that file")
    return parser.parse_args()


if __name__ == "__main__":
    os.environ["ANDON_INSECURE"] = "1"  # Hosts of a simulated network are one machine.
    sys.exit(main())
