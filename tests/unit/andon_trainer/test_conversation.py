"""The conversation: what each wait asks for, when it is over, and what events mean for it."""

from __future__ import annotations

import pytest

from andon.protocol.records import Cursor, Key, Record, RecordKind
from andon_trainer.core.conversation import Conversation, Wait
from andon_trainer.core.effects import (
    AwaitAnswer,
    EndExchange,
    EndRun,
    GoOn,
    JoinAgain,
    MoveState,
    RaiseDropped,
    RaiseHalted,
    RaiseRefused,
    ReportDefect,
    ReportFault,
    ReportState,
    RequestWork,
    SendNumber,
    StepDone,
)
from andon_trainer.core.events import (
    AveragesComplete,
    Committed,
    ControlLost,
    Dismissed,
    Halted,
    LeaveWanted,
    Resumed,
    ScalarAllReduceDone,
    TransferAsked,
    Voided,
)
from andon_trainer.core.worker_state import RoundPhase, WorkerState
from unit.andon_trainer.assigned_work import HALT, HEAD, KEY, NEXT, committed, work


def transfer(head: Key, *, sends: bool = False) -> TransferAsked:
    return TransferAsked(transfer_id=5, head=head, sends=sends, step=9, cursor=Cursor(1, 0))


def joined(*, raises_halts: bool = False) -> Conversation:
    state = WorkerState(head=HEAD, cursor=Cursor(0, 12), step=3)
    conversation = Conversation(state, raises_halts=raises_halts)
    conversation.joined(1, in_sync=True, behind=False, worker=0, halted=False)
    conversation.wait = None
    return conversation


def waiting(wait: Wait, *, raises_halts: bool = False) -> Conversation:
    conversation = joined(raises_halts=raises_halts)
    conversation.wait_for(wait)
    return conversation


def exchanging(*, raises_halts: bool = False) -> Conversation:
    conversation = waiting(Wait.WORK, raises_halts=raises_halts)
    conversation.receive(work())
    conversation.poll()
    assert conversation.over
    assert conversation.begin()
    conversation.wait_for(Wait.AVERAGES)
    return conversation


def holding() -> Conversation:
    """It has the averages of its round."""
    conversation = exchanging()
    conversation.receive(AveragesComplete(KEY, 4.0, 1))
    assert conversation.take_averages() is not None
    return conversation


def test_a_newcomer_waits_until_it_has_weights() -> None:
    conversation = Conversation()
    conversation.joined(1, in_sync=True, behind=False, worker=0, halted=False)
    conversation.wait_for(Wait.WEIGHTS)
    before = conversation.over
    conversation.receive(
        Committed(record=Record(KEY, None, RecordKind.INITIAL, 0, Cursor(0, 0), (0,)))
    )

    assert (before, conversation.over) == (False, True)


@pytest.mark.parametrize(("in_sync", "over"), [(True, True), (False, False)])
def test_a_worker_with_a_checkpoint_waits_unless_it_is_in_sync(in_sync: bool, over: bool) -> None:
    conversation = Conversation(WorkerState(head=HEAD))
    conversation.joined(1, in_sync=in_sync, behind=not in_sync, worker=0, halted=False)
    conversation.wait_for(Wait.WEIGHTS)

    assert conversation.over is over


def test_work_is_requested_once_and_ends_the_wait_when_it_comes() -> None:
    conversation = waiting(Wait.WORK)

    assert conversation.poll() == [RequestWork(HEAD)]
    assert conversation.poll() == []
    assert conversation.receive(work()) == []
    assert not conversation.over
    assert conversation.poll() == []
    assert conversation.over


def test_work_for_another_head_makes_the_worker_join_again_and_ask_there() -> None:
    conversation = waiting(Wait.WORK)
    conversation.poll()
    conversation.receive(work(parent=NEXT))

    assert conversation.poll() == [JoinAgain("assigned work for another head")]
    conversation.lost()
    conversation.joined(2, in_sync=True, behind=False, worker=0, halted=False)
    assert conversation.poll() == [RequestWork(HEAD)]


def test_the_end_of_an_epoch_is_requested_and_waited_for() -> None:
    conversation = waiting(Wait.EPOCH_END)

    assert conversation.poll() == [RequestWork(HEAD, leaves_epoch=True)]
    mark = Record(KEY, HEAD, RecordKind.MARK, 3, Cursor(1, 0), (0,))
    conversation.receive(Committed(record=mark))

    assert conversation.over


