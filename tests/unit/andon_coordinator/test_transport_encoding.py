"""What is the same for all workers is encoded once, and reads like what was encoded for each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.protocol.capabilities import BLOCK_NORMS
from andon.protocol.halts import HaltAnswer, HaltEvidence, HaltReason
from andon.protocol.records import Cursor, Key, PositionRange, Record, RecordKind
from andon.protocol.reducers import ReducerShare
from andon.protocol.run_settings import Liveness, Policy
from andon.protocol.shards import Split
from andon.v1 import coordinator_pb2 as pb
from andon_coordinator.core import effects as do
from andon_coordinator.core.join_answers import JoinStatus
from andon_coordinator.transport.encoding import Encoder, serialized
from andon_coordinator.transport.outgoing import (
    CommitAndAssign,
    JoinAnswers,
    MessageEffect,
    message_to,
)
from unit.andon_coordinator.paced_line import PLAN

ANSWERS = JoinAnswers(run_id="7f3a", secret=b"s" * 32, policy=Policy(), liveness=Liveness())
RECORD = Record(Key(1, 2), Key(1, 1), RecordKind.STEP, 1, Cursor(0, 8), (0, 1, 2))
BATCH = PositionRange(0, 8)
HALT = HaltEvidence(id=1, reason=HaltReason.OPERATOR, step=2, message="a person")

TO_ALL: list[MessageEffect] = [
    do.SendCommitted(0, RECORD, None, "", b""),
    do.SendVoided(0, Key(1, 2), "worker 1 left"),
    do.SendHalt(0, HALT),
    do.SendResume(0, 1, HaltAnswer.RETRY),
    do.SendShutdown(0, "over", "steps"),
    do.SendScalarAllReduceResult(0, Key(1, 2), 0, 1.0, 2.0, 3, (b"a",)),
]


def assignment(number: int, rank: int, *, ring: bool) -> do.Assign:
    """Of round `number`."""
    work = do.Assignment(
        key=Key(1, number),
        parent=RECORD.key,
        roster=(0, 1, 2),
        rank=rank,
        step=2,
        attempt=1,
        epoch=3,
        positions=(PositionRange(rank, rank + 1), PositionRange(rank + 4, rank + 6)),
        batch=BATCH,
        ahead=(PositionRange(8 + rank, 9 + rank),),
        ahead_batch=PositionRange(8, 16),
        ahead_micro_batches=rank,
        reducers=(ReducerShare("", 0, 64),),
        ring_addresses=("a:1", "b:1", "c:1") if ring else (),
        writes_checkpoint=rank == 1,
        checkpoint_step=1,
        micro_batches=rank,
        split=Split((3, 2, 1), interleaved=True),
        window=8,
        learning_rate_scale=1.5,
    )
    return do.Assign(rank, work)


@given(
    st.lists(st.tuples(st.integers(3, 5), st.integers(0, 2), st.booleans()), max_size=8),
)
def test_an_assignment_reads_the_same_as_one_that_was_encoded_whole(
    rounds: list[tuple[int, int, bool]],
) -> None:
    encoder = Encoder(ANSWERS)

    for number, rank, ring in rounds:
        effect = assignment(2 * number + ring, rank, ring=ring)

        assert pb.TrainResponse.FromString(encoder.encoded(effect)) == ANSWERS.assignment(effect)


@pytest.mark.parametrize("effect", TO_ALL, ids=lambda each: type(each).__name__)
def test_what_goes_to_everybody_is_encoded_once(effect: MessageEffect) -> None:
    encoder = Encoder(ANSWERS)
    assert not isinstance(effect, CommitAndAssign)

    first, second = encoder.encoded(effect), encoder.encoded(replace(effect, stream=7))

    assert first is second
    assert pb.TrainResponse.FromString(first) == message_to(effect)


def test_another_message_of_the_same_kind_is_encoded_anew() -> None:
    encoder = Encoder(ANSWERS)
    committed = do.SendCommitted(0, RECORD, None, "", b"")
    other = replace(committed, record=replace(RECORD, step=2))

    encoder.encoded(committed)

    assert pb.TrainResponse.FromString(encoder.encoded(other)) == message_to(other)
    assert pb.TrainResponse.FromString(encoder.encoded(committed)) == message_to(committed)


def test_bytes_are_written_as_they_are_and_messages_are_encoded() -> None:
    message = pb.TrainResponse(shutdown=pb.Shutdown(message="over"))

    assert serialized(b"abc") == b"abc"
    assert serialized(message) == message.SerializeToString()


def test_a_record_and_what_follows_it_read_as_if_each_had_been_sent() -> None:
    encoder = Encoder(ANSWERS)
    commits = [do.SendCommitted(rank, RECORD, None, "", b"kept") for rank in range(3)]
    assigns = [assignment(7, rank, ring=True) for rank in range(3)]

    for commit, assign in zip(commits, assigns, strict=True):
        message = pb.TrainResponse.FromString(encoder.encoded(CommitAndAssign(commit, assign)))

        expected = message_to(commit)
        work = ANSWERS.assignment(assign).shard_assignment
        expected.step_committed.assignment.CopyFrom(work)
        assert message == expected


def test_the_record_of_a_later_step_is_encoded_anew() -> None:
    encoder, later = Encoder(ANSWERS), replace(RECORD, step=9)
    for record in (RECORD, later):
        both = CommitAndAssign(
            do.SendCommitted(0, record, None, "", b""), assignment(7, 0, ring=False)
        )

        message = pb.TrainResponse.FromString(encoder.encoded(both))

        assert message.step_committed.record.step == record.step


@pytest.mark.parametrize("compares", [True, False])
def test_a_worker_is_told_that_norms_of_blocks_are_compared_only_where_they_are(
    compares: bool,
) -> None:
    answers = replace(ANSWERS, compares_blocks=compares)

    joined = do.AcceptJoin(
        stream=1,
        worker=0,
        plan=PLAN,
        join_status=JoinStatus.FRESH,
        head=None,
        step=0,
        halt=None,
    )
    accepted = answers.accepted(joined, term=1).join_accepted

    assert (BLOCK_NORMS in accepted.capabilities) == compares
