"""A group's calls over lanes: threads and memory around `GroupCalls` and `SendCalls`.

Theory of operation. The two cores are owned by a lock. Whoever has an event for them, a caller that
begins a call or a thread of a lane, takes it, and does at once what the answer asks for: frames are
put on lanes under the lock, so that they leave in the order in which the core decided. Copies,
reductions and whatever else takes time are done without it, by the same thread, so that a number
that has just come is used while it is in the processor's cache. A caller of `begin` leaves what is
long to the group's own thread, and so does everybody with what has to wait.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from andon.protocol.peer_calls import EAGER_BYTES, Call, PendingCall
from andon.protocol.peer_frames import Begin, Piece
from andon.protocol.sessions import RankFault, SessionEnd
from andon.wire.peer_frames import peer_head
from andon_trainer.core.group_calls import GroupCalls
from andon_trainer.core.peer_effects import (
    CheckInput,
    EndCall,
    Opening,
    PeerEffect,
    PlaceKept,
    ReportFault,
    RunMakes,
    SendBegin,
    SendPiece,
    UseMemory,
)
from andon_trainer.core.peer_flow import Give, MakeSome, row_of
from andon_trainer.core.peer_plan import Buffer, Span
from andon_trainer.core.send_calls import SendCalls
from andon_trainer.peers.lanes import HeadOut
from andon_trainer.peers.open_call import GroupSession, OpenCall
from andon_trainer.peers.values import BadValue, copied

__all__ = ["Core", "Deferred", "Landing", "LaneCalls", "LaneGroup"]

_log = logging.getLogger(__name__)

_LONG_BYTES = 4 * EAGER_BYTES
"""What a call may copy and reduce on its caller's thread."""
_CLOSE_S = 1.0
"""How long the end of a session waits for the group's own thread."""

Core = GroupCalls | SendCalls

Deferred = RunMakes | CheckInput | UseMemory | EndCall | ReportFault
"""Effects that are acted on without the lock."""


class LaneGroup(Protocol):
    """What these calls need of their group."""

    name: str
    ranks: tuple[int, ...]
    rank: int
    session: GroupSession

    def ended(self, call: OpenCall) -> None:
        """A call has ended well."""

    def pending_of(self, call: OpenCall) -> PendingCall:
        """A call as reports name it."""


@dataclass(slots=True)
class Landing:
    """Where a piece goes while it is received."""

    call: OpenCall
    views: list[memoryview]
    """Where it stays."""
    some: MakeSome | None
    """The reduction whose last input it is: then it stays nowhere."""
    input: int = 0
    """Which one of its inputs."""
    added: int = 0
    """How many of its bytes were reduced."""


@dataclass(slots=True)
class _PieceOut:
    """A piece on its way to a lane."""

    calls: LaneCalls
    call: OpenCall
    core: Core
    give: Give

    @property
    def size(self) -> int:
        """Bytes of its payload."""
        return self.give.stop - self.give.start

    def views(self) -> list[memoryview] | None:
        """Its payload, looked at if the gate is closed to it."""
        give, opening = self.give, self.call.opening
        assert opening is not None
        assert opening.flow is not None
        if self.core.failed or self.call.done():
            return None
        transfer = opening.flow.plan.stages[give.stage].gives[give.give]
        try:
            return self.call.leaving(row_of(transfer.spans, give.start, give.stop))
        except BadValue as bad:
            self.calls.refuse(self.core, self.call, bad)
            return None

    def head(self, views: list[memoryview]) -> bytes:
        """Its head."""
        assert self.call.opening is not None
        number = self.call.opening.number
        piece = Piece(self.core.group, number, self.give.stage, self.give.start, self.size)
        return peer_head(piece, views, checksums=self.calls.checksums)

    def sent(self) -> None:
        """The kernel has it: its memory may change."""
        self.calls.left(self.core, self.call, self.give)


