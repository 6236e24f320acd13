"""Storms around workers that learn: a sequence of faults, chosen by a seed, while somebody learns.

Workers here can learn the state while the line trains. The storms in `storm` hit members of the
roster; these hit learners, their donors, and whoever is needed meanwhile.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from chaos.barrier import POINTS
from chaos.rig import ChaosLine, WorkerSlot, await_until

__all__ = ["STRIKES", "Blow", "plan_blows", "strike"]


@dataclass(frozen=True, slots=True)
class Blow:
    """One fault, its workers, and when it comes."""

    kind: str
    learner: int
    donor: int
    """The worker with the highest id beside the learner: it gives its state."""
    other: int
    point: str
    """Where in a step somebody is stopped first."""
    after_s: float
    """How long after the learner began it comes, where no point is waited for."""


def plan_blows(seed: int, blows: int) -> list[Blow]:
    """The faults of a seed. All random choices are made here."""
    chance = random.Random(seed)
    kinds = list(STRIKES)
    planned = []
    for number in range(blows):
        # Each kind comes once before any comes again.
        if number % len(kinds) == 0:
            chance.shuffle(kinds)
        slots = [0, 1, 2]
        learner = slots.pop(chance.randrange(3))
        planned.append(
            Blow(
                kind=kinds[number % len(kinds)],
                learner=learner,
                donor=max(slots),
                other=min(slots),
                point=chance.choice(POINTS),
                after_s=chance.choice((0.0, 0.0, 0.005, 0.02, 0.1)),
            )
        )
    return planned


def strike(line: ChaosLine, blow: Blow) -> None:
    """Injects the fault, and waits until all three workers hold the line's weights again."""
    line.await_progress(0, 1, 2, steps=1)
    STRIKES[blow.kind](line, blow)
    line.await_progress(0, 1, 2, steps=1)


# ------------------------------------------------------------------------------ how it begins


def _begin_learning(line: ChaosLine, blow: Blow) -> WorkerSlot:
    """Kills the worker, and starts it again: it learns, since the two others train on."""
    learner = line.workers[blow.learner]
    learner.kill()
    line.await_progress(blow.donor, blow.other, steps=1)
    return _start(line, blow.learner)


def _start(line: ChaosLine, slot: int) -> WorkerSlot:
    before = _begun(line, slot)
    worker = line.start_worker(slot)
    await_until(f"worker {slot} to learn", lambda: _begun(line, slot) > before)
    return worker


def _begun(line: ChaosLine, slot: int) -> int:
    """How often a worker has begun to learn, or joined without having to."""
    return len(line.said(slot, "learning the line's state")) + line.installs(slot)


# ------------------------------------------------------------------------------- the faults


def _kill_learner(line: ChaosLine, blow: Blow) -> None:
    worker = _begin_learning(line, blow)
    time.sleep(blow.after_s)
    worker.kill()
    line.await_progress(blow.donor, blow.other, steps=1)
    line.start_worker(blow.learner)


def _stand_in_first_step(line: ChaosLine, blow: Blow) -> WorkerSlot:
    """The learner, which stands at the blow's point in its first step."""
    line.workers[blow.learner].kill()
    line.await_progress(blow.donor, blow.other, steps=1)
    worker = line.workers[blow.learner]
    worker.stop_at(blow.point)
    line.start_worker(blow.learner)
    worker.await_point(blow.point)
    return worker


def _kill_learner_in_its_first_step(line: ChaosLine, blow: Blow) -> None:
    worker = _stand_in_first_step(line, blow)
    time.sleep(blow.after_s)
    worker.kill()
    line.await_progress(blow.donor, blow.other, steps=1)
    line.start_worker(blow.learner)


def _freeze_learner_in_its_first_step(line: ChaosLine, blow: Blow) -> None:
    worker = _stand_in_first_step(line, blow)
    worker.signal(signal.SIGSTOP)
    worker.go()
    line.await_progress(blow.donor, blow.other, steps=2)
    worker.signal(signal.SIGCONT)


def _freeze_learner(line: ChaosLine, blow: Blow) -> None:
    worker = _begin_learning(line, blow)
    time.sleep(blow.after_s)
    worker.signal(signal.SIGSTOP)
    line.await_progress(blow.donor, blow.other, steps=2)
    worker.signal(signal.SIGCONT)


