"""The collectives of one group at one rank: when each opens, and what peers may give and get.

Theory of operation. Calls open one after the other, in the order in which the rank makes them: each
once the one before has ended. An open call sends Begin to every peer of its plan. It gives a peer
nothing until that one's Begin is here, so nothing arrives for which there is no room; only the
first bytes may follow the Begin at once, and a receiver that has not opened the call keeps them.

Begins of a peer come in the order of calls. So a Begin of a later call than the open one, from a
rank that should take part in it, shows that the two made different calls, as one with another Call
does. A call may end before a peer's Begin has come, if it needs nothing of that peer. It is
remembered then, without its bytes, until the Begin is there: so calls that differ are found.

Every method returns effects. After a fault there are none: the session is over, and whoever watches
it ends all calls.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from andon.protocol.peer_calls import MAX_AHEAD, Call, CallKind
from andon.protocol.peer_frames import Begin, Piece
from andon_trainer.core.collectives import plan_of
from andon_trainer.core.peer_effects import (
    Calls,
    CheckInput,
    Early,
    Opening,
    PeerEffect,
    SendBegin,
    UseMemory,
    sizes_of,
)
from andon_trainer.core.peer_flow import Flow, PeerViolation
from andon_trainer.core.peer_plan import Places, Plan
from andon_trainer.core.peer_work import Work

__all__ = ["GroupCalls", "checks_piece_by_piece"]

_DIVIDED = frozenset({CallKind.REDUCE_SCATTER, CallKind.SCATTER, CallKind.ALL_TO_ALL})


def checks_piece_by_piece(kind: CallKind) -> bool:
    """Whether a gate may look at an input while it leaves.

    Nobody gets a result of such a call without every piece of every input. Of the other kinds one
    rank may have its part while another part of the same input is found to be bad.
    """
    return kind not in _DIVIDED


@dataclass(slots=True)
class _Past:
    """A call that has ended before all its peers' Begins came."""

    call: Call
    gets: dict[int, int]
    """By peer that has not begun it: what it gives."""