def test_a_worker_that_is_behind_leaves_its_epoch_alone() -> None:
    conversation = waiting(Wait.EPOCH_END)
    conversation.lost()
    conversation.joined(2, in_sync=False, behind=True, worker=0, halted=False)

    assert conversation.over


def test_averages_end_the_wait_and_the_last_ones_are_held() -> None:
    conversation = exchanging()
    averages = AveragesComplete(KEY, 4.0, 1)
    conversation.receive(averages)

    assert conversation.over
    assert conversation.take_averages() == averages
    assert conversation.state.held_key == KEY


def test_averages_of_an_exchange_with_another_after_it_hold_nothing() -> None:
    conversation = exchanging()
    conversation.receive(AveragesComplete(KEY, 4.0, 1))

    assert conversation.take_averages(last=False) is not None
    assert conversation.state.phase is RoundPhase.OPEN
    conversation.wait_for(Wait.AVERAGES)
    assert not conversation.over


def test_averages_of_another_round_are_ignored() -> None:
    conversation = exchanging()
    conversation.receive(AveragesComplete(NEXT, 4.0, 1))

    assert not conversation.over


def test_a_void_round_ends_the_wait_without_averages() -> None:
    conversation = exchanging()
    conversation.receive(AveragesComplete(KEY, 4.0, 1))
    conversation.receive(Voided(KEY, "worker 1 is lost"))

    assert conversation.over
    assert conversation.take_averages() is None
    assert not conversation.begin()


def test_c_commit_001_the_record_of_averages_that_are_held_ends_the_wait_for_it() -> None:
    conversation = holding()
    conversation.wait_for(Wait.COMMIT)
    before = conversation.over

    assert conversation.receive(committed()) == [StepDone(KEY)]
    assert (before, conversation.over) == (False, True)
    state = conversation.state
    assert (state.head, state.step, state.cursor) == (KEY, 4, Cursor(0, 16))
    assert [state.take_commit(), state.take_commit()] == [committed(), None]


def test_a_round_that_is_given_up_is_reported_and_void() -> None:
    conversation = exchanging()

    fault, end = conversation.abandon("backward raised")

    assert isinstance(fault, ReportFault)
    assert (fault.fault.key, fault.fault.kind) == (KEY, "DATA_STREAM_LOST")
    assert end == EndExchange("backward raised")
    assert conversation.abandon("again") == []


@pytest.mark.parametrize("held", [False, True])
def test_a_round_that_the_script_left_in_the_middle_is_given_up_when_it_asks_again(
    held: bool,
) -> None:
    conversation = holding() if held else exchanging()

    fault, end = conversation.begin_anew()

    assert isinstance(fault, ReportFault)
    assert fault.fault.key == KEY
    assert isinstance(end, EndExchange)
    assert conversation.begin_anew() == []


def test_a_round_that_may_be_committed_or_was_not_begun_is_not_given_up() -> None:
    reported = holding()
    reported.reported()
    fresh = waiting(Wait.WORK)
    fresh.receive(work())
    fresh.poll()

    assert [each.begin_anew() for each in (reported, fresh)] == [[], []]


@pytest.mark.parametrize("averages_are_here", [False, True])
def test_f_dp_003_a_bad_value_ahead_is_reported_and_its_round_never_held(
    averages_are_here: bool,
) -> None:
    conversation = exchanging()
    conversation.wait = None  # The script computes the next window meanwhile, and looks.
    if averages_are_here:
        conversation.receive(AveragesComplete(KEY, 4.0, 1))
    fault = conversation.state.own_fault("NON_FINITE_LOSS", "the loss is nan", "nan")

    effects = conversation.refuse(fault)
    conversation.wait_for(Wait.VERDICT)
    over = conversation.over
    conversation.receive(AveragesComplete(KEY, 4.0, 1))  # They may come now, or once more.

    assert effects == [ReportFault(fault)]
    assert not over
    assert not conversation.over
    assert conversation.state.held_key is None
    conversation.receive(Halted(HALT))
    conversation.receive(Resumed(HALT.id))
    assert conversation.over
    assert conversation.refuse(fault) == []  # of a round that is void


