"""Where a worker stands: its head moves by records and transfers alone, as the rules say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from andon.protocol.halts import HaltEvidence, HaltReason
from andon.protocol.records import Cursor, Key, PositionRange, Record, RecordKind
from andon_trainer.core.events import (
    Assigned,
    Committed,
    ExchangeFailed,
    TransferAsked,
    Voided,
)
from andon_trainer.core.reports import NO_DIGEST
from andon_trainer.core.worker_state import (
    EndExchange,
    JoinAgain,
    Phase,
    ReportFault,
    StepDone,
    WorkerState,
)

HEAD, KEY, NEXT = Key(7, 1), Key(7, 2), Key(7, 3)
HALT = HaltEvidence(id=1, reason=HaltReason.OPERATOR, step=4)


def work(key: Key = KEY, parent: Key | None = HEAD) -> Assigned:
    batch = PositionRange(12, 16)
    return Assigned(
        key=key,
        parent=parent,
        roster=(0,),
        rank=0,
        world_size=1,
        step=4,
        attempt=0,
        epoch=0,
        positions=(batch,),
        batch=batch,
    )


def record(key: Key = KEY, parent: Key | None = HEAD, kind: str = "STEP") -> Committed:
    return Committed(record=Record(key, parent, RecordKind[kind], 4, Cursor(0, 16), (0,)), loss=1.5)


def at_head() -> WorkerState:
    return WorkerState(head=HEAD, cursor=Cursor(0, 12), step=3)


def assigned() -> WorkerState:
    standing = at_head()
    standing.receive(work())
    standing.take_work()
    standing.begun = True
    return standing


def holding() -> WorkerState:
    standing = assigned()
    assert standing.hold(KEY)
    return standing


def transfer(head: Key) -> TransferAsked:
    return TransferAsked(transfer_id=1, head=head, sends=False, step=9, cursor=Cursor(1, 0))


def failure(key: Key) -> ExchangeFailed:
    return ExchangeFailed(key=key, kind="DATA_STREAM_LOST", message="gone")


def test_a_line_that_is_founded_anew_takes_a_fresh_workers_weights() -> None:
    standing = WorkerState(worker=0)

    deeds = standing.receive(record(KEY, parent=HEAD, kind="INITIAL"))

    assert deeds == []
    assert standing.head == KEY


@pytest.mark.parametrize("standing", [WorkerState(worker=1), WorkerState(head=HEAD, worker=0)])
def test_only_the_fresh_worker_that_a_founding_record_names_takes_it(standing: WorkerState) -> None:
    before = standing.head

    deeds = standing.receive(record(KEY, parent=HEAD, kind="INITIAL"))

    assert deeds == [JoinAgain("got a record that can't be applied here")]
    assert standing.head == before


def test_work_is_asked_for_once_a_head_and_stream() -> None:
    standing = at_head()

    assert [standing.must_ask(1), standing.must_ask(1), standing.must_ask(2)] == [True, False, True]


def test_work_that_came_is_not_asked_for() -> None:
    standing = at_head()
    standing.receive(work())

    assert not standing.must_ask(1)


def test_work_is_not_asked_for_while_the_line_is_halted() -> None:
    standing = at_head()
    standing.joined(behind=False, in_sync=True, worker=0, halted=True)

    before_it_is_told = standing.must_ask(1)
    standing.halted(HALT)
    while_it_lasts = standing.must_ask(1)
    standing.resumed()

    assert [before_it_is_told, while_it_lasts, standing.must_ask(1)] == [False, False, True]


def test_work_for_another_head_is_never_taken() -> None:
    standing = at_head()
    standing.receive(work(parent=NEXT))

    taken, deeds = standing.take_work()

    assert taken is None
    assert deeds == [JoinAgain("assigned work for another head")]
    assert standing.phase is Phase.NONE


def test_round_that_the_script_never_began_is_taken_up_again() -> None:
    standing = at_head()
    standing.receive(work())
    taken, _ = standing.take_work()

    assert standing.forget_round() == taken


def test_round_that_was_begun_is_over_when_the_script_wants_the_next() -> None:
    standing = assigned()

    assert standing.forget_round() is None
    assert standing.phase is Phase.NONE


def test_c_commit_001_step_is_applied_with_its_averages_held() -> None:
    standing = holding()

    deeds = standing.receive(record())

    assert deeds == [StepDone(KEY)]
    assert (standing.head, standing.step, standing.cursor) == (KEY, 4, Cursor(0, 16))
    assert standing.take_commit() == record()
    assert standing.take_commit() is None


@pytest.mark.parametrize("standing", [at_head(), assigned()], ids=["none", "open"])
def test_c_commit_001_step_whose_averages_are_not_held_is_not_applied(
    standing: WorkerState,
) -> None:
    deeds = standing.receive(record())

    assert deeds == [JoinAgain("got a record that can't be applied here")]
    assert standing.head == HEAD


def test_c_commit_001_record_of_another_key_is_not_applied() -> None:
    standing = holding()

    deeds = standing.receive(record(key=NEXT))

    assert deeds == [JoinAgain("got a record that can't be applied here")]
    assert standing.head == HEAD


def test_c_commit_001_record_of_another_parent_is_not_applied() -> None:
    standing = holding()

    deeds = standing.receive(record(parent=Key(6, 9)))

    assert deeds == [JoinAgain("got a record that can't be applied here")]
    assert standing.head == HEAD


def test_record_that_is_the_head_already_changes_nothing() -> None:
    standing = holding()
    standing.receive(record())

    assert standing.receive(record()) == []
    assert standing.step == 4


def test_mark_moves_the_head_and_leaves_no_commit() -> None:
    standing = at_head()

    assert standing.receive(record(kind="MARK")) == []
    assert standing.head == KEY
    assert standing.take_commit() is None


def test_reason_to_stop_stays() -> None:
    standing = holding()
    commit = record()
    standing.receive(Committed(record=commit.record, stop_reason="steps"))
    standing.receive(record(key=NEXT, parent=KEY, kind="MARK"))

    assert standing.stop_reason == "steps"


@pytest.mark.parametrize("standing", [assigned(), holding()], ids=["open", "held"])
def test_void_round_is_over_whoever_says_so(standing: WorkerState) -> None:
    assert standing.receive(Voided(KEY, "worker 1 is lost")) == [EndExchange("worker 1 is lost")]
    assert standing.phase is Phase.VOID
    assert standing.held_key is None
    assert not standing.hold(KEY)


def test_word_of_another_round_voids_nothing() -> None:
    standing = holding()

    assert standing.receive(Voided(NEXT, "not this one")) == []
    assert standing.held_key == KEY


def test_work_that_is_void_before_it_is_taken_is_forgotten() -> None:
    standing = at_head()
    standing.receive(work())
    standing.receive(Voided(KEY, "worker 1 is lost"))

    assert standing.take_work() == (None, [])


def test_new_assignment_voids_the_round() -> None:
    standing = holding()

    assert standing.receive(work(NEXT)) == [EndExchange("a new round was assigned")]
    assert standing.held_key is None


def test_failure_of_the_open_round_is_reported() -> None:
    assert assigned().receive(failure(KEY)) == [ReportFault(failure(KEY))]


def test_failure_of_any_other_round_is_not() -> None:
    assert assigned().receive(failure(NEXT)) == []
    assert holding().receive(failure(KEY)) == []


def test_f_dp_003_halt_voids_the_round_and_the_work_that_waits() -> None:
    standing = holding()

    assert standing.halted(HALT) == (True, [EndExchange(str(HALT))])
    assert standing.held_key is None
    assert standing.take_work() == (None, [])


def test_halt_that_is_told_again_is_no_news() -> None:
    standing = at_head()
    standing.halted(HALT)

    assert standing.halted(HALT) == (False, [])
    standing.resumed()
    assert standing.halted(HALT) == (True, [])


def test_lost_stream_voids_the_open_round_but_not_one_that_is_held() -> None:
    open_, held = assigned(), holding()

    assert open_.lost() == [EndExchange("the coordinator was lost")]
    assert held.lost() == []
    assert (open_.held_key, held.held_key) == (None, KEY)


def test_work_is_asked_for_anew_after_a_loss() -> None:
    standing = at_head()
    standing.must_ask(1)
    standing.lost()

    assert standing.must_ask(1)


def test_who_is_in_sync_holds_averages_of_a_round_without_record() -> None:
    standing = holding()
    standing.lost()

    deeds = standing.joined(in_sync=True, behind=False, worker=0, halted=False)

    assert deeds == [EndExchange("its record was not written")]
    assert standing.receive(record()) == [JoinAgain("got a record that can't be applied here")]


def test_record_that_was_missed_is_applied_after_joining_again() -> None:
    standing = holding()
    standing.lost()

    assert standing.joined(in_sync=False, behind=False, worker=0, halted=False) == []
    assert standing.receive(record()) == [StepDone(KEY)]
    assert standing.take_commit() == record()


def test_a_worker_that_is_left_behind_waits_for_no_record_of_what_it_holds() -> None:
    standing = holding()
    standing.lost()

    deeds = standing.joined(in_sync=False, behind=True, worker=0, halted=False)

    assert deeds == [EndExchange("the line went on without this worker")]
    assert standing.held_key is None


def test_a_mark_goes_on_counting_scalar_all_reduces_and_keeps_the_last_two_numbers() -> None:
    standing = assigned()
    sequences = [standing.scalar_all_reduce(float(number), 1.0) for number in range(3)]

    standing.receive(record(kind="MARK"))

    assert (sequences, standing.scalar_all_reduces) == ([0, 1, 2], 3)
    assert standing.given == {1: (1.0, 1.0, NO_DIGEST), 2: (2.0, 1.0, NO_DIGEST)}


def test_transfer_moves_the_head_and_voids_what_is_held() -> None:
    standing = holding()
    standing.scalar_all_reduce(1.0, 1.0)

    assert standing.installed(transfer(NEXT)) == [EndExchange("newer weights were installed")]
    assert (standing.head, standing.step, standing.cursor) == (NEXT, 9, Cursor(1, 0))
    assert (standing.scalar_all_reduces, standing.given) == (0, {})


def test_a_run_that_is_over_for_everybody_voids_the_round_and_waits_for_no_answer() -> None:
    standing = assigned()
    standing.halted(HALT)
    standing.receive(work(NEXT))

    standing.ended("drained")

    assert (standing.stop_reason, standing.dismissed, standing.halt) == ("drained", True, None)
    assert standing.phase is Phase.VOID
    assert standing.take_work() == (None, [])
    assert (standing.head, standing.step) == (HEAD, 3)


def test_the_reason_of_a_last_step_stays_when_the_run_is_over() -> None:
    standing = assigned()
    standing.hold(KEY)
    standing.receive(replace(record(), stop_reason="steps"))

    assert standing.ended("drained") == []
    assert (standing.stop_reason, standing.head) == ("steps", KEY)
