"""What people see of a run's sessions."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from andon.protocol.halts import HaltEvidence
from andon.protocol.records import Key
from andon.protocol.sessions import RankReport, SessionOver
from andon_coordinator.core.session_events import AttendRequest
from andon_coordinator.core.session_roster import Attended
from andon_coordinator.core.sessions import SessionsCore

__all__ = ["RankSnapshot", "RankState", "SessionSnapshot", "session_snapshot"]


_MOST_NAMED = 16
"""Ranks that a sentence names."""


class RankState(enum.Enum):
    """What a rank does; values are those of `andon.v1.RankState`."""

    WAITING = 1
    """It waits for the others to attend."""
    RUNNING = 2
    """It is in no call."""
    IN_CALL = 3
    LEFT = 4
    OVER = 5
    """It was there when its session ended."""

    @property
    def label(self) -> str:
        """The state as people write it."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSnapshot:
    """One rank."""

    request: AttendRequest
    state: RankState
    report: RankReport
    exchange_ratio: float
    """The part of the time between its last two reports in which a call was open."""
    silent_s: float
    pending_s: float
    """For how long its pending call has been open, now; 0 without one."""

    @property
    def in_words(self) -> str:
        """What it does, for people: its call, for how long, and who is missing."""
        pending = self.report.pending
        if self.state is RankState.WAITING:
            return "waits for the other ranks"
        if self.state is RankState.LEFT:
            return "has left"
        if pending is None:
            return ""
        missing = pending.missing[:_MOST_NAMED]
        named = ", ".join(map(str, missing)) + (
            ", …" if len(pending.missing) > len(missing) else ""
        )
        awaits = f", without {named}" if missing else ""
        return f"{pending}, for {self.pending_s:.1f} s{awaits}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSnapshot:
    """The sessions of a run."""

    key: Key | None
    """The session that goes on; None while ranks are awaited."""
    world_size: int
    awaited: tuple[int, ...]
    ranks: tuple[RankSnapshot, ...]
    """Those that are here; those of the last session if nobody is."""
    age_s: float
    last: SessionOver | None
    """How the session before ended; None if it had no end."""
    formed: int
    halt: HaltEvidence | None
    """The last halt of a session."""

    @property
    def steps(self) -> int:
        """The steps that the ranks have made."""
        return max((each.report.steps for each in self.ranks), default=0)

    @property
    def waiting_for(self) -> str:
        """What keeps the session from being formed, in words that continue "waiting for"."""
        if not self.awaited:
            return ""
        named = self.awaited[:_MOST_NAMED]
        some = ", ".join(map(str, named)) + (", …" if len(self.awaited) > len(named) else "")
        return f"rank{'s' if len(self.awaited) > 1 else ''} {some} of {self.world_size}"


def session_snapshot(core: SessionsCore, now: float) -> SessionSnapshot | None:
    """The sessions at `now`; None if the run has had none, and nobody waits."""
    if not core.in_use:
        return None
    live = core.live
    if live is not None:
        shown, over = live.ranks, False
    elif core.waiting or core.last is None:
        shown, over = core.waiting, False
    else:
        shown, over = core.last.ranks, True
    ranks = tuple(shown[rank] for rank in sorted(shown))
    size = ranks[0].request.world_size if ranks else 0
    waits = live is None and not over
    return SessionSnapshot(
        key=None if live is None else live.key,
        world_size=size,
        awaited=tuple(sorted(set(range(size)) - core.waiting.keys())) if waits else (),
        ranks=tuple(_rank(each, now, waits=waits, over=over) for each in ranks),
        age_s=0.0 if live is None else now - live.began_at,
        last=core.over,
        formed=core.formed,
        halt=core.halt,
    )


def _rank(rank: Attended, now: float, *, waits: bool, over: bool) -> RankSnapshot:
    pending = rank.report.pending
    if waits:
        state = RankState.WAITING
    elif rank.left:
        state = RankState.LEFT
    elif over:
        state = RankState.OVER
    else:
        state = RankState.RUNNING if pending is None else RankState.IN_CALL
    since_s = 0.0 if rank.reported_at is None or over else now - rank.reported_at
    return RankSnapshot(
        request=rank.request,
        state=state,
        report=rank.report,
        exchange_ratio=rank.exchange_ratio,
        silent_s=0.0 if waits or over else max(0.0, now - rank.heard_at),
        pending_s=0.0 if pending is None else pending.open_s + since_s,
    )
