"""The line's metrics put together: the core's events and effects, sorted to who counts them.

Counters start at what the journal holds, so that they agree with it after a restart too. A commit
counts once it is durable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from andon.host.telemetry import ExchangeDurations, RefusalCounter
from andon.protocol.records import Key, RecordKind
from andon.protocol.run_settings import Topology
from andon_coordinator.core import effects, events
from andon_coordinator.core.status import LineSnapshot
from andon_coordinator.telemetry.attempts import AttemptMetrics
from andon_coordinator.telemetry.logged import LoggedMetrics
from andon_coordinator.telemetry.run import (
    CostMetrics,
    HaltMetrics,
    RunMetrics,
    ScheduleMetrics,
    ServedRun,
    SlownessMetrics,
    Totals,
)
from andon_coordinator.telemetry.steps import KeepingMetrics, StepMetrics
from andon_coordinator.telemetry.verification import VerificationMetrics
from andon_coordinator.telemetry.workers import DepartureMetrics, LearningMetrics, WorkerGauges

__all__ = ["LineMetrics"]


@dataclass(slots=True)
class _Attempt:
    """The last round that was assigned."""

    key: Key
    waits_s: dict[int, float] = field(default_factory=dict)
    """How long each worker that is ready waited for averages."""
    exchange_s: float = 0.0
    """The longest exchange among the workers that are ready."""


class LineMetrics:
    """The metrics of one line. `{worker}` is a worker's id: a slot, bounded by `max_workers`."""

    def __init__(
        self,
        registry: CollectorRegistry,
        totals: Totals,
        refusals: RefusalCounter | None = None,
        exchanges: ExchangeDurations | None = None,
        run: ServedRun | None = None,
    ) -> None:
        """Registers the metrics. Labels with a closed set of values are all there from the start.

        Args:
            registry: registers them.
            totals: what the journal holds.
            refusals: counts refusals; None: makes a counter, as the registry's only service.
            exchanges: is told which step a round belongs to. On a ring it gets the duration of
                each committed step's exchange too, since no reducer measures it.
            run: what the run is.
        """
        run = run or ServedRun()
        self._exchanges = exchanges
        self._is_ring = run.topology is Topology.RING
        self._pending: dict[Key, effects.SaveRecord] = {}
        self._worker_of: dict[int, int] = {}
        self._attempt: _Attempt | None = None
        self.scraped: Mapping[int, str] = {}
        """Where each live worker's metrics are.

        Another thread reads it, so it is replaced as a whole and never changed in place.
        """
        self.wall: Callable[[], float] = time.time
        """The time since the Unix epoch."""
        self._run = RunMetrics(registry, run)
        self._cost = CostMetrics(registry)
        self._halts = HaltMetrics(registry, totals)
        self._slowness = SlownessMetrics(registry)
        self._steps = StepMetrics(registry, totals)
        self._verification = VerificationMetrics(registry, totals.verified)
        self._attempts = AttemptMetrics(registry)
        self._schedule = ScheduleMetrics(registry, run)
        self._workers = WorkerGauges(registry)
        self._departures = DepartureMetrics(registry, totals.departures)
        self._learning = LearningMetrics(registry)
        self._keeping = KeepingMetrics(registry)
        self._logged = LoggedMetrics(registry)
        self.wrote: Callable[[float, int | None], None] = self._keeping.wrote
        """Counts a write to the journal, with the step of its record; any thread may call it."""
        self.refused = (refusals or RefusalCounter(registry)).of("coordinator")
        """Counts a call that ended with a reason."""

    def observe(self, event: events.Event, done: Sequence[effects.Effect], now: float) -> None:
        """Counts an event and its effects, at `now` of the line's clock."""
        # The event goes first: a commit ends one recovery before its effects can begin the next.
        match event:
            case events.RecordSaved():
                self._committed(event.key, now)
            case events.JournalFailed():
                self._pending.clear()
            case events.WorkerReady():
                self._ready(event)
            case events.WorkerStreamEnded():
                self._worker_of.pop(event.stream, None)
            case events.FaultReported():
                self._attempts.faulted(event.fault.kind)
            case _:
                pass
        if not done:
            return
        self._attempts.observe(event, done, now)
        for effect in done:
            self._did(event, effect, now)

    def tick(self, status: LineSnapshot) -> None:
        """Sets the gauges to a status."""
        for part in (
            self._run,
            self._cost,
            self._halts,
            self._schedule,
            self._steps,
            self._workers,
            self._keeping,
        ):
            part.tick(status)
        self.scraped = {
            each.worker: each.metrics_address
            for each in status.workers
            if each.live and each.metrics_address
        }

    def _did(self, event: events.Event, effect: effects.Effect, now: float) -> None:
        match effect:
            case effects.AcceptJoin():
                self._worker_of[effect.stream] = effect.worker
                self._workers.joined(effect.worker)
                self._attempts.joined(effect.join_status)
                self._departures.joined(effect)
            case effects.SaveRecord():
                self._pending[effect.record.key] = effect
            case effects.SaveHalt():
                self._halts.halted(effect.evidence.reason)
            case effects.SaveAnswer():
                self._halts.answered(effect.answer)
            case effects.SaveDeparture():
                # Nothing departs if the line can't do without the stopped worker.
                stopped = isinstance(event, events.WorkerStopped)
                self._departures.went(effect, stopped=stopped)
            case effects.NoteCheckpoint() | effects.NoteOverdue() | effects.NoteSetback():
                self._keeping.noted(effect, self.wall())
            case effects.NoteCaughtUp():
                self._learning.caught_up(effect)
            case effects.Assign():
                self._assigned(effect.assignment, now)
            case effects.SendCommitted():
                pass  # It counted when its record was durable.
            case _:
                self._rest(effect, now)

    def _rest(self, effect: effects.Effect, now: float) -> None:
        match effect:
            case effects.NoteSlowness():
                self._slowness.told(effect.slowness.phase)
            case effects.SendTransfer(beside_training=False):
                self._attempts.transfer_began(now)
            case effects.SaveScalars():
                self._logged.logged(effect)
            case effects.NoteSuspected() | effects.NoteNotice() | effects.NoteSlow():
                self._departures.noted(effect)
            case effects.SaveSpike():
                self._halts.acted(effect.decision.action)
            case effects.NoteDifference() | effects.SaveVerdict():
                self._verification.noted(effect)

    def _assigned(self, assignment: effects.Assignment, now: float) -> None:
        # One round has an assignment for each member; only the first one counts the attempt.
        if self._attempt is not None and self._attempt.key == assignment.key:
            return
        self._attempt = _Attempt(assignment.key)
        if self._exchanges is not None:
            self._exchanges.began(assignment.key, assignment.step)
        self._attempts.assigned(assignment.attempt, assignment.step, now)
        self._schedule.assigned(assignment)

    def _ready(self, event: events.WorkerReady) -> None:
        worker = self._worker_of.get(event.stream)
        attempt = self._attempt
        if worker is not None and attempt is not None and attempt.key == event.ready.key:
            attempt.waits_s.setdefault(worker, event.ready.timings.wait_s)
            attempt.exchange_s = max(attempt.exchange_s, event.ready.timings.exchange_s)

    def _committed(self, key: Key, now: float) -> None:
        saved = self._pending.pop(key, None)
        if saved is None or saved.record.kind is not RecordKind.STEP or saved.result is None:
            return
        step = saved.record.step
        self._steps.committed(step, saved.result)
        self._verification.committed(saved.proved)
        self._attempts.committed(step, now)
        if self._attempt is not None and self._attempt.key == key:
            for worker, seconds in self._attempt.waits_s.items():
                self._workers.waited(worker, seconds)
            if self._exchanges is not None and self._is_ring and self._attempt.exchange_s > 0:
                self._exchanges.took(self._attempt.exchange_s, key)
