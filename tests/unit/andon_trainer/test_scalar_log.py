"""The scalar log keeps what a script logged until the coordinator has it."""

from __future__ import annotations

from andon.protocol.limits import MAX_SCALARS
from andon.protocol.scalars import Scalar
from andon_trainer.core.scalar_log import MOST_KEPT, ScalarLog


def scalars(*steps: int) -> tuple[Scalar, ...]:
    return tuple(Scalar("val", step, step / 2) for step in steps)


def joined(stream: int = 1) -> ScalarLog:
    log = ScalarLog()
    log.joined(stream)
    return log


def test_what_was_logged_goes_with_the_next_heartbeat_and_once() -> None:
    log = joined()
    log.add(scalars(1, 2))

    assert log.ready
    assert log.take(1, 5) == scalars(1, 2)
    log.answered(1, 5)

    assert not log.ready
    assert log.take(1, 6) == ()


def test_one_heartbeat_with_scalars_is_unanswered_at_a_time() -> None:
    log = joined()
    log.add(scalars(1))
    log.take(1, 5)
    log.add(scalars(2))

    assert not log.ready
    assert log.take(1, 6) == ()
    log.answered(1, 5)
    assert log.ready
    assert log.take(1, 7) == scalars(2)


def test_only_the_answer_to_their_own_heartbeat_acknowledges_them() -> None:
    log = joined()
    log.take(1, 4)
    log.add(scalars(1))
    log.take(1, 5)

    log.answered(1, 4)  # Sent before there was something to log.
    log.answered(1, 6)  # A coordinator that waits for its disk answers this one sooner.
    log.joined(2)

    assert log.take(2, 1) == scalars(1)


def test_unacknowledged_scalars_go_first_on_the_next_stream_in_their_order() -> None:
    log = joined()
    log.add(scalars(1, 2))
    log.take(1, 5)
    log.add(scalars(3))

    log.joined(2)
    assert log.take(1, 6) == ()  # The old stream's thread may still run.
    log.answered(1, 5)  # And its answer may still come: too late to count.

    assert log.take(2, 1) == scalars(1, 2, 3)


def test_an_answer_of_the_last_stream_does_not_acknowledge_what_the_next_one_sent() -> None:
    log = joined()
    log.add(scalars(1))
    log.take(1, 1)
    log.joined(2)
    log.take(2, 1)

    log.answered(1, 1)
    log.joined(3)

    assert log.take(3, 1) == scalars(1)


def test_a_heartbeat_carries_a_bounded_number() -> None:
    log = joined()
    log.add(scalars(*range(MAX_SCALARS + 1)))

    assert len(log.take(1, 1)) == MAX_SCALARS
    log.answered(1, 1)
    assert log.take(1, 2) == scalars(MAX_SCALARS)


def test_of_more_than_it_keeps_the_oldest_are_given_up_and_counted() -> None:
    log = joined()
    log.add(scalars(*range(MOST_KEPT + 3)))

    assert log.lost == 3
    assert log.take(1, 1)[0] == Scalar("val", 3, 1.5)
    # What is on its way is not given up, but takes room.
    log.add(scalars(*range(MAX_SCALARS)))
    assert log.lost == 3 + MAX_SCALARS
    log.joined(2)
    assert log.take(2, 1)[0] == Scalar("val", 3, 1.5)


def test_before_it_leaves_a_worker_sends_all_the_rest_without_waiting_for_answers() -> None:
    log = joined()
    log.add(scalars(1))
    log.take(1, 1)
    log.add(scalars(*range(2, MAX_SCALARS + 4)))

    assert list(log.rest(2)) == []  # Not of another stream.
    parts = list(log.rest(1))

    assert [len(part) for part in parts] == [MAX_SCALARS, 2]
    assert parts[1] == scalars(MAX_SCALARS + 2, MAX_SCALARS + 3)
    assert list(log.rest(1)) == []
