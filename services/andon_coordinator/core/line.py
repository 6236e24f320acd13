"""The line: the coordinator's core, sans-IO. One event in, a list of effects out.

Theory of operation
===================

The coordinator decides three things: which worker computes which samples, whether a step is
committed, and whether the line stops. `LineCore` makes these decisions and does nothing else. It
has no clock, no socket, no file and no lock. It receives what happened (`events`) and returns what
has to be done (`effects`), in order. One event loop owns it; see `transport/task.py`.

The rules cited here and beside the code ("rule 5") are those of docs/protocol.md. Change one only
together with the search in tests/search, which explores the reachable states of this very code.

The chain. The history of a line is a chain of records (`chain`): an INITIAL record at the start, a
STEP for each commit, a MARK where samples were skipped, an epoch was left or the line was rolled
back. Each record has a key that was never used before, and names its parent. The key of the last
record is the line's *head*. A worker whose last applied record is the head is *in sync*; only those
train. The others get the weights of one of them first: while the line trains, if they can learn
(`learning`), or by a transfer for which it stands still (`syncing`).

A step. Every worker in sync asks for work. A *round* opens under a new key: a roster that never
changes, and a share of the batch for each member. Members compute, exchange gradients through the
reducers, and report that they hold all averages. When all have reported, the round is checked
(`agreement`, `detectors`) and its record is given to the journal. The journal answers that the
record is durable, which makes it the head, and every member gets it. Only then does a worker change
its weights.

So a round is in one of three phases, and what may end it differs:

    open      any loss, leave, fault or halt voids it, and nothing revives it; the step is tried
              again as a new round with a new key (`void`)
    pending   the journal has its record; nothing voids it any more. A halt waits until the record
              is announced. A lost worker changes nothing. Only the journal can say that the
              record was not written.
    durable   it is history. An operator can roll the line back to an earlier record, and if every
              worker that had it is lost, the line goes back by itself (`lost_state`), or for a
              spike that stays (`going_back`). All add a MARK to the chain; no record is ever
              removed

Why a round is never continued after a loss: a worker that was away may hold averages over a
different roster than the others. With a new key its reports don't count, and its averages don't
apply.

Why an answer from the journal comes before any announcement: a worker that applies a record which a
crash then erases would be ahead of everybody, with weights that nobody else has.

Requests for work. A worker asks once for each head that it reached by a STEP, an INITIAL record or
a transfer. The request is valid until a STEP is committed. After `SendVoided`, `SendResume` or a
MARK the worker MUST be ready for an assignment without asking again; asking again is harmless. A
new stream starts without a request: a worker that joined again asks again. A request that came with
a StepReady is good for that round's commit alone (`standing`).

Streams. Each event from a worker names its stream. Streams are numbered once and never reused. An
event from a stream that is not its worker's current one has no effect (rule 6), so a late message
from before a reconnect can't be taken for a new one.

Recovery. After a restart the core starts at the journal's last record. Until it uses that head for
anything, a worker that joins with a newer head moves the line there (rule 9): such a record was
durable once, and the journal lost it. From the first use of the head on, a worker that is ahead
proves that a second coordinator trained it, which halts the line.

Order within one event. `receive` first applies the rule for the event, then looks at the clock
(silence, graces, stragglers), then does what has become possible (`progress.go_on`). So a loss is
always processed before the next round opens.

Work. A step has several events of every worker, so what an event costs must not depend on how many
workers there are. `members` keeps indices for what is asked after every event; lists of everybody
are for what happens once a step. A test counts it.

Time. `now` is monotonic, in seconds; leases, grace periods and back-off are measured with it. The
task that owns the line sends `TimePassed` several times within each grace period. `wall` is the
time since the Unix epoch. It goes into evidence and into new terms, and decides whether a reported
term is plausible.

The modules
===========

Data: `events` and `effects`, `settings`, `chain`, `members`, `reducers`, `round`, `checkpoints`,
`transfers`, `scalar_all_reduces`, and `state`, which puts them together. How work is divided:
`pacing`, with `readings`, `balance`, `cadence`, `loss_trend` and `pacing_state`, and `dealing`.
What is computed while the window before is exchanged: `overlap`. Windows that do not wait for
everybody: `quorum`, which decides, and `late`. How late is too late: `suspicion`. Checks without
side effects: `agreement`, `arithmetics`, `defects`, `detectors`, `join_checks`, `verification`,
`verdicts`. Rules: `arrivals`, `departures`, `steps`, `verifying`, `standing`, `syncing`,
`learning`, `spares`, `suspects`, `notices`, `lost_state`, `going_back`, `operators`, `progress`.
`status` is what people see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from andon.protocol.scalars import ScalarNames
from andon_coordinator.core import (
    arrivals,
    departures,
    going_back,
    late,
    learning,
    lost_state,
    notices,
    operators,
    progress,
    slowness,
    spiking,
    steps,
    suspects,
    syncing,
)
from andon_coordinator.core.arithmetics import Arithmetics
from andon_coordinator.core.chain import Chain, Keys
from andon_coordinator.core.checkpoints import RunCheckpoints
from andon_coordinator.core.detectors import Detectors
from andon_coordinator.core.effects import Effect
from andon_coordinator.core.events import (
    AncestorFound,
    CordPulled,
    DrainRequested,
    Event,
    ExplanationArrived,
    FaultReported,
    FolderSearched,
    HaltCleared,
    HeartbeatArrived,
    JournalFailed,
    ListeningReported,
    NoticeGiven,
    ProbeAnswered,
    RecordSaved,
    ReducerLost,
    ReducerRegistered,
    RoundFaulted,
    ScalarAllReduceArrived,
    ScalarsSaved,
    StateReported,
    TermSaved,
    TimePassed,
    WorkerComputed,
    WorkerJoined,
    WorkerLeft,
    WorkerReady,
    WorkerStopped,
    WorkerStreamEnded,
    WorkRequested,
)
from andon_coordinator.core.line_state import LineState
from andon_coordinator.core.members import LineMember
from andon_coordinator.core.pacing import Pacing
from andon_coordinator.core.reducers import Reducers
from andon_coordinator.core.settings import History, LineSettings
from andon_coordinator.core.spikes import SpikeBook
from andon_coordinator.core.state import CoreState
from andon_coordinator.core.status import LineSnapshot, take_snapshot

__all__ = ["LineCore"]

# Any: each rule takes the event that it is listed under.
_OF_WORKERS: dict[type[Event], Callable[[CoreState, LineMember, Any], None]] = {
    WorkRequested: steps.work_requested,
    WorkerReady: steps.ready,
    FaultReported: steps.fault,
    HeartbeatArrived: arrivals.heartbeat,
    ProbeAnswered: suspects.answered,
    ExplanationArrived: slowness.explained,
    NoticeGiven: notices.given,
    WorkerLeft: departures.left,
    StateReported: learning.state_reported,
    ListeningReported: learning.listening_reported,
    WorkerComputed: late.computed,
    ScalarAllReduceArrived: syncing.scalar_all_reduce_arrived,
    WorkerStreamEnded: departures.stream_ended,
    WorkerStopped: departures.stopped,
}
"""Rules for what arrives on a joined worker's stream, and for its end."""

