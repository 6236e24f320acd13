"""Effects become messages, each exactly one."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from google.protobuf.message import Message

from andon.protocol.halts import HaltAnswer, HaltEvidence, HaltReason
from andon.protocol.records import Cursor, Key, PositionRange, Record, RecordKind
from andon.protocol.reducers import ReducerShare
from andon.v1 import coordinator_pb2 as pb
from andon.v1 import record_pb2
from andon.wire import conversion
from andon_coordinator.core import effects
from andon_coordinator.core.events import Activity, ProcessUse, StepTimings
from andon_coordinator.core.status import WorkerSnapshot
from andon_coordinator.core.transfers import TransferRole
from andon_coordinator.transport.outgoing import (
    CommitAndAssign,
    MessageEffect,
    heartbeat_answer_to,
    message_to,
    together,
    worker_status_to,
)
from scenarios import line_values

KEY = Key(2**64 - 1, 7)
HEAD = Key(9, 3)
KEY_PB = conversion.key_to_proto(KEY)
HEAD_PB = conversion.key_to_proto(HEAD)
RECORD = Record(KEY, HEAD, RecordKind.STEP, 3, Cursor(1, 4), (0, 1))
EVIDENCE = HaltEvidence(id=1, reason=HaltReason.OPERATOR, step=3)


EFFECTS: list[tuple[MessageEffect, Message]] = [
    (
        CommitAndAssign(
            effects.SendCommitted(5, RECORD, None),
            effects.Assign(
                5,
                line_values.assignment(
                    key=HEAD,
                    parent=KEY,
                    rank=1,
                    step=4,
                    epoch=1,
                    positions=(PositionRange(6, 8),),
                    batch=PositionRange(4, 8),
                ),
            ),
        ),
        pb.StepCommitted(
            record=conversion.record_to_proto(RECORD),
            assignment=pb.ShardAssignment(
                key=HEAD_PB,
                parent=KEY_PB,
                roster=[0, 1],
                world_size=2,
                rank=1,
                step=4,
                epoch=1,
                positions=[record_pb2.PositionRange(start=6, stop=8)],
                batch=record_pb2.PositionRange(start=4, stop=8),
                writes_checkpoint=False,
            ),
        ),
    ),
    (
        effects.Assign(
            5,
            line_values.assignment(
                key=KEY,
                parent=HEAD,
                roster=(0, 3),
                rank=1,
                step=3,
                attempt=2,
                epoch=1,
                positions=(PositionRange(2, 4),),
                ahead=(PositionRange(6, 8),),
                ahead_batch=PositionRange(4, 8),
                ahead_micro_batches=2,
                reducers=(ReducerShare("beta:7071", 0, 6),),
            ),
        ),
        pb.ShardAssignment(
            key=KEY_PB,
            parent=HEAD_PB,
            roster=[0, 3],
            rank=1,
            world_size=2,
            step=3,
            attempt=2,
            epoch=1,
            positions=[record_pb2.PositionRange(start=2, stop=4)],
            batch=record_pb2.PositionRange(start=0, stop=4),
            ahead=[record_pb2.PositionRange(start=6, stop=8)],
            ahead_batch=record_pb2.PositionRange(start=4, stop=8),
            ahead_micro_batches=2,
            reducers=[pb.ReducerShare(address="beta:7071", stop_element=6)],
            writes_checkpoint=False,
        ),
    ),
    (
        effects.SendCommitted(
            5,
            RECORD,
            line_values.result(
                loss=0.5,
                contributions=tuple(
                    line_values.contribution(
                        worker=worker, rank=worker, positions=(), weight=weight, loss_sum=2.0
                    )
                    for worker, weight in enumerate((4.0, 0.0))
                ),
                correct=3,
                overflow=True,
            ),
            "steps",
        ),
        pb.StepCommitted(
            record=conversion.record_to_proto(RECORD),
            loss=0.5,
            samples=4,
            contributors=1,
            stop_reason="steps",
            correct=3,
            overflow=True,
        ),
    ),
    (effects.SendVoided(5, KEY, "lost"), pb.RoundVoided(key=KEY_PB, message="lost")),
    (effects.SendHalt(5, EVIDENCE), pb.Halt(evidence=conversion.evidence_to_proto(EVIDENCE))),
    (effects.SendResume(5, 8, HaltAnswer.SKIP), pb.Resume(halt_id=8, answer=pb.HALT_ANSWER_SKIP)),
    (
        effects.SendShutdown(5, "over", "drained"),
        pb.Shutdown(message="over", stop_reason="drained"),
    ),
    (
        effects.SendShutdown(5, "nobody else", keep_state=True),
        pb.Shutdown(message="nobody else", keep_state=True),
    ),
    (
        effects.SendTransfer(
            stream=5,
            transfer_id=6,
            role=TransferRole.RECEIVE,
            head=HEAD,
            step=3,
            cursor=Cursor(1, 4),
            peer=2,
            relay="beta:7071",
            beside_training=True,
        ),
        pb.StateTransfer(
            transfer_id=6,
            head=HEAD_PB,
            role=pb.TRANSFER_ROLE_RECEIVE,
            address="beta:7071",
            peer=2,
            step=3,
            cursor=record_pb2.Cursor(epoch=1, position=4),
            beside_training=True,
        ),
    ),
    (
        effects.SendLearn(5, (ReducerShare("beta:7071", 0, 8),)),
        pb.Learn(reducers=[pb.ReducerShare(address="beta:7071", start_element=0, stop_element=8)]),
    ),
    (effects.SendProbe(5, 3), pb.Probe(number=3)),
    (effects.SendExplain(5, 4), pb.Explain(number=4)),
    (effects.SendLate(5, HEAD), pb.Late(key=HEAD_PB)),
    (
        effects.SendScalarAllReduceResult(5, HEAD, 1, 0.5, 3.0, 2, (b"", b"given")),
        pb.ScalarAllReduceResult(
            head=HEAD_PB, sequence=1, value=0.5, weight=3.0, contributors=2, data=[b"", b"given"]
        ),
    ),
]


@pytest.mark.parametrize(("effect", "expected"), EFFECTS, ids=lambda value: type(value).__name__)
def test_effect_becomes_its_message(effect: MessageEffect, expected: Message) -> None:
    message = message_to(effect)

    assert getattr(message, message.WhichOneof("message") or "") == expected


def test_an_answer_to_a_heartbeat_has_the_time_as_it_leaves() -> None:
    assert heartbeat_answer_to(effects.SendHeartbeatAnswer(5, 9), 1.5) == pb.TrainResponse(
        heartbeat_answer=pb.HeartbeatAnswer(sequence=9, unix_time_s=1.5)
    )


def test_every_outgoing_effect_is_translated_here() -> None:
    assert {type(effect) for effect, _ in EFFECTS} == set(get_args(MessageEffect))


def test_a_workers_status_has_the_times_of_its_last_step_once_there_was_one() -> None:
    timings = StepTimings(compute_s=1.5, exchange_s=0.5, wait_s=0.25, data_s=0.125, busy_s=1.25)
    worker = WorkerSnapshot(
        worker=1, rank=None, node_id="beta", device="cpu", hardware=None, speed_hint=None,
        activity=Activity.COMPUTING, detail="x", step=3, samples_per_second=2.0,
        waiting_ratio=0.125, heartbeat_age_s=0.5, live=True, in_sync=True, learns=False,
        steps_behind=0, patience_s=3.0, metrics_address="", final_digest=b"", share=0.5,
        micro_batches=0,
        timings=timings, step_s=2.0, use=ProcessUse(),
    )  # fmt: skip

    after = worker_status_to(worker)
    before = worker_status_to(replace(worker, timings=StepTimings(), step_s=0.0))

    assert (after.activity, after.detail) == (pb.ACTIVITY_COMPUTING, "x")
    assert after.step_s == 2.0
    assert after.timings == pb.Timings(
        compute_s=1.5, exchange_s=0.5, wait_s=0.25, data_s=0.125, busy_s=1.25
    )
    assert not before.HasField("timings")


def _next_of(stream: int, parent: Key = KEY) -> effects.Assign:
    work = line_values.assignment(
        key=Key(2**64 - 1, 8),
        parent=parent,
        rank=stream - 5,
        step=4,
        epoch=1,
        batch=PositionRange(4, 8),
    )
    return effects.Assign(stream, work)


def _commit(stream: int) -> effects.SendCommitted:
    return effects.SendCommitted(stream, RECORD, None)


def test_an_assignment_goes_with_the_record_that_it_follows() -> None:
    halt = effects.SendHalt(7, EVIDENCE)
    happened: list[effects.Effect] = [_commit(5), _commit(6), halt, _next_of(5), _next_of(6)]

    done = together(happened)

    assert done == [
        CommitAndAssign(_commit(5), _next_of(5)),
        CommitAndAssign(_commit(6), _next_of(6)),
        halt,
    ]


def test_an_assignment_after_a_mark_goes_alone() -> None:
    mark = replace(RECORD, kind=RecordKind.MARK, roster=())
    resume = effects.SendResume(5, 1, HaltAnswer.SKIP)
    commit = effects.SendCommitted(5, mark, None)
    happened: list[effects.Effect] = [commit, resume, _next_of(5)]

    assert together(happened) == happened


def test_an_assignment_of_another_stream_or_parent_goes_alone() -> None:
    alone: list[effects.Effect] = [_commit(5), _next_of(6), _next_of(5, HEAD)]

    assert together(alone) == alone
