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

from andon.host.arena import SharedMemoryUnavailable
from andon.protocol.peer_calls import (
    EAGER_BYTES,
    Call,
    CallKind,
    PendingCall,
    group_number,
    sends_number,
)
from andon.protocol.peer_frames import Begin, Piece
from andon.protocol.sessions import RankFault, SessionEnd, SessionOver
from andon.wire.peer_frames import peer_head
from andon_trainer.core.collectives import plan_of
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
    sizes_of,
)
from andon_trainer.core.peer_flow import Give, MakeSome, row_of
from andon_trainer.core.peer_plan import Buffer, Places, Span, Stage
from andon_trainer.core.peer_work import Ended, Work
from andon_trainer.core.send_calls import SendCalls
from andon_trainer.errors import CallTimedOut, SessionEnded
from andon_trainer.peers.host_calls import HostCall, HostCalls, differing_fault, left_fault
from andon_trainer.peers.lanes import HeadOut, Outgoing
from andon_trainer.peers.memory import CallDiffers, NeighbourLeft, NeighbourMemory
from andon_trainer.peers.memory_calls import transfer
from andon_trainer.peers.values import BadValue, Values, copied

__all__ = ["GroupSession", "OpenCall", "PeerGroup"]

_log = logging.getLogger(__name__)

