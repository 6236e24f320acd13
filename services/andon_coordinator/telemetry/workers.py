"""The workers' metrics at the service: who is here, who holds the others up or learns, who went.

`{worker}` is a worker's id, a slot below `max_workers`. A series of a slot exists while a worker is
live in it, and no longer: a number that stays would be taken for that of a worker which is here.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary

from andon.host.telemetry import TimeHistogram
from andon_coordinator.core.effects import (
    AcceptJoin,
    NoteCaughtUp,
    NoteNotice,
    NoteSlow,
    NoteSuspected,
    SaveDeparture,
)
from andon_coordinator.core.events import LeaveReason
from andon_coordinator.core.eviction import SlowStep
from andon_coordinator.core.status import LineSnapshot

__all__ = ["DepartureMetrics", "LearningMetrics", "WorkerGauges"]

_LOST, _DROPPED = "lost", "dropped"


class WorkerGauges:
    """What is known of each live worker, and how many there are."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers the metrics; no worker is here."""

        def gauge(name: str, documentation: str) -> Gauge:
            return Gauge(name, documentation, ["worker"], registry=registry)

        # Finding a series by its labels costs more than setting it, so the series are kept.
        self._here: dict[str, Summary] = {}
        """The count of the waiting of each worker that is here."""
        self._gauged: dict[str, list[tuple[str, Gauge]]] = {}
        """All gauges of each worker that was here at the last tick, with the fields they show."""
        self._workers = Gauge(
            "andon_workers",
            "Workers on the line (live), in its round (participating), and those that get the "
            "line's state while it trains (learning).",
            ["state"],
            registry=registry,
        )
        for label in ("live", "participating", "learning"):
            self._workers.labels(label).set(0)
        self._expected = Gauge(
            "andon_workers_expected",
            "Workers that the line waits for at first.",
            registry=registry,
        )
        self._reducers = Gauge(
            "andon_reducers",
            "Reducers that share the model: the coordinator's own, and those that registered.",
            registry=registry,
        )
        self._reducers_expected = Gauge(
            "andon_reducers_expected",
            "Reducers that the line waits for at first.",
            registry=registry,
        )
        self._waits = Summary(
            "andon_worker_wait_seconds",
            "Time that a live worker waited for averages in committed steps. The worker that "
            "waits least holds the others up.",
            ["worker"],
            registry=registry,
        )
        self._gauges: Mapping[str, Gauge] = {
            "waiting_ratio": gauge(
                "andon_worker_wait_ratio",
                "Part of its last step that a live worker waited for averages, from 0 to 1.",
            ),
            "samples_per_second": gauge(
                "andon_worker_samples_per_second",
                "Samples of a live worker's last step, by the time that the step took it.",
            ),
            "share": gauge(
                "andon_worker_share_ratio",
                "Part of the last step's positions that a live worker had, from 0 to 1.",
            ),
            "micro_batches": gauge(
                "andon_worker_micro_batches",
                "Micro-batches that a live worker was told to make of its positions, as in a "
                "cadence; 0 leaves it to the worker.",
            ),
            "steps_behind": gauge(
                "andon_worker_steps_behind",
                "Committed steps that a live worker still has to make up, as far as the service "
                "knows; 0 for one that trains.",
            ),
            "patience_s": gauge(
                "andon_worker_patience_seconds",
                "Time that a live worker may be silent while a round waits for it: learnt from how "
                "fast it answers, longer after each mistake, at most the lease.",
            ),
            "heartbeat_age_s": gauge(
                "andon_heartbeat_age_seconds",
                "Time since the last sign of life of a live worker.",
            ),
        }
        """By the field of `WorkerSnapshot` that each one shows."""

    def joined(self, worker: int) -> None:
        """A worker is here."""
        self._here[str(worker)] = self._waits.labels(str(worker))

    def waited(self, worker: int, seconds: float) -> None:
        """Counts how long a worker waited in a committed step."""
        # Only of those that are here: whoever went away after its report is not shown again.
        if (waits := self._here.get(str(worker))) is not None:
            waits.observe(seconds)

    def tick(self, status: LineSnapshot) -> None:
        """Sets the gauges to a status, and forgets who is gone."""
        self._workers.labels("live").set(status.live)
        self._workers.labels("participating").set(status.participating)
        learning = sum(each.learns and each.live for each in status.workers)
        self._workers.labels("learning").set(learning)
        self._expected.set(status.expect_workers)
        self._reducers.set(len(status.reducers))
        self._reducers_expected.set(status.expect_reducers)
        live = {str(each.worker): each for each in status.workers if each.live}
        for gone in self._here.keys() - live.keys():
            self._waits.remove(gone)
            del self._here[gone]
        for gone in self._gauged.keys() - live.keys():
            for gauge in self._gauges.values():
                gauge.remove(gone)
            del self._gauged[gone]
        for name, worker in live.items():
            if name not in self._here:
                self._here[name] = self._waits.labels(name)
            if name not in self._gauged:
                self._gauged[name] = [
                    (field, gauge.labels(name)) for field, gauge in self._gauges.items()
                ]
            for field, series in self._gauged[name]:
                series.set(getattr(worker, field))


