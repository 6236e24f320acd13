"""A worker that the others went on without computes on, and makes up what they did meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from andon.protocol.records import Cursor, Key, PositionRange
from andon.protocol.shards import Ranges
from andon_trainer.core.conversation import Conversation, Wait
from andon_trainer.core.effects import (
    DropComputed,
    EndExchange,
    HearOn,
    JoinAgain,
    RequestWork,
    StepDone,
    StopListening,
)
from andon_trainer.core.events import (
    Assigned,
    ControlLost,
    Event,
    Halted,
    LeftOut,
    ListeningLost,
    ScalarAllReduceDone,
    Voided,
)
from andon_trainer.core.worker_state import RoundPhase, WorkerState
from unit.andon_trainer.assigned_work import (
    HALT,
    HEAD,
    KEY,
    NEXT,
    average,
    committed,
    wait_for,
    work,
)

THIRD, FOURTH = Key(7, 4), Key(7, 5)
MINE: Ranges = (PositionRange(12, 14),)
LATE = "the others went on without this worker, which was late"


def dealt(key: Key, parent: Key, *, attends: bool = False, positions: Ranges = MINE) -> Assigned:
    rank = 1 if attends else 0
    return replace(
        work(key, parent), positions=positions, attends=attends, attended=attends, rank=rank
    )


def computing(*, sent: bool = False) -> Conversation:
    """A worker in the middle of its share of KEY; `sent`: it is done, and waits for averages."""
    state = WorkerState(head=HEAD, cursor=Cursor(0, 12), step=3, worker=0)
    conversation = Conversation(state, wait=Wait.WORK)
    assert conversation.poll() == [RequestWork(HEAD)]
    conversation.receive(dealt(KEY, HEAD))
    assert conversation.poll() == []
    conversation.wait = None
    if sent:
        state.computed.add(MINE)
        assert conversation.begin()
        conversation.wait_for(Wait.AVERAGES)
    return conversation


def late(*events: Event) -> Conversation:
    """Its share is computed, while the others made these."""
    conversation = computing()
    assert conversation.receive(LeftOut(KEY)) == [HearOn()]
    for event in events:
        assert conversation.receive(event) == []
    conversation.state.computed.add(MINE)
    return conversation


def next_round(conversation: Conversation) -> list[Any]:
    conversation.begin_anew()
    assert conversation.state.forget_round() is None
    return wait_for(conversation, Wait.WORK)


def make_up(conversation: Conversation, key: Key) -> list[Any]:
    """The script's part of a round that it attends, up to its record."""
    average(conversation, key)
    return wait_for(conversation, Wait.COMMIT)


def test_a_share_whose_round_went_on_without_it_is_computed_to_the_end_and_not_sent() -> None:
    conversation = computing()

    assert conversation.receive(LeftOut(KEY)) == [HearOn()]

    assert conversation.state.phase is RoundPhase.LATE
    assert not conversation.begin(), "the round is the others' now"


def test_a_share_that_was_sent_too_late_is_no_part_of_the_round() -> None:
    conversation = computing(sent=True)

    assert conversation.receive(LeftOut(KEY)) == [HearOn(), EndExchange(LATE)]

    assert conversation.over
    assert conversation.take_averages() is None
    assert next_round(conversation) == [RequestWork(HEAD)], "it asks again, and is ready"


def test_what_it_owes_stays_while_it_makes_up_the_others_rounds() -> None:
    conversation = late(
        dealt(NEXT, HEAD, attends=True), committed(NEXT, HEAD), dealt(THIRD, NEXT, attends=True)
    )

    assert next_round(conversation) == [RequestWork(HEAD)]
    assert make_up(conversation, NEXT) == [StepDone(NEXT)]

    assert conversation.state.computed.due == MINE
    assert next_round(conversation) == [RequestWork(NEXT)]
    assert conversation.state.attends


def test_it_arrives_with_what_it_owes() -> None:
    conversation = late(
        dealt(NEXT, HEAD, attends=True), Voided(NEXT, "a late worker is done"), dealt(THIRD, HEAD)
    )

    # RequestWork names the void round, as a learner's does.
    assert next_round(conversation) == [RequestWork(HEAD, voided=NEXT), StopListening()]

    assert conversation.state.computed.missing(dealt(THIRD, HEAD)) == ()
    assert not conversation.attending.learning
    average(conversation, THIRD)
    conversation.receive(committed(THIRD, HEAD))
    assert conversation.state.computed.due == (), "it is in the record"


