"""What collectives need of a session's control stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from andon.protocol.peer_calls import PendingCall
from andon.protocol.sessions import RankFault, SessionFormed, SessionOver

__all__ = ["Attendance", "RankReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What a rank did since the session began, and what it does now."""

    steps: int = 0
    """Backward passes that exchanged something."""
    exchange_s: float = 0.0
    """For how long calls were open, in seconds."""
    bytes: int = 0
    """Bytes of the inputs of all calls."""
    calls: int = 0
    """Calls that have ended."""
    pending: PendingCall | None = None
    """The call that has been open for longest."""
    overflows: int = 0
    """Steps whose gradients overflowed, where a gradient scaler expects that."""
    numbers: tuple[tuple[str, int, float], ...] = field(default=())
    """What the script logged since the last report: name, step, value."""


class Attendance(Protocol):
    """A session that was formed. Any thread may call it; nothing blocks."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def formed(self) -> SessionFormed:
        """The session's terms."""

    @property
    def over(self) -> SessionOver | None:
        """Why the session is over; None while it goes on."""

    def fault(self, fault: RankFault) -> None:
        """Tells the coordinator why the session can't go on. Only the first one counts."""

    def watch(self, on_over: Callable[[SessionOver], None]) -> None:
        """Has `on_over` called once the session is over; at once if it is."""

    def report_from(self, source: Callable[[], RankReport]) -> None:
        """Where reports come from, from now on. `source` is called on the session's thread."""
