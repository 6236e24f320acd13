"""What a worker reports and hears of a step is what the messages say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from andon.protocol.records import Cursor, Key, PositionRange, Record, RecordKind
from andon.protocol.reducers import ReducerShare
from andon.v1 import coordinator_pb2 as pb
from andon.wire import conversion
from andon_trainer.core.effects import ReportListening
from andon_trainer.core.events import Assigned, Committed, LearningAsked, TransferAsked
from andon_trainer.core.reports import Standing, StepReport, Timings, WrittenCheckpoint
from andon_trainer.exchange.control.translation import event_from, ready_to, request_to

KEY = Key(7, 2)
RECORD = Record(KEY, Key(7, 1), RecordKind.STEP, 1, Cursor(0, 8), (0, 1))


@pytest.mark.parametrize("correct", [None, 0, 3])
def test_what_was_right_is_told_if_it_was_counted_none_or_not(correct: int | None) -> None:
    report = StepReport(
        key=KEY, loss_sum=4.0, weight=4.0, samples=4, timings=Timings(), correct=correct
    )

    message = ready_to(report)

    assert message.HasField("correct") == (correct is not None)
    assert message.correct == (correct or 0)


@pytest.mark.parametrize(("correct", "accuracy"), [(None, None), (0, 0.0), (6, 0.75)])
def test_a_steps_accuracy_is_of_all_its_samples(
    correct: int | None, accuracy: float | None
) -> None:
    committed = pb.StepCommitted(
        record=conversion.record_to_proto(RECORD), samples=8, correct=correct
    )

    event = event_from(pb.TrainResponse(step_committed=committed))

    assert isinstance(event, Committed)
    assert event.accuracy == accuracy


def test_an_overflow_is_told_and_heard() -> None:
    told = ready_to(
        StepReport(key=KEY, loss_sum=1.0, weight=1.0, samples=1, timings=Timings(), overflow=True)
    )
    heard = event_from(
        pb.TrainResponse(
            step_committed=pb.StepCommitted(
                record=conversion.record_to_proto(RECORD), overflow=told.overflow
            )
        )
    )

    assert isinstance(heard, Committed)
    assert heard.overflow


def test_a_standing_request_is_told_and_its_assignment_heard() -> None:
    standing = Standing("beta:7100", WrittenCheckpoint(100, "/runs/step-100", KEY), 200)
    report = StepReport(key=KEY, loss_sum=1.0, weight=1.0, samples=1, timings=Timings())

    told = ready_to(replace(report, standing=standing))
    without = ready_to(report)

    assert not without.HasField("next")
    assert told.next == pb.RequestWork(
        ring_address="beta:7100",
        checkpoint=pb.Checkpoint(
            step=100, folder="/runs/step-100", head=conversion.key_to_proto(KEY)
        ),
        checkpoint_begun=200,
    )


def test_a_record_without_an_assignment_has_no_next_step() -> None:
    key = conversion.key_to_proto(KEY)
    committed = pb.StepCommitted(record=conversion.record_to_proto(RECORD))
    assigned = pb.ShardAssignment(key=key, parent=key, roster=[4], world_size=1, step=5)

    alone = event_from(pb.TrainResponse(step_committed=committed))
    committed.assignment.CopyFrom(assigned)
    both = event_from(pb.TrainResponse(step_committed=committed))

    assert isinstance(alone, Committed)
    assert isinstance(both, Committed)
    assert alone.next is None
    assert both.next == event_from(pb.TrainResponse(shard_assignment=assigned))


@pytest.mark.parametrize("ahead", [None, PositionRange(4, 8)])
def test_an_assignment_says_what_to_compute_ahead_if_anything_is(
    ahead: PositionRange | None,
) -> None:
    message = pb.ShardAssignment(
        key=conversion.key_to_proto(KEY),
        parent=conversion.key_to_proto(RECORD.parent),
        roster=[4],
        world_size=1,
        positions=[conversion.range_to_proto(PositionRange(0, 4))],
        batch=conversion.range_to_proto(PositionRange(0, 4)),
    )
    if ahead is not None:
        message.ahead.append(conversion.range_to_proto(ahead))
        message.ahead_batch.CopyFrom(conversion.range_to_proto(ahead))
        message.ahead_micro_batches = 2

    event = event_from(pb.TrainResponse(shard_assignment=message))

    assert isinstance(event, Assigned)
    assert event.ahead_batch == ahead
    assert event.ahead == (() if ahead is None else (ahead,))
    assert event.ahead_micro_batches == (0 if ahead is None else 2)


def test_what_a_worker_is_told_of_learning_is_heard() -> None:
    learn = pb.Learn(reducers=[pb.ReducerShare(address="a:1", start_element=0, stop_element=4)])
    transfer = pb.StateTransfer(
        transfer_id=1,
        head=conversion.key_to_proto(Key(1, 1)),
        role=pb.TRANSFER_ROLE_RECEIVE,
        beside_training=True,
    )

    asked = event_from(pb.TrainResponse(learn=learn))
    moves = event_from(pb.TrainResponse(state_transfer=transfer))

    assert asked == LearningAsked(reducers=(ReducerShare("a:1", 0, 4),))
    assert isinstance(moves, TransferAsked)
    assert moves.beside_training
    assert request_to(ReportListening()).WhichOneof("message") == "listening"


@pytest.mark.parametrize(("fragment", "fragments"), [(4, 4), (7, 4), (0, 1)])
def test_a_fragment_that_the_line_does_not_have_is_refused(fragment: int, fragments: int) -> None:
    assignment = pb.ShardAssignment(
        key=conversion.key_to_proto(KEY),
        parent=conversion.key_to_proto(RECORD.parent or KEY),
        roster=[0],
        world_size=1,
        fragment=fragment,
    )
    alone = pb.TrainResponse(shard_assignment=assignment)
    behind = pb.TrainResponse(
        step_committed=pb.StepCommitted(
            record=conversion.record_to_proto(RECORD), assignment=assignment
        )
    )

    for message in (alone, behind):
        with pytest.raises(conversion.WireError, match=f"fragment: {fragment} of {fragments}"):
            event_from(message, fragments=fragments)
        assert event_from(message, fragments=fragment + 2) is not None
