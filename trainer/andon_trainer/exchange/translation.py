"""Translation between the control stream's messages and the worker's own values."""

from __future__ import annotations

from typing import Any

import grpc

from andon.protocol.limits import clipped
from andon.protocol.records import Key
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import ring_pb2
from andon.wire import conversion, layouts
from andon.wire.statuses import details_of, is_final
from andon_trainer.core import events
from andon_trainer.core.reports import Digest, Joined, Joining, LeaveReport, StepReport
from andon_trainer.errors import AndonError, JoinRefused

__all__ = [
    "accepted_from",
    "event_from",
    "fault_to",
    "join_to",
    "leave_to",
    "ready_to",
    "refusal_from",
    "scalar_all_reduce_to",
]


def join_to(joining: Joining) -> pb.Join:
    """What a worker says of itself, as a message."""
    kind, name, memory = joining.device
    message = pb.Join(
        run_id=joining.run_id,
        node_id=joining.node_id,
        incarnation=joining.incarnation,
        devices=[pb.Device(kind=kind, name=name, memory_bytes=memory)],
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
    )
    if joining.launch_slot is not None:
        message.launch_slot = joining.launch_slot
    return message


def _checkpoint_plan(plan: tuple[int, str] | None) -> pb.CheckpointPlan | None:
    return None if plan is None else pb.CheckpointPlan(every=plan[0], folder=clipped(plan[1]))


def accepted_from(message: pb.TrainResponse) -> Joined:
    """The coordinator's answer to Join.

    Raises:
        JoinRefused: the peer is no coordinator of this protocol.
        WireError: it says what can't be, or what another version says.
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
    )


def event_from(message: pb.TrainResponse) -> events.Event | None:
    """A message down as an event; None for one that asks for nothing or is not known.

    Raises:
        WireError: it says what can't be, or what another version says.
    """
    match message.WhichOneof("message"):
        case "shard_assignment":
            return _assigned(message.shard_assignment)
        case "step_committed":
            committed = message.step_committed
            return events.Committed(
                record=conversion.record_from_proto(committed.record),
                loss=committed.loss,
                samples=committed.samples,
                correct=committed.correct if committed.HasField("correct") else None,
                stop_reason=committed.stop_reason,
            )
        case "round_voided":
            voided = message.round_voided
            return events.Voided(conversion.key_from_proto(voided.key), voided.message)
        case "halt":
            return events.Halted(conversion.evidence_from_proto(message.halt.evidence))
        case "resume":
            return events.Resumed(message.resume.halt_id)
        case "shutdown":
            return events.Dismissed(message.shutdown.message, message.shutdown.stop_reason)
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
            )
        case "scalar_all_reduce_result":
            scalar_all_reduce = message.scalar_all_reduce_result
            return events.ScalarAllReduceDone(
                conversion.optional_key_from_proto(scalar_all_reduce.head),
                scalar_all_reduce.sequence,
                scalar_all_reduce.value,
                scalar_all_reduce.weight,
                scalar_all_reduce.contributors,
            )
    return None


def _require_known(what: str, number: int, enum: Any) -> None:
    """Refuses a value of a frozen enum that only another version of the protocol has."""
    if number not in enum.values()[1:]:
        raise conversion.WireError(f"{number} is no {what}")


def _assigned(message: pb.ShardAssignment) -> events.Assigned:
    return events.Assigned(
        key=conversion.key_from_proto(message.key),
        parent=conversion.optional_key_from_proto(message.parent),
        roster=tuple(message.roster),
        rank=message.rank,
        world_size=message.world_size,
        step=message.step,
        attempt=message.attempt,
        epoch=message.epoch,
        positions=tuple(conversion.range_from_proto(part) for part in message.positions),
        batch=conversion.range_from_proto(message.batch),
        reducers=conversion.shares_from_proto(message.reducers),
        ring=_neighbours(message.ring) if message.HasField("ring") else None,
        writes_checkpoint=(
            message.writes_checkpoint
            if message.HasField("writes_checkpoint")
            else message.rank == 0
        ),
        checkpoint_step=message.checkpoint_step,
    )


def _neighbours(message: ring_pb2.RingNeighbours) -> events.Neighbours:
    return events.Neighbours(
        address=message.successor_address,
        token=message.successor_token,
        expected_token=message.predecessor_token,
    )


def fault_to(failed: events.ExchangeFailed) -> pb.Fault:
    """What went wrong in an exchange, as a message to the coordinator."""
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
    """A worker's report of a step, as a message."""
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
        ),
        stop_reason=clipped(report.stop_reason),
        total_weight=report.total_weight,
        world_size=report.world_size,
        gradient_norm=report.gradient_norm,
        correct=report.correct,
    )
    if report.digest.sha256:
        message.digest.CopyFrom(_digest(report.digest_head, report.digest))
    return message


def leave_to(departure: LeaveReport) -> pb.Leave:
    """A worker's last words, as a message."""
    message = pb.Leave(
        reason=f"LEAVE_REASON_{departure.reason}",
        message=clipped(departure.message),
        final_step=departure.final_step,
    )
    if departure.digest.sha256:
        message.digest.CopyFrom(_digest(departure.head, departure.digest))
    if departure.checkpoint is not None:
        message.checkpoint.CopyFrom(checkpoint_to(departure.checkpoint))
    return message


def checkpoint_to(checkpoint: tuple[int, str]) -> pb.Checkpoint:
    """A checkpoint, as its step and folder, as a message."""
    step, folder = checkpoint
    return pb.Checkpoint(step=step, folder=clipped(folder))


def scalar_all_reduce_to(
    head: Key | None, sequence: int, value: float, weight: float, digest: Digest
) -> pb.ScalarAllReduce:
    """A number to average, maybe with the digest of a worker's last weights, as a message."""
    message = pb.ScalarAllReduce(
        head=conversion.key_to_proto(head), sequence=sequence, value=value, weight=weight
    )
    if digest.sha256:
        message.digest.CopyFrom(_digest(head, digest))
    return message


def _digest(head: Key | None, digest: Digest) -> pb.WeightsDigest:
    return pb.WeightsDigest(
        head=conversion.key_to_proto(head), sha256=digest.sha256, prefixes=digest.prefixes
    )


def refusal_from(error: grpc.RpcError) -> AndonError | None:
    """The refusal that a status means; None if joining again may help."""
    if not is_final(error):
        return None
    told, code = details_of(error), error.code()
    return JoinRefused(
        (told.name or code.name).lower(),
        str(error.details()),
        component=told.metadata.get("component", ""),
        mine=told.metadata.get("mine", ""),
        theirs=told.metadata.get("theirs", ""),
    )