def test_a_number_gets_the_result_of_its_own_head_and_sequence() -> None:
    conversation = joined()
    assert conversation.give(1.0, 2.0) == [SendNumber(HEAD, 0, 1.0, 2.0)]
    conversation.wait_for(Wait.NUMBER)
    other_head = ScalarAllReduceDone(KEY, 0, 9.0, 2.0, 1)
    other_sequence = ScalarAllReduceDone(HEAD, 1, 9.0, 2.0, 1)
    mine = ScalarAllReduceDone(HEAD, 0, 1.5, 4.0, 2)

    conversation.receive(other_head)
    conversation.receive(other_sequence)
    before = conversation.over
    conversation.receive(mine)

    assert (before, conversation.over) == (False, True)
    assert conversation.take_result() == mine


def test_the_last_numbers_are_sent_again_on_a_new_stream_before_anything_else() -> None:
    conversation = joined()
    conversation.give(1.0, 2.0)
    conversation.give(3.0, 4.0)
    conversation.lost()

    effects = conversation.joined(2, in_sync=True, behind=False, worker=0, halted=False)

    assert effects == [SendNumber(HEAD, 0, 1.0, 2.0), SendNumber(HEAD, 1, 3.0, 4.0)]


def test_a_halt_pauses_the_wait_until_it_is_answered() -> None:
    conversation = exchanging()

    assert conversation.receive(Halted(HALT)) == [EndExchange(str(HALT)), AwaitAnswer(HALT)]
    assert not conversation.over
    assert conversation.may_leave
    assert conversation.poll() == []
    assert conversation.receive(Halted(HALT)) == []
    assert conversation.receive(Resumed(HALT.id)) == [GoOn()]
    assert conversation.over


def test_a_script_that_wants_halts_gets_an_exception() -> None:
    conversation = exchanging(raises_halts=True)

    assert conversation.receive(Halted(HALT)) == [EndExchange(str(HALT)), RaiseHalted(HALT)]
    assert conversation.over
    assert conversation.doubts == 1


def test_a_newcomer_waits_for_the_answer_whatever_its_script_wants() -> None:
    conversation = Conversation(raises_halts=True)
    conversation.joined(1, in_sync=False, behind=True, worker=0, halted=True)
    conversation.wait_for(Wait.WEIGHTS)

    assert conversation.receive(Halted(HALT)) == [AwaitAnswer(HALT)]


def test_a_defect_is_reported_once_a_stream_until_the_line_is_halted_and_answered() -> None:
    conversation = joined()
    conversation.halt_line("CHECKPOINT", "the disk is full")
    conversation.wait_for(Wait.ANSWER)
    report = ReportDefect("CHECKPOINT", "the disk is full")

    assert [conversation.poll(), conversation.poll()] == [[report], []]
    conversation.lost()
    conversation.joined(2, in_sync=True, behind=False, worker=0, halted=False)
    assert conversation.poll() == [report]
    conversation.receive(Halted(HALT))
    halted = conversation.over
    conversation.receive(Resumed(HALT.id))
    assert (halted, conversation.over) == (False, True)


def test_a_defect_of_a_run_that_is_over_waits_for_no_answer() -> None:
    conversation = joined()
    conversation.halt_line("CHECKPOINT", "the disk is full")
    conversation.wait_for(Wait.ANSWER)
    conversation.poll()

    conversation.receive(Dismissed("drained", "drained"))

    assert (conversation.over, conversation.poll()) == (True, [])
    assert not conversation.answered()


def test_a_defect_of_a_line_in_a_halt_waits_for_that_ones_answer() -> None:
    conversation = waiting(Wait.WORK)
    conversation.receive(Halted(HALT))
    conversation.halt_line("CHECKPOINT", "the disk is full")
    conversation.wait_for(Wait.ANSWER)

    assert conversation.poll() == []
    conversation.receive(Resumed(HALT.id))
    assert conversation.over


def test_state_is_sent_only_from_the_head_that_was_asked_for() -> None:
    conversation = waiting(Wait.WORK)

    (report,) = conversation.receive(transfer(NEXT, sends=True))

    assert report == ReportState(5, HEAD, f"this worker is at {HEAD}, not at {NEXT}")
    asked = transfer(HEAD, sends=True)
    assert conversation.receive(asked) == [MoveState(asked)]
    assert conversation.moved(asked, "") == [ReportState(5, HEAD, "")]
    assert conversation.doubts == 0


