"""Incoming: control messages of workers become the core's events.

Nothing is decided here. A message that breaks a MUST of the protocol is refused with
INVALID_MESSAGE. Texts for people are clipped and put on one line, because they are kept, logged and
sent to everybody, and a terminal obeys control characters.
Counts must be below COUNT_LIMIT, so that the journal and clients in any language can hold them.
Whether a count makes sense on this line is for the core to decide.
"""

from __future__ import annotations

import math
from dataclasses import replace

from andon.host.process import Process
from andon.protocol.arithmetic import MAX_ITEMS
from andon.protocol.attestations import DIGEST_BYTES
from andon.protocol.halts import HaltEvidence
from andon.protocol.limits import (
    COUNT_LIMIT,
    MAX_COMPONENTS,
    MAX_DIMENSIONS,
    MAX_GIVEN_BYTES,
    MAX_NODES_APART,
    MAX_NUMBERS,
    MAX_PACING_BYTES,
    MAX_SCALARS,
    PREFIX_BYTES,
    LimitExceeded,
    clipped,
    on_one_line,
    require_at_most,
)
from andon.protocol.reasons import Reason
from andon.protocol.records import Cursor, Key
from andon.protocol.ring import is_address
from andon.protocol.scalars import Scalar
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import record_pb2
from andon.wire import conversion, layouts
from andon.wire.layouts import count_layout_parts
from andon.wire.slowness import explanation_from_proto
from andon_coordinator.core import events
from andon_coordinator.transport.errors import LineError

__all__ = ["event_from", "is_slow_to_read", "join_from"]

_MAX_DEVICES = 64
_MAX_CAPABILITIES = 1024
_QUICK_PARTS = 2000
"""This many blocks and components are converted in about ten milliseconds."""


def join_from(message: pb.TrainRequest) -> events.JoinRequest:
    """The Join that opens a stream.

    Raises:
        LineError: it is not a Join, or has a value that can't be, or too many of something.
    """
    if message.WhichOneof("message") != "join":
        raise _invalid(f"a stream's first message must be join, not {_case(message)}")
    join = message.join
    try:
        return events.JoinRequest(
            run_id=_said(join.run_id),
            incarnation=join.incarnation,
            layout=layouts.layout_from_proto(join.layout),
            plan=conversion.plan_from_proto(join.plan),
            node_id=_said(join.node_id),
            launch_slot=join.launch_slot if join.HasField("launch_slot") else None,
            devices=tuple(
                events.Device(
                    _said(device.kind), _said(device.name), device.memory_bytes, device.cores
                )
                for device in join.devices[:_MAX_DEVICES]
            ),
            backend=_said(join.backend),
            protocol_version=join.protocol_version,
            capabilities=frozenset(map(clipped, join.capabilities)),
            metrics_address=_said(join.metrics_address),
            head=conversion.optional_key_from_proto(join.head),
            cursor=_cursor(join.cursor),
            step=_count("step", join.step),
            held_key=conversion.optional_key_from_proto(join.held_key),
            greatest_term=join.greatest_term,
            mid_script=join.mid_script,
            checkpoints=_checkpoint_plan(join),
            halt=_clipped_evidence(conversion.optional_evidence_from_proto(join.halt)),
            token=join.token,
            speed_hint=join.speed_hint if 0.0 < join.speed_hint < math.inf else None,
            pacing=join.pacing,
            spare=join.spare,
            arithmetic=conversion.arithmetic_from_proto(join.arithmetic),
        )
    except LimitExceeded as error:
        raise LineError(Reason.TOO_LARGE, f"join: {error}") from None
    except ValueError as error:
        raise _invalid(f"join: {error}") from None


def process_of(message: pb.TrainRequest) -> Process | None:
    """Which process a Join comes from; None: it does not say."""
    join = message.join
    return Process(join.process.host, join.process.id) if join.HasField("process") else None


def is_slow_to_read(message: pb.TrainRequest) -> bool:
    """Checks the sizes in a Join. Returns whether converting it would delay other streams.

    Raises:
        LineError: it has too many of something.
    """
    try:
        # Sizes come first: nothing of a Join is converted before they are known to be small.
        require_at_most(len(message.join.devices), _MAX_CAPABILITIES, "devices")
        require_at_most(len(message.join.capabilities), _MAX_CAPABILITIES, "capabilities")
        require_at_most(len(message.join.arithmetic), MAX_ITEMS, "things of an arithmetic")
        require_at_most(len(message.join.halt.element), MAX_DIMENSIONS, "dimensions")
        require_at_most(len(message.join.pacing), MAX_PACING_BYTES, "bytes of pacing")
        return count_layout_parts(message.join.layout) > _QUICK_PARTS
    except LimitExceeded as error:
        raise LineError(Reason.TOO_LARGE, f"join: {error}") from None


