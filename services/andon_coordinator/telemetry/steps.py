"""Committed steps, and what keeps them: the journal, checkpoints and transfers of state."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from andon.host.telemetry import FollowedCounter, OptionalGauge, TimeHistogram
from andon.protocol.records import accuracy_of
from andon_coordinator.core.effects import NoteCheckpoint, NoteOverdue, NoteSetback
from andon_coordinator.core.status import LineSnapshot
from andon_coordinator.core.step_results import StepResult
from andon_coordinator.telemetry.run import Totals

__all__ = ["KeepingMetrics", "StepMetrics"]


class StepMetrics:
    """What steps came to, once they are durable."""

    def __init__(self, registry: CollectorRegistry, totals: Totals) -> None:
        """Registers the metrics; the counters begin at what the journal holds."""
        self._head = 0
        self._total_steps, self._total_samples = totals.steps, totals.samples
        step = Gauge("andon_step", "Steps committed at the head.", registry=registry)
        step.set_function(lambda: self._head)
        self._loss = OptionalGauge(
            registry,
            "andon_step_loss",
            "Loss of the last committed step over all workers; absent before the first.",
        )
        self._accuracy = OptionalGauge(
            registry,
            "andon_step_accuracy_ratio",
            "Part of the last committed step's samples that the models got right, from 0 to 1; "
            "absent unless all workers count them.",
        )
        steps = FollowedCounter(
            registry, "andon_steps_committed_total", "Steps in the journal, since the run began."
        )
        steps.follow(lambda: self._total_steps)
        self._overflows = Counter(
            "andon_steps_overflowed_total",
            "Committed steps that moved no weight, because scaled gradients overflowed; since the "
            "service started.",
            registry=registry,
        )
        self._late = Counter(
            "andon_late_contributions_total",
            "Contributions to committed steps by workers that were left out of the step before, "
            "since they still computed; 0 without a quorum. Counted since the service started.",
            registry=registry,
        )
        samples = FollowedCounter(
            registry,
            "andon_samples_committed_total",
            "Samples in the steps of the journal; the rate is the line's throughput.",
        )
        samples.follow(lambda: self._total_samples)
        self._seconds = TimeHistogram(
            registry, "andon_step_seconds", "Time from a step's last assignment to its commit."
        )

    def committed(self, step: int, result: StepResult) -> None:
        """Counts a step that is durable."""
        self._total_steps += 1
        if result.overflow:
            self._overflows.inc()
        if late := [part for part in result.contributions if part.late]:
            self._late.inc(len(late))
        self._total_samples += result.samples
        self._seconds.observe(result.seconds, step)
        self._loss.set(result.loss)
        self._accuracy.set(accuracy_of(result.correct, result.samples))
        self._head = step

    def tick(self, status: LineSnapshot) -> None:
        """Sets the gauges to a status."""
        self._head = status.step
        if status.loss is not None:
            self._loss.set(status.loss)
            self._accuracy.set(accuracy_of(status.correct, status.samples))


class KeepingMetrics:
    """The journal's writes, checkpoints, and state on its way to newcomers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers the metrics; nothing was written yet."""
        self._writes = TimeHistogram(
            registry,
            "andon_journal_write_seconds",
            "Time of one write to the journal, one that fails included. A commit waits for it.",
        )
        self._step = Gauge(
            "andon_checkpoint_step",
            "Step of the last checkpoint, as the workers reported it; 0 before the first.",
            registry=registry,
        )
        self._at = OptionalGauge(
            registry,
            "andon_checkpoint_timestamp_seconds",
            "When the service heard of the last checkpoint, in seconds since the Unix epoch; "
            "absent before the first. After a restart it hears of an older one again.",
        )
        self._interval = Gauge(
            "andon_checkpoint_interval_steps",
            "Steps between two checkpoints; 0 if no worker writes any by itself.",
            registry=registry,
        )
        self._missed = Counter(
            "andon_checkpoints_missed_total",
            "Steps that should have had a checkpoint, and had none when the next step began.",
            registry=registry,
        )
        self._setbacks = Counter(
            "andon_state_transfer_failures_total",
            "Times that the line's state did not reach a worker. The log "
            "(`state_not_received`) and `andon status` say which one, and why.",
            registry=registry,
        )

    def wrote(self, seconds: float, step: int | None) -> None:
        """Counts a write to the journal; called on the journal's thread."""
        self._writes.observe(seconds, step)

    def noted(self, effect: NoteCheckpoint | NoteOverdue | NoteSetback, at_unix_s: float) -> None:
        """Counts a checkpoint, one that is missing, or a transfer that failed."""
        match effect:
            case NoteCheckpoint():
                self._step.set(effect.step)
                self._at.set(at_unix_s)
            case NoteOverdue():
                self._missed.inc()
            case NoteSetback():
                self._setbacks.inc()

    def tick(self, status: LineSnapshot) -> None:
        """Sets the gauges to a status."""
        checkpoints = status.checkpoints
        self._interval.set(checkpoints.every if checkpoints is not None else 0)