def test_state_that_was_received_is_the_workers_and_what_it_computed_before_is_useless() -> None:
    conversation = waiting(Wait.WORK)

    effects = conversation.moved(transfer(NEXT), "")

    assert effects == [ReportState(5, NEXT, "")]
    assert (conversation.state.head, conversation.doubts) == (NEXT, 1)


def test_a_transfer_that_failed_changes_nothing() -> None:
    conversation = waiting(Wait.WORK)

    assert conversation.moved(transfer(NEXT), "cut off") == [ReportState(5, HEAD, "cut off")]
    assert (conversation.state.head, conversation.doubts) == (HEAD, 0)


@pytest.mark.parametrize("wait", [Wait.WORK, Wait.EPOCH_END, Wait.NUMBER])
def test_a_run_that_is_over_for_everybody_ends_every_wait_between_two_steps(wait: Wait) -> None:
    conversation = waiting(wait)
    conversation.receive(Dismissed("drained", "drained"))

    assert conversation.poll() == [EndRun("drained")]


def test_after_the_last_step_numbers_are_still_averaged_and_no_work_is_waited_for() -> None:
    conversation = holding()
    conversation.receive(committed(stop_reason="steps"))
    conversation.state.forget_round()

    conversation.wait_for(Wait.NUMBER)
    assert conversation.poll() == []
    conversation.wait_for(Wait.WORK)
    assert conversation.poll() == [EndRun("steps")]


def test_a_worker_that_is_dropped_alone_is_told_so() -> None:
    conversation = waiting(Wait.WORK)

    assert conversation.receive(Dismissed("by an operator")) == [RaiseDropped("by an operator")]
    last = conversation.receive(Dismissed("nobody else", keep_state=True))
    assert last == [RaiseDropped("nobody else", keep_state=True)]
    assert conversation.dropped


def test_a_lost_stream_is_joined_again_unless_the_coordinator_refuses() -> None:
    conversation = waiting(Wait.WORK)
    refusal = RuntimeError("another layout")

    assert conversation.receive(ControlLost(1, "reset")) == [
        JoinAgain("lost the coordinator (reset)")
    ]
    assert conversation.receive(ControlLost(1, "", refusal)) == [RaiseRefused(refusal)]


def test_the_end_of_an_older_stream_means_nothing() -> None:
    conversation = waiting(Wait.WORK)

    assert conversation.receive(ControlLost(0, "reset")) == []


def test_the_wish_to_leave_only_ends_the_take() -> None:
    conversation = waiting(Wait.WORK)

    assert conversation.receive(LeaveWanted()) == []
    assert conversation.may_leave
    assert not conversation.over


@pytest.mark.parametrize(
    ("wait", "mid_script"),
    [(Wait.WEIGHTS, False), (Wait.WORK, False), (Wait.NUMBER, True), (None, True)],
)
def test_state_may_be_replaced_only_between_two_rounds(wait: Wait | None, mid_script: bool) -> None:
    conversation = joined()
    conversation.wait = wait

    assert conversation.mid_script is mid_script


def committed_with_next(parent: Key = KEY) -> Conversation:
    """Work came with the record of its round; it waits for work."""
    conversation = holding()
    conversation.wait_for(Wait.COMMIT)
    conversation.receive(committed(next=work(NEXT, parent)))
    conversation.state.forget_round()
    conversation.wait_for(Wait.WORK)
    return conversation


def test_work_that_came_with_the_record_is_taken_without_a_request() -> None:
    conversation = committed_with_next()

    effects = conversation.poll()

    assert effects == []
    assert conversation.over
    assert conversation.state.assigned == work(NEXT, KEY)


def test_work_that_came_with_the_record_and_is_void_is_asked_for() -> None:
    conversation = committed_with_next()

    conversation.receive(Voided(NEXT, "worker 1 averages a number"))

    assert conversation.poll() == [RequestWork(KEY, leaves_epoch=False)]


def test_a_halt_drops_work_that_came_with_the_record_and_it_is_asked_for_after_the_answer() -> None:
    conversation = committed_with_next()

    conversation.receive(Halted(HALT))
    before = conversation.poll()
    conversation.receive(Resumed(HALT.id))

    assert before == []
    assert conversation.poll() == [RequestWork(KEY, leaves_epoch=False)]


def test_work_of_another_head_that_came_with_a_record_is_not_taken() -> None:
    conversation = committed_with_next(HEAD)

    assert conversation.poll() == [JoinAgain("assigned work for another head")]
