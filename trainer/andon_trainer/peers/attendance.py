"""What collectives need of a session's control stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from andon.protocol.sessions import RankFault, RankReport, SessionFormed, SessionOver

__all__ = ["Attendance", "RankReport"]


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