def test_a_round_that_goes_on_without_it_before_it_came_to_it_is_not_taken_up() -> None:
    conversation = late(dealt(NEXT, HEAD, attends=True), committed(NEXT, HEAD), dealt(THIRD, NEXT))
    conversation.receive(LeftOut(THIRD))
    conversation.receive(dealt(FOURTH, NEXT, attends=True))

    next_round(conversation)
    make_up(conversation, NEXT)

    assert next_round(conversation) == [RequestWork(NEXT)]
    assert conversation.state.assigned == dealt(FOURTH, NEXT, attends=True)


def test_only_a_round_of_its_own_that_does_not_ask_for_what_it_owes_has_it_dropped() -> None:
    other = dealt(THIRD, HEAD, positions=(PositionRange(14, 16),))
    conversation = late(dealt(NEXT, HEAD, attends=True, positions=()))
    assert next_round(conversation) == [RequestWork(HEAD)]
    conversation.receive(Voided(NEXT, "lost"))
    conversation.receive(other)

    assert conversation.begin()
    wait_for(conversation, Wait.AVERAGES)

    assert DropComputed("other positions were assigned") in next_round(conversation)


@pytest.mark.parametrize("lost", [ControlLost(1, "gone"), ListeningLost("gone")])
def test_a_late_worker_that_can_not_hear_the_others_joins_again(lost: Event) -> None:
    conversation = late(dealt(NEXT, HEAD, attends=True))
    conversation.stream = 1

    (effect,) = conversation.receive(lost)

    assert isinstance(effect, JoinAgain)
    conversation.lost()
    assert conversation.state.phase is RoundPhase.VOID
    assert conversation.state.computed.due == MINE, "it may be assigned once more"


def test_to_hear_twice_that_it_is_late_changes_nothing() -> None:
    conversation = late(dealt(NEXT, HEAD, attends=True), committed(NEXT, HEAD))
    computed = conversation.state.computed.due

    again = conversation.receive(LeftOut(KEY))

    assert again == [HearOn()]
    assert conversation.state.computed.due == computed
    assert next_round(conversation) == [RequestWork(HEAD)]
    assert make_up(conversation, NEXT) == [StepDone(NEXT)], "what it has to make up is still there"


# ------------------------------------------------------------------ between two local steps


def test_a_round_that_the_others_have_made_is_made_up_in_the_middle_of_the_share() -> None:
    conversation = computing()
    conversation.receive(LeftOut(KEY))
    own = conversation.state.assigned
    missed = dealt(NEXT, HEAD, attends=True)
    conversation.receive(missed)
    assert conversation.make_up() is None, "it has no record yet"
    conversation.receive(committed(NEXT, HEAD))
    conversation.state.computed.add(MINE[:1])

    assert conversation.make_up() == missed
    assert conversation.state.is_midway
    assert make_up(conversation, NEXT) == [StepDone(NEXT)]
    conversation.state.take_up_again()

    state = conversation.state
    assert (state.head, state.phase, state.assigned) == (NEXT, RoundPhase.LATE, own)
    assert (state.is_midway, state.computed.due) == (False, MINE[:1])
    assert conversation.make_up() is None
    assert next_round(conversation) == [RequestWork(NEXT)], "only now its share is computed"


def test_rounds_that_went_on_without_a_share_are_made_up_one_after_the_other() -> None:
    conversation = late(
        dealt(NEXT, HEAD, attends=True),
        committed(NEXT, HEAD, next=dealt(THIRD, NEXT, attends=True)),
        committed(THIRD, NEXT),
    )

    for key in (NEXT, THIRD):
        assert conversation.make_up() is not None
        assert make_up(conversation, key) == [StepDone(key)]
        conversation.state.take_up_again()

    assert conversation.state.head == THIRD


