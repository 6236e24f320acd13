"""Outgoing: the core's effects become messages to workers, and its status a message to people.

Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from andon.protocol import tokens
from andon.protocol.capabilities import BLOCK_NORMS, COORDINATOR_CAPABILITIES
from andon.protocol.records import RecordKind
from andon.protocol.run_settings import Liveness, Policy
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import ring_pb2
from andon.wire import conversion
from andon.wire.round_terms import own_terms_to_proto, terms_to_proto
from andon.wire.slowness import slowness_to_proto
from andon_coordinator.core import effects
from andon_coordinator.core.checkpoints import RunCheckpoints
from andon_coordinator.core.events import StepTimings
from andon_coordinator.core.status import LineSnapshot, WorkerSnapshot
from andon_coordinator.transport.session_messages import session_status_to

__all__ = [
    "CommitAndAssign",
    "JoinAnswers",
    "MessageEffect",
    "ServicePlaces",
    "heartbeat_answer_to",
    "message_to",
    "same_for_people",
    "status_to",
    "together",
    "worker_status_to",
]


_MOST_CONVICTED = 16
"""So many convicted workers are shown to people."""


@dataclass(frozen=True, slots=True)
class CommitAndAssign:
    """A record, and the share of the step after it: one message, which wakes its worker once."""

    committed: effects.SendCommitted
    assign: effects.Assign

    @property
    def stream(self) -> int:
        """The stream of both."""
        return self.committed.stream


MessageEffect = (
    CommitAndAssign
    | effects.Assign
    | effects.SendCommitted
    | effects.SendVoided
    | effects.SendHalt
    | effects.SendResume
    | effects.SendShutdown
    | effects.SendTransfer
    | effects.SendLate
    | effects.SendLearn
    | effects.SendScalarAllReduceResult
    | effects.SendProbe
    | effects.SendExplain
)
"""Effects that are one message on one stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAnswers:
    """Makes the messages that need the run's settings or its secret."""

    run_id: str
    secret: bytes
    """Shared with the run's reducers, which check the tokens made of it."""
    policy: Policy
    liveness: Liveness
    compares_blocks: bool = False
    """Whether norms of blocks are compared: otherwise nobody need send them."""

    def accepted(self, effect: effects.AcceptJoin, term: int) -> pb.TrainResponse:
        """The answer to a Join."""
        return pb.TrainResponse(
            join_accepted=pb.JoinAccepted(
                worker=effect.worker,
                # Stream numbers grow, so (term, stream) grows with each join of a slot. Reducers
                # refuse a session token that is older than one that they have seen of the slot.
                session_token=tokens.session_token(
                    self.secret, self.run_id, effect.worker, (term, effect.stream)
                ),
                reducers=conversion.shares_to_proto(effect.reducers),
                plan=conversion.plan_to_proto(effect.plan),
                policy=conversion.policy_to_proto(self.policy),
                liveness=conversion.liveness_to_proto(self.liveness),
                join_status=conversion.enum_to_proto(effect.join_status),
                head=conversion.key_to_proto(effect.head),
                step=effect.step,
                term=term,
                halt=conversion.evidence_to_proto(effect.halt),
                run_id=self.run_id,
                capabilities=[
                    each
                    for each in COORDINATOR_CAPABILITIES
                    if each != BLOCK_NORMS or self.compares_blocks
                ],
            )
        )

    def assignment(self, effect: effects.Assign) -> pb.TrainResponse:
        """An assignment, whole."""
        message = terms_to_proto(effect.assignment)
        message.MergeFrom(self.own_assignment(effect.assignment))
        return pb.TrainResponse(shard_assignment=message)

    def own_assignment(self, work: effects.Assignment) -> pb.ShardAssignment:
        """What differs between the members of a round; on a ring, with the rank's neighbours."""
        message = own_terms_to_proto(work)
        size = len(work.roster)
        if work.ring_addresses and size > 1:
            before, after = (work.rank - 1) % size, (work.rank + 1) % size
            neighbours = ring_pb2.RingNeighbours(
                successor_address=work.ring_addresses[after],
                successor_token=self._link_token(work, work.rank, after),
                predecessor_token=self._link_token(work, before, work.rank),
            )
            message.ring.CopyFrom(neighbours)
        return message

    def _link_token(self, work: effects.Assignment, sender: int, receiver: int) -> bytes:
        roster = work.roster
        return tokens.link_token(
            self.secret, self.run_id, work.key, roster[sender], roster[receiver]
        )


