"""What people see of a run of sessions, in a status and where they look at lines."""

from __future__ import annotations

from andon.protocol.peer_calls import Call, CallKind, PendingCall
from andon.protocol.records import Key
from andon.protocol.sessions import RankReport
from andon_coordinator.core.chain import Keys
from andon_coordinator.core.events import SessionSaved, TimePassed
from andon_coordinator.core.line import LineCore
from andon_coordinator.core.line_state import LineState
from andon_coordinator.core.session_events import (
    AttendRequest,
    RankAttended,
    RankLeft,
    RankReported,
    RankStreamEnded,
)
from andon_coordinator.core.session_line import with_session
from andon_coordinator.core.session_status import session_snapshot
from andon_coordinator.core.sessions import SessionsCore
from andon_coordinator.core.settings import History, LineSettings
from andon_coordinator.core.status import LineSnapshot

KEY = Key(5, 1)


class Run:
    """The sessions of a run, and its line, which nobody joined."""

    def __init__(self) -> None:
        settings = LineSettings(run_id="7f3a", expect_workers=1, min_workers=1, max_workers=1)
        self.line = LineCore(settings, term=5, history=History(), random_bits=lambda: 0)
        self.core = SessionsCore(keys=Keys(5, lambda: 0))

    def attend(self, rank: int) -> None:
        request = AttendRequest(
            rank=rank, world_size=2, incarnation=rank + 1, node_id=f"host-{rank}", backend="cpu"
        )
        self.core.receive(RankAttended(rank + 1, request), 0.0)

    def form(self) -> None:
        self.attend(0)
        self.attend(1)
        self.core.receive(SessionSaved(KEY), 0.0)

    def status(self, now: float) -> LineSnapshot:
        return with_session(self.line.status(now), session_snapshot(self.core, now))


def test_a_run_that_nobody_attends_shows_its_line() -> None:
    run = Run()

    assert run.status(0.0).session is None


def test_ranks_that_wait_are_there_and_the_others_are_awaited() -> None:
    run = Run()
    run.attend(1)

    status = run.status(1.0)

    assert (status.state, status.waiting_for) == (LineState.FORMING, "rank 0 of 2")
    assert (status.live, status.participating, status.expect_workers) == (1, 0, 2)
    [worker] = status.workers
    assert (worker.worker, worker.rank, worker.detail) == (1, None, "waits for the other ranks")


def test_an_open_call_is_shown_with_the_time_that_it_has_been_open_now() -> None:
    run = Run()
    run.form()
    call = Call(kind=CallKind.BARRIER)
    pending = PendingCall(
        group_name="default", group=1, sequence=3, call=call, open_s=0.5, missing=(1,)
    )
    first, second = RankReport(exchange_s=1.0), RankReport(exchange_s=1.5, steps=4, pending=pending)

    run.core.receive(RankReported(1, KEY, 1, first), 1.0)
    run.core.receive(RankReported(1, KEY, 2, second), 2.0)
    status = run.status(2.5)

    assert (status.state, status.step, status.participating) == (LineState.RUNNING, 4, 2)
    worker, other = status.workers
    assert worker.detail == "call 3 of group default: barrier, for 1.0 s, without 1"
    assert (worker.waiting_ratio, worker.heartbeat_age_s) == (0.5, 0.5)
    assert (other.rank, other.detail) == (1, "")


def test_a_run_is_complete_once_all_ranks_have_left_and_not_if_one_was_lost() -> None:
    run = Run()
    run.form()
    run.core.receive(RankLeft(1, KEY, done=True), 1.0)
    leaving = run.status(1.0)
    run.core.receive(RankLeft(2, KEY, done=True), 1.0)
    lost = Run()
    lost.form()
    lost.core.receive(RankStreamEnded(2), 1.0)

    assert (leaving.state, leaving.live) == (LineState.RUNNING, 1)
    assert run.status(2.0).state is LineState.COMPLETE
    assert lost.status(2.0).state is LineState.FORMING
    assert lost.status(2.0).waiting_for == "ranks to attend"


def test_a_rank_in_a_silent_session_is_shown_as_silent() -> None:
    run = Run()
    run.form()

    run.core.receive(TimePassed(), 2.0)

    assert [worker.heartbeat_age_s for worker in run.status(2.0).workers] == [2.0, 2.0]
