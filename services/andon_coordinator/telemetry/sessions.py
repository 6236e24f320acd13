"""The metrics of sessions: what each rank exchanged, the calls that are open, and how they ended.

`{rank}` is a rank of the run's sessions, below their size. Its counters go on over sessions, and
its gauges are there as long as a session is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from andon.protocol.sessions import RankReport, SessionEnd
from andon_coordinator.core.session_events import (
    RankReported,
    SaveSessionEnd,
    SendFormed,
    SendReportAnswer,
    SessionEffect,
    SessionEvent,
)

__all__ = ["SessionMetrics"]

_IN_ORDER = "in_order"


class SessionMetrics:
    """Counts what ranks report, and how sessions end."""

    def __init__(self, registry: CollectorRegistry, ended: Mapping[str, int]) -> None:
        """Registers the metrics; `ended` is how many sessions the journal has, by their end."""
        causes = Counter(
            "andon_sessions_ended_total",
            "Sessions of ranks that ended, by why; `in_order` if all ranks left. Counted since the "
            "run began.",
            ["cause"],
            registry=registry,
        )
        names = [_IN_ORDER, *(each.label for each in SessionEnd)]
        self._ended = {name: causes.labels(name) for name in names}
        for name, number in ended.items():
            self._ended[name.lower() or _IN_ORDER].inc(number)
        self._ranks = Gauge(
            "andon_session_ranks",
            "Ranks of the session that goes on; 0 while there is none.",
            registry=registry,
        )

        def counter(name: str, documentation: str) -> Counter:
            return Counter(name, documentation, ["rank"], registry=registry)

        self._counters: Mapping[str, Counter] = {
            "steps": counter(
                "andon_rank_steps_total",
                "Backward passes of a rank that exchanged something.",
            ),
            "exchange_s": counter(
                "andon_rank_exchange_seconds_total",
                "Time in which a rank had a call open.",
            ),
            "bytes": counter(
                "andon_rank_call_bytes_total",
                "Bytes of the inputs of a rank's calls.",
            ),
            "calls": counter(
                "andon_rank_calls_total",
                "Calls of a rank that have ended.",
            ),
            "overflows": counter(
                "andon_rank_overflows_total",
                "Steps of a rank whose scaled gradients overflowed, where a gradient scaler "
                "expects that.",
            ),
        }
        """By the field of `RankReport` that each one counts."""
        self._open = Gauge(
            "andon_rank_call_open_seconds",
            "Time that a rank's oldest call had been open when it last reported; 0 in none.",
            ["rank"],
            registry=registry,
        )
        self._reports: dict[int, tuple[str, RankReport]] = {}
        """The rank of each stream of the live session, and its last report."""

    def happened(self, event: SessionEvent, done: Sequence[SessionEffect]) -> None:
        """Counts an event and its effects."""
        answered = any(isinstance(each, SendReportAnswer) for each in done)
        if isinstance(event, RankReported) and answered:
            self._reported(event)
        for effect in done:
            match effect:
                case SendFormed():
                    rank = str(effect.rank)
                    self._reports[effect.stream] = rank, RankReport()
                    self._ranks.set(len(self._reports))
                case SaveSessionEnd(over=over):
                    self._ended[_IN_ORDER if over is None else over.end.label].inc()
                    self._forget()
                case _:
                    pass

    def _reported(self, event: RankReported) -> None:
        rank, before = self._reports.get(event.stream, ("", RankReport()))
        if not rank:
            return
        for field, counter in self._counters.items():
            # A report counts from the session's beginning. What goes back is the rank's mistake.
            counter.labels(rank).inc(max(0, getattr(event.report, field) - getattr(before, field)))
        pending = event.report.pending
        self._open.labels(rank).set(0.0 if pending is None else pending.open_s)
        self._reports[event.stream] = rank, event.report

    def _forget(self) -> None:
        self._open.clear()
        self._reports.clear()
        self._ranks.set(0)
