"""The line's status as a message, for `andon status` and whoever watches."""

from __future__ import annotations

from andon.v1 import coordinator_pb2 as pb
from andon.wire import conversion
from andon_coordinator.core.checkpoints import RunCheckpoints
from andon_coordinator.core.status import LineSnapshot, WorkerSnapshot

__all__ = ["same_for_people", "status_to"]


def status_to(status: LineSnapshot, metrics_url: str) -> pb.LineStatus:
    """The message of a status; `metrics_url` is where the service's metrics are."""
    message = pb.LineStatus(
        run_id=status.run_id,
        state=conversion.enum_to_proto(status.state),
        step=status.step,
        attempt=status.attempt,
        cursor=conversion.cursor_to_proto(status.cursor),
        live=status.live,
        participating=status.participating,
        workers=[_worker(worker) for worker in status.workers],
        halt=conversion.evidence_to_proto(status.halt),
        samples_per_second=status.samples_per_second,
        exchange_s=status.exchange_s,
        hidden_ratio=status.hidden_ratio,
        metrics_url=metrics_url,
        expect_workers=status.expect_workers,
        waiting_for=status.waiting_for,
        samples=status.samples,
        stop_reason=status.stop_reason,
        reducers=[
            pb.ReducerStatus(address=address, elements=elements)
            for address, elements in status.reducers
        ],
        expect_reducers=status.expect_reducers,
    )
    if status.loss is not None:
        message.loss = status.loss
    if status.correct is not None:
        message.correct = status.correct
    if status.total_steps is not None:
        message.total_steps = status.total_steps
    if status.checkpoints is not None:
        message.checkpoints.CopyFrom(_checkpoints(status.checkpoints))
        message.checkpoints.elsewhere = status.checkpoints_elsewhere
    return message


def _checkpoints(known: RunCheckpoints) -> pb.CheckpointStatus:
    message = pb.CheckpointStatus(
        writer=known.writer,
        node_id=known.host,
        folder=known.place,
        every=known.every,
        overdue=known.overdue,
    )
    if known.step:
        message.last.CopyFrom(pb.Checkpoint(step=known.step, folder=known.folder))
    return message


def same_for_people(one: pb.LineStatus | None, other: pb.LineStatus) -> bool:
    """Whether nothing happened between two statuses but that hearts beat and time passed."""
    return one is not None and _without_ages(one) == _without_ages(other)


def _without_ages(status: pb.LineStatus) -> pb.LineStatus:
    ageless = pb.LineStatus()
    ageless.CopyFrom(status)
    for worker in ageless.workers:
        worker.heartbeat_age_s = 0.0
    return ageless


def _worker(status: WorkerSnapshot) -> pb.WorkerStatus:
    message = pb.WorkerStatus(
        worker=status.worker,
        node_id=status.node_id,
        device=status.device,
        activity=conversion.enum_to_proto(status.activity),
        detail=status.detail,
        step=status.step,
        samples_per_second=status.samples_per_second,
        waiting_ratio=status.waiting_ratio,
        heartbeat_age_s=status.heartbeat_age_s,
        live=status.live,
        metrics_address=status.metrics_address,
        final_digest=status.final_digest,
    )
    if status.rank is not None:
        message.rank = status.rank
    return message
