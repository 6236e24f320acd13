"""SENDs of one group at one rank: who receives what, also from any rank.

Theory of operation. SENDs are counted by sender and receiver, whatever their tags are. A sender
sends Begin, and after it what is small; the rest waits for the receiver's Begin of the same number.
A receiver matches: what it receives is the Begin that came first among those with its tag and of
the rank that it names, or of any; of several receives that fit a Begin, the oldest one gets it.
Each Begin is matched once, and answered then. What nobody has asked for is kept, if it is small.

A SEND that was sent may have ended here long before it is received. Its Call is kept until the
receiver's Begin shows that it received the same.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from andon.protocol.peer_calls import MAX_AHEAD, Call, CallKind
from andon.protocol.peer_frames import Begin, Piece
from andon_trainer.core.collectives import plan_of
from andon_trainer.core.peer_effects import (
    Calls,
    Early,
    Opening,
    PeerEffect,
    SendBegin,
    sizes_of,
)
from andon_trainer.core.peer_flow import Flow, PeerViolation
from andon_trainer.core.peer_plan import Places
from andon_trainer.core.peer_work import Work

__all__ = ["SendCalls"]


@dataclass(slots=True)
class _Sent:
    """A SEND that the receiver has not answered."""

    call: Call
    opening: Opening | None
    """None: it has ended here."""


@dataclass(slots=True, kw_only=True)
class SendCalls(Calls):
    """SENDs of one group at one rank."""

    places: Places
    rank: int
    """This rank in the group."""
    _sends: dict[int, int] = field(default_factory=dict)
    """By receiver: how many SENDs to it were begun."""
    _held: dict[int, deque[Opening]] = field(default_factory=dict)
    """By receiver: SENDs that wait until older ones are answered."""
    _unanswered: dict[int, dict[int, _Sent]] = field(default_factory=dict)
    """By receiver and number."""
    _sending: dict[tuple[int, int], Opening] = field(default_factory=dict)
    """By receiver and number: what has not left, or not all of it."""
    _posted: list[Opening] = field(default_factory=list)
    """Receives that nothing has come for, oldest first."""
    _came: list[tuple[int, Early]] = field(default_factory=list)
    """What nobody has asked for: its sender, and what came; oldest first."""
    _heard: dict[int, int] = field(default_factory=dict)
    """By sender: how many of its Begins came."""
    _receiving: dict[tuple[int, int], Opening] = field(default_factory=dict)
    """By sender and number."""

    def begin(self, work: Work) -> tuple[Opening, list[PeerEffect]]:
        """Sends or receives.

        Raises:
            ValueError: it is no SEND, or its parts are not those of one.
        """
        if work.call.kind is not CallKind.SEND:
            raise ValueError(f"{work.call} is no SEND")
        # Of a receive from any rank: any other one will do to look whether its parts fit.
        peer = (self.rank + 1) % self.places.size if work.peer is None else work.peer
        if not 0 <= peer < self.places.size:
            raise ValueError(f"rank {peer} is not one of the group's {self.places.size}")
        self._planned(work, peer)
        call = Opening(work, 0, work.peer)
        if work.receives:
            return call, self._guarded(lambda: self._receive(call))
        return call, self._guarded(lambda: self._send(call, peer))

    def calls(self) -> list[Opening]:
        """All that have not ended."""
        sent = self._sending.values()
        held = [each for waiting in self._held.values() for each in waiting]
        return [*sent, *held, *self._receiving.values(), *self._posted]

    # ------------------------------------------------------------------ other ranks

    def begun(self, peer: int, begin: Begin) -> list[PeerEffect]:
        """Another rank's Begin came: it sends to this one, or receives from it.

        Raises:
            PeerViolation: it breaks the protocol.
        """
        if begin.call.kind is not CallKind.SEND:
            raise PeerViolation(f"{begin.call} among the SENDs of a group")
        if begin.rank != peer or peer == self.rank:
            raise PeerViolation(f"a Begin of rank {begin.rank} of the group, and it is {peer}")
        if peer in self.gone_ranks:
            raise PeerViolation("a Begin after LaneEnd")
        if begin.receives:
            return self._guarded(lambda: self._answered(peer, begin))
        if begin.sequence != self._heard.get(peer, 0):
            raise PeerViolation(f"SEND {begin.sequence}, and {self._heard.get(peer, 0)} is next")
        self._heard[peer] = begin.sequence + 1
        return self._guarded(lambda: self._match(peer, begin))

    # ------------------------------------------------------------------ inside

    def _met(self, peer: int, number: int) -> Opening | None:
        return self._receiving.get((peer, number))

    def _came_early(self, peer: int, number: int) -> Early | None:
        return next(
            (e for sender, e in self._came if sender == peer and e.begin.sequence == number), None
        )

    def _planned(self, work: Work, peer: int) -> Flow:
        sizes = sizes_of(work)
        plan = plan_of(work.call, sizes, work.itemsize, self.places, self.rank, peer)
        return Flow(plan, work.itemsize, frozenset({peer}))

    def _send(self, call: Opening, peer: int) -> list[PeerEffect]:
        self._held.setdefault(peer, deque()).append(call)
        return self._send_held(peer) + self._miss_the_gone()

    def _send_held(self, peer: int) -> list[PeerEffect]:
        effects: list[PeerEffect] = []
        held, unanswered = self._held.get(peer), self._unanswered.setdefault(peer, {})
        while held and len(unanswered) < MAX_AHEAD:
            call = held.popleft()
            call.number = self._sends.get(peer, 0)
            self._sends[peer] = call.number + 1
            call.flow = self._planned(call.work, peer)
            unanswered[call.number] = _Sent(call.work.call, call)
            self._sending[peer, call.number] = call
            effects.append(SendBegin(call, peer, call.flow.plan.gives_bytes(peer)))
            effects += self._go_on(call)
        return effects

    def _answered(self, peer: int, begin: Begin) -> list[PeerEffect]:
        """The receiver has room for a SEND of this rank."""
        sent = self._unanswered.get(peer, {}).pop(begin.sequence, None)
        if sent is None:
            raise PeerViolation(f"an answer to SEND {begin.sequence}, which waits for none")
        call = sent.opening
        if begin.call != sent.call or begin.gives_bytes:
            own = call if call is not None else (begin.sequence, sent.call)
            return [self._differ(peer, begin, own, "")]
        effects: list[PeerEffect] = []
        if call is not None and call.flow is not None:
            call.begun.add(peer)
            call.flow.may_give.add(peer)
            effects += self._go_on(call)
        return effects + self._send_held(peer)

    def _receive(self, call: Opening) -> list[PeerEffect]:
        for at, (peer, early) in enumerate(self._came):
            if _fits(call.work, peer, early.begin.call.tag):
                del self._came[at]
                return self._open(call, peer, early)
        self._posted.append(call)
        return self._miss_the_gone()

    def _match(self, peer: int, begin: Begin) -> list[PeerEffect]:
        for at, call in enumerate(self._posted):
            if _fits(call.work, peer, begin.call.tag):
                del self._posted[at]
                return self._open(call, peer, Early(begin))
        if sum(1 for each, _ in self._came if each == peer) >= MAX_AHEAD:
            raise PeerViolation(f"more than {MAX_AHEAD} SENDs that this rank has not received")
        self._came.append((peer, Early(begin)))
        return []

    def _open(self, call: Opening, peer: int, early: Early) -> list[PeerEffect]:
        """A receive has met what it receives."""
        call.number, call.peer, begin = early.begin.sequence, peer, early.begin
        flow = call.flow = self._planned(call.work, peer)
        call.begun.add(peer)
        self._receiving[peer, call.number] = call
        gets = flow.plan.gets_bytes(peer)
        if begin.call != call.work.call or begin.gives_bytes != gets:
            return [self._differ(peer, begin, call, "")]
        effects: list[PeerEffect] = [SendBegin(call, peer, 0)]
        if early.kept:
            piece = Piece(self.group, call.number, 0, 0, len(early.kept))
            effects.append(self._place(call, peer, piece, memoryview(early.kept)))
        return effects + self._go_on(call)

    def _miss_the_gone(self) -> list[PeerEffect]:
        others = {*range(self.places.size)} - {self.rank}
        for call in self.calls():
            if call.flow is not None:
                needed = call.needs(self.deaf_ranks)
            else:
                # Of a receive from any rank, all others are too many to wait for, if all are gone.
                needed = others if call.peer is None else {call.peer}
            if needed and needed <= self.gone_ranks:
                return [self._left_behind(min(needed), call)]
        return []

    def _after(self, call: Opening) -> list[PeerEffect]:
        assert call.peer is not None
        if call.work.receives:
            self._receiving.pop((call.peer, call.number), None)
        else:
            self._sending.pop((call.peer, call.number), None)
            sent = self._unanswered.get(call.peer, {}).get(call.number)
            if sent is not None:
                sent.opening = None
        return []


def _fits(work: Work, peer: int, tag: int) -> bool:
    return work.call.tag == tag and work.peer in (None, peer)