def event_from(stream: int, message: pb.TrainRequest) -> events.Event:
    """The event for a message that follows the Join.

    Raises:
        LineError: it is a Join or an unknown case, or has a value that can't be.
    """
    case = message.WhichOneof("message")
    translate = _EVENTS.get(case or "")
    if translate is None:
        raise _invalid(f"after join, {_case(message)} has no meaning")
    try:
        return translate(stream, message)
    except ValueError as error:
        raise _invalid(f"{case}: {error}") from None


def _invalid(message: str) -> LineError:
    return LineError(Reason.INVALID_MESSAGE, message)


def _case(message: pb.TrainRequest) -> str:
    return message.WhichOneof("message") or "a message of no known case"


def _work_requested(stream: int, message: pb.TrainRequest) -> events.Event:
    work = message.request_work
    head = conversion.optional_key_from_proto(work.head)
    return events.WorkRequested(
        stream,
        head,
        _ring_address(work),
        leaves_epoch=work.leaves_epoch,
        checkpoint=_checkpoint(work),
        checkpoint_begun=_count("checkpoint_begun", work.checkpoint_begun),
        voided=conversion.optional_key_from_proto(work.voided),
    )


def _ring_address(work: pb.RequestWork) -> str:
    if work.ring_address and not is_address(work.ring_address):
        raise ValueError("ring_address must be host:port or [host]:port")
    return work.ring_address


def _standing(ready: pb.StepReady) -> events.StandingRequest | None:
    if not ready.HasField("next"):
        return None
    if ready.next.leaves_epoch:
        raise ValueError("next asks for a step, so it can't leave the epoch")
    return events.StandingRequest(
        _ring_address(ready.next),
        _checkpoint(ready.next),
        _count("checkpoint_begun", ready.next.checkpoint_begun),
    )


def _checkpoint_plan(join: pb.Join) -> events.CheckpointPlan | None:
    if not join.HasField("checkpoints"):
        return None
    plan = join.checkpoints
    return events.CheckpointPlan(_count("every", plan.every), clipped(plan.folder), plan.keep)


def _checkpoint(message: pb.RequestWork | pb.Leave) -> events.Checkpoint | None:
    if not message.HasField("checkpoint"):
        return None
    last = message.checkpoint
    head = conversion.optional_key_from_proto(last.head)
    return events.Checkpoint(_count("checkpoint", last.step), clipped(last.folder), head)


def _worker_ready(stream: int, message: pb.TrainRequest) -> events.Event:
    ready = message.step_ready
    require_at_most(len(ready.node_losses), MAX_NUMBERS, "losses of nodes")
    require_at_most(len(ready.attested), MAX_NUMBERS, "attestations")
    if len(ready.averages_digest) not in (0, DIGEST_BYTES):
        raise ValueError(f"{len(ready.averages_digest)} bytes are no digest of averages")
    require_at_most(len(ready.mean_check.relayed), MAX_NUMBERS, "relayed sums")
    require_at_most(len(ready.apart), MAX_NODES_APART, "nodes with two results")
    timings = ready.timings
    digest, digest_head, digest_prefixes = _digest_in(ready)
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
                busy_s=_seconds(timings.busy_s),
                micro_batches=timings.micro_batches,
                computed=min(timings.computed, COUNT_LIMIT - 1),
            ),
            digest=digest,
            digest_head=digest_head,
            digest_prefixes=digest_prefixes,
            end_of_data=ready.end_of_data,
            stop_reason=_said(ready.stop_reason),
            gradient_norm=ready.gradient_norm if ready.HasField("gradient_norm") else None,
            own_gradient_norm=(
                ready.own_gradient_norm if ready.HasField("own_gradient_norm") else None
            ),
            block_norms=tuple(ready.block_norms),
            overflow=ready.overflow,
            digest_base_hashed=ready.digest.base_hashed,
            next=_standing(ready),
            node_losses=conversion.node_losses_from_proto(ready.node_losses),
            attested=conversion.attestations_from_proto(ready.attested),
            averages_digest=ready.averages_digest,
            mean_check=conversion.mean_check_from_proto(ready.mean_check)
            if ready.HasField("mean_check")
            else None,
            apart=conversion.nodes_apart_from_proto(ready.apart),
        ),
    )


def _seconds(reported: float) -> float:
    """A duration or time that a worker reported; 0 in place of a negative number, NaN or infinity.

    They are for people only, so a wrong one is no reason to refuse the message.
    """
    return reported if 0.0 <= reported < math.inf else 0.0


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
            value=_said(fault.value),
            message=_said(fault.message),
            error_type=_said(fault.error_type),
            greatest=conversion.optional_key_from_proto(fault.greatest),
        ),
    )


def _heartbeat_arrived(stream: int, message: pb.TrainRequest) -> events.Event:
    beat = message.heartbeat
    try:
        activity = events.Activity(beat.activity)
    except ValueError:
        activity = events.Activity.UNSPECIFIED  # For people only; later versions may add values.
    require_at_most(len(beat.scalars), MAX_SCALARS, "scalars in a heartbeat")
    scalars = tuple(Scalar(each.name, each.step, each.value) for each in beat.scalars)
    detail, use = _said(beat.detail), _use(beat)
    return events.HeartbeatArrived(stream, beat.sequence, activity, detail, scalars, use)