@pytest.mark.parametrize(
    "first",
    [
        ScalarAllReduceDone(HEAD, 0, 1.0, 1.0, 1),
        Halted(HALT),
        Voided(Key(7, 9), "lost"),
        dealt(KEY, HEAD),
    ],
    ids=lambda event: type(event).__name__,
)
def test_what_else_the_others_did_waits_until_the_share_is_computed(first: Event) -> None:
    conversation = late(first, dealt(NEXT, HEAD, attends=True), committed(NEXT, HEAD))

    assert conversation.make_up() is None


def test_a_worker_whose_round_is_its_own_makes_nothing_up() -> None:
    assert computing().make_up() is None


def test_what_ends_the_round_that_is_made_up_ends_the_workers_own() -> None:
    conversation = late(dealt(NEXT, HEAD, attends=True), committed(NEXT, HEAD))
    assert conversation.make_up() is not None
    assert conversation.begin()

    assert conversation.lost() == [EndExchange("the coordinator was lost")]
    conversation.state.take_up_again()

    assert conversation.state.phase is RoundPhase.VOID
    assert conversation.state.computed.due == MINE, "it may be assigned once more"


# ------------------------------------------------------------------ once the share is computed


def take_turn(conversation: Conversation) -> tuple[list[Any], Assigned | None]:
    """As `Membership.take_turn` does it."""
    if not conversation.begin_turn():
        return [], None
    done = wait_for(conversation, Wait.TURN)
    return done, conversation.state.take_computed() if conversation.over else None


def test_a_share_that_is_computed_goes_into_the_next_round_where_it_ended() -> None:
    conversation = late()
    assert take_turn(conversation) == ([RequestWork(HEAD)], None)

    conversation.receive(dealt(NEXT, HEAD))

    assert take_turn(conversation) == ([StopListening()], dealt(NEXT, HEAD))
    average(conversation, NEXT)
    conversation.receive(committed(NEXT, HEAD))
    assert conversation.state.computed.due == (), "it is in the record"


def test_the_others_round_is_taken_up_first_and_may_be_made_void_for_the_share() -> None:
    attended = dealt(NEXT, HEAD, attends=True)
    conversation = late(attended)
    assert take_turn(conversation) == ([RequestWork(HEAD)], attended)
    assert conversation.begin()

    voided = conversation.receive(Voided(NEXT, "a late worker is done"))
    wait_for(conversation, Wait.AVERAGES)
    conversation.receive(dealt(THIRD, HEAD))

    assert voided == []
    done = [RequestWork(HEAD, voided=NEXT), StopListening()]
    assert take_turn(conversation) == (done, dealt(THIRD, HEAD))
    conversation.receive(Voided(THIRD, "lost"))
    assert take_turn(conversation) == ([], None), "its own round is tried again by the loop"


def test_the_others_round_is_committed_before_the_share_has_its_turn() -> None:
    attended = dealt(NEXT, HEAD, attends=True)
    conversation = late(attended, committed(NEXT, HEAD))
    assert take_turn(conversation) == ([RequestWork(HEAD)], attended)

    assert make_up(conversation, NEXT) == [StepDone(NEXT)]

    assert conversation.state.computed.due == MINE
    assert take_turn(conversation) == ([], None), "one commit in a loop body"


@pytest.mark.parametrize(
    "positions", [(PositionRange(12, 16),), (PositionRange(14, 16),)], ids=["more", "others"]
)
def test_a_turn_with_more_to_compute_is_left_to_the_loop(positions: Ranges) -> None:
    conversation = late(dealt(NEXT, HEAD, positions=positions))

    assert take_turn(conversation) == ([RequestWork(HEAD), StopListening()], None)

    assert conversation.over
    assert conversation.begin_anew() == []
    assert conversation.state.forget_round() is None
    wait_for(conversation, Wait.WORK)
    assert conversation.state.assigned == dealt(NEXT, HEAD, positions=positions)


def test_a_halt_is_heard_in_the_wait_for_a_turn() -> None:
    conversation = late(dealt(NEXT, HEAD, attends=True))
    take_turn(conversation)
    assert conversation.begin()

    conversation.receive(Halted(HALT))
    wait_for(conversation, Wait.AVERAGES)

    assert conversation.paused


def test_a_stream_that_is_lost_ends_the_wait_for_a_turn() -> None:
    conversation = late()
    take_turn(conversation)

    conversation.lost()

    assert conversation.over
    assert conversation.state.take_computed() is None
    assert conversation.state.computed.due == MINE