_CLOSE_S = 1.0
"""How long the end of a session waits for a call to come out of memory."""
_LOOK_S = 0.1
"""How often a thread that waits looks whether the session is over."""
_SYMMETRIC = frozenset({CallKind.ALL_REDUCE, CallKind.ALL_GATHER})
"""Kinds in which either all neighbours have a part in a stage or none has."""
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
        """Its state, if it goes over lanes."""
        self.host: HostCalls | None = None
        """Who makes it, if it goes through memory alone."""
        self._number = 0
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
    def number(self) -> int:
        """Its number in the group; of a SEND, among those of its sender to its receiver."""
        return self._number if self.opening is None else self.opening.number

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
        began = time.monotonic()
        if self.host is not None and not self._ended:
            self.host.help(self, timeout_s)
        if not self._ended:
            left_s = -1.0
            if timeout_s is not None:
                left_s = max(0.0, timeout_s - (time.monotonic() - began))
            if not self._open.acquire(timeout=left_s):
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
        if self.call.values.gate is not None and not opening.checked:
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
        memory: NeighbourMemory | None = None,
    ) -> None:
        """Of `Peers.group`.

        Args:
            session: the session.
            name: the group's.
            ranks: its ranks of the session, in order, this one too.
            places: where they are.
            memory: what this rank shares with its neighbours; None: everything goes over lanes.
        """
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(session.rank)
        self.session = session
        self.places = places
        self._lock = threading.RLock()
        """Owns the cores, and the order of what is put on lanes."""
        number = group_number(name, ranks)
        on_one_host = len(places.hosts) == 1
        self._memory = memory
        self._host: HostCalls | None = None
        """Makes collectives, if all ranks are neighbours."""
        if memory is not None and on_one_host:
            self._host = HostCalls(self, memory, session.rank, f"andon-peer-memory-{name}")
        self.collectives = GroupCalls(
            group=number,
            places=places,
            rank=self.rank,
            shares_memory=memory is not None and not on_one_host,
        )
        self.sends = SendCalls(group=sends_number(name, ranks), places=places, rank=self.rank)
        self._moved = threading.Condition(self._lock)
        """Notified when a call that uses memory and lanes has made progress."""
        self._calls: dict[OpenCall, None] = {}
        """Those that have not ended, oldest first."""
        self._openings: dict[Opening, OpenCall] = {}
        """Those of them that go over lanes."""
        self._queue: queue.SimpleQueue[tuple[GroupCalls | SendCalls, list[Deferred]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def begin(self, work: Work, *, awaited: bool = False) -> OpenCall:
        """Makes a call. Never blocks.

        With `awaited` the caller waits for it at once: then no other thread need be woken for a
        call that goes through memory, and none is.

        Raises:
            SessionEnded: the session is over.
            ValueError: its parts are not those of such a call.
        """
        core = self.sends if work.call.kind is CallKind.SEND else self.collectives
        call = OpenCall(self, work)
        if self._host is not None and core is self.collectives:
            self._require_parts(work)
            if self._begin_on_host(self._host, call, awaited=awaited):
                return call
        with self._lock:
            deferred = self._begin(core, call)
        if sum(_size_of(each) for each in deferred) > _LONG_BYTES:
            self._hand_over(core, deferred)
        else:
            self._settle(core, deferred)
        return call

    def leave(self) -> None:
        """This rank makes no more calls."""
        if self._host is not None:
            self._host.leave()
        elif self._memory is not None:
            self._memory.leave()

    def close(self, error: BaseException) -> None:
        """Ends all calls. Lanes are closed already."""
        if self._host is not None:
            self._host.close()
        elif self._memory is not None:
            self._memory.end()
        with self._moved:
            calls = list(self._calls)
            self._calls.clear()
            self._openings.clear()
            self._queue.put(None)
            self._moved.notify_all()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)
        if self._memory is not None:
            self._memory.close()
        for each in calls:
            each.end(error)

    # ------------------------------------------------------------------ memory alone

    @property
    def over(self) -> SessionOver | None:
        """Why the session is over."""
        return self.session.over

    def made(self, call: HostCall) -> None:
        """A call through memory has ended well."""
        assert isinstance(call, OpenCall)
        with self._lock:
            self._calls.pop(call, None)
        self.session.ended(call)
        call.end(None)

    def faulty(self, call: HostCall, fault: RankFault) -> None:
        """A call through memory shows that the session can't go on."""
        assert isinstance(call, OpenCall)
        self.collectives.failed = True
        named = fault if fault.call is not None else replace(fault, call=self.pending_of(call))
        self.session.fault(named)

    def without_memory(self, calls: list[HostCall], why: str) -> None:
        """Memory can't be shared: these calls, the first ones of the group, go over lanes."""
        _log.warning("group %s exchanges over TCP lanes: %s", self.name, why)
        for call in calls:
            assert isinstance(call, OpenCall)
            with self._lock:
                # What is begun meanwhile waits for the lock, and comes behind them.
                deferred = self._begin(self.collectives, call)
            call.host = None
            self._settle(self.collectives, deferred)

    def named(self, sequence: int, work: Work) -> PendingCall:
        """A call as reports name it."""
        return self._named(self.collectives, (sequence, work.call))

    def _begin_on_host(self, host: HostCalls, call: OpenCall, *, awaited: bool) -> bool:
        """Makes a call through memory; False if that can't be shared."""
        with self._lock:
            if self.session.over is not None:
                raise SessionEnded(self.session.over)
            # First: another thread may make it, and end it, at once.
            self._calls[call] = None
            call.host = host
        number = host.begin(call, awaited=awaited)
        if number is None:
            call.host = None
            return False
        call._number = number
        return True

    def _require_parts(self, work: Work) -> None:
        """Refuses what no plan can be made for, as lanes do."""
        plan_of(work.call, sizes_of(work), work.itemsize, self.places, self.rank)

    def _begin(self, core: GroupCalls | SendCalls, call: OpenCall) -> list[Deferred]:
        over = self.session.over
        if over is not None:
            raise SessionEnded(over)
        opening, effects = core.begin(call.work)
        call.opening = opening
        self._openings[opening] = call
        self._calls[call] = None
        return self._act(core, effects)

    # ------------------------------------------------------------------ what lanes say

    def begun(self, core: GroupCalls | SendCalls, peer: int, begin: Begin) -> None:
        """A Begin came of a rank of the group.

        Raises:
            PeerViolation: it breaks the protocol.
        """
        self._event(core, lambda: core.begun(peer, begin))

    def landing(self, core: GroupCalls | SendCalls, peer: int, piece: Piece) -> Landing | None:
        """Where a piece goes; None: it is kept, and given to `landed`.

        Raises:
            PeerViolation: it breaks the protocol.
        """
        with self._lock:
            found = core.landing(peer, piece)
            # Without its call, the session is over: nothing becomes of the bytes.
            call = None if found is None else self._openings.get(found[0])
            if found is None or call is None:
                return None
            flow = found[0].flow
            assert flow is not None
            some = None
            if not core.failed:
                some = flow.summing(peer, piece.stage, piece.offset, piece.length)
        views = [] if some is not None else [call.view(span) for span in found[1]]
        return Landing(call, views, *(some or (None, 0)))

    def add(self, core: GroupCalls | SendCalls, landing: Landing, came: memoryview) -> None:
        """Reduces the next bytes of a piece on their way; they are no longer needed then."""
        call, some = landing.call, landing.some
        assert some is not None
        if core.failed or call.done():
            return
        start = some.start + landing.added
        landing.added += came.nbytes
        now = replace(some, start=start, stop=start + came.nbytes)
        self._reduce(core, call, now, (landing.input, came))

    def landed(
        self, core: GroupCalls | SendCalls, peer: int, piece: Piece, landed: Landing | memoryview
    ) -> None:
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
            return next(iter(self._calls), None)

    def pending_of(self, call: OpenCall) -> PendingCall:
        """A call as reports name it."""
        core = self.sends if call.work.call.kind is CallKind.SEND else self.collectives
        missing: Sequence[int]
        if call.host is not None:
            missing = call.host.missing
        else:
            with self._lock:
                places = [] if call.opening is None else call.opening.missing()
            missing = [self.ranks[each] for each in places]
        return PendingCall(
            group_name=self.name,
            group=core.group,
            sequence=call.number,
            call=call.work.call,
            open_s=time.monotonic() - call.began,
            missing=tuple(missing),
        )

    def late(self, call: HostCall, timeout_s: float) -> str:
        """What people read of a call that has not ended in time."""
        assert isinstance(call, OpenCall)
        pending = self.pending_of(call)
        missing = ", ".join(map(str, pending.missing))
        ranks = f"rank {missing} is" if len(pending.missing) == 1 else f"ranks {missing} are"
        return f"{pending}: the timeout of {timeout_s:g} s passed" + (
            f", and {ranks} missing" if missing else ""
        )

    # ------------------------------------------------------------------ inside

    def _event(self, core: GroupCalls | SendCalls, event: Callable[[], list[PeerEffect]]) -> None:
        with self._lock:
            deferred = self._act(core, event())
            if self.collectives.shares_memory:
                self._moved.notify_all()
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
                out = _PieceOut(self, self._openings[effect.call], core, give)
                if self.session.put(self.ranks[give.peer], out):
                    todo += core.left(effect.call, give.stage, give.give, give.stop)
            elif isinstance(effect, PlaceKept):
                _copy(self._openings[effect.call], effect)
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
                # It waits for lanes: on the group's own thread, wherever it came up.
                if threading.current_thread() is not self._thread:
                    self._hand_over(core, [effect])
                    continue
                todo += self._through_memory(effect.call)

    def _end(self, opening: Opening) -> None:
        with self._lock:
            call = self._openings.pop(opening, None)
            if call is not None:
                self._calls.pop(call, None)
        if call is not None:
            self.session.ended(call)
            call.end(None)

    def _make(
        self, core: GroupCalls | SendCalls, opening: Opening, some: MakeSome
    ) -> list[Deferred]:
        call = self._openings.get(opening)
        if call is None or core.failed:
            return []
        if not self._reduce(core, call, some):
            return []
        with self._lock:
            return self._act(core, core.made(opening, some.stage, some.make, some.stop))

    def _reduce(
        self,
        core: GroupCalls | SendCalls,
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
            self._failed(core, call, error)
            return False
        return True

    def _check(self, core: GroupCalls | SendCalls, opening: Opening) -> list[Deferred]:
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
        call = None if fault.call is None else self._openings.get(fault.call)
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

    # ------------------------------------------------------------------ memory and lanes

    def _through_memory(self, opening: Opening) -> list[Deferred]:
        """Gives neighbours their parts, and gets theirs. Runs on the group's own thread."""
        call, memory, core = self._openings.get(opening), self._memory, self.collectives
        if call is None or memory is None or core.failed:
            return []
        try:
            if not memory.opened:
                memory.open(self._still)
            deferred = list[Deferred]()
            for stage in self._memory_stages(opening):
                deferred += self._transfer(memory, call, opening, stage)
        except SharedMemoryUnavailable as error:
            _log.warning("group %s exchanges over TCP lanes alone: %s", self.name, error)
            with self._lock:
                return self._act(core, core.give_up_memory())
        except SessionEnded:
            return []  # Whoever ends the session ends the call.
        except CallDiffers as differs:
            self.faulty(call, differing_fault(self, call.work, differs))
            return []
        except NeighbourLeft as left:
            self.faulty(call, left_fault(call.work, left))
            return []
        except Exception as error:
            self._failed(core, call, error)
            return []
        with self._lock:
            return deferred + self._act(core, core.through_memory(opening))

    def _memory_stages(self, opening: Opening) -> list[int]:
        """The stages in which some neighbour may give another something: the same for all."""
        assert opening.flow is not None
        stages = opening.flow.plan.stages
        if opening.work.call.kind not in _SYMMETRIC:
            # A barrier has none, and needs one.
            return list(range(len(stages))) or [0]
        near = frozenset(self.places.neighbours(self.rank))
        return [
            number
            for number, stage in enumerate(stages)
            if near & {each.peer for each in (*stage.gives, *stage.gets)}
        ]

    def _transfer(
        self, memory: NeighbourMemory, call: OpenCall, opening: Opening, number: int
    ) -> list[Deferred]:
        flow, core = opening.flow, self.collectives
        assert flow is not None
        stage = flow.plan.stages[number] if flow.plan.stages else Stage()
        near = self.places.neighbours(self.rank)
        gives = {each.peer: (i, each) for i, each in enumerate(stage.gives) if each.peer in near}
        gets = {each.peer: each for each in stage.gets if each.peer in near}
        with self._moved:
            while not all(flow.give_ready(number, i) == each.size for i, each in gives.values()):
                self._moved.wait(_LOOK_S)
                self._still(())
        rows = [
            (
                [call.view(span) for span in gives[peer][1].spans] if peer in gives else [],
                [call.view(span) for span in gets[peer].spans] if peer in gets else [],
            )
            for peer in near
        ]
        transfer(memory, call.work, opening.number, number, rows, self._still)
        with self._lock:
            effects: list[PeerEffect] = []
            for i, each in gives.values():
                effects += core.left(opening, number, i, each.size)
            for peer, each in gets.items():
                effects += core.placed(opening, number, peer, each.size)
            deferred = self._act(core, effects)
        # The next stage may need what is made of it.
        self._settle(core, deferred)
        return []

    def _still(self, _: tuple[int, ...]) -> None:
        over = self.session.over
        if over is not None:
            raise SessionEnded(over)

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
        copied(call.view(span), effect.kept[at : at + span.size])
        at += span.size
