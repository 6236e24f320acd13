"""The goal: the run's last step on every worker; and when it can no longer be reached."""

from __future__ import annotations

from andon_trainer.core.events import Committed
from search.state import State
from search.worker import Place
from search.world import World

__all__ = ["lost", "reached"]


def reached(world: World, state: State) -> bool:
    """Whether every worker holds the line's last step, and its script is past it.

    With spares: whether as many do as the line waits for. Where the line ends the run: whether
    every process has ended.
    """
    head = world.core(state).chain.head
    if world.bounds.ends:
        workers = (world.worker(state, slot) for slot in range(world.bounds.workers))
        return all(each.place is Place.GONE for each in workers)
    needed = world.bounds.expected if world.bounds.spares else world.bounds.workers
    workers = (world.worker(state, slot) for slot in range(world.bounds.workers))
    done = sum(
        each.state.head == head
        and each.state.step >= world.bounds.steps
        and each.place is not Place.MEAN
        for each in workers
    )
    return done >= needed


def lost(world: World, state: State) -> bool:
    """Whether no process holds the line's trained head, nor can apply its record, nor an older one.

    Only faults lead to this, and then only a person can help, with an older checkpoint. At step 0
    nothing is lost: the line is bootstrapped again.
    """
    chain = world.core(state).chain
    if chain.head is None or chain.step == 0:
        return False
    history = world.journal(state).ancestors()
    for slot in range(world.bounds.workers):
        worker_state = world.worker(state, slot).state
        if worker_state.head == chain.head or worker_state.head in history:
            return False
        held = worker_state.held_key == chain.head and chain.record is not None
        if held and chain.record is not None and worker_state.head == chain.record.parent:
            return False
        for part in state.downs[slot]:
            message = world.parts.objects[part]
            if isinstance(message, Committed) and message.record.key == chain.head:
                return False
    return True
