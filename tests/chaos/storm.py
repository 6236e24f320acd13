"""A storm: a sequence of faults, chosen by a seed, on a line that has to keep training."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chaos.barrier import POINTS
from chaos.rig import ChaosLine

__all__ = ["CALM", "TURN", "WILD", "Fault", "plan_storm", "strike", "strike_unevenly"]

WILD = {
    "kill a worker": 12,
    "kill the coordinator": 6,
    "kill two workers": 3,
    "kill a worker and the coordinator": 3,
    "kill a worker, and hold a step while it joins": 4,
    "stop a worker for a moment": 2,
    "stop a worker beyond its lease": 1,
}
"""All kinds of faults, with their weights."""

CALM = {"kill the coordinator": 4, "stop a worker for a moment": 2}
"""Faults after which every worker is assigned the same positions as without them."""

TURN = 4
"""After so many faults another worker becomes the slow one."""

_MOMENT_S = 0.2


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault, its workers, and its points in a step."""

    kind: str
    slots: tuple[int, ...]
    """All slots in random order: the fault hits the first ones."""
    points: tuple[str, str]
    """The point at which it hits the first worker, and the second."""


def plan_storm(
    seed: int, faults: int, kinds: dict[str, int], points: Sequence[str] = POINTS
) -> list[Fault]:
    """The faults of a seed. All random choices are made here; workers stop at `points`."""
    chance = random.Random(seed)
    names, often = list(kinds), list(kinds.values())
    return [
        Fault(
            kind=chance.choices(names, often)[0],
            slots=tuple(chance.sample(range(3), 3)),
            points=(chance.choice(points), chance.choice(points)),
        )
        for _ in range(faults)
    ]


def strike(line: ChaosLine, fault: Fault) -> None:
    """Injects the fault, and waits until an unaffected worker commits again (F-DP-006).

    Killed processes are restarted; they may not have joined yet when this returns.
    """
    _STRIKES[fault.kind](line, fault)


def strike_unevenly(line: ChaosLine, plan: Sequence[Fault]) -> None:
    """Strikes with each fault; one worker after the other is the slow one."""
    for number, fault in enumerate(plan):
        if number % TURN == 0:
            line.slow_down(number // TURN % 3)
        strike(line, fault)


def _reach(line: ChaosLine, fault: Fault) -> None:
    """Waits until the first worker stops at its point of some step.

    The fault comes only while the first and the second worker hold the line's weights. The third
    may still be recovering from an earlier fault.
    """
    line.await_progress(*fault.slots[:2], steps=1)
    line.workers[fault.slots[0]].stop_at(fault.points[0])
    line.workers[fault.slots[0]].await_point(fault.points[0])


def _kill_worker(line: ChaosLine, fault: Fault) -> None:
    first, second, _ = fault.slots
    _reach(line, fault)
    line.workers[first].kill()
    line.await_progress(second, steps=1)
    line.start_worker(first)


def _kill_two(line: ChaosLine, fault: Fault) -> None:
    first, second, third = fault.slots
    line.await_progress(third, steps=1)
    _reach(line, fault)
    line.workers[second].stop_at(fault.points[1])
    line.workers[first].kill()
    line.workers[second].await_point(fault.points[1])
    line.workers[second].kill()
    line.await_progress(third, steps=1)
    line.start_worker(first)
    line.start_worker(second)


def _kill_coordinator(line: ChaosLine, fault: Fault) -> None:
    first, second, _ = fault.slots
    _reach(line, fault)
    line.kill_coordinator()
    line.workers[first].go()
    line.restart_coordinator()
    line.await_progress(second, steps=1)


def _kill_both(line: ChaosLine, fault: Fault) -> None:
    first, second, _ = fault.slots
    _reach(line, fault)
    line.workers[first].kill()
    line.kill_coordinator()
    line.start_worker(first)
    line.restart_coordinator()
    line.await_progress(second, steps=1)


def _join_in_a_step(line: ChaosLine, fault: Fault) -> None:
    first, second, third = fault.slots
    line.await_progress(third, steps=1)
    _reach(line, fault)
    line.workers[first].kill()
    line.await_progress(second, third, steps=1)
    line.workers[second].stop_at(fault.points[1])
    line.workers[second].await_point(fault.points[1])
    line.start_worker(first)
    line.await_roster(3)
    line.workers[second].go()
    line.await_progress(steps=1)


def _newcomer(line: ChaosLine, fault: Fault) -> None:
    """A worker more than the line began with; it is killed once it has taken part."""
    newcomer = line.start_worker(line.expected)
    line.await_arrival(newcomer.slot)
    line.await_progress(newcomer.slot, steps=1)
    newcomer.stop_at(fault.points[0])
    newcomer.await_point(fault.points[0])
    newcomer.kill()
    del line.workers[newcomer.slot]
    line.await_progress(*fault.slots[:2], steps=1)


def _stop_for_a_moment(line: ChaosLine, fault: Fault) -> None:
    first, second, _ = fault.slots
    _reach(line, fault)
    line.workers[first].signal(signal.SIGSTOP)
    line.workers[first].go()
    time.sleep(_MOMENT_S)
    line.workers[first].signal(signal.SIGCONT)
    line.await_progress(second, steps=1)


def _stop_beyond_lease(line: ChaosLine, fault: Fault) -> None:
    first, second, _ = fault.slots
    _reach(line, fault)
    line.workers[first].signal(signal.SIGSTOP)
    line.workers[first].go()
    line.await_progress(second, steps=2)
    line.workers[first].signal(signal.SIGCONT)


_STRIKES: dict[str, Callable[[ChaosLine, Fault], None]] = {
    "kill a worker": _kill_worker,
    "kill the coordinator": _kill_coordinator,
    "kill two workers": _kill_two,
    "kill a worker and the coordinator": _kill_both,
    "kill a worker, and hold a step while it joins": _join_in_a_step,
    "stop a worker for a moment": _stop_for_a_moment,
    "stop a worker beyond its lease": _stop_beyond_lease,
    "a newcomer, and kill it": _newcomer,
}
