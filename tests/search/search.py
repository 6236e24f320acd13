"""The search: every reachable state, nearest first."""

from __future__ import annotations

import gc
import time
from array import array
from collections import deque
from dataclasses import dataclass, field

from search.faults import faults
from search.goal import lost, reached
from search.moves import moves
from search.state import Bounds, Label, State
from search.weights import Wrong
from search.worker import Place
from search.world import World

__all__ = ["Found", "Report", "search"]


@dataclass(frozen=True, slots=True)
class Found:
    """A forbidden state: what is wrong with it, and the way that led there."""

    message: str
    way: tuple[Label, ...]


@dataclass(slots=True)
class Report:
    """What a search saw."""

    bounds: Bounds
    states: int = 0
    depth: int = 0
    seconds: float = 0.0
    complete: bool = False
    """Whether no state was left out."""
    goals: int = 0
    lost: int = 0
    """States in which no process is left that holds the line's head."""
    found: Found | None = None
    stuck: list[tuple[Label, ...]] = field(default_factory=list)
    """Ways to states from which the goal can't be reached though the head is held."""


class _Graph:
    """Every state that was met, by number, with the way to it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._numbers: dict[int, int] = {}
        self._same: dict[int, int] = {}
        self.parents = array("q")
        self.labels: list[Label] = []
        self.known: dict[Label, Label] = {}
        self.sources = array("q")
        self.targets = array("q")

    def way(self, number: int) -> tuple[Label, ...]:
        labels: list[Label] = []
        while self.parents[number] >= 0:
            labels.append(self.labels[number])
            number = self.parents[number]
        return tuple(reversed(labels))

    def add(self, state: State, parent: int, label: Label) -> int | None:
        """The number of a new state; None if it is known. The edge is noted anyway."""
        new = False
        # Most ways to a state, as those on which two things happen in another order, lead to the
        # very same numbers: then what it is equal to is known.
        number = self._same.get(same := hash(state))
        if number is None:
            number = self._numbers.get(key := self._world.key(state))
            if new := number is None:
                number = self._numbers[key] = len(self.parents)
                self.parents.append(parent)
                self.labels.append(self.known.setdefault(label, label))
            self._same[same] = number
        if parent >= 0:
            self.sources.append(parent)
            self.targets.append(number)
        return number if new else None


def search(world: World, *, states: int = 10**9, seconds: float = 1e9) -> Report:
    """Visits every state within the world's bounds, or the nearest `states` of them."""
    collects = gc.isenabled()
    gc.disable()  # What a search makes lives until its end: looking for garbage finds none.
    try:
        return _search(world, states, seconds)
    finally:
        if collects:
            gc.enable()


def _search(world: World, states: int, seconds: float) -> Report:
    report = Report(world.bounds)
    graph = _Graph(world)
    began = time.monotonic()
    first = world.first()
    graph.add(first, -1, ())
    layer: deque[tuple[int, State, int]] = deque([(0, first, 0)])
    ends, gone = bytearray(1), bytearray(1)
    while layer and len(graph.parents) < states and time.monotonic() - began < seconds:
        number, state, depth = layer.popleft()
        report.depth = depth
        try:
            check(world, state)
            for after in (moves(world, state), faults(world, state)):
                for label, new in after:
                    added = graph.add(new, number, label)
                    if added is not None:
                        layer.append((added, new, depth + 1))
                        ends.append(reached(world, new))
                        gone.append(lost(world, new))
        except Wrong as wrong:
            report.found = Found(str(wrong), graph.way(number))
            break
    report.complete = not layer and report.found is None
    report.states, report.seconds = len(graph.parents), time.monotonic() - began
    report.goals, report.lost = sum(ends), sum(gone)
    if report.complete:
        report.stuck = [graph.way(each) for each in _stuck(graph, ends, gone)[:10]]
    report.seconds = time.monotonic() - began
    return report


def check(world: World, state: State) -> None:
    """What must hold in every state.

    Raises:
        Wrong: it does not.
    """
    heads: dict[object, tuple[int, int]] = {}
    for slot in range(world.bounds.workers):
        worker = world.worker(state, slot)
        head = worker.state.head
        if head is None:
            continue
        waits = worker.place in (Place.WORK, Place.ENOUGH)
        if world.bounds.means and waits and worker.scheduled != worker.state.step:
            raise Wrong(
                f"worker {slot} is at step {worker.state.step}, and its scheduler at "
                f"{worker.scheduled}"
            )
        if world.library.head(worker.weights) != head:
            raise Wrong(f"worker {slot} counts as at {head} with weights of another record")
        twice = [at for at in worker.local.change if world.library.has(worker.weights, at)]
        if twice:
            raise Wrong(f"F-DP-002: worker {slot} still has {twice} apart, which a record covers")
        other, weights = heads.setdefault(head, (slot, worker.weights))
        if weights != worker.weights:
            raise Wrong(
                f"C-COMMIT-001: workers {other} and {slot} are both at {head} "
                "and hold different histories"
            )


def _stuck(graph: _Graph, ends: bytearray, gone: bytearray) -> list[int]:
    """States from which the goal can't be reached, though some worker holds the line's head."""
    before: list[list[int]] = [[] for _ in graph.parents]
    for source, target in zip(graph.sources, graph.targets, strict=True):
        before[target].append(source)
    can = bytearray(len(graph.parents))
    todo = [number for number, end in enumerate(ends) if end or gone[number]]
    for number in todo:
        can[number] = 1
    while todo:
        for source in before[todo.pop()]:
            if not can[source]:
                can[source] = 1
                todo.append(source)
    return [number for number, able in enumerate(can) if not able]
