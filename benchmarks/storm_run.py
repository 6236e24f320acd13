"""One run of a system: trains, is struck by the planned faults, ends, and is counted."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from storm_ledger import (
    Commit,
    Counts,
    commits_of,
    computed_of,
    count,
    history_of,
    longest_pause_s,
    passed_by,
    read_ledger,
    samples_per_s,
)
from storm_plan import FREEZE, KILL_SERVICE, Fault, victim_of
from storm_systems import SPARES, System, is_alive, started
from storm_task import Settings, build, held_out_loss

from andon_coordinator.transport.reader import JournalReader

__all__ = ["Outcome", "loss_at", "run_storm"]

_WARM_UP_STEPS = 20
"""Steps that every worker has made before the time begins."""
_START_S, _SETTLE_S, _END_S = 180.0, 90.0, 90.0
_AHEAD = 40
"""Steps between the order to stop and the stop: every worker reads the order in time."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run came to."""

    replicas: int
    """Processes that have the model, spares included."""
    seconds: float
    samples_per_s: float
    longest_pause_s: float
    counts: Counts
    digests: list[str]
    """Of the weights of each replica that reached the end."""
    settled: bool
    """Whether all replicas trained within a time after the last fault."""
    struck: dict[str, int]
    missed: int
    """Faults that found no process to strike."""
    starts: int
    """Processes of workers, the first ones included."""
    restarts_by_harness: int
    steps: int
    load: float
    """Processes of the whole host that wanted a core, on average of the run's last minutes."""
    curve: list[tuple[int, float]] = field(default_factory=list)
    """Samples and the loss on held-out text."""
    timeline: list[tuple[float, int]] = field(default_factory=list)
    """Seconds and samples of the history until then, about once a second."""
    faults: list[tuple[float, str]] = field(default_factory=list)


class Workers:
    """What the workers' ledgers say while they train."""

    def __init__(self, folder: Path, count: int) -> None:
        """Nothing is written yet."""
        self.ledgers = [folder / f"ledger-{slot}.jsonl" for slot in range(count)]
        self._read = [0] * count
        self._rest = [b""] * count
        self.pids = [0] * count
        self.steps = [0] * count
        self.kept_at = [0.0] * count
        self.starts = 0
        self.ended = [False] * count

    def look(self) -> None:
        """Reads what is new."""
        for slot, file in enumerate(self.ledgers):
            if not file.exists():
                continue
            with file.open("rb") as ledger:
                ledger.seek(self._read[slot])
                new = ledger.read()
            self._read[slot] += len(new)
            *lines, self._rest[slot] = (self._rest[slot] + new).split(b"\n")
            for line in lines:
                self._note(slot, line)

    def _note(self, slot: int, line: bytes) -> None:
        if line.startswith(b'{"event": "computes"'):
            return  # most of the bytes, and nothing to know
        event = json.loads(line)
        if event["event"] == "start":
            self.pids[slot] = event["pid"]
            self.starts += 1
        elif event["event"] == "kept":
            self.steps[slot], self.kept_at[slot] = event["step"], event["at"]
        self.ended[slot] = event["event"] == "end"

    @property
    def running(self) -> list[int]:
        """The slots whose process runs."""
        return [slot for slot, pid in enumerate(self.pids) if pid and is_alive(pid)]

    def all_kept_since(self, moment: float) -> bool:
        """Whether every worker has committed a step after a moment."""
        return min(self.kept_at) > moment


class Storm:
    """Strikes the workers of a system as planned."""

    def __init__(self, plan: Sequence[Fault], freeze_s: float) -> None:
        """Nothing has happened yet."""
        self._coming = list(plan)
        self._freeze_s = freeze_s
        self._frozen: list[tuple[float, int]] = []
        self.struck: list[tuple[float, str]] = []
        self.missed = 0

    def blow(self, at_s: float, system: System, workers: Workers) -> None:
        """Does everything whose time has come."""
        for due, pid in [each for each in self._frozen if each[0] <= at_s]:
            self._frozen.remove((due, pid))
            with suppress(ProcessLookupError):  # whoever supervises it may have killed it
                os.kill(pid, signal.SIGCONT)
        while self._coming and self._coming[0].at_s <= at_s:
            self._strike(self._coming.pop(0), at_s, system, workers)

    def _strike(self, fault: Fault, at_s: float, system: System, workers: Workers) -> None:
        slot = victim_of(fault, workers.running)
        worker = None if slot is None else workers.pids[slot]
        pid = system.service() if fault.kind == KILL_SERVICE else worker
        if pid is None or not is_alive(pid):
            self.missed += 1
            print(f"    {at_s:6.1f} s {fault.kind}: nobody is there", flush=True)
            return
        os.kill(pid, signal.SIGSTOP if fault.kind == FREEZE else signal.SIGKILL)
        if fault.kind == FREEZE:
            self._frozen.append((at_s + self._freeze_s, pid))
        self.struck.append((round(at_s, 2), fault.kind))
        whom = "" if fault.kind == KILL_SERVICE else f" of slot {slot}"
        print(f"    {at_s:6.1f} s {fault.kind}{whom}, step {max(workers.steps)}", flush=True)


