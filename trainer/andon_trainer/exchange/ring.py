"""The ring exchange: blocks from rank to rank, with no reducer between them.

Theory of operation. One thread, the ring's, owns the round and both streams; the training thread,
the threads that read and those of gRPC tell it what happened, through one queue. What it answers
with goes into the link to the next rank, which frames it on a thread of its own, or into the
worker's inbox.

A stream to the next rank lives as long as rounds are committed and that rank stays the next. A
round that is void takes its streams with it, at both ends: nothing of its key is ever added to
another's. What comes for a round that this rank was not assigned yet waits; who sends it is checked
once it was: the coordinator told this rank and the one before it, and nobody else, the token of
their link.
"""

from __future__ import annotations

import functools
import hmac
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
import numpy as np

from andon.layout import Layout
from andon.messages import OpenRound
from andon.records import Key
from andon.ring_frames import frame_pass
from andon.ring_messages import EnterRound, RingChunk, RingTerms
from andon.terms import Policy
from andon_trainer.exchange.calls import Call
from andon_trainer.exchange.events import Assigned, AveragesComplete, ExchangeFailed
from andon_trainer.exchange.gate import defect_of
from andon_trainer.exchange.inbox import Inbox
from andon_trainer.exchange.path import Floats
from andon_trainer.exchange.ring_link import RingLink
from andon_trainer.exchange.ring_listener import (
    Incoming,
    Received,
    RingListener,
    StreamEnded,
)
from andon_trainer.exchange.ring_round import Effect, Forward, RingRound, Send, Violation

__all__ = ["RingExchange", "RingPlace"]

log = logging.getLogger(__name__)

_LEAST_PING_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RingPlace:
    """Where a worker listens for the rank before it, and where it says that it does."""

    bind: str
    """An address of this machine."""
    port: int
    """0 is any free one."""
    advertised: str
    """The host by which the others reach it."""
    lease_s: float
    """A neighbour whose machine does not answer for so long is lost."""


@dataclass(slots=True)
class _Arrivals:
    """What a stream brought, until its round is begun here."""

    key: Key | None = None
    """The round that it entered last."""
    early: deque[Received] = field(default_factory=deque)
    over: str = ""
    """Why it ended."""


