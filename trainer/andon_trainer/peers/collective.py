"""A group's calls at one rank: threads and memory around `GroupCalls` and `SendCalls`.

Theory of operation. The two cores of a group are owned by its lock. Whoever has an event for them,
a caller that begins a call or a thread of a lane, takes the lock, and does at once what the answer
asks for: frames are put on lanes under the lock, so that they leave in the order in which the core
decided. Copies, reductions and whatever else takes time are done without it, by the same thread, so
that a number that has just come is used while it is in the processor's cache. A caller of `begin`
leaves what is long to the group's own thread.

A call ends once: when its core says so, or when the session is over. Then nobody reads or writes
its memory any more. Who waits for it sleeps on a lock of the interpreter; callbacks run on a thread
of the session that carries no collective.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from andon.protocol.peer_calls import EAGER_BYTES, Call, CallKind, PendingCall
from andon.protocol.peer_frames import Begin, Piece
from andon.protocol.sessions import RankFault, SessionEnd, SessionOver
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
from andon_trainer.core.peer_plan import Buffer, Places, Span
from andon_trainer.core.peer_work import Ended, Work
from andon_trainer.core.send_calls import SendCalls
from andon_trainer.errors import CallTimedOut, SessionEnded
from andon_trainer.peers.lanes import HeadOut, Outgoing
from andon_trainer.peers.values import BadValue, Values

__all__ = ["GroupSession", "OpenCall", "PeerGroup"]

_log = logging.getLogger(__name__)

_LONG_BYTES = 4 * EAGER_BYTES
"""What a call may copy and reduce on its caller's thread."""

Deferred = RunMakes | CheckInput | UseMemory | EndCall | ReportFault
"""Effects that are acted on without the lock."""


class GroupSession(Protocol):
    """What a group needs of its session."""

    @property
    def rank(self) -> int:
        """This rank of the session."""

    @property
    def checksums(self) -> bool:
        """Whether all ranks have `crc32c.v1`."""

    @property
    def over(self) -> SessionOver | None:
        """Why the session is over; None while it goes on."""

    def put(self, peer: int, frame: Outgoing) -> bool:
        """Sends a frame to a rank of the session; True: the kernel has it."""

    def fault(self, fault: RankFault) -> None:
        """Ends the session. Never blocks, and calls nothing back."""

    def later(self, act: Callable[[], None]) -> None:
        """Has something called on a thread that carries no collective."""

    def ended(self, call: OpenCall) -> None:
        """Counts a call that has ended."""


