"""The ranks of a session: who waits, who is in it, and what people see of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from andon.protocol.records import Key
from andon.protocol.sessions import RankFault, RankReport
from andon_coordinator.core.session_events import AttendRequest
from andon_coordinator.core.session_words import name_of

__all__ = ["Attended", "Session"]


_MEASURED_S = 0.5
"""A rank's part of the time in calls is measured over no less."""


@dataclass(slots=True)
class Attended:
    """One rank, from Attend to the end of its stream or of its session."""

    stream: int
    request: AttendRequest
    heard_at: float
    report: RankReport = field(default_factory=RankReport)
    exchange_ratio: float = 0.0
    """The part of the time between two of its reports in which a call was open."""
    measured: tuple[float, float] | None = None
    """When that was measured last, and how long calls had been open until then."""
    reported_at: float | None = None
    left: bool = False
    """Whether it ended its part in order."""

    def measure(self, exchange_s: float, now: float) -> None:
        """Takes how long calls have been open; reports that follow at once say nothing new."""
        if self.measured is not None:
            at, spent_s = self.measured
            if now - at < _MEASURED_S:
                return
            self.exchange_ratio = min(1.0, max(0.0, (exchange_s - spent_s) / (now - at)))
        self.measured = now, exchange_s

    @property
    def name(self) -> str:
        """The rank as people write it."""
        return name_of(self.request.rank, self.request.node_id)


@dataclass(slots=True)
class Session:
    """Ranks under one key."""

    key: Key
    ranks: dict[int, Attended]
    began_at: float
    lease_s: float
    report_s: float
    accusation: tuple[RankFault, int, float] | None = None
    """What waits for the end of the accused's stream, who reported it, and until when."""

    @property
    def present(self) -> Iterator[Attended]:
        """The ranks that have not left."""
        return (each for each in self.ranks.values() if not each.left)

    @property
    def steps(self) -> int:
        """The steps that its ranks have made, as far as they have reported."""
        return max(each.report.steps for each in self.ranks.values())
