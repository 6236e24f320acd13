"""The worker's state: its head moves by records and transfers alone, as the rules say."""

from __future__ import annotations

from typing import Any

import pytest

from andon.protocol.records import Cursor, Key
from andon_trainer.core.effects import EndExchange, JoinAgain, ReportFault, StepDone
from andon_trainer.core.events import (
    ExchangeFailed,
    TransferAsked,
    Voided,
)
from andon_trainer.core.reports import NO_DIGEST
from andon_trainer.core.worker_state import RoundPhase, WorkerState
from unit.andon_trainer.assigned_work import HALT, HEAD, KEY, NEXT, committed, work


def at_head() -> WorkerState:
    return WorkerState(head=HEAD, cursor=Cursor(0, 12), step=3)


def assigned() -> WorkerState:
    state = at_head()
    state.receive(work())
    state.take_work()
    state.begun = True
    return state


def holding() -> WorkerState:
    state = assigned()
    assert state.hold(KEY)
    return state


def transfer(head: Key) -> TransferAsked:
    return TransferAsked(transfer_id=1, head=head, sends=False, step=9, cursor=Cursor(1, 0))


def failure(key: Key) -> ExchangeFailed:
    return ExchangeFailed(key=key, kind="DATA_STREAM_LOST", message="gone")


def test_a_line_that_is_bootstrapped_again_takes_a_fresh_workers_weights() -> None:
    state = WorkerState(worker=0)

    effects = state.receive(committed(KEY, parent=HEAD, kind="INITIAL"))

    assert effects == []
    assert state.head == KEY


@pytest.mark.parametrize("state", [WorkerState(worker=1), WorkerState(head=HEAD, worker=0)])
def test_only_the_fresh_worker_that_an_initial_record_names_takes_it(state: WorkerState) -> None:
    before = state.head

    effects = state.receive(committed(KEY, parent=HEAD, kind="INITIAL"))

    assert effects == [JoinAgain("got a record that can't be applied here")]
    assert state.head == before


def test_work_is_not_asked_for_while_the_line_is_halted() -> None:
    state = at_head()
    state.joined(behind=False, in_sync=True, worker=0, halted=True)

    before_it_is_taken = state.must_ask(1)
    state.halted(HALT)
    while_it_lasts = state.must_ask(1)
    state.resumed()

    assert [before_it_is_taken, while_it_lasts, state.must_ask(1)] == [False, False, True]


def test_a_round_that_the_script_never_began_is_returned_to_it() -> None:
    state = at_head()
    state.receive(work())
    taken, _ = state.take_work()

    assert state.forget_round() == taken


def test_round_that_was_begun_is_over_when_the_script_wants_the_next() -> None:
    state = assigned()

    assert state.forget_round() is None
    assert state.phase is RoundPhase.NONE


@pytest.mark.parametrize("state", [at_head(), assigned()], ids=["none", "open"])
def test_c_commit_001_step_whose_averages_are_not_held_is_not_applied(
    state: WorkerState,
) -> None:
    effects = state.receive(committed())

    assert effects == [JoinAgain("got a record that can't be applied here")]
    assert state.head == HEAD


@pytest.mark.parametrize("other", [{"key": NEXT}, {"parent": Key(6, 9)}], ids=["key", "parent"])
def test_c_commit_001_record_of_another_key_or_parent_is_not_applied(other: dict[str, Any]) -> None:
    state = holding()

    effects = state.receive(committed(**other))

    assert effects == [JoinAgain("got a record that can't be applied here")]
    assert state.head == HEAD


def test_record_that_is_the_head_already_changes_nothing() -> None:
    state = holding()
    state.receive(committed())

    assert state.receive(committed()) == []
    assert state.step == 4


def test_mark_moves_the_head_and_leaves_no_commit() -> None:
    state = at_head()

    assert state.receive(committed(kind="MARK")) == []
    assert state.head == KEY
    assert state.take_commit() is None


def test_reason_to_stop_stays() -> None:
    state = holding()
    state.receive(committed(stop_reason="steps"))
    state.receive(committed(key=NEXT, parent=KEY, kind="MARK"))

    assert state.stop_reason == "steps"


@pytest.mark.parametrize("state", [assigned(), holding()], ids=["open", "held"])
def test_a_void_round_is_over(state: WorkerState) -> None:
    assert state.receive(Voided(KEY, "worker 1 is lost")) == [EndExchange("worker 1 is lost")]
    assert state.phase is RoundPhase.VOID
    assert state.held_key is None
    assert not state.hold(KEY)


