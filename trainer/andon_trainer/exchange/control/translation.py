"""Translation between the messages of the control stream and the worker's own values.

Nothing is decided here. Enums that people may extend are passed as names; a value of a closed enum
that this version does not know is refused.
"""

from __future__ import annotations

from typing import Any

import grpc

from andon.host.process import own_process
from andon.protocol.limits import MAX_NODES_APART, MAX_PACING_BYTES, clipped
from andon.protocol.records import Key
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import ring_pb2
from andon.wire import conversion, layouts
from andon.wire.round_terms import terms_from_proto
from andon.wire.statuses import details_of, is_final
from andon_trainer.core import events
from andon_trainer.core.effects import (
    ReportComputed,
    ReportDefect,
    ReportFault,
    ReportListening,
    ReportState,
    RequestWork,
    SendNumber,
)
from andon_trainer.core.reports import (
    Digest,
    Joined,
    Joining,
    LeaveReport,
    Standing,
    StepReport,
    WrittenCheckpoint,
)
from andon_trainer.errors import AndonError, JoinRefused

_GREATEST_FLOAT32 = 3.4028234663852886e38

__all__ = [
    "Report",
    "accepted_from",
    "event_from",
    "join_to",
    "leave_to",
    "ready_to",
    "refusal_from",
    "request_to",
    "work_to",
]

Report = ReportComputed | ReportDefect | ReportFault | ReportListening | ReportState | SendNumber
"""Effects that are a message to the coordinator and nothing else."""


def join_to(joining: Joining) -> pb.Join:
    """A worker's Join, as a message."""
    kind, name, memory, cores = joining.device
    message = pb.Join(
        run_id=joining.run_id,
        node_id=joining.node_id,
        incarnation=joining.incarnation,
        devices=[pb.Device(kind=kind, name=name, memory_bytes=memory, cores=cores)],
        backend=kind,
        protocol_version=joining.protocol_version,
        capabilities=joining.capabilities,
        layout=layouts.layout_to_proto(joining.layout),
        plan=conversion.plan_to_proto(joining.plan),
        metrics_address=joining.metrics_address,
        head=conversion.key_to_proto(joining.head),
        cursor=conversion.cursor_to_proto(joining.cursor),
        step=joining.step,
        held_key=conversion.key_to_proto(joining.held_key),
        greatest_term=joining.greatest_term,
        mid_script=joining.mid_script,
        token=joining.token,
        checkpoints=_checkpoint_plan(joining.checkpoints),
        halt=conversion.evidence_to_proto(joining.halt),
        speed_hint=joining.speed_hint,
        spare=joining.spare,
        pacing=joining.pacing,
        process=_process(),
        arithmetic=conversion.arithmetic_to_proto(joining.arithmetic),
    )
    if joining.launch_slot is not None:
        message.launch_slot = joining.launch_slot
    return message


def _process() -> pb.ProcessPlace | None:
    """This process, for a coordinator on the same host."""
    own = own_process()
    return pb.ProcessPlace(host=own.host, id=own.id) if own.host else None


def _checkpoint_plan(plan: tuple[int, str, int] | None) -> pb.CheckpointPlan | None:
    if plan is None:
        return None
    every, folder, keep = plan
    return pb.CheckpointPlan(every=every, folder=clipped(folder), keep=keep)


def accepted_from(message: pb.TrainResponse) -> Joined:
    """The coordinator's answer to Join.

    Raises:
        JoinRefused: the peer is no coordinator of this protocol.
        WireError: a field is invalid, or has a value that only another version knows.
    """
    if message.WhichOneof("message") != "join_accepted":
        raise JoinRefused("protocol", "the coordinator did not answer Join with JoinAccepted")
    answer = message.join_accepted
    _require_known("join status", answer.join_status, pb.JoinStatus)
    return Joined(
        worker=answer.worker,
        session_token=answer.session_token,
        reducers=conversion.shares_from_proto(answer.reducers),
        plan=conversion.plan_from_proto(answer.plan),
        policy=conversion.policy_from_proto(answer.policy),
        liveness=conversion.liveness_from_proto(answer.liveness),
        in_sync=answer.join_status == pb.JOIN_STATUS_IN_SYNC,
        behind=answer.join_status == pb.JOIN_STATUS_BEHIND,
        head=conversion.optional_key_from_proto(answer.head),
        step=answer.step,
        term=answer.term,
        halt=conversion.optional_evidence_from_proto(answer.halt)
        if answer.HasField("halt")
        else None,
        run_id=answer.run_id,
        capabilities=frozenset(answer.capabilities),
        control_socket=answer.control_socket,
    )


