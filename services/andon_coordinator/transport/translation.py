"""Translation: control messages to the core's events, and the core's effects to messages.

Nothing is decided here. A message that can't be is refused by name with InvalidMessage. Texts for
people are cut: they are kept, logged and sent to everybody. Counts are below COUNT_LIMIT, so that
whoever keeps them can; what a count may be on this line, the core judges.
"""

from __future__ import annotations

import math
from dataclasses import replace

from andon.protocol.halts import HaltEvidence
from andon.protocol.limits import (
    COUNT_LIMIT,
    MAX_COMPONENTS,
    MAX_DIMENSIONS,
    PREFIX_BYTES,
    LimitExceeded,
    clipped,
    require_at_most,
)
from andon.protocol.records import Cursor, Key
from andon.protocol.ring import is_address
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import record_pb2
from andon.wire import conversion, layouts
from andon.wire.layouts import count_layout_parts
from andon_coordinator.core import effects, events
from andon_coordinator.transport.errors import InvalidMessage, TooLarge

__all__ = ["Outgoing", "event_from", "join_from", "message_to", "require_readable"]

Outgoing = (
    effects.Assign
    | effects.SendCommitted
    | effects.SendVoided
    | effects.SendHalt
    | effects.SendResume
    | effects.SendShutdown
    | effects.SendTransfer
    | effects.SendScalarAllReduceResult
    | effects.SendHeartbeatAnswer
)
"""Effects that are one message to one stream, and nothing else."""

_MAX_DEVICES = 64
_MAX_CAPABILITIES = 1024
_QUICK_PARTS = 2000
"""Blocks and components that are read in some ten milliseconds."""


def join_from(message: pb.TrainRequest) -> events.JoinRequest:
    """The Join that opens a stream.

    Raises:
        InvalidMessage: it is no Join, or says what can't be.
        TooLarge: it has more of something than there may be.
    """
    if message.WhichOneof("message") != "join":
        raise InvalidMessage(f"a stream's first message must be join, not {_case(message)}")
    join = message.join
    try:
        return events.JoinRequest(
            run_id=clipped(join.run_id),
            incarnation=join.incarnation,
            layout=layouts.layout_from_proto(join.layout),
            plan=conversion.plan_from_proto(join.plan),
            node_id=clipped(join.node_id),
            launch_slot=join.launch_slot if join.HasField("launch_slot") else None,
            devices=tuple(
                events.Device(clipped(device.kind), clipped(device.name), device.memory_bytes)
                for device in join.devices[:_MAX_DEVICES]
            ),
            backend=clipped(join.backend),
            protocol_version=join.protocol_version,
            capabilities=frozenset(map(clipped, join.capabilities)),
            metrics_address=clipped(join.metrics_address),
            head=conversion.optional_key_from_proto(join.head),
            cursor=_cursor(join.cursor),
            step=_count("step", join.step),
            held_key=conversion.optional_key_from_proto(join.held_key),
            greatest_term=join.greatest_term,
            mid_script=join.mid_script,
            checkpoints=_checkpoint_plan(join),
            halt=_readable(conversion.optional_evidence_from_proto(join.halt)),
            token=join.token,
        )
    except LimitExceeded as error:
        raise TooLarge(f"join: {error}") from None
    except ValueError as error:
        raise InvalidMessage(f"join: {error}") from None


def require_readable(message: pb.TrainRequest) -> bool:
    """Looks at a Join before it is read; whether that takes so long that others would notice.

    Raises:
        TooLarge: it has more of something than there may be.
    """
    try:
        require_at_most(len(message.join.devices), _MAX_CAPABILITIES, "devices")
        require_at_most(len(message.join.capabilities), _MAX_CAPABILITIES, "capabilities")
        require_at_most(len(message.join.halt.element), MAX_DIMENSIONS, "dimensions")
        return count_layout_parts(message.join.layout) > _QUICK_PARTS
    except LimitExceeded as error:
        raise TooLarge(f"join: {error}") from None


def event_from(stream: int, message: pb.TrainRequest) -> events.Event:
    """What a later message of a stream says.

    Raises:
        InvalidMessage: it is Join, or a case that is not known, or says what can't be.
    """
    case = message.WhichOneof("message")
    translate = _EVENTS.get(case or "")
    if translate is None:
        raise InvalidMessage(f"after join, {_case(message)} has no meaning")
    try:
        return translate(stream, message)
    except ValueError as error:
        raise InvalidMessage(f"{case}: {error}") from None


def _case(message: pb.TrainRequest) -> str:
    return message.WhichOneof("message") or "a message of no known case"


