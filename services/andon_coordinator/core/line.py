"""The line: the coordinator's core, sans-IO. One event in, a list of effects out.

Theory of operation
-------------------

The line's history is a chain of records; its end is the head (`chain`). A worker is *in sync* if
the last record that it applied is the head, and only then may it train. `Line.receive` hands each
event to the rule that it concerns (`arrivals`, `departures`, `steps`, ..., `operators`), and
then lets `progress.go_on` do what has become possible. All of them work on one `Board`.

A step: every worker on the roster asks for work; a `Round` is opened under a key that was never
used; each worker gets its share; each says that it holds all averages; the round is judged
(`defects`) and becomes a record, which the journal is given (`SaveRecord`). From then on nothing
undoes it: not a halt, which waits until the record is announced, nor a loss. Once it is durable
(`RecordSaved`) it is the head, and is sent to every worker that can apply it.

Until the journal is given the record, any loss, leave, fault or halt voids the round for good.

Requests for work. A worker asks once for each head that a STEP, an INITIAL or a transfer gave
it. Its request stands until a STEP is committed: after `SendVoided`, after `SendResume` and after
a MARK it MUST be ready for an assignment without asking again. (Asking again is harmless.) A new
stream has no request on it: a worker that joined again asks again.

Time. `now` is monotonic, in seconds, and rules leases, graces and back-off; whoever owns the line
sends `TimePassed` several times a grace. `wall` is the time since the Unix epoch: it goes into
evidence and into new terms and decides nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from andon_coordinator.core import (
    arrivals,
    comparing,
    departures,
    operators,
    progress,
    registration,
    steps,
    stragglers,
    syncing,
)
from andon_coordinator.core.board import Board
from andon_coordinator.core.chain import Chain
from andon_coordinator.core.detectors import Detectors
from andon_coordinator.core.effects import Effect, LineState
from andon_coordinator.core.events import (
    CordPulled,
    DrainRequested,
    Event,
    FaultReported,
    HaltCleared,
    HeartbeatArrived,
    JournalFailed,
    RecordSaved,
    ReducerLost,
    ReducerRegistered,
    ScalarAllReduceArrived,
    StateReported,
    StreamEnded,
    TermSaved,
    WorkerJoined,
    WorkerLeft,
    WorkerReady,
    WorkRequested,
)
from andon_coordinator.core.keys import Keys
from andon_coordinator.core.reducers import Reducers
from andon_coordinator.core.roster import Member
from andon_coordinator.core.settings import History, LineSettings
from andon_coordinator.core.status import LineStatus, take_status

__all__ = ["Line"]

# What a worker says, or its stream's end. Any: each rule takes the event that it is listed under.
_OF_WORKERS: dict[type[Event], Callable[[Board, Member, Any], None]] = {
    WorkRequested: steps.work_requested,
    WorkerReady: steps.ready,
    FaultReported: steps.fault,
    HeartbeatArrived: arrivals.heartbeat,
    WorkerLeft: departures.left,
    StateReported: syncing.state_reported,
    ScalarAllReduceArrived: comparing.scalar_all_reduce_arrived,
    StreamEnded: departures.ended,
}

_OF_OTHERS: dict[type[Event], Callable[[Board, Any], None]] = {
    WorkerJoined: arrivals.joined,
    ReducerRegistered: registration.registered,
    ReducerLost: registration.lost,
    TermSaved: steps.term_saved,
    RecordSaved: steps.record_saved,
    JournalFailed: steps.journal_failed,
    CordPulled: operators.pull_cord,
    HaltCleared: operators.clear,
    DrainRequested: operators.drain,
}


class Line:
    """One run's line. It has no clock, no socket and no lock; one task owns it."""

    def __init__(
        self,
        settings: LineSettings,
        *,
        term: int,
        history: History,
        random_bits: Callable[[], int],
    ) -> None:
        """Starts where the journal ends.

        Args:
            settings: how the line is run.
            term: this coordinator's, durable, and above every other term of the journal.
            history: what the journal holds.
            random_bits: draws 32 random bits, for terms that are taken later.
        """
        if term < history.greatest_term:
            raise ValueError(f"term {term} is below the journal's {history.greatest_term}")
        if history.head is not None and history.head.key.term >= term:
            raise ValueError(f"term {term} is not above that of the head {history.head.key}")
        chain = Chain(history.head, history.result)
        if history.plan is not None:
            chain.keep_within(history.plan.epoch_size)
        self._board = board = Board(
            settings=settings,
            keys=Keys(term, random_bits),
            chain=chain,
            plan=history.plan,
            layout=history.layout,
            reducers=Reducers(own=settings.own_reducer),
            next_halt_id=history.next_halt_id,
            detectors=Detectors(
                loss_spike=settings.loss_spike,
                gradient_norm_spike=settings.gradient_norm_spike,
                recent=history.recent,
                accepted_step=history.accepted_step,
            ),
            dropped=set(history.dropped),
            last_roster=history.last_roster,
            ended=dict(history.ended),
            abandoned=history.abandoned,
        )
        if history.roll_back:
            self._go_back(history)
            return
        ended = history.result.stop_reason if history.result is not None else ""
        board.stop = ended or board.end_reached(chain.step, chain.cursor)
        if history.halt is not None and board.is_newer(history.halt):
            board.halt = history.halt
            board.state = LineState.HALTED

    def _go_back(self, history: History) -> None:
        """The run begins anew at its head: what people said of its end and of its halt is over."""
        board = self._board
        board.rolling_back = board.totals_open = True
        board.dropped.clear()
        board.halt = history.halt

    @property
    def state(self) -> LineState:
        """What the line is doing, for people."""
        return self._board.state

    @property
    def takes_newcomers(self) -> bool:
        """Whether a worker that was never here may join; a halted line takes it, too."""
        board = self._board
        over = board.state is LineState.COMPLETE or board.shut_down
        return not (over or board.draining or board.stop)

    def receive(self, event: Event, now: float, *, wall: float = 0.0) -> list[Effect]:
        """What is to be done, in this order, because `event` happened.

        Events of streams that are not a worker's current stream have no effect (rule 6).
        """
        board = self._board
        board.now = now
        if board.started_at is None:
            board.started_at = now
        board.wall = wall
        board.effects = []
        if board.rolling_back:
            operators.roll_back(board)
        kind = type(event)
        if kind in _OF_WORKERS:
            self._of_worker(event)
        elif kind in _OF_OTHERS:
            _OF_OTHERS[kind](board, event)
        departures.watch(board)
        stragglers.watch(board)
        progress.go_on(board)
        return board.effects

    def status(self, now: float) -> LineStatus:
        """What people see of the line."""
        return take_status(self._board, now)

    def _of_worker(self, event: Any) -> None:
        member = self._board.roster.on_stream(event.stream)
        if member is None:
            return
        member.heard_at = self._board.now
        _OF_WORKERS[type(event)](self._board, member, event)