_OF_LEARNERS: dict[type[Event], Callable[[CoreState, LineMember, Any], None]] = {
    **_OF_WORKERS,
    WorkRequested: learning.work_requested,
    WorkerReady: learning.ready,
    FaultReported: learning.fault,
    ScalarAllReduceArrived: learning.number_arrived,
}
"""The same for a worker that learns: nothing that it says counts for a round."""

_OF_LATE: dict[type[Event], Callable[[CoreState, LineMember, Any], None]] = {
    **_OF_LEARNERS,
    FaultReported: steps.fault,
}
"""The same for one that is late: what it computes will count, so a defect in it halts the line."""

_OF_OTHERS: dict[type[Event], Callable[[CoreState, Any], None]] = {
    WorkerJoined: arrivals.joined,
    ReducerRegistered: arrivals.reducer_registered,
    ReducerLost: departures.reducer_lost,
    RoundFaulted: steps.round_faulted,
    TermSaved: steps.term_saved,
    RecordSaved: steps.record_saved,
    ScalarsSaved: arrivals.scalars_saved,
    AncestorFound: going_back.ancestor_found,
    FolderSearched: lost_state.folder_searched,
    JournalFailed: steps.journal_failed,
    CordPulled: operators.pull_cord,
    HaltCleared: operators.clear,
    DrainRequested: operators.drain,
}
"""Rules for everything else. `TimePassed` has none: the clock is looked at after every event."""


