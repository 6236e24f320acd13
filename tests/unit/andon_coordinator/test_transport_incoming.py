"""Messages of workers become events; what breaks the protocol is refused by name."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import Message

from andon.protocol.attestations import Attestation, ElementApart, MeanCheck, NodeApart
from andon.protocol.grains import Node, NodeLoss
from andon.protocol.halts import HaltEvidence, HaltReason
from andon.protocol.limits import (
    COUNT_LIMIT,
    MAX_COMPONENTS,
    MAX_GRAINS,
    MAX_HASHED_SAMPLES,
    MAX_MESSAGE_BYTES,
)
from andon.protocol.reasons import Reason
from andon.protocol.records import Cursor, Key
from andon.protocol.run_settings import RunPlan
from andon.protocol.scalars import Scalar
from andon.testing import small_layout
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import halt_pb2, record_pb2
from andon.wire import conversion, layouts
from andon_coordinator.core import events
from andon_coordinator.transport.errors import LineError
from andon_coordinator.transport.incoming import event_from, join_from
from scenarios import line_values

KEY = Key(2**64 - 1, 7)
HEAD = Key(9, 3)
KEY_PB = conversion.key_to_proto(KEY)
HEAD_PB = conversion.key_to_proto(HEAD)
PLAN = RunPlan(global_batch=4)
EVIDENCE = HaltEvidence(id=1, reason=HaltReason.OPERATOR, step=3)


def refused(why: str) -> pytest.RaisesExc[LineError]:
    """Expects that a message is refused as one that breaks the protocol."""
    return pytest.RaisesExc(
        LineError, match=why, check=lambda error: error.reason is Reason.INVALID_MESSAGE
    )


def up(message: Message) -> pb.TrainRequest:
    """A message in its case of the envelope; an envelope as it is."""
    if isinstance(message, pb.TrainRequest):
        return message
    cases = pb.TrainRequest.DESCRIPTOR.oneofs_by_name["message"].fields
    (case,) = (each.name for each in cases if each.message_type is message.DESCRIPTOR)
    return pb.TrainRequest(**{case: message})  # type: ignore[arg-type]  # by its descriptor


def beat(*scalars: pb.LoggedScalar) -> pb.Heartbeat:
    return pb.Heartbeat(sequence=1, scalars=scalars)


def join(**fields: Any) -> pb.TrainRequest:
    message = pb.Join(
        run_id="7f3a",
        layout=layouts.layout_to_proto(small_layout()),
        plan=conversion.plan_to_proto(PLAN),
    )
    message.MergeFrom(pb.Join(**fields))
    return pb.TrainRequest(join=message)


def test_the_largest_report_of_a_verified_step_fits_a_message() -> None:
    leaf = pb.Attestation(first=MAX_GRAINS, grains=1, digest=bytes(16), samples=bytes(8))
    some = pb.Attestation(first=MAX_GRAINS, grains=MAX_GRAINS, digest=bytes(16))
    loss = pb.NodeLoss(first=MAX_GRAINS, grains=1, weight=1.5, loss_sum=1.5)
    # All grains, and as many sums and nodes as they could make.
    ready = pb.StepReady(attested=[leaf] * MAX_GRAINS + [some] * (MAX_GRAINS // 2))
    ready.node_losses.extend([loss] * (MAX_GRAINS // 2))
    # Samples that are hashed one by one, what an inquest itemises, and prefixes of the weights.
    others = 8 * MAX_HASHED_SAMPLES + 2**20 + 8 * MAX_COMPONENTS

    assert ready.ByteSize() + others < MAX_MESSAGE_BYTES - 2**16


def test_c_wire_002_join_request_has_every_field_of_the_message() -> None:
    request = join_from(
        join(
            node_id="alpha",
            launch_slot=0,
            incarnation=2**64 - 1,
            devices=[pb.Device(kind="cuda", name="H200", memory_bytes=5)],
            backend="cuda",
            protocol_version=1,
            capabilities=["ring.v1"],
            metrics_address="alpha:9401",
            head=HEAD_PB,
            cursor=record_pb2.Cursor(epoch=1, position=4),
            step=3,
            held_key=KEY_PB,
            greatest_term=12,
            halt=conversion.evidence_to_proto(EVIDENCE),
            token=b"token",
        )
    )

    assert request == line_values.joining(
        plan=PLAN,
        incarnation=2**64 - 1,
        layout=small_layout(),
        node_id="alpha",
        launch_slot=0,
        devices=(events.Device("cuda", "H200", 5),),
        backend="cuda",
        protocol_version=1,
        capabilities=frozenset({"ring.v1"}),
        metrics_address="alpha:9401",
        head=HEAD,
        cursor=Cursor(1, 4),
        step=3,
        held_key=KEY,
        greatest_term=12,
        halt=EVIDENCE,
        token=b"token",
    )


def test_texts_of_a_join_can_not_move_a_terminals_cursor() -> None:
    told = conversion.evidence_to_proto(replace(EVIDENCE, value="\x1b[2J", message="one\ntwo"))

    request = join_from(join(node_id="al\x1bpha", halt=told))

    assert request.node_id == "al pha"
    assert request.halt == replace(EVIDENCE, value=" [2J", message="one two")


def test_c_wire_002_fresh_join_has_no_slot_head_or_halt() -> None:
    request = join_from(join())

    assert (request.launch_slot, request.head, request.held_key, request.halt) == (None,) * 4


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (pb.RequestWork(head=HEAD_PB), events.WorkRequested(5, HEAD)),
        (pb.RequestWork(), events.WorkRequested(5, None)),
        (
            pb.StepReady(
                key=KEY_PB,
                loss_sum=1.5,
                weight=2.0,
                samples=2,
                correct=0,
                timings=pb.Timings(compute_s=1, exchange_s=2, wait_s=3, data_s=4),
                digest=pb.WeightsDigest(head=HEAD_PB, sha256=b"d" * 32, base_hashed=True),
                end_of_data=True,
                stop_reason="enough",
                total_weight=4.0,
                world_size=2,
                gradient_norm=0.0,
                overflow=True,
                node_losses=[pb.NodeLoss(first=4, grains=3, weight=2.0, loss_sum=1.5)],
                attested=[
                    pb.Attestation(
                        first=4,
                        grains=1,
                        digest=b"d" * 16,
                        samples=b"s" * 8,
                        components=b"c" * 32,
                    )
                ],
                averages_digest=b"a" * 16,
                mean_check=pb.MeanCheck(
                    expected=b"e" * 16,
                    came=b"c" * 16,
                    relayed=[b"r" * 16],
                    apart=pb.ElementApart(block=1, element=2, expected=0.5, came=0.25),
                ),
                apart=[
                    pb.NodeApart(
                        first=4,
                        grains=2,
                        own=b"e" * 16,
                        other=b"c" * 16,
                        element=pb.ElementApart(block=1, element=2, expected=0.5, came=0.25),
                    )
                ],
            ),
            events.WorkerReady(
                5,
                line_values.ready(
                    key=KEY,
                    loss_sum=1.5,
                    correct=0,
                    timings=events.StepTimings(compute_s=1, exchange_s=2, wait_s=3, data_s=4),
                    digest=b"d" * 32,
                    digest_head=HEAD,
                    end_of_data=True,
                    stop_reason="enough",
                    gradient_norm=0.0,
                    overflow=True,
                    digest_base_hashed=True,
                    node_losses=(NodeLoss(Node(4, 7), 2.0, 1.5),),
                    attested=(
                        Attestation(
                            node=Node(4, 5),
                            digest=b"d" * 16,
                            samples=b"s" * 8,
                            components=b"c" * 32,
                        ),
                    ),
                    averages_digest=b"a" * 16,
                    mean_check=MeanCheck(
                        expected=b"e" * 16,
                        came=b"c" * 16,
                        relayed=(b"r" * 16,),
                        apart=ElementApart(1, 2, 0.5, 0.25),
                    ),
                    apart=(
                        NodeApart(
                            node=Node(4, 6),
                            own=b"e" * 16,
                            other=b"c" * 16,
                            element=ElementApart(1, 2, 0.5, 0.25),
                        ),
                    ),
                ),
            ),
        ),
        (
            pb.Fault(
                key=KEY_PB,
                kind=pb.FAULT_KIND_STALE_ROUND,
                rank=0,
                block=0,
                element=8,
                value="nan",
                message="m",
                error_type="T",
                greatest=HEAD_PB,
            ),
            events.FaultReported(
                5,
                events.Fault(
                    kind=events.FaultKind.STALE_ROUND,
                    key=KEY,
                    rank=0,
                    block=0,
                    element=8,
                    value="nan",
                    message="m",
                    error_type="T",
                    greatest=HEAD,
                ),
            ),
        ),
        (
            # No text of a worker may end a line, or move the cursor of an operator's terminal.
            pb.TrainRequest(
                fault=pb.Fault(
                    kind=pb.FAULT_KIND_PROTOCOL,
                    value="nan\n",
                    message="\x1b[2Jé:\r\u2028all\u202e",
                    error_type="\x9bE",
                )
            ),
            events.FaultReported(
                5,
                events.Fault(
                    kind=events.FaultKind.PROTOCOL,
                    value="nan ",
                    message=" [2Jé:  all ",
                    error_type=" E",
                ),
            ),
        ),
        (
            pb.Fault(kind=99),  # type: ignore[arg-type]  # of a later version
            events.FaultReported(5, events.Fault(kind=events.FaultKind.PROTOCOL)),
        ),
        (
            pb.Heartbeat(
                sequence=3,
                activity=pb.ACTIVITY_BUSY,
                detail="upload",
                busy_cores=1.5,
                memory_bytes=2**30,
            ),
            events.HeartbeatArrived(
                5, 3, events.Activity.BUSY, "upload", use=events.ProcessUse(1.5, 2**30)
            ),
        ),
        (
            pb.Heartbeat(busy_cores=-math.inf, memory_bytes=0),
            events.HeartbeatArrived(5, 0, use=events.ProcessUse(None, 0)),
        ),
        (
            pb.Heartbeat(
                sequence=4,
                scalars=[
                    pb.LoggedScalar(name="val/loss", step=7, value=math.inf),
                    pb.LoggedScalar(name="lr"),
                ],
            ),
            events.HeartbeatArrived(
                5, 4, scalars=(Scalar("val/loss", 7, math.inf), Scalar("lr", 0, 0.0))
            ),
        ),
        (
            pb.Heartbeat(activity=99),  # type: ignore[arg-type]  # likewise
            events.HeartbeatArrived(5, 0),
        ),
        (
            pb.Leave(
                reason=pb.LEAVE_REASON_COMPLETE,
                message="done",
                final_step=9,
                digest=pb.WeightsDigest(head=HEAD_PB, sha256=b"d" * 32),
            ),
            events.WorkerLeft(5, events.LeaveReason.COMPLETE, "done", 9, b"d" * 32, HEAD),
        ),
        (pb.Leave(), events.WorkerLeft(5, events.LeaveReason.FAILED)),
        (
            pb.StateReport(transfer_id=4, head=HEAD_PB, failure="disk"),
            events.StateReported(5, 4, HEAD, "disk"),
        ),
        (
            pb.ScalarAllReduce(head=HEAD_PB, sequence=2, value=0.5, weight=3.0, data=b"given"),
            events.ScalarAllReduceArrived(5, HEAD, 2, 0.5, 3.0, data=b"given"),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_c_wire_002_message_becomes_its_event(message: Message, expected: events.Event) -> None:
    assert event_from(5, up(message)) == expected


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (pb.TrainRequest(), "no known case"),
        (join(), "join"),
        (pb.StepReady(), "step_ready"),
        (pb.StepReady(key=KEY_PB, node_losses=[pb.NodeLoss(first=3)]), "not a node"),
        (pb.StepReady(key=KEY_PB, node_losses=[pb.NodeLoss()] * 65537), "65537 losses of nodes"),
        (pb.StepReady(key=KEY_PB, attested=[pb.Attestation(grains=1)]), "a digest has 16 bytes"),
        (pb.StepReady(key=KEY_PB, attested=[pb.Attestation()] * 65537), "65537 attestations"),
        (pb.StepReady(key=KEY_PB, averages_digest=b"short"), "no digest of averages"),
        (pb.StepReady(key=KEY_PB, digest=pb.WeightsDigest(sha256=b"short")), "32 bytes"),
        (pb.RequestWork(head=record_pb2.Key(round=3)), "request_work"),
        (pb.ScalarAllReduce(data=bytes(3073)), "scalar_all_reduce"),
        (beat(pb.LoggedScalar()), "letters, digits"),
        (beat(pb.LoggedScalar(name="<b>")), "letters, digits"),
        (beat(pb.LoggedScalar(name="n" * 65)), "65 characters in the name"),
        (beat(pb.LoggedScalar(name="val", step=COUNT_LIMIT)), "the step of a scalar"),
        (beat(*[pb.LoggedScalar(name="val")] * 257), "257 scalars in a heartbeat"),
    ],
)
def test_c_wire_002_invalid_message_is_refused_by_name(message: Message, why: str) -> None:
    with refused(why):
        event_from(5, up(message))


OPERATOR = halt_pb2.HALT_REASON_OPERATOR
COUNTS: list[tuple[str, pb.TrainRequest]] = [
    ("samples", pb.TrainRequest(step_ready=pb.StepReady(key=KEY_PB, samples=COUNT_LIMIT))),
    ("correct", pb.TrainRequest(step_ready=pb.StepReady(key=KEY_PB, correct=COUNT_LIMIT))),
    ("final_step", pb.TrainRequest(leave=pb.Leave(final_step=COUNT_LIMIT))),
    ("step", join(step=COUNT_LIMIT)),
    ("cursor.epoch", join(cursor=record_pb2.Cursor(epoch=COUNT_LIMIT))),
    ("cursor.position", join(cursor=record_pb2.Cursor(position=COUNT_LIMIT))),
    ("halt.id", join(halt=halt_pb2.HaltEvidence(id=COUNT_LIMIT, reason=OPERATOR))),
    ("halt.step", join(halt=halt_pb2.HaltEvidence(id=1, step=COUNT_LIMIT, reason=OPERATOR))),
]


@pytest.mark.parametrize(("name", "message"), COUNTS, ids=[name for name, _ in COUNTS])
def test_count_beyond_the_limit_is_refused_by_name(name: str, message: pb.TrainRequest) -> None:
    with refused(f"{name} is {COUNT_LIMIT}, but a count is below"):
        join_from(message) if message.HasField("join") else event_from(5, message)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (pb.TrainRequest(), "no known case"),
        (pb.TrainRequest(heartbeat=pb.Heartbeat()), "heartbeat"),
        (pb.TrainRequest(join=pb.Join()), "join"),
        (join(head=record_pb2.Key(round=3)), "join: Key"),
    ],
)
def test_c_wire_002_invalid_join_is_refused_by_name(message: pb.TrainRequest, why: str) -> None:
    with refused(why):
        join_from(message)


@pytest.mark.parametrize("reported", [-1.0, float("nan"), float("inf")])
def test_impossible_duration_counts_as_zero(reported: float) -> None:
    ready = pb.StepReady(key=KEY_PB, timings=pb.Timings(wait_s=reported, data_s=1))

    event = event_from(3, pb.TrainRequest(step_ready=ready))

    assert isinstance(event, events.WorkerReady)
    assert event.ready.timings == events.StepTimings(data_s=1)


def test_a_standing_request_comes_with_a_report() -> None:
    ready = pb.StepReady(key=KEY_PB, next=pb.RequestWork(ring_address="alpha:7100"))
    ready.next.checkpoint.step = 5

    event = event_from(3, pb.TrainRequest(step_ready=ready))

    assert isinstance(event, events.WorkerReady)
    assert event.ready.next == events.StandingRequest("alpha:7100", events.Checkpoint(5, ""))


@pytest.mark.parametrize(
    "request_work",
    [pb.RequestWork(leaves_epoch=True), pb.RequestWork(ring_address="no address")],
    ids=["leaves the epoch", "no address"],
)
def test_a_standing_request_that_can_not_be_met_is_refused(request_work: pb.RequestWork) -> None:
    ready = pb.StepReady(key=KEY_PB, next=request_work)

    with pytest.raises(LineError, match="step_ready"):
        event_from(3, pb.TrainRequest(step_ready=ready))