def _freeze_worker(line: ChaosLine, blow: Blow) -> None:
    """It is cut off, and learns once it goes on."""
    worker = line.workers[blow.learner]
    worker.stop_at(blow.point)
    worker.await_point(blow.point)
    worker.signal(signal.SIGSTOP)
    worker.go()
    line.await_progress(blow.donor, blow.other, steps=2)
    worker.signal(signal.SIGCONT)
    time.sleep(blow.after_s)


def _freeze_twice(line: ChaosLine, blow: Blow) -> None:
    """Stopped once more while it learns what it missed."""
    _freeze_worker(line, blow)
    worker = line.workers[blow.learner]
    worker.signal(signal.SIGSTOP)
    line.await_progress(blow.donor, blow.other, steps=1)
    worker.signal(signal.SIGCONT)


def _kill_donor(line: ChaosLine, blow: Blow) -> None:
    _begin_learning(line, blow)
    time.sleep(blow.after_s)
    line.workers[blow.donor].kill()
    line.await_progress(blow.other, steps=1)
    line.start_worker(blow.donor)


def _freeze_donor(line: ChaosLine, blow: Blow) -> None:
    _begin_learning(line, blow)
    time.sleep(blow.after_s)
    line.workers[blow.donor].signal(signal.SIGSTOP)
    line.await_progress(blow.other, steps=2)
    line.workers[blow.donor].signal(signal.SIGCONT)


def _two_learners(line: ChaosLine, blow: Blow) -> None:
    """Both are given their state by a lone survivor."""
    line.workers[blow.learner].kill()
    line.workers[blow.donor].kill()
    line.await_progress(blow.other, steps=1)
    line.start_worker(blow.learner)
    time.sleep(blow.after_s)
    line.start_worker(blow.donor)


def _two_learners_of_whom_one_dies(line: ChaosLine, blow: Blow) -> None:
    _two_learners(line, blow)
    time.sleep(blow.after_s)
    line.workers[blow.learner].kill()
    line.await_progress(blow.other, steps=1)
    line.start_worker(blow.learner)


def _kill_coordinator(line: ChaosLine, blow: Blow) -> None:
    _begin_learning(line, blow)
    time.sleep(blow.after_s)
    line.kill_coordinator()
    line.restart_coordinator()


def _kill_coordinator_in_the_first_step(line: ChaosLine, blow: Blow) -> None:
    worker = _stand_in_first_step(line, blow)
    line.kill_coordinator()
    worker.go()
    line.restart_coordinator()


def _kill_all_three(line: ChaosLine, blow: Blow) -> None:
    """The learner, its donor and the coordinator."""
    worker = _begin_learning(line, blow)
    time.sleep(blow.after_s)
    line.workers[blow.donor].kill()
    line.kill_coordinator()
    worker.kill()
    line.start_worker(blow.donor)
    line.restart_coordinator()
    line.start_worker(blow.learner)


def _pull_cord(line: ChaosLine, blow: Blow) -> None:
    _begin_learning(line, blow)
    time.sleep(blow.after_s)
    line.service.pull_cord()
    time.sleep(blow.after_s)
    _answer(line)


def _pull_cord_in_the_first_step(line: ChaosLine, blow: Blow) -> None:
    worker = _stand_in_first_step(line, blow)
    line.service.pull_cord()
    line.service.await_halt()
    worker.go()
    time.sleep(blow.after_s)
    _answer(line)


def _answer(line: ChaosLine) -> None:
    """Lets the line go on, as soon as no record is being saved any more."""
    halt = line.service.await_halt().id

    def answered() -> bool:
        try:
            line.service.clear_halt(halt)
        except grpc.RpcError as error:
            if "a record is being saved" not in str(error):
                raise
            return False
        return True

    await_until("the halt to be answered", answered)


STRIKES: dict[str, Callable[[ChaosLine, Blow], None]] = {
    "kill a learner": _kill_learner,
    "kill a learner in its first step": _kill_learner_in_its_first_step,
    "freeze a learner": _freeze_learner,
    "freeze a learner in its first step": _freeze_learner_in_its_first_step,
    "freeze a worker": _freeze_worker,
    "freeze a worker, and again as it learns": _freeze_twice,
    "kill the donor": _kill_donor,
    "freeze the donor": _freeze_donor,
    "two learners": _two_learners,
    "two learners, and kill one": _two_learners_of_whom_one_dies,
    "kill the coordinator": _kill_coordinator,
    "kill the coordinator in a learner's first step": _kill_coordinator_in_the_first_step,
    "kill learner, donor and coordinator": _kill_all_three,
    "pull the cord": _pull_cord,
    "pull the cord in a learner's first step": _pull_cord_in_the_first_step,
}
