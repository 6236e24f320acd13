"""The announcer: tells the line's reducers what they may serve, before a worker hears of it.

A session token says who a worker is. It does not say what the line decides: which rounds are open,
who is an end of a transfer, who was dropped. So every effect passes here before it is carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from andon.protocol.announcements import (
    Announcement,
    RoundOpening,
    Session,
    SessionsRevoked,
    TransferOpening,
)
from andon.protocol.records import Key
from andon_coordinator.core import effects
from andon_coordinator.core.transfers import TransferRole
from andon_coordinator.transport.outgoing import CommitAndAssign
from andon_coordinator.transport.streams import ReducerStream, Streams

__all__ = ["Announcer"]


class Announcer:
    """Derives announcements from effects, and remembers what a new reducer has to know."""

    def __init__(
        self,
        own: Callable[[Announcement], None] | None,
        *,
        term: int,
        revoked: Iterable[int],
    ) -> None:
        """Announces to the reducer of this process by `own`; None: there is none.

        The sessions that workers in the slots `revoked` had before this `term` are over. Whoever
        has such a slot now joins again anyway, and gets a session of this term.
        """
        self._own = own
        self._round: RoundOpening | None = None
        self._sessions: dict[int, Session] = {}
        """The newest session of each worker."""
        self._worker_of: dict[int, int] = {}
        """By stream."""
        self._revoked: dict[int, SessionsRevoked] = {}
        for worker in revoked:
            self._revoked[worker] = SessionsRevoked(Session(worker, (term, 0)))
            if own is not None:
                own(self._revoked[worker])

    def before(
        self, effect: effects.Effect | CommitAndAssign, streams: Streams, *, term: int
    ) -> None:
        """Announces what an effect, which is carried out next, lets workers do."""
        match effect:
            case (
                effects.Assign(assignment=work)
                | CommitAndAssign(assign=effects.Assign(assignment=work))
            ):
                self._open_round(work.key, streams)
            case effects.AcceptJoin():
                self._accept(effect, term)
            case effects.SendTransfer(checkpoint=None, role=TransferRole.RECEIVE):
                # The receiver is told first; what is for the sender would say the same again.
                self._announce(self._opening_of(effect), streams)
            case effects.SaveDeparture(dropped=True) | effects.EndSession():
                self._announce(self._revoke(effect.worker, term), streams)
            case _:
                pass

    def _accept(self, effect: effects.AcceptJoin, term: int) -> None:
        older = self._sessions.get(effect.worker)
        if older is not None:
            self._worker_of.pop(older.serial[1], None)
        # The serial of the session token that the worker gets: see `JoinAnswers.accepted`.
        self._sessions[effect.worker] = Session(effect.worker, (term, effect.stream))
        self._worker_of[effect.stream] = effect.worker

    def _opening_of(self, effect: effects.SendTransfer) -> TransferOpening:
        joiner = self._sessions[self._worker_of[effect.stream]]
        donor = self._sessions[effect.peer]
        return TransferOpening(
            effect.transfer_id, donor, joiner, effect.beside_training, effect.holds_up
        )

    def _revoke(self, worker: int, term: int) -> SessionsRevoked:
        newest = self._sessions.get(worker, Session(worker, (term, 0)))
        # One above the newest: the session that this very worker has now is over, too. Streams
        # are numbered, so the one with which it may join again has a later number.
        number = newest.serial[1] + 1
        revoked = SessionsRevoked(Session(worker, (newest.serial[0], number)))
        self._revoked[worker] = revoked
        return revoked

    def greet(self, stream: ReducerStream) -> None:
        """Announces to a reducer that just registered what others were told before."""
        # Before the round: nobody who was dropped may send in it.
        for revoked in self._revoked.values():
            stream.announce(revoked)
        if self._round is not None:
            stream.announce(self._round)

    def _open_round(self, key: Key, streams: Streams) -> None:
        # A round has an assignment for each member: only the first is news.
        # Keys rise (rule 1), so a greater one is a round that nobody was told of.
        if self._round is None or key > self._round.key:
            self._round = RoundOpening(key)
            self._announce(self._round, streams)

    def _announce(self, announcement: Announcement, streams: Streams) -> None:
        if self._own is not None:
            self._own(announcement)
        streams.announce(announcement)
