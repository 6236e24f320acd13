"""All groups of one session at one rank: frames go to their groups, and the end goes to all.

Frames may name a group that this rank has not made yet: another one was faster. They are kept then,
within the limits that a group has, and handed to it once it is made.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from andon.protocol.peer_calls import (
    EAGER_BYTES,
    MAX_AHEAD,
    group_number,
)
from andon.protocol.peer_frames import Begin, LaneEnd, Piece
from andon.protocol.sessions import RankFault, RankReport, SessionEnd, SessionOver
from andon.tcp.listening import TcpListener
from andon.wire.checksums import CAPABILITY as CHECKSUMS
from andon.wire.peer_frames import peer_head
from andon_trainer.core.peer_flow import PeerViolation
from andon_trainer.core.peer_plan import Places, places_of
from andon_trainer.errors import SessionEnded
from andon_trainer.peers.attendance import Attendance
from andon_trainer.peers.collective import OpenCall, PeerGroup
from andon_trainer.peers.lanes import HeadOut, Lanes, Outgoing, PeerFrames
from andon_trainer.peers.memory import MEMORY_CAPABILITY, Neighbour, NeighbourMemory
from andon_trainer.peers.receiving import Core, rank_in, reader_of

__all__ = ["Peers"]

_MAX_STRANGE_GROUPS = 1024
"""Groups that others have made and this rank has not."""
_MAX_STRANGE_BYTES = 2**25
"""What is kept for them."""
_FINISH_S = 2.0
"""How long a rank that leaves waits until its last frames are sent."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Stranger:
    """What came from one peer for a group that this rank has not made."""

    frames: list[tuple[Begin | Piece, memoryview | None]] = field(default_factory=list)
    begins: int = 0

    def claim(self, frame: Begin | Piece) -> None:
        """Counts a frame.

        Raises:
            PeerViolation: it may not come before this rank has made the group.
        """
        if isinstance(frame, Begin):
            self.begins += 1
            if self.begins > 2 * MAX_AHEAD:
                raise PeerViolation(f"more than {MAX_AHEAD} calls ahead of this rank")
        elif frame.stage or frame.offset + frame.length > EAGER_BYTES or len(self.frames) > 2**12:
            raise PeerViolation("a piece of a group that this rank has not made")


