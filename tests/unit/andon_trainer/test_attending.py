"""What a worker that learns is told of rounds waits until its script is where the line was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from andon.protocol.records import Cursor, Key
from andon_trainer.core.attending import Attending
from andon_trainer.core.conversation import Conversation, Wait
from andon_trainer.core.effects import (
    AwaitAnswer,
    EndExchange,
    EndRun,
    GoOn,
    JoinAgain,
    Listen,
    MoveState,
    ReportState,
    RequestWork,
    SendNumber,
    StepDone,
    StopListening,
)
from andon_trainer.core.events import (
    Assigned,
    AveragesComplete,
    ControlLost,
    Dismissed,
    Event,
    ExchangeFailed,
    Halted,
    LearningAsked,
    LeaveWanted,
    ListeningLost,
    Resumed,
    ScalarAllReduceDone,
    TransferAsked,
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

FOURTH = Key(7, 4)
STATE = TransferAsked(
    transfer_id=5, head=HEAD, sends=False, step=3, cursor=Cursor(0, 12), beside_training=True
)


def attended(key: Key = KEY, parent: Key = HEAD) -> Assigned:
    return replace(work(key, parent), attends=True, attended=True, rank=1, positions=())


def number(head: Key = HEAD, sequence: int = 0) -> ScalarAllReduceDone:
    return ScalarAllReduceDone(head, sequence, 2.0, 1.0, 1)


def learning(*events: Event) -> Conversation:
    """A newcomer that waits for weights; it listens, and was told of these."""
    conversation = Conversation()
    conversation.joined(1, in_sync=False, behind=True, worker=1, halted=False)
    conversation.wait_for(Wait.WEIGHTS)
    assert conversation.receive(LearningAsked()) == [Listen(LearningAsked())]
    for event in events:
        assert conversation.receive(event) == []
    return conversation


def installed(*events: Event) -> Conversation:
    """It has the state of HEAD, and takes what it was told meanwhile."""
    conversation = learning()
    assert conversation.receive(STATE) == [MoveState(STATE)]
    conversation.moved(STATE, "")
    assert conversation.over
    for event in events:
        assert conversation.receive(event) == []
    conversation.wait = None
    return conversation


def make_step(conversation: Conversation, key: Key = KEY) -> None:
    """The script makes up a step, up to where it waits for the record."""
    next_round(conversation)
    average(conversation, key)


def next_round(conversation: Conversation) -> list[Any]:
    """As `Membership.next_round` does it."""
    conversation.begin_anew()
    if conversation.state.forget_round() is not None:
        return []
    effects = wait_for(conversation, Wait.WORK)
    assert conversation.state.assigned is not None
    return effects


def test_steps_are_made_up_in_order_and_each_record_waits_for_its_averages() -> None:
    conversation = installed(
        attended(), committed(), attended(NEXT, KEY), committed(NEXT, KEY), attended(FOURTH, NEXT)
    )
    assert conversation.attending.behind == 2

    assert next_round(conversation) == [RequestWork(HEAD)]
    assert conversation.state.assigned == attended()
    make_step(conversation)
    assert wait_for(conversation, Wait.COMMIT) == [StepDone(KEY)]
    assert conversation.attending.behind == 1
    make_step(conversation, NEXT)
    assert wait_for(conversation, Wait.COMMIT) == [StepDone(NEXT)]

    assert (conversation.state.head, conversation.attending.behind) == (NEXT, 0)
    assert next_round(conversation) == [RequestWork(NEXT)]
    assert conversation.state.assigned == attended(FOURTH, NEXT)


def test_what_is_of_the_installed_state_is_dropped_and_an_assignment_beside_it_is_not() -> None:
    before = Key(7, 0)
    conversation = installed(
        attended(HEAD, before),
        number(before),
        committed(HEAD, before, next=attended()),
        Voided(HEAD, "old"),
        number(HEAD, 3),
    )

    next_round(conversation)

    assert conversation.state.assigned == attended()
    assert conversation.state.head == HEAD


def test_nothing_of_rounds_is_taken_before_the_state_is_here() -> None:
    conversation = learning(attended(), committed(), Voided(NEXT, "lost"))

    assert conversation.poll() == []
    assert not conversation.over


@pytest.mark.parametrize("event", [number(), Halted(HALT), Resumed(1)])
def test_what_concerns_the_wait_for_the_state_passes_at_once(event: Event) -> None:
    assert not learning().attending.keeps(event)


@pytest.mark.parametrize(
    "event",
    [
        *(Dismissed("gone"), Dismissed("over", "drained"), ControlLost(1, "gone"), LeaveWanted()),
        *(STATE, LearningAsked(), AveragesComplete(KEY, 1.0, 1), ListeningLost("gone")),
        ExchangeFailed(key=KEY, kind="PROTOCOL", message="other"),
    ],
)
def test_what_is_of_the_present_moment_passes_at_once(event: Event) -> None:
    assert not installed(attended(), committed()).attending.keeps(event)


def test_the_end_of_the_run_waits_until_its_last_step_is_made_up() -> None:
    conversation = installed(attended(), committed(stop_reason="max-steps"), Dismissed("", "over"))

    # It asks for nothing: it would be sent away.
    assert next_round(conversation) == []
    average(conversation)
    assert wait_for(conversation, Wait.COMMIT) == [StepDone(KEY)]

    assert conversation.state.stop_reason == "max-steps"


def test_the_end_of_the_run_does_not_wait_for_a_state_that_never_comes() -> None:
    conversation = learning(attended())
    conversation.receive(STATE)
    assert conversation.moved(STATE, "gone") == [ReportState(5, None, "gone")]
    # It came to the inbox while the state was to move.
    assert conversation.receive(committed(stop_reason="max-steps")) == []

    conversation.receive(Dismissed("", "over"))

    assert conversation.poll() == [EndRun("over")]


@pytest.mark.parametrize("lost", [ControlLost(1, "gone"), ListeningLost("gone")])
def test_what_is_lost_when_the_run_is_over_ends_the_run_here_too(lost: Event) -> None:
    conversation = installed(attended(), committed(stop_reason="max-steps"), Dismissed("", "over"))
    next_round(conversation)

    assert conversation.receive(lost) == [EndExchange("the run is over: over")]

    conversation.state.forget_round()
    conversation.wait_for(Wait.WORK)
    assert conversation.poll() == [EndRun("over")]


def test_that_the_run_is_over_is_told_once_nothing_is_left_to_make_up() -> None:
    end = Dismissed("", "over")
    conversation = installed(attended(), committed(stop_reason="max-steps"), end, number(KEY))
    make_step(conversation)
    wait_for(conversation, Wait.COMMIT)
    conversation.give(7.0, 1.0)
    wait_for(conversation, Wait.NUMBER)
    assert conversation.take_result() == number(KEY)

    conversation.give(7.0, 1.0)
    conversation.wait_for(Wait.NUMBER)
    assert conversation.poll() == [EndRun("max-steps")]


def test_without_learning_everything_passes_at_once() -> None:
    attending = Attending()

    assert not any(attending.keeps(each) for each in (attended(), committed(), number()))
    assert attending.next(WorkerState(), Wait.WORK, None) is None


def test_a_void_round_ends_where_the_script_has_come_to_it() -> None:
    conversation = installed(attended())
    next_round(conversation)
    assert conversation.begin()
    conversation.receive(Voided(KEY, "a worker was lost"))
    conversation.receive(attended(NEXT))

    assert wait_for(conversation, Wait.AVERAGES) == [EndExchange("a worker was lost")]
    next_round(conversation)
    assert conversation.state.assigned == attended(NEXT)


def test_a_round_that_is_void_before_the_script_comes_to_it_is_not_made_up() -> None:
    conversation = installed(attended(), Voided(KEY, "a worker was lost"), attended(NEXT))

    next_round(conversation)

    assert conversation.state.assigned == attended(NEXT)


def test_a_round_is_void_when_another_takes_its_place() -> None:
    conversation = installed(attended())
    make_step(conversation)
    conversation.receive(attended(NEXT))

    assert wait_for(conversation, Wait.COMMIT) == [EndExchange("a new round was assigned")]


def test_a_mark_moves_the_cursor_in_its_turn() -> None:
    conversation = installed(
        attended(), committed(), committed(NEXT, KEY, "MARK"), attended(FOURTH, NEXT)
    )
    make_step(conversation)
    wait_for(conversation, Wait.COMMIT)
    assert conversation.state.head == KEY

    wait_for(conversation, Wait.EPOCH_END)
    next_round(conversation)

    assert conversation.state.head == NEXT
    assert conversation.state.assigned == attended(FOURTH, NEXT)


def test_a_number_waits_until_the_script_gives_its_own() -> None:
    conversation = installed(attended(), committed(), number(KEY), attended(NEXT, KEY))
    make_step(conversation)
    wait_for(conversation, Wait.COMMIT)

    # It is sent: this worker may be on a roster already, and not know it.
    assert conversation.give(7.0, 1.0) == [SendNumber(KEY, 0, 7.0, 1.0)]
    assert wait_for(conversation, Wait.NUMBER) == []

    assert conversation.take_result() == number(KEY)


@pytest.mark.parametrize("assigned_first", [True, False])
def test_a_number_that_came_after_a_standing_assignment_is_found(assigned_first: bool) -> None:
    order: list[Event] = [attended(NEXT, KEY), number(KEY)]
    conversation = installed(attended(), committed(), *(order if assigned_first else order[::-1]))
    make_step(conversation)
    wait_for(conversation, Wait.COMMIT)
    conversation.give(7.0, 1.0)
    wait_for(conversation, Wait.NUMBER)

    assert conversation.take_result() == number(KEY)
    next_round(conversation)
    assert conversation.state.assigned == attended(NEXT, KEY)


def test_a_number_that_the_script_does_not_give_is_dropped() -> None:
    conversation = installed(
        attended(), committed(), number(KEY), attended(NEXT, KEY), committed(NEXT, KEY)
    )
    make_step(conversation)
    wait_for(conversation, Wait.COMMIT)

    make_step(conversation, NEXT)
    assert wait_for(conversation, Wait.COMMIT) == [StepDone(NEXT)]


@pytest.mark.parametrize(
    ("wait", "what"),
    [
        (Wait.NUMBER, "waits for a mean"),
        (Wait.EPOCH_END, "has left its epoch"),
        (Wait.WORK, "left that step in the middle"),
        (Wait.ANSWER, "waits for the answer"),
        (Wait.VERDICT, "has found a value that must not count"),
    ],
)
def test_a_script_that_waits_for_what_the_line_did_not_do_begins_anew(
    wait: Wait, what: str
) -> None:
    conversation = installed(attended(), committed())
    next_round(conversation)
    assert conversation.begin()
    if wait is Wait.WORK:
        assert conversation.begin_anew() == [EndExchange("its script left the step in the middle")]
        conversation.state.forget_round()
    if wait is Wait.ANSWER:
        conversation.halt_line("CHECKPOINT", "no space")
    if wait is Wait.NUMBER:
        conversation.give(1.0, 1.0)
    if wait is Wait.EPOCH_END:
        conversation.state.leave_epoch()
    conversation.wait_for(wait)

    found = [each for each in conversation.poll() if isinstance(each, JoinAgain)]

    assert len(found) == 1
    assert what in found[0].why


def test_a_defect_of_a_worker_that_makes_up_the_runs_last_step_waits_for_no_answer() -> None:
    conversation = installed(attended(), committed(stop_reason="max-steps"))
    conversation.halt_line("CHECKPOINT", "no space")

    assert wait_for(conversation, Wait.ANSWER) == []
    assert not conversation.answered()
    make_step(conversation)
    assert wait_for(conversation, Wait.COMMIT) == [StepDone(KEY)]


@pytest.mark.parametrize(
    ("events", "lacks"),
    [
        ((), False),  # The others may be in it themselves.
        ((committed(),), True),
        ((number(), committed()), True),
        # Nobody is there any more to join again.
        ((committed(stop_reason="max-steps"), Dismissed("", "over")), True),
    ],
)
def test_averages_that_never_come_of_a_committed_round_are_no_exchange_of_the_others(
    events: tuple[Event, ...], lacks: bool
) -> None:
    conversation = installed(attended(), *events)
    next_round(conversation)
    assert conversation.begin()
    conversation.wait_for(Wait.AVERAGES)

    assert conversation.poll() == []  # They may be on their way.

    assert conversation.lacks_averages is lacks
    effects = conversation.waited_in_vain()
    assert bool(effects) is lacks
    joins = [isinstance(each, JoinAgain) for each in effects]
    assert any(joins) is (lacks and not conversation.state.dismissed)
    assert conversation.state.dismissed is any(isinstance(each, Dismissed) for each in events)
    assert all("waits for averages" in each.why for each in effects if isinstance(each, JoinAgain))


def test_no_averages_are_lacking_once_they_are_here_or_where_the_worker_is_on_the_roster() -> None:
    conversation = installed(attended(), committed())
    make_step(conversation)
    assert not conversation.lacks_averages
    wait_for(conversation, Wait.COMMIT)
    conversation.receive(work(NEXT, KEY))
    next_round(conversation)
    conversation.receive(committed(NEXT, KEY))
    conversation.wait_for(Wait.AVERAGES)

    assert not conversation.lacks_averages


def test_a_script_that_gives_fewer_numbers_than_the_line_begins_anew() -> None:
    conversation = installed(attended(), committed(), number(KEY, 2))
    make_step(conversation)
    wait_for(conversation, Wait.COMMIT)
    conversation.give(1.0, 1.0)
    conversation.wait_for(Wait.NUMBER)

    (again,) = conversation.poll()

    assert isinstance(again, JoinAgain)


def test_a_fault_of_an_attended_round_is_told_nobody_and_begins_anew() -> None:
    conversation = installed(attended())
    next_round(conversation)
    assert conversation.begin()
    conversation.wait_for(Wait.AVERAGES)

    effects = conversation.receive(
        ExchangeFailed(key=KEY, kind="PROTOCOL", message="rank 1 called something else")
    )

    assert effects == [JoinAgain("this worker can't make up a step (rank 1 called something else)")]


def test_averages_that_are_lost_begin_anew_while_it_learns_and_mean_nothing_after_that() -> None:
    lost = ListeningLost("the stream ended")

    assert installed(attended()).receive(lost) == [JoinAgain("the stream ended")]
    assert Conversation().receive(lost) == []


def test_on_the_roster_it_has_arrived_and_everything_passes_at_once() -> None:
    conversation = installed(attended(), committed(), work(NEXT, KEY), number(KEY))
    make_step(conversation)
    wait_for(conversation, Wait.COMMIT)
    conversation.give(7.0, 1.0)

    assert wait_for(conversation, Wait.NUMBER) == [StopListening()]
    assert conversation.take_result() == number(KEY)
    assert not conversation.attending.learning
    next_round(conversation)
    assert conversation.state.assigned == work(NEXT, KEY)
    assert conversation.receive(Voided(NEXT, "lost")) == [EndExchange("lost")]


def test_what_came_with_the_roster_keeps_its_order() -> None:
    conversation = installed(attended(), work(NEXT), Voided(NEXT, "lost"), work(FOURTH))

    next_round(conversation)  # The attended round is void: another was assigned.

    assert conversation.state.assigned == work(FOURTH)
    assert not conversation.attending.learning


def test_a_halt_comes_to_the_script_where_it_came_to_the_others() -> None:
    conversation = installed(
        attended(),
        committed(),
        attended(NEXT, KEY),
        Halted(HALT),
        Resumed(1),
        attended(FOURTH, KEY),
    )
    make_step(conversation)
    # The line was halted long before, and this step was committed by then.
    assert wait_for(conversation, Wait.COMMIT) == [StepDone(KEY)]
    assert conversation.state.halt is None

    assert next_round(conversation) == [RequestWork(KEY), AwaitAnswer(HALT), GoOn()]

    assert conversation.state.assigned == attended(FOURTH, KEY)


def test_after_a_void_round_it_asks_again_and_says_of_which_it_has_heard() -> None:
    conversation = installed(attended())
    assert next_round(conversation) == [RequestWork(HEAD)]
    assert conversation.begin()

    conversation.receive(Voided(KEY, "lost"))
    assert wait_for(conversation, Wait.AVERAGES) == [EndExchange("lost")]
    for event in (attended(NEXT), Voided(NEXT, "lost"), attended(FOURTH)):
        conversation.receive(event)  # It has not come to that round before it is void.

    assert next_round(conversation) == [RequestWork(HEAD, voided=NEXT)]


def test_after_a_halt_it_asks_again_and_says_which_round_was_halted() -> None:
    conversation = installed(attended())
    next_round(conversation)
    assert conversation.begin()
    halt = replace(HALT, key=KEY)

    for event in (Halted(halt), Resumed(1), attended(NEXT)):
        conversation.receive(event)
    wait_for(conversation, Wait.AVERAGES)

    again = next_round(conversation)
    assert RequestWork(HEAD, voided=KEY) in again
    assert conversation.state.assigned == attended(NEXT)


def test_a_lost_stream_takes_with_it_what_was_kept() -> None:
    conversation = installed(attended(), committed())
    next_round(conversation)
    assert conversation.begin()

    assert conversation.lost() == [EndExchange("the coordinator was lost")]

    assert not conversation.attending.learning
    assert conversation.state.phase is RoundPhase.VOID


def test_a_state_that_came_while_no_round_ran_ends_learning() -> None:
    conversation = learning(attended())
    usual = replace(STATE, beside_training=False)
    conversation.receive(usual)

    assert StopListening() in conversation.moved(usual, "")
    assert not conversation.attending.learning


def test_a_transfer_that_failed_leaves_it_listening_for_the_next() -> None:
    conversation = learning(attended(), committed())
    conversation.moved(STATE, "the sender is gone")
    later = replace(STATE, head=KEY, transfer_id=6)
    assert conversation.receive(later) == [MoveState(later)]
    conversation.receive(attended(NEXT, KEY))
    conversation.moved(later, "")

    next_round(conversation)

    assert (conversation.state.head, conversation.state.assigned) == (KEY, attended(NEXT, KEY))