class LaneCalls:
    """The calls of one group over lanes."""

    def __init__(self, group: LaneGroup, collectives: GroupCalls, sends: SendCalls) -> None:
        """Takes the cores over."""
        self._group = group
        self.collectives, self.sends = collectives, sends
        self.lock = threading.RLock()
        """Owns the cores, and the order of what is put on lanes."""
        self.moved = threading.Condition(self.lock)
        """Notified when a call that also uses memory has made progress."""
        self.through_memory: Callable[[OpenCall], list[Deferred]] | None = None
        """Gives neighbours their parts of a call; runs on the group's own thread."""
        self._openings: dict[Opening, OpenCall] = {}
        """Calls that have not ended."""
        self._closed = False
        self._queue: queue.SimpleQueue[tuple[Core, list[Deferred]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def checksums(self) -> bool:
        """Whether frames have checksums."""
        return self._group.session.checksums

    def begin(self, core: Core, call: OpenCall) -> None:
        """Makes a call. Never blocks.

        Raises:
            ValueError: its parts are not those of such a call.
        """
        with self.lock:
            if self._closed:
                return  # Whoever ended the session ends the call.
            opening, effects = core.begin(call.work)
            call.opening = opening
            self._openings[opening] = call
            deferred = self._act(core, effects)
        if sum(_size_of(each) for each in deferred) > _LONG_BYTES:
            self._hand_over(core, deferred)
        else:
            self.settle(core, deferred)

    def close(self) -> None:
        """The session is over: nothing becomes of any event. Lanes are closed already."""
        with self.moved:
            self._closed = True
            self._openings.clear()
            self._queue.put(None)
            self.moved.notify_all()
            thread = self._thread
        if thread is not None and threading.current_thread() is not thread:
            thread.join(_CLOSE_S)

    def missing(self, call: OpenCall) -> list[int]:
        """The ranks of the group of which a call misses something."""
        with self.lock:
            return [] if call.opening is None else call.opening.missing()

    # ------------------------------------------------------------------ what lanes say

    def begun(self, core: Core, peer: int, begin: Begin) -> None:
        """A Begin came of a rank of the group.

        Raises:
            PeerViolation: it breaks the protocol.
        """
        self._event(core, lambda: core.begun(peer, begin))

    def landing(self, core: Core, peer: int, piece: Piece) -> Landing | None:
        """Where a piece goes; None: it is kept, and given to `landed`.

        Raises:
            PeerViolation: it breaks the protocol.
        """
        with self.lock:
            found = core.landing(peer, piece)
            # Without its call, the session is over: nothing becomes of the bytes.
            call = None if found is None else self._openings.get(found[0])
            if found is None or call is None or self._closed:
                return None
            flow = found[0].flow
            assert flow is not None
            some = None
            if not core.failed:
                some = flow.summing(peer, piece.stage, piece.offset, piece.length)
        views = [] if some is not None else [call.view(span) for span in found[1]]
        return Landing(call, views, *(some or (None, 0)))

    def add(self, core: Core, landing: Landing, came: memoryview) -> None:
        """Reduces the next bytes of a piece on their way; they are no longer needed then."""
        call, some = landing.call, landing.some
        assert some is not None
        if core.failed or call.done():
            return
        start = some.start + landing.added
        landing.added += came.nbytes
        now = replace(some, start=start, stop=start + came.nbytes)
        self._reduce(core, call, now, (landing.input, came))

    def landed(self, core: Core, peer: int, piece: Piece, landed: Landing | memoryview) -> None:
        """A piece is where `landing` said, or it was kept."""
        if isinstance(landed, memoryview):
            self._event(core, lambda: core.landed(peer, piece, landed))
        elif landed.some is None:
            self._event(core, lambda: core.landed(peer, piece, None))
        else:
            opening, some = landed.call.opening, landed.some
            assert opening is not None
            upto = piece.offset + piece.length
            self._event(core, lambda: core.summed(opening, peer, upto, some))

    def left(self, core: Core, call: OpenCall, give: Give) -> None:
        """A lane has sent a piece."""
        opening = call.opening
        assert opening is not None
        self._event(core, lambda: core.left(opening, give.stage, give.give, give.stop))

    def gone(self, peer: int) -> None:
        """A rank of the group begins no more calls."""
        self._event(self.collectives, lambda: self.collectives.gone(peer))
        self._event(self.sends, lambda: self.sends.gone(peer))

    def deaf(self, peer: int) -> None:
        """Nothing can be sent to a rank of the group that is gone."""
        self._event(self.collectives, lambda: self.collectives.deaf(peer))
        self._event(self.sends, lambda: self.sends.deaf(peer))

    def refuse(self, core: Core, call: OpenCall, bad: BadValue) -> None:
        """A value is not finite: the session ends."""
        core.failed = True
        self._group.session.fault(replace(bad.fault, call=self._group.pending_of(call)))

    # ------------------------------------------------------------------ inside

    def event(self, core: Core, event: Callable[[], list[PeerEffect]]) -> list[Deferred]:
        """Has a core take an event; what takes time is returned, for `settle`."""
        with self.lock:
            if self._closed:
                return []
            deferred = self._act(core, event())
            if self.through_memory is not None:
                self.moved.notify_all()
        return deferred

    def _event(self, core: Core, event: Callable[[], list[PeerEffect]]) -> None:
        self.settle(core, self.event(core, event))

    def _act(self, core: Core, effects: list[PeerEffect]) -> list[Deferred]:
        """Acts on effects under the lock; what takes time is returned."""
        todo, deferred = deque(effects), list[Deferred]()
        while todo:
            effect = todo.popleft()
            if isinstance(effect, SendBegin):
                opening = effect.call
                frame = Begin(
                    group=core.group,
                    sequence=opening.number,
                    call=opening.work.call,
                    rank=self._group.rank,
                    gives_bytes=effect.gives_bytes,
                    receives=opening.work.receives,
                )
                head = peer_head(frame, checksums=self._group.session.checksums)
                self._group.session.put(self._group.ranks[effect.peer], HeadOut(head))
            elif isinstance(effect, SendPiece):
                give = effect.give
                out = _PieceOut(self, self._openings[effect.call], core, give)
                if self._group.session.put(self._group.ranks[give.peer], out):
                    todo += core.left(effect.call, give.stage, give.give, give.stop)
            elif isinstance(effect, PlaceKept):
                _copy(self._openings[effect.call], effect)
                todo += core.placed(effect.call, effect.stage, effect.peer, effect.upto)
            else:
                deferred.append(effect)
        return deferred

    def settle(self, core: Core, deferred: list[Deferred]) -> None:
        """Does what takes time, and what follows from it."""
        todo = deque(deferred)
        while todo:
            effect = todo.popleft()
            if isinstance(effect, EndCall):
                self._end(effect.call)
            elif isinstance(effect, RunMakes):
                for make in effect.makes:
                    todo += self._make(core, effect.call, make)
            elif isinstance(effect, CheckInput):
                todo += self._check(core, effect.call)
            elif isinstance(effect, ReportFault):
                self._report(core, effect)
            elif threading.current_thread() is self._thread:
                call = self._openings.get(effect.call)
                assert self.through_memory is not None, "the group shares memory"
                if call is not None and not core.failed:
                    todo += self.through_memory(call)
            else:
                # It waits for lanes, which nobody else may do.
                self._hand_over(core, [effect])

    def _end(self, opening: Opening) -> None:
        with self.lock:
            call = self._openings.pop(opening, None)
        if call is not None:
            self._group.ended(call)

    def _make(self, core: Core, opening: Opening, some: MakeSome) -> list[Deferred]:
        call = self._openings.get(opening)
        if call is None or core.failed:
            return []
        if not self._reduce(core, call, some):
            return []
        return self.event(core, lambda: core.made(opening, some.stage, some.make, some.stop))

    def _reduce(
        self,
        core: Core,
        call: OpenCall,
        some: MakeSome,
        came: tuple[int, memoryview] | None = None,
    ) -> bool:
        """Copies or reduces; whether it could. `came` is an input that lies nowhere else."""
        assert call.opening is not None
        assert call.opening.flow is not None
        make = call.opening.flow.plan.stages[some.stage].makes[some.make]
        out = call.view(make.out.within(some.start, some.stop))
        inputs = [
            came[1]
            if came is not None and came[0] == place
            else call.view(each.within(some.start, some.stop))
            for place, each in enumerate(make.inputs)
        ]
        try:
            if make.reduces:
                call.values.reduce(make, some.start, out, inputs)
            else:
                copied(out, inputs[0])
        except BadValue as bad:
            self.refuse(core, call, bad)
            return False
        except Exception as error:
            self.failed(core, call, error)
            return False
        return True

    def _check(self, core: Core, opening: Opening) -> list[Deferred]:
        call = self._openings.get(opening)
        if call is None:
            return []
        try:
            for number, part in enumerate(call.work.parts):
                for index, view in enumerate(part.gives):
                    span = Span(Buffer.GIVES, number, index, 0, view.nbytes)
                    call.values.require_finite(span, view)
        except BadValue as bad:
            self.refuse(core, call, bad)
            return []
        except Exception as error:
            self.failed(core, call, error)
            return []
        return self.event(core, lambda: core.checked(opening))

    def failed(self, core: Core, call: OpenCall, error: Exception) -> None:
        """What a caller gave to the call has failed."""
        _log.exception("a call could not be carried out")
        core.failed = True
        self._group.session.fault(
            RankFault(
                end=SessionEnd.SCRIPT_FAILED,
                culprit=self._group.session.rank,
                message=f"rank {self._group.session.rank}: {call.work.call} failed: {error!r}",
                call=self._group.pending_of(call),
            )
        )

    def _report(self, core: Core, fault: ReportFault) -> None:
        call = None if fault.call is None else self._openings.get(fault.call)
        mine = None if call is None else self._group.pending_of(call)
        if mine is None and fault.own is not None:
            mine = self.named(core, fault.own)
        self._group.session.fault(
            RankFault(
                end=fault.end,
                culprit=self._group.ranks[fault.culprit],
                message=f"group {self._group.name}: {fault.message}",
                call=mine,
                other_call=None if fault.other is None else self.named(core, fault.other),
            )
        )

    def named(self, core: Core, made: tuple[int, Call]) -> PendingCall:
        """A call that is not open here, as reports name it: its number, and what it is."""
        number, call = made
        return PendingCall(
            group_name=self._group.name, group=core.group, sequence=number, call=call, open_s=0.0
        )

    # ------------------------------------------------------------------ the group's own thread

    def _hand_over(self, core: Core, deferred: list[Deferred]) -> None:
        with self.lock:
            if self._thread is None and not self._closed:
                name = f"andon-peer-group-{self._group.name}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
        self._queue.put((core, deferred))

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            self.settle(*work)
            # The name would keep memory alive while the thread waits for more.
            del work


def _size_of(effect: Deferred) -> int:
    """How many bytes an effect copies, reduces or looks at."""
    if isinstance(effect, RunMakes):
        return sum(each.stop - each.start for each in effect.makes)
    if isinstance(effect, CheckInput):
        return sum(v.nbytes for part in effect.call.work.parts for v in part.gives)
    return 0


def _copy(call: OpenCall, effect: PlaceKept) -> None:
    at = 0
    for span in effect.spans:
        copied(call.view(span), effect.kept[at : at + span.size])
        at += span.size
