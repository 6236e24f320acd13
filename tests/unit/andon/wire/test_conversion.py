"""Conversion: plain values to protobuf and back, and enums that agree (contract C-WIRE-002)."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.protocol.encoding import Encoding
from andon.protocol.halts import HaltAnswer, HaltReason
from andon.protocol.layout import BlockKind, DType
from andon.protocol.limits import MAX_DIMENSIONS, LimitExceeded
from andon.protocol.messages import BlockFaultKind, Operation
from andon.protocol.records import Cursor, RecordKind
from andon.protocol.reducers import ReducerShare
from andon.protocol.run_settings import Liveness, MeanKind, Policy, RunPlan
from andon.protocol.slowness import SlowPhase
from andon.v1 import coordinator_pb2, halt_pb2, layout_pb2, record_pb2, reducer_pb2
from andon.wire import conversion, layouts
from andon_coordinator.core import events
from andon_coordinator.core.join_answers import JoinStatus
from andon_coordinator.core.line_state import LineState
from andon_coordinator.core.transfers import TransferRole
from unit.andon import strategies
from unit.andon.strategies import BOUNDED

WireError = conversion.WireError


def through_bytes(message: Any) -> Any:
    """The message as the other end parses it."""
    return type(message).FromString(message.SerializeToString())


@pytest.mark.parametrize(
    ("values", "to_proto", "from_proto"),
    [
        (strategies.keys, conversion.key_to_proto, conversion.key_from_proto),
        (strategies.cursors, conversion.cursor_to_proto, conversion.cursor_from_proto),
        (strategies.ranges, conversion.range_to_proto, conversion.range_from_proto),
        (strategies.records(), conversion.record_to_proto, conversion.record_from_proto),
        (strategies.layouts(), layouts.layout_to_proto, layouts.layout_from_proto),
        (strategies.evidences, conversion.evidence_to_proto, conversion.evidence_from_proto),
        (strategies.plans, conversion.plan_to_proto, conversion.plan_from_proto),
        (strategies.policies, conversion.policy_to_proto, conversion.policy_from_proto),
        (strategies.livenesses, conversion.liveness_to_proto, conversion.liveness_from_proto),
    ],
    ids=["key", "cursor", "range", "record", "layout", "evidence", "plan", "policy", "liveness"],
)
def test_c_wire_002_a_value_round_trips(
    values: st.SearchStrategy[Any],
    to_proto: Callable[[Any], Any],
    from_proto: Callable[[Any], Any],
) -> None:
    @BOUNDED
    @given(values)
    def round_trips(value: Any) -> None:
        assert from_proto(through_bytes(to_proto(value))) == value

    round_trips()


ENUMS: list[tuple[type[enum.Enum], Any, str]] = [
    (Encoding, layout_pb2.Encoding, "ENCODING"),
    (DType, layout_pb2.Dtype, "DTYPE"),
    (BlockKind, layout_pb2.BlockKind, "BLOCK_KIND"),
    (RecordKind, record_pb2.RecordKind, "RECORD_KIND"),
    (HaltReason, halt_pb2.HaltReason, "HALT_REASON"),
    (HaltAnswer, coordinator_pb2.HaltAnswer, "HALT_ANSWER"),
    (Operation, reducer_pb2.Operation, "OPERATION"),
    (BlockFaultKind, reducer_pb2.BlockFaultKind, "BLOCK_FAULT_KIND"),
    (events.Activity, coordinator_pb2.Activity, "ACTIVITY"),
    (events.LeaveReason, coordinator_pb2.LeaveReason, "LEAVE_REASON"),
    (events.FaultKind, coordinator_pb2.FaultKind, "FAULT_KIND"),
    (LineState, coordinator_pb2.LineState, "LINE_STATE"),
    (JoinStatus, coordinator_pb2.JoinStatus, "JOIN_STATUS"),
    (TransferRole, coordinator_pb2.TransferRole, "TRANSFER_ROLE"),
    (SlowPhase, coordinator_pb2.SlowPhase, "SLOW_PHASE"),
    (MeanKind, coordinator_pb2.MeanKind, "MEAN_KIND"),
]


@pytest.mark.parametrize(("members", "generated", "prefix"), ENUMS, ids=[each[2] for each in ENUMS])
def test_c_wire_002_an_enum_has_the_names_and_numbers_of_the_generated_one(
    members: type[enum.Enum], generated: Any, prefix: str
) -> None:
    ours = {f"{prefix}_{member.name}": member.value for member in members}

    theirs = dict(generated.items())
    assert theirs.pop(f"{prefix}_UNSPECIFIED") == 0
    ours.pop(f"{prefix}_UNSPECIFIED", None)
    assert ours == theirs


def test_a_policy_says_which_mean_gradients_have() -> None:
    policy = Policy(mean=MeanKind.TRIMMED)

    assert conversion.policy_from_proto(conversion.policy_to_proto(policy)) == policy


def test_every_generated_enum_has_a_python_enum() -> None:
    modules = (coordinator_pb2, halt_pb2, layout_pb2, record_pb2, reducer_pb2)

    generated = {
        descriptor.name
        for module in modules
        for descriptor in module.DESCRIPTOR.enum_types_by_name.values()
    }

    # Reasons to refuse are texts on the wire, and more than these: see test_statuses.
    assert generated - {"Reason"} == {paired.DESCRIPTOR.name for _, paired, _ in ENUMS}


def test_none_and_an_absent_message_are_the_same() -> None:
    record = record_pb2.Record(parent=conversion.key_to_proto(None))

    assert not record.HasField("parent")
    assert conversion.optional_key_from_proto(record.parent) is None
    assert conversion.evidence_to_proto(None) is None
    assert conversion.optional_evidence_from_proto(halt_pb2.HaltEvidence()) is None
    assert conversion.enum_to_proto(None) == 0
    assert conversion.optional_enum_from_proto(Encoding, 0) is None


def test_an_absent_cursor_is_the_start() -> None:
    assert conversion.cursor_from_proto(record_pb2.Record().cursor) == Cursor(0, 0)


def test_an_unknown_halt_reason_is_still_a_halt() -> None:
    message = halt_pb2.HaltEvidence(id=1, message="the dog barked")
    message.reason = 77  # type: ignore[assignment] # of a later version

    evidence = conversion.evidence_from_proto(message)

    assert evidence.reason is HaltReason.PROTOCOL_VIOLATION
    assert evidence.message == "halt reason 77, unknown to this version: the dog barked"


def test_an_absent_number_of_a_plan_is_none_and_zero_is_zero() -> None:
    plan = RunPlan(global_batch=1, total_steps=0)

    message = through_bytes(conversion.plan_to_proto(plan))

    assert message.HasField("total_steps")
    assert not message.HasField("total_epochs")
    assert conversion.plan_from_proto(message) == plan


@pytest.mark.parametrize("workers", [1, 256, 1024])
def test_a_liveness_comes_back_with_its_heartbeats(workers: int) -> None:
    liveness = Liveness.of_line(3.0, workers)

    assert conversion.liveness_from_proto(conversion.liveness_to_proto(liveness)) == liveness


def test_a_worker_sends_a_heartbeat_once_a_lease_even_if_it_need_not() -> None:
    seldom = conversion.liveness_to_proto(Liveness(lease_s=3.0))
    seldom.heartbeat_s = float("inf")

    assert conversion.liveness_from_proto(seldom).heartbeat_s == 3.0


def test_the_map_of_the_reducers_comes_back_as_it_was() -> None:
    shares = (ReducerShare("", 0, 40), ReducerShare("beta:7071", 40, 2**40))

    assert conversion.shares_from_proto(conversion.shares_to_proto(shares)) == shares


def _policy(**other: Any) -> coordinator_pb2.Policy:
    message = conversion.policy_to_proto(Policy())
    message.MergeFrom(coordinator_pb2.Policy(**other))
    return message


ELEMENT = [0] * (MAX_DIMENSIONS + 1)
PARENT, LATER = record_pb2.Key(term=1, round=1), record_pb2.Key(term=1, round=2)
STEP, OPERATOR = record_pb2.RECORD_KIND_STEP, halt_pb2.HALT_REASON_OPERATOR
REFUSED: list[tuple[Callable[[Any], Any], Any, str]] = [
    (conversion.key_from_proto, record_pb2.Key(), "Key"),
    (conversion.optional_key_from_proto, record_pb2.Key(round=3), "Key"),
    (conversion.record_from_proto, record_pb2.Record(key=PARENT, parent=LATER, kind=STEP),
     r"Record: record 0\.00000001/1 does not come after"),
    (conversion.record_from_proto, record_pb2.Record(key=PARENT), "RecordKind"),
    (conversion.range_from_proto, record_pb2.PositionRange(start=2, stop=1), "PositionRange"),
    (conversion.evidence_from_proto, halt_pb2.HaltEvidence(id=1), "0 is no HaltReason"),
    (conversion.evidence_from_proto, halt_pb2.HaltEvidence(reason=OPERATOR), "HaltEvidence"),
    (conversion.evidence_from_proto, halt_pb2.HaltEvidence(id=1, reason=OPERATOR, element=ELEMENT),
     "dimensions of an element"),
    (conversion.plan_from_proto, coordinator_pb2.RunPlan(), "RunPlan"),
    (conversion.plan_from_proto, coordinator_pb2.RunPlan(global_batch=1, dataset_size=0),
     "RunPlan"),
    (conversion.policy_from_proto, coordinator_pb2.Policy(encoding="ENCODING_FLOAT32"),
     "chunk_elements"),
    (conversion.policy_from_proto, coordinator_pb2.Policy(chunk_elements=1), "0 is no Encoding"),
    (conversion.policy_from_proto, _policy(chunk_elements=2**20), "chunks of 4194304 bytes"),
    (conversion.liveness_from_proto, coordinator_pb2.Liveness(lease_s=3.0, heartbeat_s=0.1),
     "Liveness"),
    (conversion.liveness_from_proto, coordinator_pb2.Liveness(lease_s=math.nan, heartbeat_s=1.0),
     "Liveness"),
    (conversion.liveness_from_proto, coordinator_pb2.Liveness(), "Liveness"),
    (conversion.shares_from_proto, [coordinator_pb2.ReducerShare(start_element=2, stop_element=1)],
     "before"),
]  # fmt: skip


@pytest.mark.parametrize(("read", "message", "match"), REFUSED)
def test_c_wire_002_what_no_value_may_be_is_refused(
    read: Callable[[Any], Any], message: Any, match: str
) -> None:
    with pytest.raises((WireError, LimitExceeded), match=match):
        read(message)