def event_from(message: pb.TrainResponse, *, fragments: int | None = None) -> events.Event | None:
    """A message of the coordinator as an event; None if it is of no kind that this worker knows.

    Args:
        message: what the coordinator sent.
        fragments: in how many parts the line's policy exchanges the model; None: nobody knows.

    Raises:
        WireError: a field is invalid, or has a value that only another version knows.
    """
    event = _event_of(message)
    assigned = event.next if isinstance(event, events.Committed) else event
    if fragments is None or not isinstance(assigned, events.Assigned):
        return event
    fragment = assigned.fragment
    if fragment is not None and not (fragments > 1 and fragment < fragments):
        # It would exchange no block at all, and keep what it computed for ever.
        raise conversion.WireError(f"ShardAssignment.fragment: {fragment} of {fragments}")
    return event


def _event_of(message: pb.TrainResponse) -> events.Event | None:
    match message.WhichOneof("message"):
        case "shard_assignment":
            return _assigned(message.shard_assignment)
        case "step_committed":
            return _committed(message.step_committed)
        case "round_voided":
            voided = message.round_voided
            return events.Voided(conversion.key_from_proto(voided.key), voided.message)
        case "halt" | "resume" | "shutdown":
            return _halt_or_end(message)
        case "state_transfer":
            transfer = message.state_transfer
            _require_known("transfer role", transfer.role, pb.TransferRole)
            return events.TransferAsked(
                transfer_id=transfer.transfer_id,
                head=conversion.key_from_proto(transfer.head),
                sends=transfer.role == pb.TRANSFER_ROLE_SEND,
                step=transfer.step,
                cursor=conversion.cursor_from_proto(transfer.cursor),
                address=transfer.address,
                beside_training=transfer.beside_training,
                checkpoint=_checkpoint_to_read(transfer),
            )
        case "learn":
            return events.LearningAsked(
                reducers=conversion.shares_from_proto(message.learn.reducers)
            )
        case "late":
            return events.LeftOut(conversion.key_from_proto(message.late.key))
        case "scalar_all_reduce_result":
            result = message.scalar_all_reduce_result
            return events.ScalarAllReduceDone(
                conversion.optional_key_from_proto(result.head),
                result.sequence,
                result.value,
                result.weight,
                result.contributors,
                tuple(result.data),
            )
    return None


def _checkpoint_to_read(transfer: pb.StateTransfer) -> WrittenCheckpoint | None:
    if not transfer.HasField("checkpoint"):
        return None
    read = transfer.checkpoint
    return WrittenCheckpoint(read.step, read.folder, conversion.key_from_proto(read.head))


def _halt_or_end(message: pb.TrainResponse) -> events.Event:
    if message.HasField("halt"):
        return events.Halted(conversion.evidence_from_proto(message.halt.evidence))
    if message.HasField("resume"):
        return events.Resumed(message.resume.halt_id)
    told = message.shutdown
    return events.Dismissed(told.message, told.stop_reason, told.keep_state)


def _committed(message: pb.StepCommitted) -> events.Committed:
    return events.Committed(
        record=conversion.record_from_proto(message.record),
        loss=message.loss,
        samples=message.samples,
        correct=message.correct if message.HasField("correct") else None,
        stop_reason=message.stop_reason,
        # A longer one would not be accepted with the next Join.
        pacing=message.pacing if len(message.pacing) <= MAX_PACING_BYTES else b"",
        overflow=message.overflow,
        gradient_scale=message.gradient_scale or 1.0,
        next=_assigned(message.assignment) if message.HasField("assignment") else None,
    )


def _require_known(what: str, number: int, enum: Any) -> None:
    """Refuses a value of a closed enum that only another version of the protocol has."""
    if number not in enum.values()[1:]:
        raise conversion.WireError(f"{number} is no {what}")


def _assigned(message: pb.ShardAssignment) -> events.Assigned:
    ring = _neighbours(message.ring) if message.HasField("ring") else None
    return terms_from_proto(message, events.Assigned, ring=ring)


def _neighbours(message: ring_pb2.RingNeighbours) -> events.Neighbours:
    return events.Neighbours(
        address=message.successor_address,
        token=message.successor_token,
        expected_token=message.predecessor_token,
    )


def request_to(effect: Report) -> pb.TrainRequest:
    """What the core has to say, as a message."""
    match effect:
        case ReportFault(failed):
            return pb.TrainRequest(fault=_fault(failed))
        case ReportDefect(kind, text):
            fault = pb.Fault(kind=f"FAULT_KIND_{kind}", message=clipped(text))
            return pb.TrainRequest(fault=fault)
        case ReportState(transfer_id, head, failure):
            report = pb.StateReport(
                transfer_id=transfer_id,
                head=conversion.key_to_proto(head),
                failure=clipped(failure),
            )
            return pb.TrainRequest(state_report=report)
        case ReportComputed(key):
            computed = pb.Computed(key=conversion.key_to_proto(key))
            return pb.TrainRequest(computed=computed)
        case ReportListening():
            return pb.TrainRequest(listening=pb.Listening())
        case SendNumber():
            return pb.TrainRequest(scalar_all_reduce=_number(effect))