class LearningMetrics:
    """Workers that got the line's state while it trained, and what that cost the others."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers the metrics; nobody has learnt anything."""
        self._took = TimeHistogram(
            registry,
            "andon_learning_seconds",
            "Time that a worker took to learn the line's state while the line trained; the count "
            "is that of workers that arrived so.",
        )
        self._waited = Counter(
            "andon_learning_wait_seconds_total",
            "Time that rounds opened later for workers that were about to arrive.",
            registry=registry,
        )

    def caught_up(self, effect: NoteCaughtUp) -> None:
        """Counts a worker that is in sync."""
        if effect.learnt:
            self._took.observe(effect.seconds)
            self._waited.inc(effect.waited_s)


class DepartureMetrics:
    """Counts workers that went, by why."""

    def __init__(self, registry: CollectorRegistry, before: Mapping[str, int]) -> None:
        """Registers the counter; it begins at what the journal holds, by label."""
        departures = Counter(
            "andon_departures_total",
            "Workers that went, by reason: lost (nobody knows why), dropped (by a person), or why "
            "they left. Counted since the run began.",
            ["reason"],
            registry=registry,
        )
        names = [each.name.lower() for each in LeaveReason]
        self._departures = {name: departures.labels(name) for name in (*names, _LOST, _DROPPED)}
        self._stopped = Counter(
            "andon_workers_stopped_total",
            "Workers that the line went on without at once, because their process was stopped.",
            registry=registry,
        )
        self._suspected = Counter(
            "andon_workers_suspected_total",
            "Workers that the line went on without at once, because they did not answer while a "
            "round waited for them.",
            registry=registry,
        )
        self._there = Counter(
            "andon_workers_suspected_wrongly_total",
            "Suspected workers that came back within a lease: it would have been enough to wait.",
            registry=registry,
        )
        self._notices = Counter(
            "andon_notices_total",
            "Workers that said that their machine was about to go.",
            registry=registry,
        )
        self._evicted = Counter(
            "andon_evictions_total",
            "Workers that the line does without because they were slow for long: they follow it "
            "and compute nothing.",
            registry=registry,
        )
        for name, counter in self._departures.items():
            counter.inc(before.get(name, 0))

    def went(self, effect: SaveDeparture, *, stopped: bool) -> None:
        """Counts one; `stopped` if it went because its process was stopped."""
        without_reason = _DROPPED if effect.dropped else _LOST
        reason = without_reason if effect.reason is None else effect.reason.name.lower()
        self._departures[reason].inc()
        if stopped:
            self._stopped.inc()

    def noted(self, effect: NoteSuspected | NoteNotice | NoteSlow) -> None:
        """Counts one that does not answer, gave notice, or follows because it is slow."""
        match effect:
            case NoteSuspected():
                self._suspected.inc()
            case NoteNotice():
                self._notices.inc()
            case NoteSlow():
                self._evicted.inc(effect.what is SlowStep.FOLLOWS)

    def joined(self, effect: AcceptJoin) -> None:
        """Counts one that was suspected by mistake."""
        self._there.inc(effect.mistaken_s is not None)