def together(done: Sequence[effects.Effect]) -> list[effects.Effect | CommitAndAssign]:
    """The effects of one event, where each assignment is joined to the STEP that it follows.

    Both would be messages of the same stream, one after the other, with nothing in between.
    """
    found: list[effects.Effect | CommitAndAssign] = []
    commits: dict[int, int] = {}
    for effect in done:
        match effect:
            case effects.Assign(stream, assignment) if stream in commits:
                at = commits[stream]
                committed = found[at]
                if (
                    isinstance(committed, effects.SendCommitted)
                    and committed.record.key == assignment.parent
                ):
                    # In the commit's place: every other message keeps its own.
                    found[at] = CommitAndAssign(committed, effect)
                    continue
            case effects.SendCommitted(stream, record) if record.kind is RecordKind.STEP:
                # Only for a STEP. In its event, work goes only to workers with a standing request,
                # which read both from one message. Work after a MARK was asked for earlier, and
                # the answer to a halt may lie between the two.
                commits[stream] = len(found)
            case _:
                pass
        found.append(effect)
    return found


def message_to(effect: MessageEffect) -> pb.TrainResponse:
    """The message that an effect sends."""
    match effect:
        case effects.Assign():
            message = terms_to_proto(effect.assignment)
            message.MergeFrom(own_terms_to_proto(effect.assignment))
            return pb.TrainResponse(shard_assignment=message)
        case CommitAndAssign(committed, assign):
            both = message_to(committed)
            work = message_to(assign).shard_assignment
            both.step_committed.assignment.CopyFrom(work)
            return both
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
            shutdown = pb.Shutdown(
                message=effect.message,
                stop_reason=effect.stop_reason,
                keep_state=effect.keep_state,
            )
            return pb.TrainResponse(shutdown=shutdown)
        case (
            effects.SendLearn()
            | effects.SendLate()
            | effects.SendTransfer()
            | effects.SendProbe()
            | effects.SendExplain()
        ):
            return _rare(effect)
        case effects.SendScalarAllReduceResult():
            result = pb.ScalarAllReduceResult(
                head=conversion.key_to_proto(effect.head),
                sequence=effect.sequence,
                value=effect.value,
                weight=effect.weight,
                contributors=effect.contributors,
                data=effect.data,
            )
            return pb.TrainResponse(scalar_all_reduce_result=result)


def heartbeat_answer_to(
    effect: effects.SendHeartbeatAnswer, unix_time_s: float
) -> pb.TrainResponse:
    """The answer to a heartbeat, with the time as it leaves."""
    answer = pb.HeartbeatAnswer(sequence=effect.sequence, unix_time_s=unix_time_s)
    return pb.TrainResponse(heartbeat_answer=answer)


def _committed(effect: effects.SendCommitted) -> pb.StepCommitted:
    message = pb.StepCommitted(
        record=conversion.record_to_proto(effect.record),
        stop_reason=effect.stop_reason,
        pacing=effect.pacing,
    )
    result = effect.result
    if result is not None:
        message.loss = result.loss
        message.samples = result.samples
        message.contributors = result.contributors
        message.overflow = result.overflow
        message.gradient_scale = 0.0 if result.gradient_scale == 1.0 else result.gradient_scale
        if result.correct is not None:
            message.correct = result.correct
    return message


def _rare(
    effect: effects.SendLearn
    | effects.SendLate
    | effects.SendTransfer
    | effects.SendProbe
    | effects.SendExplain,
) -> pb.TrainResponse:
    """What concerns one worker: how it gets the line's state, and whether it is there."""
    if isinstance(effect, effects.SendLate):
        return pb.TrainResponse(late=pb.Late(key=conversion.key_to_proto(effect.key)))
    if isinstance(effect, effects.SendProbe):
        return pb.TrainResponse(probe=pb.Probe(number=effect.number))
    if isinstance(effect, effects.SendExplain):
        return pb.TrainResponse(explain=pb.Explain(number=effect.number))
    if isinstance(effect, effects.SendLearn):
        reducers = conversion.shares_to_proto(effect.reducers)
        return pb.TrainResponse(learn=pb.Learn(reducers=reducers))
    return pb.TrainResponse(state_transfer=_transfer(effect))


