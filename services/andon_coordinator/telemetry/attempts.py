"""Attempts: why steps were tried again, and how long the line stood still for it."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter

from andon.host.telemetry import TableCounter, TimeHistogram
from andon_coordinator.core import effects, events
from andon_coordinator.core.events import FaultKind
from andon_coordinator.core.join_answers import JoinStatus

__all__ = ["AttemptCause", "AttemptMetrics"]


class AttemptCause(enum.Enum):
    """Why an attempt began: it is the first of its step, or what voided the one before."""

    __hash__ = object.__hash__  # See `Encoding`.

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
        self._attempts = TableCounter(
            registry,
            "andon_step_attempts_total",
            "Attempts at steps, by cause: the first one, or what voided the attempt before.",
            ["cause"],
            {each: (each.value,) for each in AttemptCause},
        )
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
        self._recovery = TimeHistogram(
            registry,
            "andon_recovery_seconds",
            "Time from the loss that voided a round to the next commit; halts do not count.",
        )
        self._join_pause = TimeHistogram(
            registry,
            "andon_join_pause_seconds",
            "Time that the line stood still for the state of newcomers, from one step to the "
            "next; halts do not count.",
        )

    def faulted(self, kind: FaultKind) -> None:
        """Counts a fault that a worker reported."""
        self._faults[kind].inc()

    def observe(self, event: events.Event, done: Sequence[effects.Effect], now: float) -> None:
        """Notes what an event broke, before its effects are counted."""
        kinds = {type(effect) for effect in done}
        if effects.SaveHalt in kinds:
            # The line waits for a person now. That time is no recovery and no pause for anybody.
            self._cause, self._broken_at, self._paused_at = AttemptCause.HALT, None, None
        elif effects.SendVoided in kinds and not isinstance(
            event, events.ScalarAllReduceArrived | events.WorkRequested
        ):  # What those two void, a script has left: nothing broke.
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
            self._join_pause.observe(now - self._paused_at, step)
            self._paused_at = None
        cause = AttemptCause.FIRST if attempt == 0 else self._cause or AttemptCause.OTHER
        self._attempts.totals[cause] += 1
        self._cause = None

    def committed(self, step: int, now: float) -> None:
        """A step is durable: what broke before it is overcome."""
        if self._broken_at is not None:
            self._recovery.observe(now - self._broken_at, step)
            self._broken_at = None


def _cause_of(event: events.Event) -> AttemptCause:
    """Why the next attempt begins, after an event voided the last one."""
    corrupt = events.FaultKind.CORRUPT_CHUNK
    if isinstance(event, events.FaultReported) and event.fault.kind is corrupt:
        return AttemptCause.CORRUPT
    return _CAUSES.get(type(event), AttemptCause.OTHER)
