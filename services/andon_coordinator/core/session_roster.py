"""The ranks of a session: who waits, who is in it, and what people see of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from andon.protocol.records import Key
from andon.protocol.sessions import RankFault, RankReport
from andon_coordinator.core.session_events import AttendRequest
from andon_coordinator.core.session_words import name_of

__all__ = ["Attended", "Session"]


@dataclass(slots=True)
class Attended:
    """One rank, from Attend to the end of its stream or of its session."""

    stream: int
    request: AttendRequest
    heard_at: float
    report: RankReport = field(default_factory=RankReport)
    exchange_ratio: float = 0.0
    """The part of the time between its last two reports in which a call was open."""
    reported_at: float | None = None
    left: bool = False
    """Whether it ended its part in order."""

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
