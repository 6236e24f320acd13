"""Faults of the recovery benchmark: each is injected once, and the parts of the recovery are timed.

Times come from the workers' logs, by CLOCK_MONOTONIC, which all processes of a host share. A part
ends when the last survivor has completed it.
"""

from __future__ import annotations

import random
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from chaos.rig import ChaosLine, WorkerSlot, await_until, events_of

__all__ = ["Recovery", "kill_coordinator", "kill_worker", "rejoin", "stop_worker"]

_POINTS = ("assigned", "before-blocks", "mid-blocks", "after-blocks")
"""Points at which a step can't be committed without the worker that stopped there."""

Events = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds, `total` first, then its parts in order."""

    parts: dict[str, float]


def kill_worker(line: ChaosLine, chance: random.Random) -> Recovery:
    """SIGKILL in the middle of a step; the worker is restarted afterwards."""
    struck, survivors = _brought_to_a_point(line, chance)
    began = time.monotonic()
    struck.kill()
    recovery = _recovery(line, survivors, began, _voided)
    line.start_worker(struck.slot)
    line.await_progress()
    return recovery


def stop_worker(line: ChaosLine, chance: random.Random) -> Recovery:
    """SIGSTOP in the middle of a step, and SIGCONT once the others have continued."""
    struck, survivors = _brought_to_a_point(line, chance)
    began = time.monotonic()
    struck.signal(signal.SIGSTOP)
    struck.go()
    recovery = _recovery(line, survivors, began, _voided)
    struck.signal(signal.SIGCONT)
    line.await_progress()
    return recovery


def kill_coordinator(line: ChaosLine, chance: random.Random) -> Recovery:
    """SIGKILL of the service in the middle of a step; the next one is started at once."""
    held, others = _brought_to_a_point(line, chance)
    began = time.monotonic()
    line.kill_coordinator()
    held.go()
    line.restart_coordinator()
    restarted_s = time.monotonic() - began
    recovery = _recovery(line, [held, *others], began, _disconnected)
    line.await_progress()
    return Recovery({**recovery.parts, "of which the service's start": restarted_s})


def rejoin(line: ChaosLine, slot: int) -> Recovery:
    """From the start of a killed worker's replacement, without weights, to its first contribution.

    `pause` is the time from the others' last commit without the newcomer until it has their state:
    the cost of the transfer to them. The time between these two commits also contains the
    newcomer's first step, which takes about as long as the line's median step before.
    """
    line.workers[slot].kill()
    others = [worker for worker in line.workers.values() if worker.slot != slot]
    line.await_progress(*(worker.slot for worker in others), steps=3)
    worker = line.start_worker(slot)
    line.await_step(line.await_progress(*(other.slot for other in others), steps=0))
    await_until("the first contribution", lambda: _since_start(worker, "applied"), patience_s=120.0)
    line.await_progress(steps=1)
    began = _since_start(worker, "start")[0]["at"]
    installed = _since_start(worker, "installed")[0]["at"]
    contributed = _since_start(worker, "applied")[0]["at"]
    pauses, between, usual = [], [], []
    for other in others:
        moments = [each["at"] for each in events_of(other.log) if each["event"] == "applied"]
        for before, after in pairwise(moments):
            if after < began:
                usual.append(after - before)
            elif before < installed < after:
                between.append(after - before)
                pauses.append(installed - before)
    return Recovery(
        {
            "total": contributed - began,
            "join and transfer": installed - began,
            "first step": contributed - installed,
            "pause": max(pauses),
            "between the others' commits": max(between),
            "usual step": statistics.median(usual),
        }
    )


def _brought_to_a_point(
    line: ChaosLine, chance: random.Random
) -> tuple[WorkerSlot, list[WorkerSlot]]:
    """Stops a worker in the middle of a step; returns it, and the others."""
    workers = [line.workers[slot] for slot in chance.sample(range(3), 3)]
    line.await_progress()
    point = chance.choice(_POINTS)
    workers[0].stop_at(point)
    workers[0].await_point(point)
    time.sleep(0.05)  # the others compute their shares, and wait
    return workers[0], workers[1:]


def _recovery(
    line: ChaosLine, survivors: list[WorkerSlot], began: float, detected: Callable[[Events], Events]
) -> Recovery:
    """Waits for the commit, and reads the time of each part from the logs."""
    line.await_progress(*(worker.slot for worker in survivors), steps=1)
    parts = []
    for worker in survivors:
        events = [event for event in events_of(worker.log) if event["at"] >= began]
        committed = _first(events, "applied")
        tries = [event for event in events if event.get("key") == committed["key"]]
        moments = [
            detected(events)[0]["at"],
            _first(tries, "assigned")["at"],
            _first(tries, "computed")["at"],
            committed["at"],
        ]
        parts.append(moments)
    ends = [max(moments) for moments in zip(*parts, strict=True)]
    names = ("detection", "re-assignment", "recomputation", "commit")
    lengths = [b - a for a, b in pairwise([began, *ends])]
    return Recovery({"total": ends[-1] - began, **dict(zip(names, lengths, strict=True))})


def _voided(events: Events) -> Events:
    return [each for each in events if "is tried again" in each.get("message", "")]


def _disconnected(events: Events) -> Events:
    return [each for each in events if "lost the coordinator" in each.get("message", "")]


def _first(events: Events, kind: str) -> dict[str, Any]:
    return next(event for event in events if event["event"] == kind)


def _since_start(worker: WorkerSlot, kind: str) -> Events:
    """The events of a kind that the worker's current process logged."""
    events = events_of(worker.log)
    starts = [at for at, event in enumerate(events) if event["event"] == "start"]
    return [event for event in events[starts[-1] :] if event["event"] == kind]
