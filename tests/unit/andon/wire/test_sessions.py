"""Messages of sessions: what is legal comes back as it went; what no rank can mean is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from andon.protocol.limits import LimitExceeded
from andon.protocol.sessions import SessionEnd
from andon.v1 import session_pb2 as pb
from andon.wire import sessions
from andon.wire.conversion import WireError
from vectors.samples import samples

SAMPLES: dict[str, Any] = samples()


@pytest.mark.parametrize(
    ("name", "there", "back"),
    [
        ("Call", sessions.call_from_proto, sessions.call_to_proto),
        ("PendingCall", sessions.pending_from_proto, sessions.pending_to_proto),
        ("SessionOver", sessions.over_from_proto, sessions.over_to_proto),
        ("SessionFormed", sessions.formed_from_proto, sessions.formed_to_proto),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_c_wire_002_a_message_comes_back_as_it_was(name: str, there: Any, back: Any) -> None:
    sample = pb.SessionOver() if name == "SessionOver" else SAMPLES[name]
    if name == "SessionOver":
        sample.CopyFrom(SAMPLES[name])
        sample.fault.ClearField("key")  # The end has it already.

    assert back(there(sample)) == sample


def test_a_report_and_a_fault_come_back_without_what_their_stream_says() -> None:
    report, fault = SAMPLES["RankReport"], SAMPLES["RankFault"]

    reported = sessions.report_to_proto(sessions.report_from_proto(report))
    faulted = sessions.fault_to_proto(sessions.fault_from_proto(fault))

    reported.key.CopyFrom(report.key)
    reported.number = report.number
    faulted.key.CopyFrom(fault.key)
    assert (reported, faulted) == (report, fault)


@pytest.mark.parametrize(
    "end", [each for each in SessionEnd if not each.from_ranks], ids=lambda each: each.label
)
def test_what_only_the_coordinator_may_say_is_refused(end: SessionEnd) -> None:
    with pytest.raises(WireError, match="a rank does not report"):
        sessions.fault_from_proto(pb.RankFault(end=end.value))  # type: ignore[arg-type]


def test_an_end_that_this_version_does_not_know_is_an_end() -> None:
    over = sessions.over_from_proto(pb.SessionOver(end=99, message="later"))  # type: ignore[arg-type]

    assert "unknown to this version: later" in over.message
    assert not over.end.is_halt


@pytest.mark.parametrize(
    "call",
    [
        pb.Call(kind=pb.CALL_KIND_UNSPECIFIED, tensors=1),
        pb.Call(kind=99, tensors=1),  # type: ignore[arg-type]
        pb.Call(kind=pb.CALL_KIND_BROADCAST, tensors=1),
        pb.Call(kind=pb.CALL_KIND_BARRIER, tensors=1, root=1),
        pb.Call(kind=pb.CALL_KIND_ALL_REDUCE, tensors=1),
        pb.Call(kind=pb.CALL_KIND_SEND, tensors=0),
        pb.Call(kind=pb.CALL_KIND_GATHER, tensors=1, root=2**31),
    ],
    ids=("no kind", "another kind", "no root", "a root", "no reduction", "no tensor", "no rank"),
)
def test_a_call_that_no_rank_can_mean_is_refused(call: pb.Call) -> None:
    with pytest.raises(WireError):
        sessions.call_from_proto(call)


def test_numbers_that_can_not_be_are_refused() -> None:
    with pytest.raises(WireError):
        sessions.report_from_proto(pb.RankReport(exchange_s=math.nan))
    with pytest.raises(WireError):
        sessions.report_from_proto(pb.RankReport(numbers=[pb.NamedNumber(name="a b")]))
    with pytest.raises(LimitExceeded):
        sessions.report_from_proto(pb.RankReport(numbers=[pb.NamedNumber(name="a")] * 65))
    with pytest.raises(WireError):
        sessions.formed_from_proto(pb.SessionFormed(lease_s=1.0, report_s=2.0))
    with pytest.raises(LimitExceeded):
        sessions.pending_from_proto(pb.PendingCall(missing=[0] * 5000))