def test_the_void_of_another_round_voids_nothing() -> None:
    state = holding()

    assert state.receive(Voided(NEXT, "not this one")) == []
    assert state.held_key == KEY


def test_new_assignment_voids_the_round() -> None:
    state = holding()

    assert state.receive(work(NEXT)) == [EndExchange("a new round was assigned")]
    assert state.held_key is None


def test_failure_of_the_open_round_is_reported_and_of_no_other() -> None:
    assert assigned().receive(failure(KEY)) == [ReportFault(failure(KEY))]
    assert assigned().receive(failure(NEXT)) == []
    assert holding().receive(failure(KEY)) == []


def test_f_dp_003_halt_voids_the_round_and_the_work_that_waits() -> None:
    state = holding()

    assert state.halted(HALT) == (True, [EndExchange(str(HALT))])
    assert state.held_key is None
    assert state.take_work() == (None, [])


def test_a_halt_that_is_repeated_is_no_news() -> None:
    state = at_head()
    state.halted(HALT)

    assert state.halted(HALT) == (False, [])
    state.resumed()
    assert state.halted(HALT) == (True, [])


def test_lost_stream_voids_the_open_round_but_not_one_that_is_held() -> None:
    open_, held = assigned(), holding()

    assert open_.lost() == [EndExchange("the coordinator was lost")]
    assert held.lost() == []
    assert (open_.held_key, held.held_key) == (None, KEY)


def test_work_is_asked_for_anew_after_a_loss() -> None:
    state = at_head()
    state.must_ask(1)
    state.lost()

    assert state.must_ask(1)


def test_a_worker_in_sync_holds_averages_of_a_round_without_record() -> None:
    state = holding()
    state.lost()

    effects = state.joined(in_sync=True, behind=False, worker=0, halted=False)

    assert effects == [EndExchange("its record was not written")]
    assert state.receive(committed()) == [JoinAgain("got a record that can't be applied here")]


def test_record_that_was_missed_is_applied_after_joining_again() -> None:
    state = holding()
    state.lost()

    assert state.joined(in_sync=False, behind=False, worker=0, halted=False) == []
    assert state.receive(committed()) == [StepDone(KEY)]
    assert state.take_commit() == committed()


def test_a_worker_that_is_left_behind_waits_for_no_record_of_what_it_holds() -> None:
    state = holding()
    state.lost()

    effects = state.joined(in_sync=False, behind=True, worker=0, halted=False)

    assert effects == [EndExchange("the line went on without this worker")]
    assert state.held_key is None


def test_a_mark_goes_on_counting_scalar_all_reduces_and_keeps_the_last_two_numbers() -> None:
    state = assigned()
    sequences = [state.scalar_all_reduce(float(number), 1.0) for number in range(3)]

    state.receive(committed(kind="MARK"))

    assert (sequences, state.scalar_all_reduces) == ([0, 1, 2], 3)
    assert state.given == {1: (1.0, 1.0, NO_DIGEST, b""), 2: (2.0, 1.0, NO_DIGEST, b"")}


def test_transfer_moves_the_head_and_voids_what_is_held() -> None:
    state = holding()
    state.scalar_all_reduce(1.0, 1.0)

    assert state.installed(transfer(NEXT)) == [EndExchange("newer weights were installed")]
    assert (state.head, state.step, state.cursor) == (NEXT, 9, Cursor(1, 0))
    assert (state.scalar_all_reduces, state.given) == (0, {})


def test_a_run_that_is_over_for_everybody_voids_the_round_and_waits_for_no_answer() -> None:
    state = assigned()
    state.halted(HALT)
    state.receive(work(NEXT))

    state.ended("drained")

    assert (state.stop_reason, state.dismissed, state.halt) == ("drained", True, None)
    assert state.phase is RoundPhase.VOID
    assert state.take_work() == (None, [])
    assert (state.head, state.step) == (HEAD, 3)


def test_the_reason_of_a_last_step_stays_when_the_run_is_over() -> None:
    state = assigned()
    state.hold(KEY)
    state.receive(committed(stop_reason="steps"))

    assert state.ended("drained") == []
    assert (state.stop_reason, state.head) == ("steps", KEY)
