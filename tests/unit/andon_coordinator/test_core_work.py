"""The core's work: that of an event does not grow with the roster, that of a step grows with it.

Work is counted, never timed: as executed bytecode instructions of the core, and as members that a
list of them was made of, which is a loop that no bytecode shows.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from andon_coordinator.core import events as on
from andon_coordinator.core import members as members_module
from andon_coordinator.core.members import LineMember, Members
from scenarios.crowd_simulation import SimulatedCrowd

_CORE = str(Path(members_module.__file__).parent)
_SMALL, _LARGE = 12, 60
_SLACK = 1.25
"""A heap's depth, and a set that happens to be resized."""


class Work:
    """Instructions and members, by kind of event: of each event its sum."""

    def __init__(self) -> None:
        self.of_events: defaultdict[str, list[int]] = defaultdict(list)
        self._counted = 0

    @contextmanager
    def counting(self, kind: str) -> Iterator[None]:
        """Counts what happens in the core while this is open."""
        self._counted = 0
        with _each_instruction(self.took):
            yield
        self.of_events[kind].append(self._counted)

    def took(self, operations: int) -> None:
        """So many instructions were executed, or members looked at one by one."""
        self._counted += operations


if sys.version_info >= (3, 12):

    @contextmanager
    def _each_instruction(took: Callable[[int], None]) -> Iterator[None]:
        tool, instruction = sys.monitoring.PROFILER_ID, sys.monitoring.events.INSTRUCTION

        def executed(code: CodeType, _offset: int) -> object:
            if not code.co_filename.startswith(_CORE):
                return sys.monitoring.DISABLE
            return took(1)

        sys.monitoring.use_tool_id(tool, __name__)
        try:
            sys.monitoring.register_callback(tool, instruction, executed)
            sys.monitoring.set_events(tool, instruction)
            yield
        finally:
            sys.monitoring.set_events(tool, sys.monitoring.events.NO_EVENTS)
            sys.monitoring.register_callback(tool, instruction, None)
            sys.monitoring.free_tool_id(tool)

else:

    @contextmanager
    def _each_instruction(took: Callable[[int], None]) -> Iterator[None]:
        def enter(frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
            if not frame.f_code.co_filename.startswith(_CORE):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return step

        def step(frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
            took(event == "opcode")
            return step

        before = sys.gettrace()
        sys.settrace(enter)
        try:
            yield
        finally:
            sys.settrace(before)


class CountedMembers(Members):
    """Members whose lists are counted."""

    work: Work | None = None

    def _of(self, workers: Any) -> list[LineMember]:
        found = super()._of(workers)
        if self.work is not None:
            self.work.took(len(found))
        return found


def counted(crowd: SimulatedCrowd) -> Work:
    """Counts from now on what the core of a line does."""
    work, members, core = Work(), CountedMembers(), crowd.line._core
    for each in list(core.members):
        members.put(each)
    members.work, core.members = work, members
    receive = crowd.line.receive

    def counts(event: on.Event, now: float, *, wall: float = 0.0) -> Any:
        with work.counting(type(event).__name__):
            return receive(event, now, wall=wall)

    crowd.line.receive = counts  # type: ignore[method-assign]  # it counts, and does the same
    return work


def usual(work: Work) -> dict[str, int]:
    """The most that an event of each kind cost, without the one that concerned everybody."""
    assert all(min(counts) > 0 for counts in work.of_events.values()), "nothing was counted"
    return {kind: max(sorted(counts)[:-1]) for kind, counts in work.of_events.items() if counts[1:]}


def small_and_large(act: Callable[[SimulatedCrowd], object], **how: Any) -> tuple[Work, Work]:
    """What an act costs a line of few workers, and one of many; it was done once before."""
    works = []
    for workers in (_SMALL, _LARGE):
        crowd = SimulatedCrowd(workers, **how)
        crowd.step()
        works.append(counted(crowd))
        act(crowd)
    return works[0], works[1]


@pytest.mark.parametrize("schedule", ["every-step", "balanced", "cadence"])
def test_the_work_of_an_event_does_not_grow_with_the_roster(schedule: str) -> None:
    small, large = small_and_large(SimulatedCrowd.step, schedule=schedule)

    assert usual(large).keys() == {"WorkRequested", "HeartbeatArrived", "WorkerReady"}
    for kind, cost in usual(large).items():
        assert cost <= _SLACK * usual(small)[kind], kind


@pytest.mark.parametrize("schedule", ["every-step", "balanced", "cadence"])
def test_the_work_of_a_step_grows_no_faster_than_the_roster(schedule: str) -> None:
    small, large = small_and_large(SimulatedCrowd.step, schedule=schedule)

    for kind, counts in large.of_events.items():
        assert sum(counts) / _LARGE <= _SLACK * sum(small.of_events[kind]) / _SMALL, kind


def test_a_tick_costs_the_same_on_any_line() -> None:
    small, large = small_and_large(lambda crowd: [crowd.send(on.TimePassed()) for _ in range(2)])

    assert usual(large)["TimePassed"] <= _SLACK * usual(small)["TimePassed"]


def test_a_straggler_time_out_adds_nothing_to_an_event_that_begins_no_wait() -> None:
    small, large = small_and_large(SimulatedCrowd.step, straggler_timeout_s=30.0)

    # The first request and the first report begin a wait, the last ones end it.
    for kind in ("WorkRequested", "WorkerReady"):
        few, many = (sorted(each.of_events[kind])[:-2] for each in (small, large))
        assert max(many) <= _SLACK * max(few), kind


@pytest.mark.parametrize("last", [False, True], ids=["a mean", "the last weights"])
def test_a_number_to_average_costs_the_same_on_any_line(last: bool) -> None:
    small, large = small_and_large(lambda crowd: crowd.mean(last=last))

    few, many = usual(small), usual(large)
    assert many["ScalarAllReduceArrived"] <= _SLACK * few["ScalarAllReduceArrived"]


def test_a_join_costs_the_same_on_any_line() -> None:
    costs = []
    for workers in (_SMALL, _LARGE):
        crowd = SimulatedCrowd(workers, spare=3)
        work = counted(crowd)
        for _ in range(3):
            crowd.join_newcomer()
        costs.append(usual(work)["WorkerJoined"])

    assert costs[1] <= _SLACK * costs[0]


def test_a_list_of_all_members_is_counted() -> None:
    work = Work()
    members = CountedMembers()
    crowd = SimulatedCrowd(_SMALL)
    for each in crowd.line._core.members:
        members.put(each)
    members.work = work

    with work.counting("scan"):
        members.live()

    assert work.of_events["scan"][0] > _SMALL