class Peers:
    """All groups of one session in this process."""

    def __init__(
        self,
        attendance: Attendance,
        listener: TcpListener,
        *,
        tls: Path | None = None,
        shared_dir: Path | None = None,
    ) -> None:
        """Offers lanes to the other ranks, and opens none yet.

        Args:
            attendance: the session, which was formed.
            listener: where this rank's lanes are taken. It stays the caller's.
            tls: the folder of certificates; None: nothing is encrypted.
            shared_dir: where this rank shares memory with its neighbours. None: it did not list
                that capability when it attended.
        """
        self._attendance = attendance
        self._shared_dir = shared_dir
        formed = attendance.formed
        self.rank = attendance.rank
        self._capabilities = formed.capabilities
        self.checksums = CHECKSUMS in formed.capabilities
        self._lock = threading.RLock()
        """Guards what follows. Taken before the lock of a group, never while that is held."""
        self._groups: dict[int, tuple[PeerGroup, Core]] = {}
        """By the number that frames have."""
        self._strangers: dict[int, defaultdict[int, _Stranger]] = {}
        """By number and peer: what came for groups that are not made."""
        self._strange_bytes = 0
        """Of their pieces."""
        self._gone: set[int] = set()
        """Ranks whose LaneEnd came."""
        self._over: SessionOver | None = None
        self._closed = False
        self._calls = self._bytes = 0
        self._exchange_s = 0.0
        self._later = _Acts("andon-peer-tell")
        self._faults = _Acts("andon-peer-fault")
        """Beside the other: what is called later may wait for the very call that failed."""
        self._lanes = Lanes(
            self.rank,
            formed.peers,
            listener,
            PeerFrames(partial(reader_of, self), self._lost, self._deaf, self._broke),
            tls,
        )
        attendance.watch(self._end)

    def group(self, name: str, ranks: Sequence[int]) -> PeerGroup:
        """Makes a group of some ranks of the session, in this order; this rank is one of them.

        All of them make it, with the same name, which no group of these ranks had before.

        Raises:
            SessionEnded: the session is over.
            ValueError: the ranks are not such ranks.
        """
        peers = self._attendance.formed.peers
        if self.rank not in ranks or len(set(ranks)) != len(ranks):
            raise ValueError(f"ranks {list(ranks)} are not different ones, rank {self.rank} too")
        if not set(ranks) <= set(range(len(peers))):
            raise ValueError(f"ranks {list(ranks)} are not among those of the session")
        chosen = [peers[rank] for rank in ranks]
        shares = self._shared_dir is not None and MEMORY_CAPABILITY in self._capabilities
        places = places_of([each.shared_folder if shares else b"" for each in chosen])
        memory = self._memory(name, ranks, places) if shares else None
        group = PeerGroup(self, name, ranks, places, memory)
        numbers = group.lanes.collectives.group, group.lanes.sends.group
        with self._lock:
            if self._over is not None or self._closed:
                raise SessionEnded(self._over or self._left())
            if numbers[0] in self._groups:
                raise ValueError(f"there is a group {name!r} of these ranks")
            # Under the lock, so that what comes meanwhile is behind what came before.
            self._admit(numbers[0], group, group.lanes.collectives)
            self._admit(numbers[1], group, group.lanes.sends)
            gone = self._gone & set(ranks)
        for peer in gone:
            group.lanes.gone(group.ranks.index(peer))
        return group

    def _memory(self, name: str, ranks: Sequence[int], places: Places) -> NeighbourMemory | None:
        """What this rank shares with its neighbours in a group; None if it has none there."""
        formed, near = self._attendance.formed, places.neighbours(list(ranks).index(self.rank))
        if len(near) < 2 or self._shared_dir is None:
            return None
        if len(places.hosts) > 1 and not places.even:
            # Plans count each rank as a host of its own.
            return None
        neighbours = [
            Neighbour(rank=peer.rank, token_to=peer.token_to, token_from=peer.token_from)
            for peer in (formed.peers[ranks[place]] for place in near)
        ]
        return NeighbourMemory(
            self._shared_dir, formed.key, group_number(name, ranks), neighbours, self.rank
        )

    def _admit(self, number: int, group: PeerGroup, core: Core) -> None:
        for peer, stranger in self._strangers.pop(number, {}).items():
            for frame, kept in stranger.frames:
                self._strange_bytes -= 0 if kept is None else kept.nbytes
                self._replay(group, core, peer, frame, kept)
        self._groups[number] = group, core

    def _all_groups(self) -> list[PeerGroup]:
        return list({id(group): group for group, _ in self._groups.values()}.values())

    def report(self) -> RankReport:
        """What this rank has exchanged, and what is open."""
        with self._lock:
            groups = self._all_groups()
            counted = self._calls, self._bytes, self._exchange_s
        found = [(group, call) for group in groups if (call := group.pending())]
        pending = None
        if found:
            group, call = min(found, key=lambda each: each[1].began)
            pending = group.pending_of(call)
        return RankReport(
            calls=counted[0], bytes=counted[1], exchange_s=counted[2], pending=pending
        )

    def close(self) -> None:
        """Leaves in order: says so on each lane, and ends them. Calls that are open fail."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            groups = self._all_groups()
        if self._over is None:
            for group in groups:
                group.leave()
            # Neighbours, too: one may wait for memory that this rank never made. Who has left
            # needs nothing any more, and takes no lane.
            near = {peer for group in groups for peer in group.sharing}
            for peer in sorted(({*self._lanes.linked} | near) - self._gone - {self.rank}):
                self._lanes.put(peer, HeadOut(peer_head(LaneEnd(), checksums=self.checksums)))
            self._lanes.finish(_FINISH_S)
        self._end(self._over or self._left())
        self._later.end()
        self._faults.end()

    def _left(self) -> SessionOver:
        """What calls fail with once this rank has left."""
        return SessionOver(
            key=self._attendance.formed.key,
            end=SessionEnd.RANK_LEFT,
            culprit=self.rank,
            culprit_node="",
            message=f"rank {self.rank} has left the session",
        )

    # ------------------------------------------------------------------ for groups

    @property
    def over(self) -> SessionOver | None:
        """Why the session is over; None while it goes on."""
        return self._over

    def has_left(self, peer: int) -> bool:
        """Whether a rank has said that it makes no more calls."""
        return peer in self._gone

    def put(self, peer: int, frame: Outgoing) -> bool:
        """Sends a frame to a rank; True: the kernel has it."""
        return self._lanes.put(peer, frame)

    def fault(self, fault: RankFault) -> None:
        """Ends the session. The first fault of this rank is the first that is told."""
        self._faults.put(partial(self._attendance.fault, fault))

    def later(self, act: Callable[[], None]) -> None:
        """Has something called on a thread that carries no collective."""
        self._later.put(act)

    def ended(self, call: OpenCall) -> None:
        """Counts a call that has ended."""
        size = sum(view.nbytes for part in call.work.parts for view in part.gives)
        with self._lock:
            self._calls += 1
            self._bytes += size
            self._exchange_s += time.monotonic() - call.began

    # ------------------------------------------------------------------ frames

    def found(self, number: int) -> tuple[PeerGroup, Core] | None:
        """The group whose frames have a number."""
        return self._groups.get(number)

    def claim(self, peer: int, frame: Begin | Piece) -> bool:
        """Makes room for a frame of a group that is not made; False: it was made meanwhile.

        Raises:
            PeerViolation: it may not come yet.
        """
        with self._lock:
            if frame.group in self._groups:
                return False
            if frame.group not in self._strangers and len(self._strangers) >= _MAX_STRANGE_GROUPS:
                raise PeerViolation(f"more than {_MAX_STRANGE_GROUPS} groups of others")
            self._strangers.setdefault(frame.group, defaultdict(_Stranger))[peer].claim(frame)
            if isinstance(frame, Piece):
                self._strange_bytes += frame.length
                if self._strange_bytes > _MAX_STRANGE_BYTES:
                    raise PeerViolation("too much for groups that this rank has not made")
            return True

    def keep(self, peer: int, frame: Begin | Piece, kept: memoryview | None) -> None:
        """Keeps a frame of a group that is not made; hands it over if it was made meanwhile."""
        with self._lock:
            found = self._groups.get(frame.group)
            if found is None:
                self._strangers[frame.group][peer].frames.append((frame, kept))
                return
        self._replay(*found, peer, frame, kept)

    def end_of(self, peer: int) -> None:
        """A peer's LaneEnd came."""
        self._lanes.left(peer)
        with self._lock:
            self._gone.add(peer)
            groups = self._all_groups()
        for group in groups:
            if peer in group.ranks:
                group.lanes.gone(group.ranks.index(peer))

    def _replay(
        self,
        group: PeerGroup,
        core: Core,
        peer: int,
        frame: Begin | Piece,
        kept: memoryview | None,
    ) -> None:
        try:
            place = rank_in(group, peer)
            if isinstance(frame, Begin):
                group.lanes.begun(core, place, frame)
                return
            landing = group.lanes.landing(core, place, frame)
            assert kept is not None, "a piece is kept with its bytes"
            if landing is None:
                group.lanes.landed(core, place, frame, kept)
                return
            if landing.some is None:
                _spread(landing.views, kept)
            else:
                group.lanes.add(core, landing, kept)
            group.lanes.landed(core, place, frame, landing)
        except PeerViolation as violation:
            self._broke(peer, violation)

    # ------------------------------------------------------------------ ends

    def _lost(self, peer: int, why: str) -> None:
        """A lane of a peer broke."""
        self._accuse(SessionEnd.UNREACHABLE, peer, f"rank {peer} can't be reached: {why}")

    def _deaf(self, peer: int) -> None:
        """A peer that left takes nothing more."""
        for group in self._all_groups():
            if peer in group.ranks:
                group.lanes.deaf(group.ranks.index(peer))

    def _broke(self, peer: int, error: Exception) -> None:
        """What a peer sent breaks the protocol."""
        self._accuse(SessionEnd.CORRUPT, peer, f"what rank {peer} sent is not valid: {error}")

    def _accuse(self, end: SessionEnd, peer: int, message: str) -> None:
        if self._over is not None or self._closed:
            return
        _log.info("peer_fault: %s", message)
        pending = self.report().pending
        self.fault(RankFault(end=end, culprit=peer, message=message, call=pending))

    def _end(self, over: SessionOver) -> None:
        """The session is over: no lane, and no call."""
        with self._lock:
            if self._over is None:
                self._over = over
            groups = self._all_groups()
            self._strangers.clear()
        # First: nobody may read or write the memory of a call that has ended.
        self._lanes.close()
        for group in groups:
            group.close(SessionEnded(self._over))


class _Acts:
    """Acts one after the other, on a thread that starts with the first of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, act: Callable[[], None]) -> None:
        """Has it called; never blocks."""
        self._queue.put(act)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def end(self) -> None:
        """Waits for the acts so far, unless one of them asks for it. Later ones are dropped."""
        self._queue.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while (act := self._queue.get()) is not None:
            try:
                act()
            except Exception:
                _log.exception("what %s was to do failed", self._name)
            del act


def _spread(views: Sequence[memoryview], data: memoryview) -> None:
    at = 0
    for view in views:
        view[:] = data[at : at + view.nbytes]
        at += view.nbytes
