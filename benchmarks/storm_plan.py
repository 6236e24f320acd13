"""The storm's faults: drawn from a seed before any system starts, so that all get the same ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["FREEZE", "KILL", "KILL_SERVICE", "Fault", "ideal_share", "planned", "victim_of"]

KILL = "kill-worker"
"""SIGKILL of a worker, which is started again and joins as a newcomer."""
FREEZE = "freeze-worker"
"""SIGSTOP of a worker, and SIGCONT some seconds later."""
KILL_SERVICE = "kill-service"
"""SIGKILL of what the workers of a system find each other by."""
_BAG = (KILL,) * 6 + (FREEZE,) * 2 + (KILL_SERVICE,) * 2
"""Ten faults in random order, then ten more: so a short storm has a fair mixture, too."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens, how many seconds after the storm began, and to which slot."""

    at_s: float
    kind: str
    slot: int


def planned(seed: int, every_s: float, seconds: float, replicas: int) -> list[Fault]:
    """A fault each `every_s`, the last one early enough to see what follows from it."""
    chance = random.Random(seed)
    faults: list[Fault] = []
    bag: list[str] = []
    for number in range(1, int(seconds // every_s)):
        if not bag:
            bag = chance.sample(_BAG, len(_BAG))
        faults.append(Fault(number * every_s, bag.pop(), chance.randrange(replicas)))
    return faults


def ideal_share(plan: Sequence[Fault], freeze_s: float, seconds: float, replicas: int) -> float:
    """What a system keeps that loses what its frozen workers would have computed, and nothing else.

    The others go on at their own speed. A worker or a service that is killed is back at once.
    """
    absent_s = 0.0
    for slot in range(replicas):
        until = 0.0
        for fault in plan:
            if fault.kind == FREEZE and fault.slot == slot:
                end = min(fault.at_s + freeze_s, seconds)
                absent_s += max(0.0, end - max(fault.at_s, until))
                until = max(until, end)
    return 1.0 - absent_s / (seconds * replicas)


def victim_of(fault: Fault, running: Sequence[int]) -> int | None:
    """The slot that a fault strikes: its own, or the next one whose process runs; None: none does.

    `running` is in rising order. A system that is slow to start workers again is not spared.
    """
    later = [slot for slot in running if slot >= fault.slot]
    return next(iter([*later, *running]), None)