def _use(beat: pb.Heartbeat) -> events.ProcessUse:
    """What the worker uses; a number that no host has counts as none, since only people read it."""
    cores = beat.busy_cores if beat.HasField("busy_cores") else math.nan
    return events.ProcessUse(
        cores if 0.0 <= cores < math.inf else None,
        beat.memory_bytes if beat.HasField("memory_bytes") else None,
    )


def _probe_answered(stream: int, message: pb.TrainRequest) -> events.Event:
    return events.ProbeAnswered(stream, message.probe_answer.number)


def _explanation_arrived(stream: int, message: pb.TrainRequest) -> events.Event:
    return events.ExplanationArrived(stream, explanation_from_proto(message.explanation))


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
        _said(leave.message),
        final_step,
        digest,
        digest_head,
        _checkpoint(leave),
        leave.digest.base_hashed,
    )


def _notice_given(stream: int, message: pb.TrainRequest) -> events.Event:
    return events.NoticeGiven(stream, _said(message.notice.message))


def _state_reported(stream: int, message: pb.TrainRequest) -> events.Event:
    report = message.state_report
    head = conversion.optional_key_from_proto(report.head)
    return events.StateReported(stream, report.transfer_id, head, _said(report.failure))


def _listening_reported(stream: int, _message: pb.TrainRequest) -> events.Event:
    return events.ListeningReported(stream)


def _worker_computed(stream: int, message: pb.TrainRequest) -> events.Event:
    return events.WorkerComputed(stream, conversion.key_from_proto(message.computed.key))


def _scalar_all_reduce_arrived(stream: int, message: pb.TrainRequest) -> events.Event:
    scalar_all_reduce = message.scalar_all_reduce
    require_at_most(len(scalar_all_reduce.data), MAX_GIVEN_BYTES, "bytes of data")
    return events.ScalarAllReduceArrived(
        stream,
        conversion.optional_key_from_proto(scalar_all_reduce.head),
        scalar_all_reduce.sequence,
        scalar_all_reduce.value,
        scalar_all_reduce.weight,
        *_digest(scalar_all_reduce.digest),
        _prefixes(scalar_all_reduce.digest),
        scalar_all_reduce.data,
        scalar_all_reduce.digest.base_hashed,
    )


_EVENTS = {
    "request_work": _work_requested,
    "step_ready": _worker_ready,
    "fault": _fault_reported,
    "heartbeat": _heartbeat_arrived,
    "probe_answer": _probe_answered,
    "explanation": _explanation_arrived,
    "notice": _notice_given,
    "leave": _worker_left,
    "state_report": _state_reported,
    "listening": _listening_reported,
    "computed": _worker_computed,
    "scalar_all_reduce": _scalar_all_reduce_arrived,
}


def _said(text: str) -> str:
    """A worker's text for people."""
    return on_one_line(clipped(text)) if text else ""


def _clipped_evidence(evidence: HaltEvidence | None) -> HaltEvidence | None:
    """A halt's evidence as a worker remembers it, with the same limits as everything else."""
    if evidence is None:
        return None
    return replace(
        evidence,
        id=_count("halt.id", evidence.id),
        step=_count("halt.step", evidence.step),
        at_unix_s=_seconds(evidence.at_unix_s),
        parameter=_said(evidence.parameter),
        element=evidence.element,
        value=_said(evidence.value),
        message=_said(evidence.message),
    )


def _count(name: str, number: int) -> int:
    """The number itself, which must be below COUNT_LIMIT, because others store it."""
    if number >= COUNT_LIMIT:
        raise ValueError(f"{name} is {number}, but a count is below {COUNT_LIMIT}")
    return number


def _cursor(message: record_pb2.Cursor) -> Cursor:
    cursor = conversion.cursor_from_proto(message)
    _count("cursor.epoch", cursor.epoch)
    _count("cursor.position", cursor.position)
    return cursor


def _digest(message: pb.WeightsDigest) -> tuple[bytes, Key | None]:
    if len(message.sha256) not in (0, 32):
        raise ValueError(f"a digest is 32 bytes, not {len(message.sha256)}")
    return message.sha256, conversion.optional_key_from_proto(message.head)


def _digest_in(ready: pb.StepReady) -> tuple[bytes, Key | None, bytes]:
    """Digest, head and prefixes in a report; most reports have none."""
    if not ready.HasField("digest"):
        return b"", None, b""
    return (*_digest(ready.digest), _prefixes(ready.digest))


def _prefixes(message: pb.WeightsDigest) -> bytes:
    count, rest = divmod(len(message.prefixes), PREFIX_BYTES)
    if rest or count > MAX_COMPONENTS:
        raise ValueError(f"a digest's prefixes are {PREFIX_BYTES} bytes a component")
    return message.prefixes