class OpenCall:
    """A call that was begun. Any thread may wait for it."""

    def __init__(self, group: PeerGroup, work: Work) -> None:
        """Of a group's `begin`."""
        self._group = group
        self.work = work
        self.values = Values.of(work, group.ranks[group.rank], len(group.ranks))
        self.began = time.monotonic()
        self.opening: Opening | None = None
        self._open = threading.Lock()
        """Held until the call has ended."""
        self._open.acquire()
        self._lock = threading.Lock()
        """Guards the end, and who is told."""
        self._ended = False
        self._error: BaseException | None = None
        self._told: list[Ended] = []
        self._scratch: memoryview | None = None

    @property
    def sender(self) -> int | None:
        """Of a receive that has ended: the sender's rank in the group."""
        return None if self.opening is None else self.opening.peer

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns once the call has ended.

        Raises:
            SessionEnded: the session is over.
            CallTimedOut: it has not ended in time; it stays open.
        """
        if not self._open.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            raise CallTimedOut(self._group.late(self, timeout_s or 0.0))
        self._open.release()
        if self._error is not None:
            raise self._error

    def then(self, ended: Ended) -> None:
        """Has `ended` called once; at once if the call has ended."""
        with self._lock:
            if not self._ended:
                self._told.append(ended)
                return
        ended(self._error)

    def end(self, error: BaseException | None) -> None:
        """Ends the call, unless it has ended."""
        with self._lock:
            if self._ended:
                return
            self._ended, self._error = True, error
            told, self._told = self._told, []
        self._scratch = None
        self._open.release()
        for each in told:
            self._group.session.later(partial(each, error))

    def view(self, span: Span) -> memoryview:
        """The memory of a span."""
        if span.buffer is Buffer.SCRATCH:
            return self._scratched()[span.start : span.stop]
        part = self.work.parts[span.part]
        views = part.gives if span.buffer is Buffer.GIVES else part.takes
        whole = views[span.index]
        return whole if span.size == whole.nbytes else whole[span.start : span.stop]

    def _scratched(self) -> memoryview:
        with self._lock:
            if self._scratch is None:
                assert self.opening is not None
                assert self.opening.flow is not None
                self._scratch = _memory(self.opening.flow.plan.scratch_bytes)
            return self._scratch


def _memory(size: int) -> memoryview:
    """Memory for what comes, in large pages where the kernel has them."""
    if size < 2**20:
        return memoryview(bytearray(size))
    room = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            room.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(room)


@dataclass(slots=True)
class _PieceOut:
    """A piece on its way to a lane."""

    group: PeerGroup
    call: OpenCall
    core: GroupCalls | SendCalls
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
        spans = list(row_of(transfer.spans, give.start, give.stop))
        views = [self.call.view(span) for span in spans]
        if self.call.values.gate is not None:
            try:
                for span, view in zip(spans, views, strict=True):
                    if span.buffer is Buffer.GIVES:
                        self.call.values.require_finite(span, view)
            except BadValue as bad:
                self.group.refuse(self.core, self.call, bad)
                return None
        return views

    def head(self, views: list[memoryview]) -> bytes:
        """Its head."""
        assert self.call.opening is not None
        number = self.call.opening.number
        piece = Piece(self.core.group, number, self.give.stage, self.give.start, self.size)
        return peer_head(piece, views, checksums=self.group.session.checksums)

    def sent(self) -> None:
        """The kernel has it: its memory may change."""
        self.group.left(self.core, self.call, self.give)


class PeerGroup:
    """Some ranks of a session, in order, and the calls that they make together."""

    def __init__(
        self,
        session: GroupSession,
        name: str,
        ranks: Sequence[int],
        places: Places,
        numbers: tuple[int, int],
    ) -> None:
        """Of `Peers.group`."""
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(session.rank)
        self.session = session
        self.places = places
        self._lock = threading.RLock()
        """Owns the cores, and the order of what is put on lanes."""
        self.collectives = GroupCalls(group=numbers[0], places=places, rank=self.rank)
        self.sends = SendCalls(group=numbers[1], places=places, rank=self.rank)
        self._calls: dict[Opening, OpenCall] = {}
        """Those that have not ended."""
        self._queue: queue.SimpleQueue[tuple[GroupCalls | SendCalls, list[Deferred]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def begin(self, work: Work) -> OpenCall:
        """Makes a call. Never blocks.

        Raises:
            SessionEnded: the session is over.
            ValueError: its parts are not those of such a call.
        """
        core = self.sends if work.call.kind is CallKind.SEND else self.collectives
        call = OpenCall(self, work)
        with self._lock:
            over = self.session.over
            if over is not None:
                raise SessionEnded(over)
            opening, effects = core.begin(work)
            call.opening = opening
            self._calls[opening] = call
            deferred = self._act(core, effects)
        if sum(_size_of(each) for each in deferred) > _LONG_BYTES:
            self._hand_over(core, deferred)
        else:
            self._settle(core, deferred)
        return call

    def close(self, error: BaseException) -> None:
        """Ends all calls. Lanes are closed already."""
        with self._lock:
            calls, self._calls = list(self._calls.values()), {}
            self._queue.put(None)
        for each in calls:
            each.end(error)

    # ------------------------------------------------------------------ what lanes say

    def begun(self, core: GroupCalls | SendCalls, peer: int, begin: Begin) -> None:
        """A Begin came of a rank of the group.

        Raises:
            PeerViolation: it breaks the protocol.
        """
        self._event(core, lambda: core.begun(peer, begin))

    def landing(
        self, core: GroupCalls | SendCalls, peer: int, piece: Piece
    ) -> list[memoryview] | None:
        """Where a piece goes; None: it is kept, and given to `landed`.

        Raises:
            PeerViolation: it breaks the protocol.
        """
        with self._lock:
            found = core.landing(peer, piece)
            # Without its call, the session is over: nothing becomes of the bytes.
            call = None if found is None else self._calls.get(found[0])
        if found is None or call is None:
            return None
        return [call.view(span) for span in found[1]]

    def landed(
        self, core: GroupCalls | SendCalls, peer: int, piece: Piece, kept: memoryview | None
    ) -> None:
        """A piece is where `landing` said, or in `kept`."""
        self._event(core, lambda: core.landed(peer, piece, kept))

    def left(self, core: GroupCalls | SendCalls, call: OpenCall, give: Give) -> None:
        """A lane has sent a piece."""
        opening = call.opening
        assert opening is not None
        self._event(core, lambda: core.left(opening, give.stage, give.give, give.stop))

    def gone(self, peer: int) -> None:
        """A rank of the group begins no more calls."""
        self._event(self.collectives, lambda: self.collectives.gone(peer))
        self._event(self.sends, lambda: self.sends.gone(peer))

    def refuse(self, core: GroupCalls | SendCalls, call: OpenCall, bad: BadValue) -> None:
        """A value is not finite: the session ends."""
        core.failed = True
        self.session.fault(replace(bad.fault, call=self.pending_of(call)))

    # ------------------------------------------------------------------ for people

    def pending(self) -> OpenCall | None:
        """The call that has been open for longest."""
        with self._lock:
            calls = list(self._calls.values())
        return min(calls, key=lambda each: each.began, default=None)

    def pending_of(self, call: OpenCall) -> PendingCall:
        """A call as reports name it."""
        opening = call.opening
        assert opening is not None
        core = self.sends if opening.work.call.kind is CallKind.SEND else self.collectives
        with self._lock:
            missing = opening.missing()
        return PendingCall(
            group_name=self.name,
            group=core.group,
            sequence=opening.number,
            call=opening.work.call,
            open_s=time.monotonic() - call.began,
            missing=tuple(self.ranks[each] for each in missing),
        )

    def late(self, call: OpenCall, timeout_s: float) -> str:
        """What people read of a call that has not ended in time."""
        pending = self.pending_of(call)
        missing = ", ".join(map(str, pending.missing))
        waits = f"rank {missing}" if len(pending.missing) == 1 else f"ranks {missing}"
        return f"{pending} has not ended within {timeout_s:g} s" + (
            f": it waits for {waits}" if missing else ""
        )

    # ------------------------------------------------------------------ inside

    def _event(self, core: GroupCalls | SendCalls, event: Callable[[], list[PeerEffect]]) -> None:
        with self._lock:
            deferred = self._act(core, event())
        self._settle(core, deferred)

    def _act(self, core: GroupCalls | SendCalls, effects: list[PeerEffect]) -> list[Deferred]:
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
                    rank=self.rank,
                    gives_bytes=effect.gives_bytes,
                    receives=opening.work.receives,
                )
                head = peer_head(frame, checksums=self.session.checksums)
                self.session.put(self.ranks[effect.peer], HeadOut(head))
            elif isinstance(effect, SendPiece):
                give = effect.give
                out = _PieceOut(self, self._calls[effect.call], core, give)
                if self.session.put(self.ranks[give.peer], out):
                    todo += core.left(effect.call, give.stage, give.give, give.stop)
            elif isinstance(effect, PlaceKept):
                _copy(self._calls[effect.call], effect)
                todo += core.placed(effect.call, effect.stage, effect.peer, effect.upto)
            else:
                deferred.append(effect)
        return deferred

    def _settle(self, core: GroupCalls | SendCalls, deferred: list[Deferred]) -> None:
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
            else:
                raise AssertionError("no neighbours share memory here")

    def _end(self, opening: Opening) -> None:
        with self._lock:
            call = self._calls.pop(opening, None)
        if call is not None:
            self.session.ended(call)
            call.end(None)

    def _make(
        self, core: GroupCalls | SendCalls, opening: Opening, some: MakeSome
    ) -> list[Deferred]:
        call = self._calls.get(opening)
        if call is None or core.failed:
            return []
        assert opening.flow is not None
        make = opening.flow.plan.stages[some.stage].makes[some.make]
        out = call.view(make.out.within(some.start, some.stop))
        inputs = [call.view(each.within(some.start, some.stop)) for each in make.inputs]
        try:
            if make.reduces:
                call.values.reduce(make, some.start, out, inputs)
            else:
                out[:] = inputs[0]
        except BadValue as bad:
            self.refuse(core, call, bad)
            return []
        except Exception as error:
            self._failed(core, call, error)
            return []
        with self._lock:
            return self._act(core, core.made(opening, some.stage, some.make, some.stop))

    def _check(self, core: GroupCalls | SendCalls, opening: Opening) -> list[Deferred]:
        call = self._calls.get(opening)
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
            self._failed(core, call, error)
            return []
        with self._lock:
            return self._act(core, core.checked(opening))

    def _failed(self, core: GroupCalls | SendCalls, call: OpenCall, error: Exception) -> None:
        """What a caller gave to the call has failed."""
        _log.exception("a call could not be carried out")
        core.failed = True
        self.session.fault(
            RankFault(
                end=SessionEnd.SCRIPT_FAILED,
                culprit=self.session.rank,
                message=f"rank {self.session.rank}: {call.work.call} failed: {error!r}",
                call=self.pending_of(call),
            )
        )

    def _report(self, core: GroupCalls | SendCalls, fault: ReportFault) -> None:
        call = None if fault.call is None else self._calls.get(fault.call)
        mine = None if call is None else self.pending_of(call)
        if mine is None and fault.own is not None:
            mine = self._named(core, fault.own)
        self.session.fault(
            RankFault(
                end=fault.end,
                culprit=self.ranks[fault.culprit],
                message=f"group {self.name}: {fault.message}",
                call=mine,
                other_call=None if fault.other is None else self._named(core, fault.other),
            )
        )

    def _named(self, core: GroupCalls | SendCalls, made: tuple[int, Call]) -> PendingCall:
        number, call = made
        return PendingCall(
            group_name=self.name, group=core.group, sequence=number, call=call, open_s=0.0
        )

    # ------------------------------------------------------------------ the group's own thread

    def _hand_over(self, core: GroupCalls | SendCalls, deferred: list[Deferred]) -> None:
        if self._thread is None:
            name = f"andon-peer-group-{self.name}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        self._queue.put((core, deferred))

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            self._settle(*work)
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
        call.view(span)[:] = effect.kept[at : at + span.size]
        at += span.size