def work_to(
    effect: RequestWork,
    ring_address: str,
    checkpoint: WrittenCheckpoint | None,
    checkpoint_begun: int,
) -> pb.TrainRequest:
    """A request for work, or for the end of the epoch, as a message."""
    message = pb.RequestWork(
        head=conversion.key_to_proto(effect.head),
        ring_address=ring_address,
        leaves_epoch=effect.leaves_epoch,
        checkpoint=None if checkpoint is None else _checkpoint(checkpoint),
        checkpoint_begun=checkpoint_begun,
        voided=conversion.key_to_proto(effect.voided),
    )
    return pb.TrainRequest(request_work=message)


def _standing(standing: Standing | None) -> pb.RequestWork | None:
    if standing is None:
        return None
    checkpoint = standing.checkpoint
    return pb.RequestWork(
        ring_address=standing.ring_address,
        checkpoint=None if checkpoint is None else _checkpoint(checkpoint),
        checkpoint_begun=standing.checkpoint_begun,
    )


def _fault(failed: events.ExchangeFailed) -> pb.Fault:
    message = pb.Fault(
        key=conversion.key_to_proto(failed.key),
        kind=f"FAULT_KIND_{failed.kind}",
        element=failed.element,
        value=failed.value,
        message=clipped(failed.message),
        greatest=conversion.key_to_proto(failed.greatest),
    )
    if failed.rank is not None:
        message.rank = failed.rank
    if failed.block is not None:
        message.block = failed.block
    return message


def ready_to(report: StepReport) -> pb.StepReady:
    """A worker's report of a finished step, as a message."""
    timings = report.timings
    message = pb.StepReady(
        key=conversion.key_to_proto(report.key),
        loss_sum=report.loss_sum,
        weight=report.weight,
        samples=report.samples,
        timings=pb.Timings(
            compute_s=timings.compute_s,
            exchange_s=timings.exchange_s,
            wait_s=timings.wait_s,
            data_s=timings.data_s,
            busy_s=timings.busy_s,
            micro_batches=timings.micro_batches,
            computed=timings.computed,
        ),
        stop_reason=clipped(report.stop_reason),
        end_of_data=report.end_of_data,
        total_weight=report.total_weight,
        world_size=report.world_size,
        gradient_norm=report.gradient_norm,
        correct=report.correct,
        own_gradient_norm=report.own_gradient_norm,
        block_norms=[min(norm, _GREATEST_FLOAT32) for norm in report.block_norms],
        overflow=report.overflow,
        next=_standing(report.standing),
        node_losses=conversion.node_losses_to_proto(report.node_losses),
        attested=conversion.attestations_to_proto(report.attested),
        averages_digest=report.averages_digest,
        mean_check=conversion.mean_check_to_proto(report.mean_check),
        apart=conversion.nodes_apart_to_proto(report.apart[:MAX_NODES_APART]),
    )
    if report.digest.sha256:
        message.digest.CopyFrom(_digest(report.digest_head, report.digest))
    return message


def leave_to(departure: LeaveReport) -> pb.Leave:
    """A worker's Leave, as a message."""
    message = pb.Leave(
        reason=f"LEAVE_REASON_{departure.reason}",
        message=clipped(departure.message),
        final_step=departure.final_step,
    )
    if departure.digest.sha256:
        message.digest.CopyFrom(_digest(departure.head, departure.digest))
    if departure.checkpoint is not None:
        message.checkpoint.CopyFrom(_checkpoint(departure.checkpoint))
    return message


def _checkpoint(checkpoint: WrittenCheckpoint) -> pb.Checkpoint:
    head = conversion.key_to_proto(checkpoint.head)
    return pb.Checkpoint(step=checkpoint.step, folder=clipped(checkpoint.folder), head=head)


def _number(effect: SendNumber) -> pb.ScalarAllReduce:
    message = pb.ScalarAllReduce(
        head=conversion.key_to_proto(effect.head),
        sequence=effect.sequence,
        value=effect.value,
        weight=effect.weight,
        data=effect.data,
    )
    # A digest comes with the number that ends a run: it is compared once all workers gave theirs.
    if effect.digest.sha256:
        message.digest.CopyFrom(_digest(effect.head, effect.digest))
    return message


def _digest(head: Key | None, digest: Digest) -> pb.WeightsDigest:
    return pb.WeightsDigest(
        head=conversion.key_to_proto(head),
        sha256=digest.sha256,
        prefixes=digest.prefixes,
        base_hashed=digest.base_hashed,
    )


def refusal_from(error: grpc.RpcError) -> AndonError | None:
    """The refusal that a status stands for; None if joining again may help."""
    if not is_final(error):
        return None
    details, code = details_of(error), error.code()
    return JoinRefused(
        (details.name or code.name).lower(),
        str(error.details()),
        component=details.metadata.get("component", ""),
        mine=details.metadata.get("mine", ""),
        theirs=details.metadata.get("theirs", ""),
    )
