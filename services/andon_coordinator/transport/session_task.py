"""What owns the core of sessions: their streams, and the effects on them carried out in order.

It works as `LineTask` does, on the same event loop and the same journal, and is asked by it: there
is one clock, one ticker and one end of both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import get_args

from andon.host.logs import LogEvent
from andon.protocol.reasons import Reason
from andon_coordinator.core import effects
from andon_coordinator.core.session_events import (
    AttendRequest,
    CloseAttendance,
    RankAttended,
    RankStreamEnded,
    RefuseAttendance,
    SaveSession,
    SaveSessionEnd,
    SendFormed,
    ServiceLeaving,
    SessionEffect,
    SessionEvent,
)
from andon_coordinator.core.session_status import SessionSnapshot, session_snapshot
from andon_coordinator.core.sessions import SessionsCore
from andon_coordinator.transport.errors import LineError
from andon_coordinator.transport.journal import JournalEffect
from andon_coordinator.transport.session_messages import SessionMessage
from andon_coordinator.transport.streams import CallStream

__all__ = ["Happened", "RankStream", "SessionTask"]

log = logging.getLogger("andon_coordinator.sessions")

RankStream = CallStream[SessionMessage]
"""One rank's Attend call."""

Happened = Callable[[SessionEvent, Sequence[SessionEffect]], None]
"""Watches what happens to sessions. It is called on the event loop, and must not block."""

_MOST_NEW = 1024
"""Streams that may be open without having attended; with more the oldest of them is ended."""
_SAVES = (SaveSession, SaveSessionEnd, effects.SaveHalt, effects.SaveScalars)
_SENDS = get_args(SessionMessage)


class SessionTask:
    """Owns the core of sessions. Everything here runs on the event loop."""

    def __init__(
        self, core: SessionsCore, *, save: Callable[[JournalEffect], None], flush_s: float
    ) -> None:
        """`save` takes what goes to the journal; a stream that is over has `flush_s` to be read."""
        self._core = core
        self._save = save
        self._flush_s = flush_s
        self._streams: dict[int, RankStream] = {}
        self._last_number = 0
        self._leaving: LineError | None = None

    @property
    def in_use(self) -> bool:
        """Whether the run is one of sessions."""
        return self._core.in_use

    @property
    def streams(self) -> int:
        """How many ranks have an open stream."""
        return len(self._streams)

    def status(self, now: float) -> SessionSnapshot | None:
        """What the sessions are doing; None: the run has none."""
        return session_snapshot(self._core, now)

    def open_stream(self) -> RankStream:
        """A new stream of a rank.

        Raises:
            LineError: the coordinator is going away.
        """
        if self._leaving is not None:
            raise self._leaving
        new = [each for each in self._streams.values() if not each.joined]
        if len(new) >= _MOST_NEW:
            # A peer that has not said who it is must not keep others out.
            text = f"{len(new)} streams are open that did not attend"
            new[0].end(LineError(Reason.TOO_MANY_STREAMS, text))
            del self._streams[new[0].number]
        self._last_number += 1
        stream = RankStream(self._last_number, flush_s=self._flush_s)
        self._streams[stream.number] = stream
        return stream

    def attended(
        self, stream: RankStream, request: AttendRequest, *, trains: bool
    ) -> RankAttended | None:
        """The event of a stream's Attend; None if the stream is over."""
        if stream.over:
            return None
        stream.joined = True
        return RankAttended(stream.number, request, trains)

    def forget(self, stream: RankStream) -> RankStreamEnded | None:
        """Forgets a stream that is over; the event of it if the core knows it."""
        self._streams.pop(stream.number, None)
        return RankStreamEnded(stream.number) if stream.joined else None

    def receive(self, event: SessionEvent, now: float, wall: float) -> Sequence[SessionEffect]:
        """Tells the core what happened, and carries out what follows. Returns what followed."""
        done = self._core.receive(event, now, wall=wall)
        for effect in done:
            _log(effect)
            if isinstance(effect, _SAVES):
                self._save(effect)
            elif not isinstance(effect, effects.RefuseOperator):
                self._on_stream(effect)
        return done

    def close(self, error: LineError, now: float, wall: float) -> None:
        """Ends the session and all streams, and opens no more."""
        if self._leaving is None:
            if error.reason is Reason.SERVICE_LEAVING:
                self.receive(ServiceLeaving(), now, wall)
            self._leaving = error
            for stream in self._streams.values():
                stream.end(error)

    def _on_stream(self, effect: SessionMessage | RefuseAttendance | CloseAttendance) -> None:
        stream = self._streams.get(effect.stream)
        if stream is None:
            return
        match effect:
            case RefuseAttendance():
                stream.end(LineError.of(effect.refusal))
            case CloseAttendance(reason=None):
                stream.end()
            case CloseAttendance(reason=reason) if reason is not None:
                stream.end(LineError(reason, effect.message))
            case _:
                assert isinstance(effect, _SENDS), f"no adapter does {effect}"
                stream.send(effect)


def _log(effect: SessionEffect) -> None:
    match effect:
        case RefuseAttendance():
            refusal = effect.refusal
            reason = str(refusal.reason)
            log.warning(LogEvent("attendance_refused", reason=reason, message=refusal.message))
        case SendFormed(rank=0):
            log.info(LogEvent("session_formed", key=str(effect.key), ranks=len(effect.roster)))
        case SaveSessionEnd(over=None):
            log.info(LogEvent("session_complete", key=str(effect.key), steps=effect.steps))
        case SaveSessionEnd(over=over) if over is not None:
            log.error(
                LogEvent(
                    "session_over",
                    key=str(effect.key),
                    end=over.end.label,
                    culprit=over.culprit,
                    message=over.message,
                )
            )