class LineCore:
    """The core of one run's line; see the theory of operation above."""

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
            term: this coordinator's own. It is durable already, and no other term in the journal is
                greater.
            history: what the journal holds.
            random_bits: draws 32 random bits, for terms that are started later.
        """
        if term < history.greatest_term:
            raise ValueError(f"term {term} is below the journal's {history.greatest_term}")
        if history.head is not None and history.head.key.term >= term:
            raise ValueError(f"term {term} is not above that of the head {history.head.key}")
        chain = Chain(history.head, history.result)
        if history.plan is not None:
            chain.normalize_cursor(history.plan.epoch_size)
        self._core = core = CoreState(
            settings=settings,
            keys=Keys(term, random_bits),
            chain=chain,
            plan=history.plan,
            layout=history.layout,
            reducers=Reducers(own=settings.own_reducer),
            checkpoints=RunCheckpoints(service_host=settings.host, journalled=history.checkpoints),
            next_halt_id=history.next_halt_id,
            detectors=Detectors(
                loss_spike=settings.loss_spike,
                gradient_norm_spike=settings.gradient_norm_spike,
                worker_gradient_norm=settings.worker_gradient_norm,
                recent=history.recent,
                accepted_step=history.accepted_step,
            ),
            comparison=spiking.comparison_after(settings, history),
            spikes=SpikeBook(settings.on_spike, history.spikes),
            pacing=Pacing(settings.pacing, settings.policy, history.pacing),
            dropped=set(history.dropped),
            barred=set(history.barred),
            evicted=dict(history.evicted),
            stand=history.stand,
            last_roster=history.last_roster,
            departed=dict(history.departed),
            abandoned=history.abandoned,
            arithmetics=Arithmetics(history.arithmetic, dict(history.arithmetics)),
            scalar_names=ScalarNames(history.scalar_names),
            verified=replace(history.verified, convicted=list(history.verified.convicted)),
        )
        if history.roll_back:
            self._prepare_roll_back(history)
            return
        ended = history.result.stop_reason if history.result is not None else ""
        core.stop_reason = ended or core.end_reached(chain.step, chain.cursor)
        if history.halt is not None and core.is_after_head(history.halt):
            core.halt = history.halt
            core.line_state = LineState.HALTED

    def _prepare_roll_back(self, history: History) -> None:
        """Resumes from the head: earlier decisions about the run's end and workers are void."""
        core = self._core
        # The MARK itself is made with the first event, because effects need one to go out with.
        core.roll_back_pending = core.totals_reopened = True
        core.dropped.clear()
        core.barred.clear()
        core.evicted.clear()
        core.halt = history.halt

    @property
    def state(self) -> LineState:
        """What the line is doing, for people."""
        return self._core.line_state

    @property
    def step(self) -> int:
        """Steps committed at the head."""
        return self._core.chain.step

    @property
    def term(self) -> int:
        """The coordinator's present term."""
        return self._core.keys.term

    @property
    def live(self) -> int:
        """How many workers have an open stream."""
        return self._core.members.live_count

    @property
    def in_use(self) -> bool:
        """Whether the run is one of a line: a worker was taken, now or before this process."""
        return self._core.layout is not None or self._core.chain.head is not None

    @property
    def takes_newcomers(self) -> bool:
        """Whether a worker that was never here may join; True on a halted line as well."""
        core = self._core
        over = core.line_state is LineState.COMPLETE or core.shut_down
        return not (over or core.draining or core.stop_reason)

    def expected(self, now: float) -> tuple[int, ...]:
        """The workers that were lost, and whose processes may still come back."""
        return tuple(
            each.worker
            for each in self._core.members
            if each.stream is None and each.expected_until is not None and now < each.expected_until
        )

    def receive(self, event: Event, now: float, *, wall: float = 0.0) -> list[Effect]:
        """What has to be done, in this order, because `event` happened.

        Events of streams that are not a worker's current stream have no effect (rule 6).
        """
        core = self._core
        core.now = now
        if core.started_at is None:
            core.started_at = now
        core.wall = wall
        # A new list: the caller has the one of the event before.
        core.effects = []
        # First, so that no rule below acts on the head that the MARK replaces.
        if core.roll_back_pending:
            operators.roll_back(core)
        kind = type(event)
        if kind in _OF_WORKERS:
            self._of_worker(event)
        elif kind in _OF_OTHERS:
            _OF_OTHERS[kind](core, event)
        # The order matters: losses are processed before `go_on` may open the next round.
        departures.look_for_silence(core)
        departures.look_for_stragglers(core, ticked=kind is TimePassed)
        if isinstance(event, TimePassed):
            suspects.ticked(core, event.late_s)
            suspects.look(core)
            slowness.look(core)
        # Before the next round may open, which is without them.
        if core.noticed:
            notices.release(core)
        progress.go_on(core)
        # A standing request is good for this event alone.
        core.standing = frozenset()
        return core.effects

    def status(self, now: float) -> LineSnapshot:
        """What people see of the line."""
        return take_snapshot(self._core, now)

    def _of_worker(self, event: Any) -> None:
        member = self._core.members.on_stream(event.stream)
        if member is None:
            if isinstance(event, WorkerLeft | WorkerStreamEnded):
                notices.after_release(self._core, event)
            return  # Not a worker's current stream: a late message from before a reconnect.
        # Any message is a sign of life, not just a heartbeat. The other two are none.
        # Before the rule: it may ask how long the member has been silent.
        if not isinstance(event, WorkerStreamEnded | WorkerStopped):
            member.heard_at = self._core.now
        learning = member.learning
        rules = _OF_WORKERS if learning is None else _OF_LATE if learning.late else _OF_LEARNERS
        rules[type(event)](self._core, member, event)