def _work_requested(stream: int, message: pb.TrainRequest) -> events.Event:
    work = message.request_work
    if work.ring_address and not is_address(work.ring_address):
        raise ValueError("ring_address must be host:port or [host]:port")
    head = conversion.optional_key_from_proto(work.head)
    return events.WorkRequested(
        stream,
        head,
        work.ring_address,
        leaves_epoch=work.leaves_epoch,
        checkpoint=_checkpoint(work),
    )


def _checkpoint_plan(join: pb.Join) -> events.CheckpointPlan | None:
    if not join.HasField("checkpoints"):
        return None
    plan = join.checkpoints
    return events.CheckpointPlan(_count("every", plan.every), clipped(plan.folder))


def _checkpoint(message: pb.RequestWork | pb.Leave) -> events.Checkpoint | None:
    if not message.HasField("checkpoint"):
        return None
    last = message.checkpoint
    return events.Checkpoint(_count("checkpoint", last.step), clipped(last.folder))


def _worker_ready(stream: int, message: pb.TrainRequest) -> events.Event:
    ready = message.step_ready
    timings = ready.timings
    digest, digest_head = _digest(ready.digest)
    return events.WorkerReady(
        stream,
        events.Ready(
            key=conversion.key_from_proto(ready.key),
            loss_sum=ready.loss_sum,
            weight=ready.weight,
            samples=_count("samples", ready.samples),
            total_weight=ready.total_weight,
            world_size=ready.world_size,
            correct=_count("correct", ready.correct) if ready.HasField("correct") else None,
            timings=events.StepTimings(
                compute_s=_seconds(timings.compute_s),
                exchange_s=_seconds(timings.exchange_s),
                wait_s=_seconds(timings.wait_s),
                data_s=_seconds(timings.data_s),
            ),
            digest=digest,
            digest_head=digest_head,
            digest_prefixes=_prefixes(ready.digest),
            end_of_data=ready.end_of_data,
            stop_reason=clipped(ready.stop_reason),
            gradient_norm=ready.gradient_norm if ready.HasField("gradient_norm") else None,
        ),
    )


def _seconds(told: float) -> float:
    """A time that a worker told; what cannot be one counts as none."""
    return told if 0.0 <= told < math.inf else 0.0


def _fault_reported(stream: int, message: pb.TrainRequest) -> events.Event:
    fault = message.fault
    try:
        kind = events.FaultKind(fault.kind)
    except ValueError:
        kind = events.FaultKind.PROTOCOL  # "an unknown kind MUST be taken as PROTOCOL"
    return events.FaultReported(
        stream,
        events.Fault(
            kind=kind,
            key=conversion.optional_key_from_proto(fault.key),
            rank=fault.rank if fault.HasField("rank") else None,
            block=fault.block if fault.HasField("block") else None,
            element=fault.element,
            value=clipped(fault.value),
            message=clipped(fault.message),
            error_type=clipped(fault.error_type),
            greatest=conversion.optional_key_from_proto(fault.greatest),
        ),
    )


def _heartbeat_arrived(stream: int, message: pb.TrainRequest) -> events.Event:
    beat = message.heartbeat
    try:
        activity = events.Activity(beat.activity)
    except ValueError:
        activity = events.Activity.UNSPECIFIED  # for people only, and it may grow
    return events.HeartbeatArrived(stream, beat.sequence, activity, clipped(beat.detail))


def _worker_left(stream: int, message: pb.TrainRequest) -> events.Event:
    leave = message.leave
    try:
        reason = events.LeaveReason(leave.reason)
    except ValueError:
        reason = events.LeaveReason.FAILED  # "an unknown reason MUST be taken as FAILED"
    digest, digest_head = _digest(leave.digest)
    final_step = _count("final_step", leave.final_step)
    return events.WorkerLeft(
        stream,
        reason,
        clipped(leave.message),
        final_step,
        digest,
        digest_head,
        _checkpoint(leave),
    )


def _state_reported(stream: int, message: pb.TrainRequest) -> events.Event:
    report = message.state_report
    head = conversion.optional_key_from_proto(report.head)
    return events.StateReported(stream, report.transfer_id, head, clipped(report.failure))


def _scalar_all_reduce_arrived(stream: int, message: pb.TrainRequest) -> events.Event:
    scalar_all_reduce = message.scalar_all_reduce
    return events.ScalarAllReduceArrived(
        stream,
        conversion.optional_key_from_proto(scalar_all_reduce.head),
        scalar_all_reduce.sequence,
        scalar_all_reduce.value,
        scalar_all_reduce.weight,
        *_digest(scalar_all_reduce.digest),
        _prefixes(scalar_all_reduce.digest),
    )


_EVENTS = {
    "request_work": _work_requested,
    "step_ready": _worker_ready,
    "fault": _fault_reported,
    "heartbeat": _heartbeat_arrived,
    "leave": _worker_left,
    "state_report": _state_reported,
    "scalar_all_reduce": _scalar_all_reduce_arrived,
}