class RingExchange:
    """An `Exchange` from rank to rank."""

    def __init__(self, layout: Layout, policy: Policy, inbox: Inbox, place: RingPlace) -> None:
        """Makes the buffers of the averages; listens to nobody yet."""
        self._layout, self._policy, self._inbox, self._place = layout, policy, inbox, place
        self.averages: list[Floats] = [
            np.zeros(block.elements, dtype=np.float32) for block in layout.blocks
        ]
        self._whole = Call(name="line.backward", blocks=range(len(layout.blocks)))
        self._assigned: Assigned | None = None
        self._weight = 0.0
        self._refused = False
        self.first_sent: float | None = None
        self.sent_bytes = self.received_bytes = 0
        self._listener: RingListener | None = None
        self._thread: threading.Thread | None = None
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # The ring's thread alone uses what follows.
        self._round: RingRound | None = None
        self._link: RingLink | None = None
        self._entered: Incoming | None = None
        self._stashed_bytes = 0
        """Of the entered stream's, those that were not given back yet."""
        self._streams: dict[Incoming, _Arrivals] = {}
        self._greatest: Key | None = None

    # ------------------------------------------------------------------ the training thread's side

    def listen(self) -> str:
        """Listens for the rank before this one, if it does not; where, as host:port.

        Raises:
            ValueError: it can't listen there.
        """
        if self._listener is None:
            place = self._place
            self._events = queue.SimpleQueue()
            ping_s = max(place.lease_s, _LEAST_PING_S)
            self._listener = RingListener(place.bind, place.port, self._heard, ping_s)
            self._thread = threading.Thread(target=self._own, name="andon-ring", daemon=True)
            self._thread.start()
        host = self._place.advertised
        where = f"[{host}]" if ":" in host else host
        return f"{where}:{self._listener.port}"

    @property
    def is_open(self) -> bool:
        """See `Exchange`."""
        return self._listener is not None

    @property
    def refused(self) -> bool:
        """See `Exchange`."""
        return self._refused

    def open(self, address: str, opening: OpenRound) -> None:
        """See `Exchange`; the reducer that is named has no part in it."""
        self.listen()

    def begin(self, assigned: Assigned, weight: float, call: Call | None = None) -> None:
        """See `Exchange`."""
        self._assigned, self._weight = assigned, weight
        self._refused = False
        self.first_sent = None
        round_ = RingRound(
            assigned, weight, call or self._whole, self._layout, self._policy, self.averages
        )
        self._events.put(lambda: self._begin(round_))

    def submit(self, block: int, flat: Floats) -> None:
        """See `Exchange`."""
        assert self._assigned is not None
        if self._refused:
            return
        defect = defect_of(flat, self._policy.encoding)
        if defect is not None:
            self._refused = True
            self._inbox.put(
                ExchangeFailed(
                    key=self._assigned.key,
                    kind=defect.kind,
                    message="",
                    rank=self._assigned.rank,
                    block=block,
                    element=defect.element,
                    value=defect.value,
                )
            )
            return
        if self.first_sent is None:
            self.first_sent = time.perf_counter()
        key = self._assigned.key
        self._events.put(lambda: self._act(key, lambda round_: round_.submit(block, flat)))

    def submit_data(self) -> None:
        """See `Exchange`."""
        assert self._assigned is not None
        self.first_sent = time.perf_counter()
        key = self._assigned.key
        self._events.put(lambda: self._act(key, RingRound.submit_data))

    def abstain(self) -> None:
        """See `Exchange`: the weight 0 that `begin` told says it all."""
        assert self._weight == 0, "who has a weight gives something"

    def end(self) -> None:
        """See `Exchange`; the round's streams go too."""
        assigned, self._assigned = self._assigned, None
        if assigned is not None:
            self._events.put(lambda: self._end(assigned.key))

    def close(self) -> None:
        """Ends both streams and stops listening."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        assert self._thread is not None
        self._events.put(self._forget)
        self._events.put(None)
        self._thread.join()
        listener.close()
        self._streams.clear()

    # ------------------------------------------------------------------ the ring's thread

    def _own(self) -> None:
        """Does what it is told, one thing after the other."""
        events = self._events
        while (act := events.get()) is not None:
            try:
                act()
            except Exception as error:  # the boundary of this thread: the round is void
                log.exception("the ring failed")
                self._put_lost(f"the ring failed: {type(error).__name__}: {error}")

    def _heard(self, event: Received | StreamEnded) -> None:
        """Runs on a reading thread."""
        self._events.put(functools.partial(self._take, event))

    def _begin(self, round_: RingRound) -> None:
        assigned = round_.assigned
        again = self._round is not None and self._round.assigned.key == assigned.key
        self._round, self._greatest = round_, assigned.key
        if assigned.world_size > 1:
            if assigned.ring is None:
                self._put_lost("this line is no ring: start the worker anew")
                return
            if not again:
                self._enter(round_)
            elif self._link is None or not self._link.alive:
                self._put_lost("the stream to the next rank is gone")
                return
        self._do(round_.begin())
        for stream in list(self._streams):
            self._drain(stream)

    def _enter(self, round_: RingRound) -> None:
        """Enters a new round at the next rank."""
        assigned = round_.assigned
        ring = assigned.ring
        assert ring is not None
        self._entered, self._stashed_bytes = None, 0
        if self._link is None or not self._link.alive or self._link.address != ring.address:
            self._unlink()
            ping_s = max(self._place.lease_s, _LEAST_PING_S)
            self._link = RingLink(ring.address, ping_s, self._count, self._link_lost)
        enter = EnterRound(
            key=assigned.key,
            rank=assigned.rank,
            world_size=assigned.world_size,
            token=ring.token,
        )
        self._link.send(lambda: frame_pass(enter))

    def _act(self, key: Key, act: Callable[[RingRound], list[Effect]]) -> None:
        """What this worker gives to the present round."""
        if self._round is not None and self._round.assigned.key == key:
            self._do(act(self._round))
            self._give_back()

    def _end(self, key: Key) -> None:
        """The round is void."""
        if self._round is not None and self._round.assigned.key == key:
            self._forget()

    def _forget(self) -> None:
        self._round = None
        self._unlink()
        if self._entered is not None:
            self._entered.refuse(grpc.StatusCode.ABORTED, "the round is void")
            self._entered, self._stashed_bytes = None, 0

    def _unlink(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _take(self, event: Received | StreamEnded) -> None:
        """Something came, or will come no more."""
        arrivals = self._streams.setdefault(event.stream, _Arrivals())
        if isinstance(event, StreamEnded):
            arrivals.over = event.message
        else:
            arrivals.early.append(event)
        self._drain(event.stream)

    def _drain(self, stream: Incoming) -> None:
        """Takes what a stream brought, as far as its round is the present one."""
        arrivals = self._streams[stream]
        while arrivals.early and self._use(stream, arrivals, arrivals.early[0]):
            arrivals.early.popleft()
        if not arrivals.over:
            return
        if stream is not self._entered:
            del self._streams[stream]
        elif self._round is not None and not (self._round.complete or arrivals.early):
            self._put_lost(arrivals.over)

    def _use(self, stream: Incoming, arrivals: _Arrivals, received: Received) -> bool:
        """Takes one message; False if its time has not come."""
        message, round_ = received.message, self._round
        if isinstance(message, EnterRound):
            arrivals.key = message.key
        elif arrivals.key is None or message.key != arrivals.key:
            self._blame(stream, "a message of a round that its sender did not enter")
            return True
        key = message.key
        if self._greatest is not None and key < self._greatest:
            stream.refuse_stale(self._greatest)
            return True
        if round_ is None or key != round_.assigned.key:
            if self._greatest is not None and key == self._greatest:
                stream.refuse(grpc.StatusCode.ABORTED, "the round is void")
                return True
            return False
        if isinstance(message, EnterRound):
            self._admit(stream, message, round_)
            stream.free(len(received.data))
            return True
        if stream is not self._entered:
            return True  # It was refused.
        if round_.complete and message.sequence != round_.call.sequence:
            return False
        self._receive(stream, received, message, round_)
        return True

    def _admit(self, stream: Incoming, message: EnterRound, round_: RingRound) -> None:
        """Lets the rank before this one in, and nobody else."""
        assigned = round_.assigned
        ring, before = assigned.ring, (assigned.rank - 1) % assigned.world_size
        right = ring is not None and hmac.compare_digest(message.token, ring.expected_token)
        if not right or (message.rank, message.world_size) != (before, assigned.world_size):
            text = "this is not the token of this link in this round"
            stream.refuse(grpc.StatusCode.UNAUTHENTICATED, text)
            return
        if self._entered is not None and self._entered is not stream:
            self._blame(stream, "the rank before this one entered the round twice")
            return
        stream.admitted = True
        self._entered = stream

    def _receive(
        self,
        stream: Incoming,
        received: Received,
        message: RingTerms | RingChunk,
        round_: RingRound,
    ) -> None:
        self._stashed_bytes += len(received.data)
        self.received_bytes += len(received.data)
        try:
            self._do(round_.receive(message, received.data))
        except Violation as violation:
            self._blame(stream, str(violation))
        self._give_back()

    def _give_back(self) -> None:
        """Makes room for more: what does not wait for this rank's own blocks is used."""
        if self._round is not None and self._entered is not None:
            waiting = self._round.waiting_bytes
            self._entered.free(self._stashed_bytes - waiting)
            self._stashed_bytes = waiting

    def _blame(self, stream: Incoming, what: str) -> None:
        """The sender of a stream broke the protocol."""
        stream.refuse(grpc.StatusCode.INVALID_ARGUMENT, what)
        round_ = self._round
        if round_ is not None and stream is self._entered:
            round_.failed = True
            assigned = round_.assigned
            rank = (assigned.rank - 1) % assigned.world_size
            self._inbox.put(
                ExchangeFailed(
                    key=assigned.key, kind="PROTOCOL", message=f"it sent {what}", rank=rank
                )
            )

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._send(functools.partial(frame_pass, effect.message))
                case Forward():
                    self._send(functools.partial(bytes, effect.data))
                case AveragesComplete() | ExchangeFailed():
                    self._inbox.put(effect)

    def _send(self, frame: Callable[[], bytes]) -> None:
        if self._link is not None:
            self._link.send(frame)

    def _count(self, size: int) -> None:
        """Runs on the sending thread."""
        self.sent_bytes += size

    def _link_lost(self, link: RingLink, why: str, greatest: Key | None) -> None:
        """Runs on a thread of gRPC's."""
        self._events.put(lambda: self._link_ended(link, why, greatest))

    def _link_ended(self, link: RingLink, why: str, greatest: Key | None) -> None:
        round_ = self._round
        if link is not self._link or round_ is None:
            return
        if greatest is None:
            self._put_lost(why)
            return
        text = "the next rank has begun a greater key"
        key = round_.assigned.key
        self._inbox.put(
            ExchangeFailed(key=key, kind="STALE_ROUND", message=text, greatest=greatest)
        )

    def _put_lost(self, why: str) -> None:
        """The round can't be finished; said once."""
        round_ = self._round
        if round_ is not None and not round_.failed:
            round_.failed = True
            key = round_.assigned.key
            self._inbox.put(ExchangeFailed(key=key, kind="DATA_STREAM_LOST", message=why))
