"""Attempts: why steps were tried again, and how long the line stood still for it."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter

from andon.host.telemetry import observe, time_histogram
from andon_coordinator.core import effects, events
from andon_coordinator.core.effects import JoinStatus
from andon_coordinator.core.events import FaultKind

__all__ = ["AttemptCause", "AttemptMetrics"]


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


class AttemptMetrics:
    """Attempts, faults, joins, and the pauses that they cause."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers the metrics; every label exists from the start, at 0."""
        self._cause: AttemptCause | None = None
        """What voided the round before the next attempt; None: nothing did."""
        self._broken_at: float | None = None
        """When the first loss since the last commit voided a round; a halt resets it."""
        self._paused_at: float | None = None
        """When the first state transfer since the last assignment began; a halt resets it."""
        attempts = Counter(
            "andon_step_attempts_total",
            "Attempts at steps, by cause: the first one, or what voided the attempt before.",
            ["cause"],
            registry=registry,
        )
        self._attempts = {each: attempts.labels(each.value) for each in AttemptCause}
        faults = Counter(
            "andon_faults_total",
            "Faults that workers reported, by kind. Several workers may report the same one.",
            ["kind"],
            registry=registry,
        )
        self._faults = {each: faults.labels(each.name.lower()) for each in FaultKind}
        joins = Counter(
            "andon_joins_total",
            "Workers that were taken in, by how far they were; a worker whose stream broke joins "
            "again.",
            ["status"],
            registry=registry,
        )
        self._joins = {each: joins.labels(each.name.lower()) for each in JoinStatus}
        self._recovery = time_histogram(
            registry,
            "andon_recovery_seconds",
            "Time from the loss that voided a round to the next commit; halts do not count.",
        )
        self._join_pause = time_histogram(
            registry,
            "andon_join_pause_seconds",
            "Time that the line stood still for the state of newcomers, from one step to the "
            "next; halts do not count.",
        )

    def observe(self, event: events.Event, done: Sequence[effects.Effect], now: float) -> None:
        """Notes what an event broke, before its effects are counted."""
        if isinstance(event, events.FaultReported):
            self._faults[event.fault.kind].inc()
        if any(isinstance(effect, effects.SaveHalt) for effect in done):
            # The line waits for a person now. That time is no recovery and no pause for anybody.
            self._cause, self._broken_at, self._paused_at = AttemptCause.HALT, None, None
        elif isinstance(event, events.ScalarAllReduceArrived | events.WorkRequested):
            pass  # What these void, a script has left: nothing broke.
        elif any(isinstance(effect, effects.SendVoided) for effect in done):
            self._cause = self._cause or _cause_of(event)
            self._broken_at = now if self._broken_at is None else self._broken_at

    def joined(self, status: JoinStatus) -> None:
        """Counts a worker that was taken in."""
        self._joins[status].inc()

    def transfer_began(self, now: float) -> None:
        """State is on its way to a newcomer: the line stands still."""
        if self._paused_at is None:
            self._paused_at = now

    def assigned(self, attempt: int, step: int, now: float) -> None:
        """A round opened: the attempt of this number at a step."""
        if self._paused_at is not None:
            observe(self._join_pause, now - self._paused_at, step)
            self._paused_at = None
        cause = AttemptCause.FIRST if attempt == 0 else self._cause or AttemptCause.OTHER
        self._attempts[cause].inc()
        self._cause = None

    def committed(self, step: int, now: float) -> None:
        """A step is durable: what broke before it is overcome."""
        if self._broken_at is not None:
            observe(self._recovery, now - self._broken_at, step)
            self._broken_at = None


def _cause_of(event: events.Event) -> AttemptCause:
    """Why the next attempt begins, after an event voided the last one."""
    corrupt = events.FaultKind.CORRUPT_CHUNK
    if isinstance(event, events.FaultReported) and event.fault.kind is corrupt:
        return AttemptCause.CORRUPT
    return _CAUSES.get(type(event), AttemptCause.OTHER)
