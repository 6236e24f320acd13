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
    LeftOut,
    ListeningLost,
    Voided,
)
from andon_trainer.core.worker_state import RoundPhase, WorkerState
from unit.andon_trainer.assigned_work import HEAD, KEY, NEXT, average, committed, wait_for, work

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