def _transfer(effect: effects.SendTransfer) -> pb.StateTransfer:
    read = effect.checkpoint
    return pb.StateTransfer(
        transfer_id=effect.transfer_id,
        head=conversion.key_to_proto(effect.head),
        role=conversion.enum_to_proto(effect.role),
        peer=effect.peer,
        address=effect.relay,
        step=effect.step,
        cursor=conversion.cursor_to_proto(effect.cursor),
        beside_training=effect.beside_training,
        checkpoint=None
        if read is None
        else pb.Checkpoint(
            step=read.step, folder=read.folder, head=conversion.key_to_proto(read.head)
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlaces:
    """Where a service is reached beside its port; statuses show its other ports."""

    shared_dir: Path | None = None
    """The folder of its sockets for workers of this host; None: it offers none."""
    metrics_url: str = ""
    tcp_port: int = 0
    """Of its own reducer's TCP lanes; 0: it offers none."""


def status_to(status: LineSnapshot, places: ServicePlaces) -> pb.LineStatus:
    """The line's status."""
    message = pb.LineStatus(
        run_id=status.run_id,
        state=conversion.enum_to_proto(status.state),
        step=status.step,
        attempt=status.attempt,
        cursor=conversion.cursor_to_proto(status.cursor),
        live=status.live,
        participating=status.participating,
        workers=[worker_status_to(worker) for worker in status.workers],
        halt=conversion.evidence_to_proto(status.halt),
        samples_per_second=status.samples_per_second,
        exchange_s=status.exchange_s,
        hidden_ratio=status.hidden_ratio,
        metrics_url=places.metrics_url,
        expect_workers=status.expect_workers,
        waiting_for=status.waiting_for,
        samples=status.samples,
        stop_reason=status.stop_reason,
        reducers=[
            pb.ReducerStatus(address=address, elements=elements)
            for address, elements in status.reducers
        ],
        expect_reducers=status.expect_reducers,
        schedule=status.schedule,
        schedule_note=status.schedule_note,
        grain=status.grain,
        one_arithmetic=status.one_arithmetic,
        fragments=status.fragments if status.fragments > 1 else 0,
        mean=conversion.enum_to_proto(status.mean),
        slowness=[slowness_to_proto(each, stacks=False) for each in status.slowness],
        tcp_port=places.tcp_port,
        cost=pb.RunCost(**_known(asdict(status.cost))),
    )
    if status.loss is not None:
        message.loss = status.loss
    if status.correct is not None:
        message.correct = status.correct
    if status.total_steps is not None:
        message.total_steps = status.total_steps
    if status.session is not None:
        message.session.CopyFrom(session_status_to(status.session))
    if status.quorum is not None:
        message.quorum = status.quorum
    if status.noise_scale is not None:
        message.noise_scale = status.noise_scale
    if status.trimmed is not None:
        message.trimmed = status.trimmed
    if status.verify:
        done = status.verified
        message.verification.CopyFrom(
            pb.VerificationStatus(
                fraction=status.verify,
                steps=done.steps,
                grains=done.grains,
                differences=done.differences,
                convicted=done.convicted[-_MOST_CONVICTED:],
            )
        )
    if status.checkpoints is not None:
        message.checkpoints.CopyFrom(_checkpoint_status(status.checkpoints))
        message.checkpoints.elsewhere = status.checkpoints_elsewhere
    return message


def _known(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def _checkpoint_status(known: RunCheckpoints) -> pb.CheckpointStatus:
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
    """Whether two statuses differ in nothing but the ages of heartbeats."""
    return one is not None and _without_ages(one) == _without_ages(other)


def _without_ages(status: pb.LineStatus) -> pb.LineStatus:
    ageless = pb.LineStatus()
    ageless.CopyFrom(status)
    for worker in ageless.workers:
        worker.heartbeat_age_s = 0.0
    if ageless.HasField("session"):
        ageless.session.age_s = 0.0
        for rank in ageless.session.ranks:
            rank.silent_s = rank.pending.open_s = 0.0
    return ageless


def worker_status_to(status: WorkerSnapshot) -> pb.WorkerStatus:
    """One worker's part of the status."""
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
        share=status.share,
        micro_batches=status.micro_batches,
        step_s=status.step_s,
        late_records=status.late_records,
        owed_positions=status.owed_positions,
        notice=status.notice,
        slow=status.slow,
    )
    if status.slowness is not None:
        message.slowness.CopyFrom(slowness_to_proto(status.slowness))
    if status.step_s:
        message.timings.CopyFrom(_timings(status.timings))
    if status.rank is not None:
        message.rank = status.rank
    if (device := status.hardware) is not None:
        message.hardware.CopyFrom(
            pb.Device(
                kind=device.kind,
                name=device.name,
                memory_bytes=device.memory_bytes,
                cores=device.cores,
            )
        )
    return message


def _timings(timings: StepTimings) -> pb.Timings:
    return pb.Timings(
        compute_s=timings.compute_s,
        exchange_s=timings.exchange_s,
        wait_s=timings.wait_s,
        data_s=timings.data_s,
        busy_s=timings.busy_s,
        micro_batches=timings.micro_batches,
        computed=timings.computed,
    )
