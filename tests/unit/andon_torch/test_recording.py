"""A rank's trace: its backward passes, its calls, and for whom they waited."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from andon.host.trace import TraceEvent, TracePart, Track, parts_folder, read_part
from andon.protocol.peer_calls import Call, CallKind, PendingCall
from andon_torch.gate import GateMode, GradientWatch
from andon_torch.recording import RecordedCaller, Recording
from andon_torch.reductions import TorchReduce
from andon_torch.testing import FakeCall
from andon_trainer.core.peer_work import Part, Work
from andon_trainer.timeline import Timeline

BARRIER = Work(call=Call(kind=CallKind.BARRIER), itemsize=1)
SUM = Work(
    call=Call(kind=CallKind.ALL_REDUCE, dtype="float32", count=2, reduction="sum"),
    itemsize=4,
    parts=(Part((memoryview(bytearray(8)),), (memoryview(bytearray(8)),)),),
    reduce=TorchReduce("sum", torch.float32, 2),
)


@dataclass
class NumberedCall(FakeCall):
    """A call that knows its number, and says who looks for whom it waits."""

    number: int = 0
    asked: int = 0


@dataclass
class Group:
    """A group whose calls the test ends; rank 1 is missing while one is open."""

    name: str = "default"
    rank: int = 0
    ranks: tuple[int, ...] = (0, 1)
    calls: list[NumberedCall] = field(default_factory=list)

    def begin(self, work: Work, *, awaited: bool = False) -> NumberedCall:
        self.calls.append(NumberedCall(work, number=len(self.calls)))
        return self.calls[-1]

    def pending_of(self, call: NumberedCall) -> PendingCall:
        call.asked += 1
        return PendingCall(
            group_name=self.name, group=1, sequence=call.number, call=call.work.call,
            open_s=0.0, missing=(1,),
        )  # fmt: skip


@dataclass
class Rig:
    """A group that is recorded, and what the trace has of it."""

    group: Group
    caller: RecordedCaller
    watch: GradientWatch
    recording: Recording
    read: Callable[[], TracePart]

    def spans(self, track: Track) -> list[TraceEvent]:
        """The spans of a track, once all is written."""
        self.recording.close()
        return [each for each in self.read().events if each.track is track and each.kind == "X"]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A rank 0 that is recorded."""
    trace, group, watch = tmp_path / "t.json", Group(), GradientWatch(GateMode.BACKWARD)
    recording = Recording(Timeline(trace, run_id="7f3a", called="rank"))
    caller = RecordedCaller(recording, group, watch)

    def read() -> TracePart:
        [path] = parts_folder(trace).iterdir()
        return read_part(path)

    yield Rig(group, caller, watch, recording, read)
    recording.close()


def test_a_call_is_a_span_with_its_group_bytes_and_step(rig: Rig) -> None:
    rig.recording.formed(0, 0.0)

    rig.caller.begin(SUM)
    rig.group.calls[0].end()

    [span] = rig.spans(Track.CALLS)
    args = {
        "call": "all_reduce(sum) of 2 float32", "group": "default", "sequence": 0,
        "bytes": 8, "step": 0,
    }  # fmt: skip
    assert (span.name, args.items() <= span.args.items()) == ("all_reduce(sum)", True)
    assert (rig.read().worker, rig.read().header.called) == (0, "rank")


def test_a_call_that_is_open_for_long_says_for_which_rank_it_waited(rig: Rig) -> None:
    rig.caller.begin(BARRIER)
    call = rig.group.calls[0]
    while call.asked < 2:  # The looking thread comes by itself.
        pass
    call.end()

    [span] = rig.spans(Track.CALLS)
    assert span.args["waited_for_ms"].keys() == {"1"}
    assert 0 < span.args["waited_for_ms"]["1"] <= span.us / 1000 + 1


def test_whoever_waits_ends_the_span_once_and_has_a_span_of_its_own(rig: Rig) -> None:
    work = rig.caller.begin(BARRIER)

    with pytest.raises(TimeoutError):
        work.wait(0.1)
    rig.group.calls[0].end()
    work.wait(None)

    [waited] = rig.spans(Track.SCRIPT)
    assert waited.name == "wait for barrier"
    assert len(rig.spans(Track.CALLS)) == 1


def test_calls_that_fail_and_those_that_never_end_say_so(rig: Rig) -> None:
    rig.caller.begin(BARRIER)
    rig.caller.begin(SUM)
    rig.group.calls[0].end(RuntimeError("rank 1 is gone"))

    failed = [each.args["failed"] for each in rig.spans(Track.CALLS)]

    assert failed == ["rank 1 is gone", "it had not ended"]


class _Exchanges(torch.autograd.Function):
    """Makes a sum in the backward pass, as DistributedDataParallel does."""

    rig: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        rig: Rig = _Exchanges.rig
        rig.watch.gate_for([gradient], "sum")
        rig.caller.begin(SUM)
        # As that does: its own callback waits for the calls.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(rig.group.calls[-1].end)
        return gradient


def test_a_backward_pass_goes_from_its_first_call_to_its_end_and_is_a_step(rig: Rig) -> None:
    _Exchanges.rig = rig
    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        _Exchanges.apply(_Exchanges.apply(x)).sum().backward()  # type: ignore[no-untyped-call]

    passes = rig.spans(Track.SCRIPT)

    assert [(each.name, each.args["step"]) for each in passes] == [("backward", 1), ("backward", 2)]
    calls = rig.spans(Track.CALLS)
    assert [each.args["step"] for each in calls] == [1, 1, 2, 2]
    for each in calls:
        within = passes[each.args["step"] - 1]
        assert within.at_us <= each.at_us
        assert each.at_us + each.us <= within.at_us + within.us