def _readable(evidence: HaltEvidence | None) -> HaltEvidence | None:
    """Evidence as a worker remembers it, cut to what is kept of any."""
    if evidence is None:
        return None
    return replace(
        evidence,
        id=_count("halt.id", evidence.id),
        step=_count("halt.step", evidence.step),
        at_unix_s=_seconds(evidence.at_unix_s),
        parameter=clipped(evidence.parameter),
        element=evidence.element,
        value=clipped(evidence.value),
        message=clipped(evidence.message),
    )


def _count(name: str, number: int) -> int:
    """A count that others keep."""
    if number >= COUNT_LIMIT:
        raise ValueError(f"{name} is {number}, and a count is below {COUNT_LIMIT}")
    return number


def _cursor(message: record_pb2.Cursor) -> Cursor:
    return Cursor(
        _count("cursor.epoch", message.epoch), _count("cursor.position", message.position)
    )


def _digest(message: pb.WeightsDigest) -> tuple[bytes, Key | None]:
    if len(message.sha256) not in (0, 32):
        raise ValueError(f"a digest is 32 bytes, not {len(message.sha256)}")
    return message.sha256, conversion.optional_key_from_proto(message.head)


def _prefixes(message: pb.WeightsDigest) -> bytes:
    count, rest = divmod(len(message.prefixes), PREFIX_BYTES)
    if rest or count > MAX_COMPONENTS:
        raise ValueError(f"a digest's prefixes are {PREFIX_BYTES} bytes a component")
    return message.prefixes


def message_to(effect: Outgoing) -> pb.TrainResponse:
    """The message that an effect sends."""
    match effect:
        case effects.Assign():
            return pb.TrainResponse(shard_assignment=_assignment(effect.assignment))
        case effects.SendCommitted():
            return pb.TrainResponse(step_committed=_committed(effect))
        case effects.SendVoided():
            voided = pb.RoundVoided(key=conversion.key_to_proto(effect.key), message=effect.message)
            return pb.TrainResponse(round_voided=voided)
        case effects.SendHalt():
            halt = pb.Halt(evidence=conversion.evidence_to_proto(effect.evidence))
            return pb.TrainResponse(halt=halt)
        case effects.SendResume():
            resume = pb.Resume(
                halt_id=effect.halt_id, answer=conversion.enum_to_proto(effect.answer)
            )
            return pb.TrainResponse(resume=resume)
        case effects.SendShutdown():
            shutdown = pb.Shutdown(message=effect.message, stop_reason=effect.stop_reason)
            return pb.TrainResponse(shutdown=shutdown)
        case effects.SendTransfer():
            return pb.TrainResponse(state_transfer=_transfer(effect))
        case effects.SendScalarAllReduceResult():
            result = pb.ScalarAllReduceResult(
                head=conversion.key_to_proto(effect.head),
                sequence=effect.sequence,
                value=effect.value,
                weight=effect.weight,
                contributors=effect.contributors,
            )
            return pb.TrainResponse(scalar_all_reduce_result=result)
        case effects.SendHeartbeatAnswer():
            answer = pb.HeartbeatAnswer(sequence=effect.sequence)
            return pb.TrainResponse(heartbeat_answer=answer)


def _assignment(assignment: effects.Assignment) -> pb.ShardAssignment:
    return pb.ShardAssignment(
        key=conversion.key_to_proto(assignment.key),
        parent=conversion.key_to_proto(assignment.parent),
        roster=assignment.roster,
        rank=assignment.rank,
        world_size=len(assignment.roster),
        step=assignment.step,
        attempt=assignment.attempt,
        epoch=assignment.epoch,
        positions=[conversion.range_to_proto(positions) for positions in assignment.positions],
        batch=conversion.range_to_proto(assignment.batch),
        reducers=conversion.shares_to_proto(assignment.reducers),
        writes_checkpoint=assignment.writes_checkpoint,
        checkpoint_step=assignment.checkpoint_step,
    )


def _committed(effect: effects.SendCommitted) -> pb.StepCommitted:
    message = pb.StepCommitted(
        record=conversion.record_to_proto(effect.record), stop_reason=effect.stop_reason
    )
    result = effect.result
    if result is not None:
        message.loss = result.loss
        message.samples = result.samples
        message.contributors = result.contributors
        if result.correct is not None:
            message.correct = result.correct
    return message


def _transfer(effect: effects.SendTransfer) -> pb.StateTransfer:
    return pb.StateTransfer(
        transfer_id=effect.transfer_id,
        head=conversion.key_to_proto(effect.head),
        role=conversion.enum_to_proto(effect.role),
        peer=effect.peer,
        address=effect.relay,
        step=effect.step,
        cursor=conversion.cursor_to_proto(effect.cursor),
    )