@dataclass(slots=True, kw_only=True)
class GroupCalls(Calls):
    """Collectives of one group at one rank."""

    places: Places
    rank: int
    """This rank in the group."""
    shares_memory: bool = False
    """Whether neighbours give each other parts through memory."""
    _made: int = 0
    """How many calls this rank has made."""
    _waiting: deque[Opening] = field(default_factory=deque)
    """Those that are not open."""
    _open: Opening | None = None
    _early: dict[int, dict[int, Early]] = field(default_factory=dict)
    """By peer and number, in the order of numbers."""
    _past: dict[int, _Past] = field(default_factory=dict)
    """By number."""
    _last_begun: dict[int, int] = field(default_factory=dict)
    """By peer: the number of the last call whose Begin came."""
    _ahead: dict[int, int] = field(default_factory=dict)
    """By peer: how many Begins of this rank that one has not answered by its own."""

    def begin(self, work: Work) -> tuple[Opening, list[PeerEffect]]:
        """Makes a call.

        Raises:
            ValueError: its parts are not those of such a call.
        """
        self._plan(work)
        call = Opening(work, self._made)
        self._made += 1
        self._waiting.append(call)
        return call, self._guarded(self._open_next)

    def calls(self) -> list[Opening]:
        """All that have not ended, oldest first."""
        return [*([] if self._open is None else [self._open]), *self._waiting]

    # ------------------------------------------------------------------ other ranks

    def begun(self, peer: int, begin: Begin) -> list[PeerEffect]:
        """A peer's Begin came.

        Raises:
            PeerViolation: it breaks the protocol.
        """
        number, last = begin.sequence, self._last_begun.get(peer, -1)
        if begin.receives or begin.call.kind is CallKind.SEND:
            raise PeerViolation("a SEND among the collectives of a group")
        if begin.rank != peer:
            raise PeerViolation(f"a Begin of rank {begin.rank} of the group, and it is {peer}")
        if number <= last or peer in self.gone_ranks:
            raise PeerViolation(f"a Begin of call {number} after that of {last}, or after LaneEnd")
        self._last_begun[peer] = number
        return self._guarded(lambda: self._take(peer, begin))

    def give_up_memory(self) -> list[PeerEffect]:
        """Neighbours can't share memory, none of them: everything goes over lanes.

        They find that out in the first call that needs it, so no earlier one went through memory.
        """
        self.shares_memory = False
        call = self._open
        if call is None or call.flow is None or not call.in_memory:
            return []
        near = frozenset(call.flow.plan.peers) - call.flow.elsewhere
        call.flow.elsewhere |= near
        call.in_memory = False
        return self._guarded(lambda: self._start_over_lanes(call, near))

    # ------------------------------------------------------------------ inside

    def _met(self, peer: int, number: int) -> Opening | None:
        call = self._open
        there = call is not None and call.number == number and peer in call.begun
        return call if there else None

    def _came_early(self, peer: int, number: int) -> Early | None:
        return self._early.get(peer, {}).get(number)

    def _start_over_lanes(self, call: Opening, peers: frozenset[int]) -> list[PeerEffect]:
        flow = call.flow
        assert flow is not None
        effects = self._tell(call, flow, peers)
        for peer in sorted(peers):
            early = self._early.get(peer, {}).pop(call.number, None)
            if early is not None:
                effects += self._meet(call, flow, peer, early.begin)
                effects += self._place_early(call, peer, early)
        return effects + self._miss_the_gone() + self._go_on(call)

    def _tell(self, call: Opening, flow: Flow, peers: frozenset[int]) -> list[PeerEffect]:
        """Sends Begin."""
        for peer in peers:
            self._ahead[peer] = self._ahead.get(peer, 0) + 1
        # The rank before this one is told first, since it gives to this one first.
        nearest = sorted(peers, key=lambda peer: (self.rank - peer) % self.places.size)
        return [SendBegin(call, peer, flow.plan.gives_bytes(peer)) for peer in nearest]

    def _plan(self, work: Work) -> Plan:
        if work.call.kind is CallKind.SEND:
            raise ValueError("a SEND is no collective")
        return plan_of(work.call, sizes_of(work), work.itemsize, self.places, self.rank)

    def _open_next(self) -> list[PeerEffect]:
        effects: list[PeerEffect] = []
        while self._open is None and self._waiting:
            plan = self._plan(self._waiting[0].work)
            near = self.places.neighbours(self.rank) if self.shares_memory else ()
            elsewhere = frozenset(plan.peers) - frozenset(near)
            if any(self._ahead.get(peer, 0) >= MAX_AHEAD for peer in elsewhere):
                break
            call = self._open = self._waiting.popleft()
            call.flow = Flow(plan, call.work.itemsize, elsewhere)
            effects += self._start(call, call.flow)
        return effects

    def _start(self, call: Opening, flow: Flow) -> list[PeerEffect]:
        effects = self._tell(call, flow, flow.elsewhere)
        call.in_memory = len(flow.elsewhere) < len(flow.plan.peers)
        if call.work.gate is not None and not checks_piece_by_piece(call.work.call.kind):
            call.unchecked = True
            effects.append(CheckInput(call))
        if call.in_memory:
            effects.append(UseMemory(call))
        for peer, waiting in self._early.items():
            if self._is_near(peer) and call.in_memory:
                continue
            early = waiting.pop(call.number, None)
            if early is not None:
                effects += self._meet(call, flow, peer, early.begin)
                effects += self._place_early(call, peer, early)
            elif waiting and peer in flow.elsewhere:
                effects += self._skipped(call, peer, next(iter(waiting.values())).begin)
        return effects + self._miss_the_gone() + self._go_on(call)

    def _place_early(self, call: Opening, peer: int, early: Early) -> list[PeerEffect]:
        """What came early goes where it belongs, unless the calls differ."""
        if not early.kept or peer not in call.begun:
            return []
        piece = Piece(self.group, call.number, 0, 0, len(early.kept))
        return [self._place(call, peer, piece, memoryview(early.kept))]

    def _take(self, peer: int, begin: Begin) -> list[PeerEffect]:
        number, call = begin.sequence, self._open
        if call is not None and call.flow is not None and number >= call.number:
            if number == call.number and peer in call.flow.elsewhere:
                return self._meet(call, call.flow, peer, begin) + self._go_on(call)
            if peer in call.flow.elsewhere - call.begun:
                return self._skipped(call, peer, begin)
        near = call is not None and number == call.number and self._is_near(peer)
        if near or number >= self._made - len(self._waiting):
            waiting = self._early.setdefault(peer, {})
            if len(waiting) >= MAX_AHEAD:
                raise PeerViolation(f"more than {MAX_AHEAD} calls ahead of this rank")
            waiting[number] = Early(begin)
            return []
        past = self._past.get(number)
        if past is None or peer not in past.gets:
            return [self._differ(peer, begin, None, "")]
        gets = past.gets.pop(peer)
        if not past.gets:
            del self._past[number]
        if past.call != begin.call or gets != begin.gives_bytes:
            return [self._differ(peer, begin, (number, past.call), _sizes(begin, gets))]
        self._ahead[peer] -= 1
        # This rank may have waited for that.
        return self._open_next()

    def _is_near(self, peer: int) -> bool:
        """Whether a peer's Begin comes because memory can't be shared: this rank learns it, too."""
        return self.shares_memory and peer in self.places.neighbours(self.rank)

    def _meet(self, call: Opening, flow: Flow, peer: int, begin: Begin) -> list[PeerEffect]:
        """A peer has begun the open call: is it the same one?"""
        gets = flow.plan.gets_bytes(peer)
        if begin.call != call.work.call or peer not in flow.elsewhere or begin.gives_bytes != gets:
            return [self._differ(peer, begin, call, _sizes(begin, gets))]
        call.begun.add(peer)
        flow.may_give.add(peer)
        self._ahead[peer] -= 1
        return []

    def _skipped(self, call: Opening, peer: int, begin: Begin) -> list[PeerEffect]:
        """A peer that should take part in the open call has begun a later one."""
        return [self._differ(peer, begin, call, f", without having begun call {call.number}")]

    def _miss_the_gone(self) -> list[PeerEffect]:
        call = self._open
        if call is None or call.flow is None:
            return []
        needed = call.needs(self.deaf_ranks) & self.gone_ranks
        return [self._left_behind(min(needed), call)] if needed else []

    def _after(self, call: Opening) -> list[PeerEffect]:
        if self._open is not call:
            return []
        flow = call.flow
        assert flow is not None
        silent = {each: flow.plan.gets_bytes(each) for each in flow.elsewhere - call.begun}
        if silent:
            self._past[call.number] = _Past(call.work.call, silent)
        self._open = None
        return self._open_next()


def _sizes(begin: Begin, gets: int) -> str:
    given = begin.gives_bytes
    return "" if given == gets else f"; it gives {given} bytes, and this rank takes {gets}"
