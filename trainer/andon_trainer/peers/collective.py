"""A group of ranks at one of them: its calls go over lanes, through memory, or both.

A call ends once: when all of it is done, or when the session is over. Then nobody reads or writes
its memory any more. Who waits for it sleeps on a lock of the interpreter, or makes it; callbacks
run on a thread of the session that carries no collective.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from andon.protocol.peer_calls import CallKind, PendingCall, group_number, sends_number
from andon.protocol.sessions import RankFault
from andon_trainer.core.collectives import plan_of
from andon_trainer.core.group_calls import GroupCalls
from andon_trainer.core.peer_effects import sizes_of
from andon_trainer.core.peer_plan import Places
from andon_trainer.core.peer_work import Work
from andon_trainer.core.send_calls import SendCalls
from andon_trainer.errors import SessionEnded
from andon_trainer.peers.call_room import CallRoom
from andon_trainer.peers.host_calls import HostCalls
from andon_trainer.peers.host_stages import HostStages
from andon_trainer.peers.lane_calls import LaneCalls
from andon_trainer.peers.memory import NeighbourLeft, NeighbourMemory
from andon_trainer.peers.open_call import GroupSession, OpenCall

__all__ = ["OpenCall", "PeerGroup"]

_log = logging.getLogger(__name__)


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
        self._places = places
        self.room = CallRoom()
        self._lock = threading.Lock()
        """Guards the table of calls."""
        self._calls: dict[OpenCall, None] = {}
        """Those that have not ended, oldest first."""
        self._closed = False
        self._memory = memory
        self._leaving: set[int] = set()
        """Ranks that were waited for when they had left."""
        on_several_hosts = len(places.hosts) > 1
        self.lanes = LaneCalls(
            self,
            GroupCalls(
                group=group_number(name, ranks),
                places=places,
                rank=self.rank,
                shares_memory=memory is not None and on_several_hosts,
            ),
            SendCalls(group=sends_number(name, ranks), places=places, rank=self.rank),
        )
        self._host: HostCalls | None = None
        """Makes collectives, if all ranks are neighbours."""
        if memory is not None and on_several_hosts:
            HostStages(self, self.lanes, memory, places, self.rank)
        elif memory is not None:
            self._host = HostCalls(self, memory, session.rank, f"andon-peer-memory-{name}")

    def begin(self, work: Work, *, awaited: bool = False) -> OpenCall:
        """Makes a call. Never blocks.

        With `awaited` the caller waits for it at once: then no other thread need be woken for a
        call that goes through memory, and none is.

        Raises:
            SessionEnded: the session is over.
            ValueError: its parts are not those of such a call.
        """
        call = OpenCall(self, work, len(self.ranks))
        sends = work.call.kind is CallKind.SEND
        if not sends:
            # Refuses what no plan can be made for, before anybody hears of it.
            plan_of(work.call, sizes_of(work), work.itemsize, self._places, self.rank)
        with self._lock:
            # First: another thread may end it at once.
            if self._closed:
                assert self.session.over is not None, "a group is closed when its session ends"
                raise SessionEnded(self.session.over)
            self._calls[call] = None
        if not sends and self._host is not None and self._on_host(self._host, call, awaited):
            return call
        try:
            self.lanes.begin(self.lanes.sends if sends else self.lanes.collectives, call)
        except ValueError:
            with self._lock:
                self._calls.pop(call, None)
            raise
        return call

    def leave(self) -> None:
        """This rank makes no more calls."""
        if self._memory is not None:
            self._memory.leave()

    @property
    def sharing(self) -> tuple[int, ...]:
        """The ranks of the session with which this one shares memory here, itself too."""
        return () if self._memory is None else self._memory.ranks

    def close(self, error: BaseException) -> None:
        """Ends all calls. Lanes are closed already."""
        with self._lock:
            self._closed = True
            calls = list(self._calls)
            self._calls.clear()
        if self._host is not None:
            self._host.close()
        elif self._memory is not None:
            self._memory.end()
        self.lanes.close()
        if self._memory is not None:
            self._memory.close()
        for each in calls:
            each.end(error)

    # ------------------------------------------------------------------ for people

    def pending(self) -> OpenCall | None:
        """The call that has been open for longest."""
        with self._lock:
            return next(iter(self._calls), None)

    def pending_of(self, call: OpenCall) -> PendingCall:
        """A call as reports name it."""
        lanes = self.lanes
        core = lanes.sends if call.work.call.kind is CallKind.SEND else lanes.collectives
        missing: Sequence[int]
        if call.host is not None:
            missing = call.host.missing
        else:
            missing = [self.ranks[each] for each in lanes.missing(call)]
        return PendingCall(
            group_name=self.name,
            group=core.group,
            sequence=call.number,
            call=call.work.call,
            open_s=time.monotonic() - call.began,
            missing=tuple(missing),
        )

    def late(self, call: OpenCall, timeout_s: float) -> str:
        """What people read of a call that has not ended in time."""
        pending = self.pending_of(call)
        missing = ", ".join(map(str, pending.missing))
        ranks = f"rank {missing} is" if len(pending.missing) == 1 else f"ranks {missing} are"
        return f"{pending}: the timeout of {timeout_s:g} s passed" + (
            f", and {ranks} missing" if missing else ""
        )

    # ------------------------------------------------------------------ for its parts

    def look(self, awaited: Sequence[int]) -> None:
        """What to do at least every tenth of a second while ranks are waited for in memory.

        Raises:
            SessionEnded: the session is over.
            NeighbourLeft: one of them has left.
        """
        if self.session.over is not None:
            raise SessionEnded(self.session.over)
        for rank in awaited:
            if self.session.has_left(rank):
                # What it gave before it left may have been given since somebody looked.
                if rank in self._leaving:
                    raise NeighbourLeft(rank)
                self._leaving.add(rank)

    @property
    def stopped(self) -> bool:
        """Whether the session can't go on, as a collective has shown, or is over."""
        return self.lanes.collectives.failed or self.session.over is not None

    def ended(self, call: OpenCall) -> None:
        """A call has ended well."""
        with self._lock:
            self._calls.pop(call, None)
        self.session.ended(call)
        call.end(None)

    def faulty(self, call: OpenCall, fault: RankFault) -> None:
        """A call through memory shows that the session can't go on."""
        self.lanes.collectives.failed = True
        named = fault if fault.call is not None else replace(fault, call=self.pending_of(call))
        self.session.fault(named)

    def without_memory(self, calls: Sequence[OpenCall], why: str) -> None:
        """Memory can't be shared: these calls, the first ones of the group, go over lanes."""
        _log.warning("group %s exchanges over TCP lanes: %s", self.name, why)
        for call in calls:
            call.host = None
            self.lanes.begin(self.lanes.collectives, call)

    def named(self, sequence: int, work: Work) -> PendingCall:
        """A call as reports name it."""
        return self.lanes.named(self.lanes.collectives, (sequence, work.call))

    def _on_host(self, host: HostCalls, call: OpenCall, awaited: bool) -> bool:  # noqa: FBT001
        """Makes a call through memory; False if that can't be shared."""
        call.host = host
        number = host.begin(call, awaited=awaited)
        if number is None:
            call.host = None
            return False
        call.place = number
        return True
