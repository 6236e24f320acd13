"""A worker's local steps, made a second time from its log.

The order of a worker's local steps depends on which rounds were void, and on overlapped lines they
go on while a record is on its way. None of that is in the journal. So each worker logs the local
steps that it made, before it sends, and whatever else moves its own weights: a record, a transfer,
a drop. The replay reads that log up to a record, and says what the worker must have sent for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from andon.protocol.records import Key
from andon_coordinator.core.step_results import StepContribution
from chaos.computing import ranges_of
from chaos.model import Floats, LineState, LocalWeights, Mask, Task
from chaos.schedules import LineSchedule

__all__ = ["Replay", "exchanged_in"]


class Replay:
    """One worker's own weights, from its first process to its last."""

    def __init__(
        self, slot: int, log: Sequence[dict[str, Any]], task: Task, schedule: LineSchedule
    ) -> None:
        """Stands at the beginning of the log."""
        self._slot = slot
        self._task = task
        self._schedule = schedule
        self._events: Iterator[dict[str, Any]] = iter(log)
        self._own = LocalWeights()
        self._head: Key | None = None
        """The last record that the worker held."""
        self._epochs: dict[Key, int] = {}
        """The epoch of each assignment."""
        self._exchanged: dict[Key, Mask | None] = {}
        """The elements of each assignment's fragment; None: all."""

    def contribution(
        self, key: Key, part: StepContribution, states: Mapping[Key, LineState]
    ) -> Floats:
        """What the worker sent in a round, by its log.

        Args:
            key: the round's; later than all that were asked for before.
            part: what the record says.
            states: what the line holds after each record before this one.

        Raises:
            AssertionError: the log does not have the round, or other positions than the record.
        """
        where = f"worker {self._slot} in {key}"
        for event in self._events:
            self._follow(event, states)
            if event["event"] == "computed" and Key(*event["key"]) == key:
                assert self._head is not None, f"{where}: it never got weights"
                _judge_positions(self._own.due, part, where)
                return self._own.change(states[self._head].weights)
        raise AssertionError(f"C-COMMIT-001: {where}: it never computed anything for it")

    def _follow(self, event: dict[str, Any], states: Mapping[Key, LineState]) -> None:
        match event["event"]:
            case "start":
                self._head, self._own = None, LocalWeights()
            case "installed":
                self._head = self._known(event, states)
                self._own.begin(states[self._head].weights)
            case "dropped":
                assert self._head is not None
                self._own.begin(states[self._head].weights)
            case "assigned" | "attending":
                key = Key(*event["key"])
                self._epochs[key] = event["epoch"]
                self._exchanged[key] = exchanged_in(event, self._task, self._schedule)
            case "computed" | "ahead" as pile:
                epoch = self._epochs[Key(*event["key"])]
                step = self._own.step if pile == "computed" else self._own.step_ahead
                for positions in event["parts"]:
                    step(self._task, epoch, ranges_of(positions))
                if pile == "computed" and self._head is not None:
                    # It is taken now, before anything is computed ahead of it.
                    self._own.change(states[self._head].weights)
            case "applied":
                before, self._head = self._head, self._known(event, states)
                assert before is not None
                old, new = states[before].weights, states[self._head].weights
                if event["attends"] and self._own.due:
                    # What a late worker owes is no part of a round that it only attends.
                    self._own.attend(old, new)
                else:
                    moved = self._exchanged.get(self._head)
                    self._own.rebase(old, new, moved, self._schedule.mix)

    def _known(self, event: dict[str, Any], states: Mapping[Key, LineState]) -> Key:
        key = Key(*event["key"])
        assert key in states, f"worker {self._slot} holds a record that the journal does not: {key}"
        return key


def exchanged_in(event: dict[str, Any], task: Task, schedule: LineSchedule) -> Mask | None:
    """The elements that an assignment's round exchanges; None: all."""
    if event["fragment"] is None:
        return None
    return task.exchanged(event["fragment"], schedule.fragments)


def _judge_positions(made: Sequence[int], part: StepContribution, where: str) -> None:
    """Local steps took exactly the positions that the record says, each of them once."""
    doubled = [at for at, times in Counter(made).items() if times > 1]
    assert not doubled, f"F-DP-002: {where}: in more than one local step: {doubled[:5]}"
    wanted = {at for each in part.positions for at in range(each.start, each.stop)}
    assert set(made) == wanted, f"C-COMMIT-001: {where}: {sorted(set(made) ^ wanted)[:5]}"
