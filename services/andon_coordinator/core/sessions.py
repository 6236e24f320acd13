"""The core of sessions: a roster of fixed size under one key, and one end with its culprit.

Theory of operation
===================

Ranks attend, each on a stream of its own. Once all of them wait, the core draws a key and has the
session saved. It names the key to nobody before SessionSaved: a coordinator that restarts must not
give it to another session. If a rank goes away meanwhile, that key is used up, and the others wait
on.

A session has one end. The first event that ends it decides who is the culprit, and everything that
follows from that end (lanes that break, streams that close, calls that fail) meets no session any
more. Only the accusations of `ACCUSATIONS` wait: a rank that is killed breaks its lanes and its
stream at once, and what others see of the lanes may be read first.

A rank whose stream ended is told nothing. All others get SendOver and the end of their streams, so
no stream outlives its session.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from andon.protocol.halts import HaltEvidence
from andon.protocol.reasons import Reason
from andon.protocol.records import Key
from andon.protocol.run_settings import Liveness
from andon.protocol.scalars import Scalar, ScalarNames
from andon.protocol.sessions import (
    ACCUSATIONS,
    GRACE_S,
    SILENT_LEASES,
    RankFault,
    SessionEnd,
    SessionOver,
)
from andon_coordinator.core.chain import Keys
from andon_coordinator.core.effects import RefuseOperator, SaveHalt, SaveScalars
from andon_coordinator.core.events import (
    CordPulled,
    SessionNotSaved,
    SessionSaved,
    TimePassed,
)
from andon_coordinator.core.join_answers import JoinRefusal
from andon_coordinator.core.session_checks import refusal_of
from andon_coordinator.core.session_ends import Ending, difference, evidence_of, over_of
from andon_coordinator.core.session_events import (
    AttendRequest,
    CloseAttendance,
    RankAttended,
    RankFaulted,
    RankLeft,
    RankReported,
    RankStreamEnded,
    RefuseAttendance,
    SaveSession,
    SaveSessionEnd,
    SendFormed,
    SendOver,
    SendReportAnswer,
    ServiceLeaving,
    SessionEffect,
    SessionEvent,
)
from andon_coordinator.core.session_roster import Attended, Session

__all__ = ["SessionsCore"]

_SILENT = "was not heard for {:.1f} s: it is frozen, or cut off"
_HELD = "has not reported for {:.1f} s, though its process answers: something holds its interpreter"
_LEAVING = "the coordinator is going away: attend again"


class SessionsCore:
    """The sessions of one run; see the theory of operation above."""

    def __init__(
        self,
        *,
        keys: Keys,
        lease_s: float = Liveness().lease_s,
        next_halt_id: int = 1,
        formed: int = 0,
        scalar_names: ScalarNames | None = None,
    ) -> None:
        """Starts with no ranks.

        Args:
            keys: draws keys of a term that is durable.
            lease_s: a rank whose process answers no ping for so long loses its stream.
            next_halt_id: of the first halt.
            formed: how many sessions the journal has.
            scalar_names: names of numbers that scripts logged before.
        """
        self._keys = keys
        self._lease_s = lease_s
        self._next_halt_id = next_halt_id
        self._names = scalar_names or ScalarNames()
        self._streams: dict[int, Attended] = {}
        """Every rank that waits or is in the live session, by its stream."""
        self._forming: tuple[Key, tuple[int, ...]] | None = None
        """The session that is being saved, and the streams of its ranks in order."""
        self._now = self._wall = 0.0
        self._effects: list[SessionEffect] = []
        self.waiting: dict[int, Attended] = {}
        """Those that wait for the next session, by rank."""
        self.live: Session | None = None
        """The session that goes on."""
        self.last: Session | None = None
        """The session before."""
        self.over: SessionOver | None = None
        """How that one ended; None if it had no end."""
        self.halt: HaltEvidence | None = None
        """The last halt of a session, of this process."""
        self.formed = formed
        """How many sessions the run has had."""

    @property
    def in_use(self) -> bool:
        """Whether the run is one of sessions: its workers can't use Train."""
        return bool(self.formed or self.waiting or self.live is not None or self._forming)

    def receive(self, event: SessionEvent, now: float, *, wall: float = 0.0) -> list[SessionEffect]:
        """What has to be done, in this order, because `event` happened.

        Events of streams that are no rank's have no effect, and neither have those of a key that
        is not the live session's.
        """
        self._now, self._wall, self._effects = now, wall, []
        _RULES[type(event)](self, event)
        self._look_at_clock()
        self._form()
        return self._effects

    # -------------------------------------------------------------------------- attending

    def _attended(self, event: RankAttended) -> None:
        request, stream = event.request, event.stream
        refusal = self._refusal(event)
        if refusal is not None:
            self._emit(RefuseAttendance(stream, refusal))
            return
        present = self.live.ranks.get(request.rank) if self.live is not None else None
        if present is not None and not present.left:
            self._take_over(present, request)
        older = self.waiting.get(request.rank)
        if older is not None:  # Of the same process: `_refusal` looked.
            text = "the rank attended again on a newer stream"
            self._forget(older)
            self._emit(CloseAttendance(older.stream, Reason.REJOIN_NEEDED, text))
        self.waiting[request.rank] = self._streams[stream] = Attended(stream, request, self._now)

    def _refusal(self, event: RankAttended) -> JoinRefusal | None:
        others = self.waiting or (self.live.ranks if self.live is not None else {})
        sizes = (each.request.world_size for each in others.values())
        older = self.waiting.get(event.request.rank)
        return refusal_of(
            event.request,
            plausible=self._keys.is_plausible(event.request.greatest_term, self._wall),
            trains=event.trains,
            world_size=next(sizes, None),
            waits=None if older is None else older.request,
        )

    def _take_over(self, present: Attended, request: AttendRequest) -> None:
        """Ends the live session: a newcomer has the rank of one of its ranks."""
        assert self.live is not None
        if present.request.incarnation == request.incarnation:
            # A stream is never resumed. Its process would not attend anew with the older one open.
            self._lose(present, "attended anew: its stream was broken")
            return
        where = f" on {request.node_id}" if request.node_id else ""
        text = f"was replaced: another process{where} attends with its rank"
        self._end(self.live, Ending(SessionEnd.REPLACED, culprit=present, what=text))

    def _form(self) -> None:
        """Has a session saved once all its ranks wait."""
        if self.live is not None or self._forming is not None or not self.waiting:
            return
        ranks = sorted(self.waiting)
        first = self.waiting[ranks[0]].request
        if len(ranks) < first.world_size:
            return
        roster = tuple(self.waiting[rank] for rank in ranks)
        greatest = max(each.request.greatest_term for each in roster)
        if greatest > self._keys.term:
            # A coordinator that lost its journal. SaveSession makes the term durable, and nobody
            # hears of a key before that.
            self._keys.start_term_above(greatest, self._wall)
            self._keys.saved = True
        key = self._keys.draw()
        self._forming = key, tuple(each.stream for each in roster)
        self._emit(SaveSession(key, tuple(each.request for each in roster)))

    def _saved(self, event: SessionSaved) -> None:
        if self._forming is None or self._forming[0] != event.key:
            return  # Given up meanwhile: a rank went away.
        key, streams = self._forming
        roster = [self._streams[stream] for stream in streams]
        self._forming, self.waiting = None, {}
        slower = Liveness.of_line(self._lease_s, len(roster)).heartbeat_s
        lease_s = max(self._lease_s, 2 * slower)
        for each in roster:
            each.heard_at = self._now
        self.formed += 1
        self.live = Session(
            key=key,
            ranks={each.request.rank: each for each in roster},
            began_at=self._now,
            lease_s=lease_s,
            report_s=slower,
        )
        requests = tuple(each.request for each in roster)
        for each in roster:
            self._emit(
                SendFormed(
                    stream=each.stream,
                    rank=each.request.rank,
                    key=key,
                    roster=requests,
                    capabilities=frozenset.intersection(*(r.capabilities for r in requests)),
                    lease_s=lease_s,
                    report_s=slower,
                )
            )

    def _not_saved(self, event: SessionNotSaved) -> None:
        if self._forming is None or self._forming[0] != event.key:
            return
        self._forming = None
        text = f"the coordinator can't write its journal: {event.why}"
        self._dismiss(Reason.INTERNAL, text)

    # ------------------------------------------------------------------------- live ranks

    def _reported(self, event: RankReported) -> None:
        found = self._heard(event.stream, event.key)
        if found is None:
            return
        session, rank = found
        rank.measure(event.report.exchange_s, self._now)
        rank.report, rank.reported_at = event.report, self._now
        self._emit(SendReportAnswer(rank.stream, event.number))
        self._save_numbers(rank)
        self._compare_calls(session, rank)

    def _save_numbers(self, rank: Attended) -> None:
        scalars = tuple(
            Scalar(name, step, value)
            for name, step, value in rank.report.numbers
            if self._names.take(name)
        )
        if scalars:
            self._emit(SaveScalars(rank.request.rank, scalars))

    def _compare_calls(self, session: Session, rank: Attended) -> None:
        """Ends the session if another rank is in the same call, and made it differently."""
        fault = difference(session, rank)
        if fault is not None:
            self._end(session, Ending(SessionEnd.CALLS_DIFFER, what=fault.message, fault=fault))

    def _faulted(self, event: RankFaulted) -> None:
        found = self._heard(event.stream, event.key)
        if found is None:
            return
        session, reporter = found
        fault = event.fault
        if fault.culprit is not None and fault.culprit not in session.ranks:
            self._break_off(reporter, f"rank {fault.culprit}, which it accuses, is not there")
            return
        accused = None if fault.culprit is None else session.ranks[fault.culprit]
        if fault.end in ACCUSATIONS and accused not in (None, reporter):
            assert accused is not None
            if not accused.left:
                waits = fault, reporter.request.rank, self._now + GRACE_S
                session.accusation = session.accusation or waits
                return
        self._end_by(session, fault, reporter)

    def _end_by(self, session: Session, fault: RankFault, reporter: Attended) -> None:
        culprit = None if fault.culprit is None else session.ranks[fault.culprit]
        self._end(session, Ending(fault.end, culprit=culprit, fault=fault, reporter=reporter))

    def _left(self, event: RankLeft) -> None:
        rank = self._streams.get(event.stream)
        if rank is None:
            return
        session = self._session_of(rank)
        if session is None:
            self._forget(rank)
            self._emit(CloseAttendance(rank.stream))
            return
        if event.key is not None and event.key != session.key:
            return
        others = any(each is not rank for each in session.present)
        if others and not (event.done and event.key is not None):
            self._lose(rank, "left before its script was done")
            return
        rank.left = True
        self._forget(rank)
        self._emit(CloseAttendance(rank.stream))
        if not others:
            self.live, self.last, self.over = None, session, None
            self._emit(SaveSessionEnd(session.key, None, session.steps))
        elif session.accusation is not None and session.accusation[0].culprit == rank.request.rank:
            # It went in order, so no end of its stream will explain what was seen.
            self._end_by(session, session.accusation[0], session.ranks[session.accusation[1]])

    def _stream_ended(self, event: RankStreamEnded) -> None:
        rank = self._streams.get(event.stream)
        if rank is None:
            return
        self._forget(rank)
        session, silent_s = self._session_of(rank), self._now - rank.heard_at
        if session is not None:
            # Pings may end the connection of a frozen process before its lease is over.
            frozen = silent_s > 1.5 * session.report_s
            what = _SILENT.format(silent_s) if frozen else "is gone: its connection ended"
            self._lose(rank, what)

    # --------------------------------------------------------------------------------- ends

    def _lose(self, rank: Attended, what: str) -> None:
        session = self._session_of(rank)
        assert session is not None
        self._end(session, Ending(SessionEnd.RANK_LOST, culprit=rank, what=what))

    def _break_off(self, rank: Attended, why: str) -> None:
        """Ends the stream of a rank that breaks a MUST, and with it its session."""
        session = self._session_of(rank)
        assert session is not None
        # Before the end, which tells all whose streams are open and closes them.
        self._forget(rank)
        self._emit(CloseAttendance(rank.stream, Reason.INVALID_MESSAGE, why))
        what = f"broke the protocol: {why}"
        self._end(session, Ending(SessionEnd.RANK_LOST, culprit=rank, what=what))

    def _end(self, session: Session, ending: Ending) -> None:
        """Ends the live session for all its ranks."""
        assert self.live is session, "a session has one end"
        self.live, self.last = None, session
        halt_id = 0
        if ending.end.is_halt:
            halt_id, self._next_halt_id = self._next_halt_id, self._next_halt_id + 1
        self.over = over = over_of(session, ending, halt_id)
        # Before the journal: no weight depends on it, and the ranks wait.
        for each in session.present:
            if self._streams.get(each.stream) is each:
                self._emit(SendOver(each.stream, over))
                replaced = over.end is SessionEnd.REPLACED and each is ending.culprit
                reason = Reason.REJOIN_NEEDED if replaced else None
                self._emit(CloseAttendance(each.stream, reason, over.message if replaced else ""))
                self._forget(each)
        self._emit(SaveSessionEnd(session.key, over, session.steps))
        if halt_id:
            self.halt = evidence_of(session, over, self._wall)
            self._emit(SaveHalt(self.halt))

    def _look_at_clock(self) -> None:
        session = self.live
        if session is None:
            return
        # Silence first: if the accused is silent, that is why.
        silent = min(session.present, key=lambda each: (each.heard_at, each.request.rank))
        silent_s = self._now - silent.heard_at
        if silent_s > SILENT_LEASES * session.lease_s:
            self._lose(silent, _HELD.format(silent_s))
        elif session.accusation is not None and self._now >= session.accusation[2]:
            fault, reporter, _ = session.accusation
            self._end_by(session, fault, session.ranks[reporter])

    def _cord_pulled(self, event: CordPulled) -> None:
        if self.live is None:
            text = "no session goes on: there is nothing to halt"
            self._emit(RefuseOperator(text))
            return
        why = f": {event.reason}" if event.reason else ""
        text = f"{event.operator or 'an operator'} pulled the cord{why}"
        self._end(self.live, Ending(SessionEnd.OPERATOR, what=text))

    def _service_leaving(self, _: ServiceLeaving) -> None:
        if self.live is not None:
            what = "the service goes away"
            self._end(self.live, Ending(SessionEnd.SERVICE_LEAVING, what=what))
        self._forming = None
        self._dismiss(Reason.SERVICE_LEAVING, _LEAVING)

    def _dismiss(self, reason: Reason, text: str) -> None:
        """Ends the streams of all that wait."""
        for each in list(self.waiting.values()):
            self._forget(each)
            self._emit(CloseAttendance(each.stream, reason, text))

    # ----------------------------------------------------------------------------- shared

    def _heard(self, stream: int, key: Key | None) -> tuple[Session, Attended] | None:
        """Who sent something of the live session; None if it is of another one."""
        rank = self._streams.get(stream)
        session = None if rank is None else self._session_of(rank)
        if rank is None or session is None or session.key != key:
            return None
        rank.heard_at = self._now
        return session, rank

    def _session_of(self, rank: Attended) -> Session | None:
        """The live session, if this rank is in it."""
        live = self.live
        return live if live is not None and live.ranks.get(rank.request.rank) is rank else None

    def _forget(self, rank: Attended) -> None:
        """Nothing more that comes on this rank's stream counts."""
        self._streams.pop(rank.stream, None)
        if self.waiting.get(rank.request.rank) is rank:
            del self.waiting[rank.request.rank]
        if self._forming is not None and rank.stream in self._forming[1]:
            # Its key is used up. It is saved as a session that lost this rank.
            key, self._forming = self._forming[0], None
            over = SessionOver(
                key=key,
                end=SessionEnd.RANK_LOST,
                culprit=rank.request.rank,
                culprit_node=rank.request.node_id,
                message=f"{rank.name} went away before the session was formed",
            )
            self._emit(SaveSessionEnd(key, over))

    def _emit(self, effect: SessionEffect) -> None:
        self._effects.append(effect)


# Any: each rule takes the event that it is listed under.
_RULES: dict[type[Any], Callable[[SessionsCore, Any], None]] = {
    RankAttended: SessionsCore._attended,
    RankReported: SessionsCore._reported,
    RankFaulted: SessionsCore._faulted,
    RankLeft: SessionsCore._left,
    RankStreamEnded: SessionsCore._stream_ended,
    SessionSaved: SessionsCore._saved,
    SessionNotSaved: SessionsCore._not_saved,
    CordPulled: SessionsCore._cord_pulled,
    ServiceLeaving: SessionsCore._service_leaving,
    TimePassed: lambda core, event: None,
}