def run_storm(
    name: str, settings: Settings, plan: Sequence[Fault], seconds: float, freeze_s: float
) -> Outcome:
    """Trains for some seconds, and a moment more without faults, in which all may come back.

    Raises:
        RuntimeError: not all workers trained within some minutes of their start.
    """
    workers = Workers(Path(settings.folder), settings.replicas + SPARES.get(name, 0))
    storm, restarts = Storm(plan, freeze_s), 0
    with started(name, settings) as system:

        def until(holds: Callable[[], bool], patience_s: float, begun: float | None = None) -> bool:
            nonlocal restarts
            deadline = time.monotonic() + patience_s
            while time.monotonic() < deadline:
                restarts += system.tend()
                workers.look()
                if holds():
                    return True
                if system.over:
                    return False
                if begun is not None:
                    storm.blow(time.time() - begun, system, workers)
                time.sleep(_POLL_S)
            return False

        if not until(lambda: min(workers.steps) >= _WARM_UP_STEPS, _START_S):
            raise RuntimeError(f"{name} did not begin to train: see the logs in {settings.folder}")
        begun = time.time()
        until(lambda: False, seconds, begun)
        ended = time.time()
        settled = until(lambda: workers.all_kept_since(ended + 2.0), _SETTLE_S, begun)
        stop = Path(settings.folder) / "stop"
        stop.with_suffix(".new").write_text(str(max(workers.steps) + _AHEAD))
        stop.with_suffix(".new").replace(stop)
        until(lambda: all(workers.ended), _END_S)
    return _counted(name, settings, storm, workers, (begun, ended, settled, restarts))


def _counted(
    name: str,
    settings: Settings,
    storm: Storm,
    workers: Workers,
    times: tuple[float, float, bool, int],
) -> Outcome:
    begun, ended, settled, restarts = times
    folder = Path(settings.folder)
    ledgers = [read_ledger(each) for each in workers.ledgers]
    ends = [ledger[-1] for ledger in ledgers if ledger and ledger[-1]["event"] == "end"]
    if name.startswith("andon"):
        history, passed = _journal(folder / "runs/storm/journal.sqlite")
        every: list[Commit] = history
    else:
        commits = commits_of(ledgers)
        every = list(commits.values())
        last = max(every, key=lambda each: each.at).name if not ends else ends[0]["commit"]
        history, passed = history_of(commits, last), passed_by(ledgers)
    kept = [position for each in history for position in each.positions]
    computed = computed_of(ledgers)
    total, timeline = 0, list[tuple[float, int]]()
    for commit in history:
        total += len(commit.positions)
        if begun <= commit.at < ended and (not timeline or commit.at - begun - timeline[-1][0] > 1):
            timeline.append((round(commit.at - begun, 1), total))
    return Outcome(
        replicas=len(ledgers),
        seconds=round(ended - begun, 1),
        samples_per_s=samples_per_s(history, begun, ended),
        longest_pause_s=longest_pause_s(every, begun, ended),
        counts=count(kept, passed, computed),
        digests=[end["digest"] for end in ends],
        settled=settled,
        struck=dict(Counter(kind for _, kind in storm.struck)),
        missed=storm.missed,
        starts=workers.starts,
        restarts_by_harness=restarts,
        steps=len(history),
        load=round(os.getloadavg()[1], 1),
        curve=_curve(folder),
        timeline=timeline,
        faults=storm.struck,
    )


def _journal(path: Path) -> tuple[list[Commit], set[int]]:
    """The line's history, and the positions that its cursor has passed."""
    with JournalReader(path) as journal:
        steps = [entry for entry in journal.chain() if entry.result is not None]
    history: list[Commit] = []
    for entry in steps:
        assert entry.result is not None
        positions = [
            position
            for part in entry.result.contributions
            for each in part.positions
            for position in range(each.start, each.stop)
        ]
        parent = history[-1].name if history else ""
        name = f"{entry.record.key}"
        history.append(Commit(name, parent, entry.at_unix_s, tuple(positions)))
    end = steps[-1].result.batch.stop if steps and steps[-1].result is not None else 0
    return history, set(range(end))


def _curve(folder: Path) -> list[tuple[int, float]]:
    model, _ = build()
    curve = []
    for snapshot in sorted(folder.glob("snapshot-*.pt")):
        model.load_state_dict(torch.load(snapshot))
        curve.append((int(snapshot.stem.rpartition("-")[2]), round(held_out_loss(model), 5)))
    return curve


def loss_at(curve: Sequence[tuple[int, float]], samples: float) -> float:
    """The loss after so many samples, interpolated between two snapshots.

    Raises:
        ValueError: the curve does not reach so far.
    """
    for (before, high), (after, low) in pairwise(curve):
        if before <= samples <= after:
            return high + (low - high) * (samples - before) / max(after - before, 1)
    raise ValueError(f"no snapshots on both sides of {samples} samples")
