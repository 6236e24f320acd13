"""Telemetry: the line's metrics for Prometheus, fed with the core's events and effects.

Counters start at what the journal holds, so that they agree with it after a restart too. A commit
counts once it is durable.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Summary

from andon import __version__
from andon.host.telemetry import ExchangeDurations, RefusalCounter
from andon.protocol.halts import HaltReason
from andon.protocol.records import Key, RecordKind, accuracy_of
from andon_coordinator.core import effects, events
from andon_coordinator.core.effects import LineState
from andon_coordinator.core.status import LineSnapshot

__all__ = ["AttemptCause", "LineMetrics", "Totals"]

_STEP_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)


class AttemptCause(enum.Enum):
    """Why an attempt began: it is the first of its step, or what voided the one before."""

    FIRST = "first"
    STREAM_LOST = "stream_lost"
    LEASE_LAPSED = "lease_lapsed"
    LEFT = "left"
    REJOINED = "rejoined"
    FAULT = "fault"
    CORRUPT = "corrupt"
    REDUCER_LOST = "reducer_lost"
    HALT = "halt"
    OTHER = "other"


_CAUSES: dict[type[events.Event], AttemptCause] = {
    events.WorkerStreamEnded: AttemptCause.STREAM_LOST,
    events.TimePassed: AttemptCause.LEASE_LAPSED,
    events.WorkerLeft: AttemptCause.LEFT,
    events.WorkerJoined: AttemptCause.REJOINED,
    events.FaultReported: AttemptCause.FAULT,
    events.ReducerLost: AttemptCause.REDUCER_LOST,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What the journal holds when the process starts."""

    steps: int = 0
    samples: int = 0
    halts: Mapping[HaltReason, int] = field(default_factory=dict)


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
    ) -> None:
        """Registers the metrics. Labels with a closed set of values are all there from the start.

        Args:
            registry: registers them.
            totals: what the journal holds.
            refusals: counts refusals; None: makes a counter, as the registry's only service.
            exchanges: gets the duration of each committed step's exchange, as workers reported it;
                None: the reducers measure it themselves.
        """
        self._exchanges = exchanges
        self._pending: dict[Key, effects.SaveRecord] = {}
        self._worker_of: dict[int, int] = {}
        self._attempt: _Attempt | None = None
        self._cause: AttemptCause | None = None
        """What voided the round before the next attempt; None: nothing did."""
        self._broken_at: float | None = None
        """When the first loss since the last commit voided a round; a halt resets it."""
        self._paused_at: float | None = None
        """When the first state transfer since the last assignment began."""
        self._shown: set[str] = set()
        self.scraped: Mapping[int, str] = {}
        """Where each live worker's metrics are.

        Another thread reads it, so it is replaced as a whole and never changed in place.
        """
        Info("andon_build", "The service's version", registry=registry).info(
            {"version": __version__}
        )
        self._state = Gauge(
            "andon_line_state", "1 for the line's state, else 0", ["state"], registry=registry
        )
        for state in LineState:
            self._state.labels(state.name.lower()).set(0)
        self._halts = Counter(
            "andon_jidoka_halts",
            "Times that the line stopped itself",
            ["reason"],
            registry=registry,
        )
        for reason in HaltReason:
            self._halts.labels(reason.label).inc(totals.halts.get(reason, 0))
        self._attempts = Counter(
            "andon_step_attempts",
            "Attempts at steps, by why they began",
            ["cause"],
            registry=registry,
        )
        for cause in AttemptCause:
            self._attempts.labels(cause.value)
        self._workers = Gauge(
            "andon_workers", "Workers on the line, and in its round", ["state"], registry=registry
        )
        for label in ("live", "participating"):
            self._workers.labels(label).set(0)
        self._reducers = Gauge("andon_reducers", "Reducers on the map", registry=registry)
        self.refused = (refusals or RefusalCounter(registry)).of("coordinator")
        """Counts a call that ended with a reason."""
        self._register_steps(registry, totals)
        self._waits = Summary(
            "andon_worker_wait_seconds",
            "Time spent waiting for averages in committed steps, as the worker reported",
            ["worker"],
            registry=registry,
        )
        self._shares = Gauge(
            "andon_worker_share_ratio",
            "Part of the last step's positions that a live worker had, from 0 to 1",
            ["worker"],
            registry=registry,
        )
        self._micro_batches = Gauge(
            "andon_worker_micro_batches",
            "Micro-batches that a live worker was told to make of them; 0: it was left to it",
            ["worker"],
            registry=registry,
        )
        self._ages = Gauge(
            "andon_heartbeat_age_seconds",
            "Since a live worker was last heard",
            ["worker"],
            registry=registry,
        )

    def _register_steps(self, registry: CollectorRegistry, totals: Totals) -> None:
        self._loss = Gauge("andon_step_loss", "The last step's loss", registry=registry)
        self._accuracy = Gauge(
            "andon_step_accuracy_ratio",
            "Samples of the last step that the models got right, from 0 to 1; NaN: not counted",
            registry=registry,
        )
        self._accuracy.set(math.nan)
        self._step = Gauge("andon_step", "Steps committed at the head", registry=registry)
        self._steps = Counter("andon_steps_committed", "Steps committed", registry=registry)
        self._steps.inc(totals.steps)
        self._overflows = Counter(
            "andon_steps_overflowed",
            "Committed steps that moved no weight, because scaled gradients overflowed",
            registry=registry,
        )
        self._samples = Counter(
            "andon_samples_committed", "Samples in committed steps", registry=registry
        )
        self._samples.inc(totals.samples)
        self._seconds = Histogram(
            "andon_step_seconds",
            "From a step's last assignment to its commit",
            buckets=_STEP_BUCKETS_S,
            registry=registry,
        )
        self._recovery = Histogram(
            "andon_recovery_seconds",
            "From the loss that voided a round to the next commit",
            buckets=_STEP_BUCKETS_S,
            registry=registry,
        )
        self._join_pause = Histogram(
            "andon_join_pause_seconds",
            "Time that the line waited for the state of newcomers, between two steps",
            buckets=_STEP_BUCKETS_S,
            registry=registry,
        )

        self._checkpoint = Gauge(
            "andon_checkpoint_step", "Step of the last checkpoint", registry=registry
        )
        self._missing = Counter(
            "andon_checkpoints_missed",
            "Steps that should have had a checkpoint and had none",
            registry=registry,
        )
        self._setbacks = Counter(
            "andon_state_transfer_failures",
            "Times that the line's state did not reach a worker",
            registry=registry,
        )

    def observe(self, event: events.Event, done: Sequence[effects.Effect], now: float) -> None:
        """Counts an event and its effects, at `now` of the line's clock."""
        # The event goes first: a commit ends one recovery before its effects can begin the next.
        if isinstance(event, events.RecordSaved):
            self._committed(event.key, now)
        elif isinstance(event, events.JournalFailed):
            self._pending.clear()
        elif isinstance(event, events.WorkerReady):
            self._ready(event)
        elif isinstance(event, events.WorkerStreamEnded):
            self._worker_of.pop(event.stream, None)
        self._look_for_breaks(event, done, now)
        for effect in done:
            self._did(effect, now)

    def tick(self, status: LineSnapshot) -> None:
        """Sets the gauges to a status."""
        for state in LineState:
            self._state.labels(state.name.lower()).set(state is status.state)
        self._workers.labels("live").set(status.live)
        self._workers.labels("participating").set(status.participating)
        self._reducers.set(len(status.reducers))
        self._step.set(status.step)
        if status.loss is not None:
            self._loss.set(status.loss)
        self._accuracy.set(_shown(accuracy_of(status.correct, status.samples)))
        ages = {str(each.worker): each.heartbeat_age_s for each in status.workers if each.live}
        for worker in self._shown - ages.keys():
            for gauge in (self._ages, self._shares, self._micro_batches):
                gauge.remove(worker)
        for worker, age in ages.items():
            self._ages.labels(worker).set(age)
        for each in status.workers:
            if each.live:
                self._shares.labels(str(each.worker)).set(each.share)
                self._micro_batches.labels(str(each.worker)).set(each.micro_batches)
        self._shown = set(ages)
        self.scraped = {
            each.worker: each.metrics_address
            for each in status.workers
            if each.live and each.metrics_address
        }

    def _did(self, effect: effects.Effect, now: float) -> None:
        match effect:
            case effects.AcceptJoin():
                self._worker_of[effect.stream] = effect.worker
                self._waits.labels(str(effect.worker))
            case effects.SaveRecord():
                self._pending[effect.record.key] = effect
            case effects.SaveHalt():
                self._halts.labels(effect.evidence.reason.label).inc()
            case effects.NoteCheckpoint():
                self._checkpoint.set(effect.step)
            case effects.NoteOverdue():
                self._missing.inc()
            case effects.NoteSetback():
                self._setbacks.inc()
            case effects.SendTransfer() if self._paused_at is None:
                self._paused_at = now
            case effects.Assign():
                self._assigned(effect.assignment, now)

    def _assigned(self, assignment: effects.Assignment, now: float) -> None:
        # One round has an assignment for each member; only the first one counts the attempt.
        if self._attempt is not None and self._attempt.key == assignment.key:
            return
        if self._paused_at is not None:
            self._join_pause.observe(now - self._paused_at)
            self._paused_at = None
        self._attempt = _Attempt(assignment.key)
        cause = self._cause or AttemptCause.OTHER
        self._attempts.labels(
            (AttemptCause.FIRST if assignment.attempt == 0 else cause).value
        ).inc()
        self._cause = None

    def _ready(self, event: events.WorkerReady) -> None:
        worker = self._worker_of.get(event.stream)
        attempt = self._attempt
        if worker is not None and attempt is not None and attempt.key == event.ready.key:
            attempt.waits_s.setdefault(worker, event.ready.timings.wait_s)
            attempt.exchange_s = max(attempt.exchange_s, event.ready.timings.exchange_s)

    def _look_for_breaks(
        self, event: events.Event, done: Sequence[effects.Effect], now: float
    ) -> None:
        if any(isinstance(effect, effects.SaveHalt) for effect in done):
            # The line waits for a person now. That time is no recovery.
            self._cause, self._broken_at = AttemptCause.HALT, None
        elif any(isinstance(effect, effects.SendVoided) for effect in done):
            self._cause = self._cause or _cause_of(event)
            self._broken_at = now if self._broken_at is None else self._broken_at

    def _committed(self, key: Key, now: float) -> None:
        saved = self._pending.pop(key, None)
        if saved is None or saved.record.kind is not RecordKind.STEP or saved.result is None:
            return
        self._steps.inc()
        self._overflows.inc(saved.result.overflow)
        self._samples.inc(saved.result.samples)
        self._seconds.observe(saved.result.seconds)
        self._loss.set(saved.result.loss)
        self._accuracy.set(_shown(accuracy_of(saved.result.correct, saved.result.samples)))
        self._step.set(saved.record.step)
        if self._broken_at is not None:
            self._recovery.observe(now - self._broken_at)
            self._broken_at = None
        if self._attempt is not None and self._attempt.key == key:
            for worker, seconds in self._attempt.waits_s.items():
                self._waits.labels(str(worker)).observe(seconds)
            if self._exchanges is not None and self._attempt.exchange_s > 0:
                self._exchanges.took(self._attempt.exchange_s)


def _cause_of(event: events.Event) -> AttemptCause:
    """Why the next attempt begins, after an event voided the last one."""
    corrupt = events.FaultKind.CORRUPT_CHUNK
    if isinstance(event, events.FaultReported) and event.fault.kind is corrupt:
        return AttemptCause.CORRUPT
    return _CAUSES.get(type(event), AttemptCause.OTHER)


def _shown(accuracy: float | None) -> float:
    return math.nan if accuracy is None else accuracy
