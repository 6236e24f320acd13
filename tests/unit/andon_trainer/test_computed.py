"""What a worker of overlapped windows has computed beyond its head: kept, moved on, or dropped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from andon.protocol.halts import HaltEvidence, HaltReason
from andon.protocol.records import Cursor, Key, PositionRange, Record, RecordKind
from andon.protocol.shards import Ranges
from andon_trainer.core.computed import Computed
from andon_trainer.core.conversation import Conversation
from andon_trainer.core.effects import DropComputed, Effect, MoveState
from andon_trainer.core.events import (
    Assigned,
    Committed,
    Dismissed,
    Halted,
    TransferAsked,
    Voided,
)
from andon_trainer.core.worker_state import RoundPhase, WorkerState
from unit.andon_trainer.assigned_work import HALT, HEAD, KEY, NEXT, work


def ranges(*bounds: tuple[int, int]) -> Ranges:
    return tuple(PositionRange(start, stop) for start, stop in bounds)


def windows(due: Ranges, ahead: Ranges, key: Key = KEY, parent: Key = HEAD) -> Assigned:
    return replace(work(key, parent), positions=due, ahead=ahead, ahead_batch=PositionRange(16, 24))


FIRST = windows(ranges((12, 14)), ranges((16, 18)))


def computing() -> Conversation:
    """A worker that has computed both windows of a round, and waits for its averages."""
    state = WorkerState(head=HEAD, cursor=Cursor(0, 12), step=3, worker=0)
    state.receive(FIRST)
    state.take_work()
    state.begun = True
    state.computed.add(FIRST.positions)
    state.computed.add_ahead(FIRST.ahead)
    return Conversation(state)


def drops(effects: list[Effect]) -> list[DropComputed]:
    return [each for each in effects if isinstance(each, DropComputed)]


def record(kind: RecordKind, key: Key = KEY) -> Committed:
    return Committed(record=Record(key, HEAD, kind, 4, Cursor(0, 16), (0,)))


def test_the_commit_of_a_round_makes_what_was_computed_ahead_due() -> None:
    worker = computing()
    assert worker.state.hold(KEY)

    worker.receive(record(RecordKind.STEP))

    assert worker.state.computed == Computed(due=FIRST.ahead)


def test_after_a_void_round_only_a_lost_workers_positions_are_missing() -> None:
    worker = computing()
    worker.receive(Voided(KEY, "worker 1 is gone"))
    again = windows(ranges((12, 16)), ranges((16, 24)), key=NEXT)
    worker.receive(again)

    _, effects = worker.state.take_work()

    assert effects == []
    assert worker.state.computed.missing(again) == ranges((14, 16))
    assert worker.state.computed.missing_ahead(again) == ranges((18, 24))


@pytest.mark.parametrize(
    "otherwise",
    [
        windows(ranges((14, 16)), ranges((16, 18)), key=NEXT),
        windows(ranges((12, 16)), ranges((20, 24)), key=NEXT),
        windows(ranges((12, 16)), (), key=NEXT),
    ],
    ids=["due", "ahead", "nothing ahead"],
)
def test_a_coordinator_that_assigns_otherwise_has_both_piles_dropped(otherwise: Assigned) -> None:
    worker = computing()
    worker.state.lost()
    worker.receive(otherwise)

    _, effects = worker.state.take_work()

    assert drops(effects)
    assert worker.state.computed.missing(otherwise) == otherwise.positions
    assert worker.state.phase is RoundPhase.OPEN


def test_a_mark_drops_what_was_computed() -> None:
    worker = computing()
    worker.receive(Voided(KEY, "skipped"))

    effects = worker.receive(record(RecordKind.MARK, NEXT))

    assert drops(effects)
    assert not worker.state.computed


def test_a_halt_that_doubts_nobodys_numbers_drops_nothing() -> None:
    worker = computing()

    effects = worker.receive(Halted(HALT))

    assert drops(effects) == []
    assert worker.state.computed.due == FIRST.positions


def test_a_halt_for_this_workers_numbers_drops_what_began_at_them_too() -> None:
    worker = computing()
    mine = HaltEvidence(id=1, reason=HaltReason.NON_FINITE_GRADIENT, step=4, worker=0)

    effects = worker.receive(Halted(mine))

    assert drops(effects)
    assert not worker.state.computed


@pytest.mark.parametrize("sends", [True, False])
def test_both_piles_are_dropped_before_state_moves(sends: bool) -> None:
    worker = computing()
    worker.receive(Voided(KEY, "worker 1 is gone"))
    asked = TransferAsked(transfer_id=1, head=HEAD, sends=sends, step=3, cursor=Cursor(0, 12))

    effects = worker.receive(asked)

    assert [type(each) for each in effects] == [DropComputed, MoveState]
    assert not worker.state.computed


def test_a_run_that_ends_without_a_last_step_ends_with_the_heads_weights() -> None:
    worker = computing()

    effects = worker.receive(Dismissed("drained", "drained"))

    assert drops(effects)


def test_a_worker_without_local_steps_never_drops_anything() -> None:
    state = WorkerState(head=HEAD, cursor=Cursor(0, 12), step=3, worker=0)
    state.receive(work())

    _, effects = state.take_work()

    assert effects == []
    assert state.drop_computed("no reason") == []
