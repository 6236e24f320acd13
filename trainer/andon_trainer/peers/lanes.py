"""Lanes between this rank and the others: one for each direction in which something is sent.

Theory of operation. A lane is opened when the first frame goes there, by the thread that sends on
it. Frames leave in the order in which they are put. Whoever puts a small frame on a lane that has
nothing to send sends it itself, as far as the kernel takes it at once: a thread that would have to
wake for it costs as much as the rest of a small call. Everything else is sent by the lane's thread.

What comes is read by one thread for each lane, which never waits for anything but its lane: a frame
has its room before it is sent. So ranks that send each other at the same time never block.

A peer's process that ends closes its ends of all lanes. Where it sends, the reading thread sees it
at once. Where it only receives, nobody reads, so one thread watches these sockets.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from andon.host.tls import host_of
from andon.protocol.messages import TcpOffer
from andon.protocol.peer_calls import EAGER_BYTES, MAX_PIECE_BYTES
from andon.protocol.sessions import Peer
from andon.protocol.tokens import peer_nonce
from andon.tcp.connecting import TcpUnavailable, connect
from andon.tcp.connection import TcpConnection
from andon.tcp.framing import prefixed
from andon.tcp.listening import OpenOffer, TcpListener
from andon.tcp.proof import LaneDirection, LaneSession
from andon.tcp.receiving import FrameReader, TcpReceiver
from andon.wire.peer_frames import PeerHead
from andon_trainer.exchange.channels import close_in_children

__all__ = ["HeadOut", "Lanes", "Outgoing", "PeerFrames"]

OPEN_WITHIN_S = 5.0
"""How long opening a lane may take; docs/protocol-sessions.md, section 27."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.01, 0.2
"""How long it waits between two tries, at first and at most."""
_GRACE_S = 0.25
"""How long a peer whose process closed a lane may take to say that it left in order."""
_UNSENT_BYTES = 2**18
"""What the kernel keeps of a lane beside what is on its way; its own measure is megabytes. When a
call begins, the first lanes would fill that, and keep cores and link from the others. Less would
run dry on a fast link before the lane's thread is awake."""

_CLOSED = getattr(select, "POLLRDHUP", select.POLLHUP)
"""What `poll` says of a connection whose other end was closed. Only Linux says it at once."""

_log = logging.getLogger(__name__)


class Outgoing(Protocol):
    """A frame that is to be sent."""

    @property
    def size(self) -> int:
        """Bytes of its payload."""

    def views(self) -> list[memoryview] | None:
        """Its payload, where it lies; None: it must not be sent any more."""

    def head(self, views: list[memoryview]) -> bytes:
        """Its head."""

    def sent(self) -> None:
        """The kernel has it. Called on the lane's thread, unless `put` returned True."""


@dataclass(slots=True)
class HeadOut:
    """A frame without a payload."""

    made: bytes
    """Its head."""
    size: int = 0

    def views(self) -> list[memoryview]:
        """None: it has no payload."""
        return []

    def head(self, views: list[memoryview]) -> bytes:
        """Its head."""
        del views
        return self.made

    def sent(self) -> None:
        """Nothing follows."""


@dataclass(frozen=True, slots=True)
class PeerFrames:
    """What becomes of a peer's frames and of its lanes. Called on the threads of lanes."""

    reader: Callable[[int], FrameReader[PeerHead]]
    """What is done with the frames of a peer; its `ended` is called by `Lanes`."""
    lost: Callable[[int, str], None]
    """A lane broke, or could not be opened: the peer, and why."""
    deaf: Callable[[int], None]
    """A peer that left in order has closed its end of the lane to it."""
    broke: Callable[[int, Exception], None]
    """What came from a peer breaks the protocol."""


class _OutgoingLane:
    """The lane to one peer."""

    def __init__(
        self, name: str, open_lane: Callable[[], TcpConnection], lost: Callable[[str], None]
    ) -> None:
        self._open_lane, self._lost = open_lane, lost
        self._lock = threading.Lock()
        """Guards `_waiting`, and the connection while somebody sends at once."""
        self._waiting = 0
        """How many frames the thread has not sent."""
        self._queue: queue.SimpleQueue[tuple[Outgoing | None, memoryview | None] | None] = (
            queue.SimpleQueue()
        )
        self.connection: TcpConnection | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, frame: Outgoing) -> bool:
        """Sends a frame after all others; never blocks. True: the kernel has all of it already."""
        with self._lock:
            if not self._waiting and self.connection is not None and frame.size <= EAGER_BYTES:
                views = frame.views()
                if views is None:
                    return False
                data = b"".join([_bytes_of(frame, views), *views])
                with contextlib.suppress(OSError):  # The thread meets it again, and reports it.
                    sent = self.connection.send_at_once(data)
                    if sent == len(data):
                        return True
                    if sent:
                        self._waiting += 1
                        self._queue.put((frame, memoryview(data)[sent:]))
                        return False
            self._waiting += 1
            self._queue.put((frame, None))
            return False

    def finish(self) -> None:
        """Ends the lane after all that was put."""
        self._queue.put(None)

    def close(self) -> None:
        """Ends the lane at once."""
        self._closing = True
        if self.connection is not None:
            self.connection.end()
        self._queue.put(None)

    def join(self, within_s: float) -> None:
        """Waits for the thread."""
        if threading.current_thread() is not self._thread:
            self._thread.join(within_s)

    def _run(self) -> None:
        try:
            self._send_all()
        except (OSError, TcpUnavailable) as error:
            self._report(str(error))
        except Exception as error:
            if not self._closing:
                _log.exception("a frame to a peer could not be sent")
            self._report(f"a frame could not be sent: {error}")
        finally:
            if self.connection is not None:
                self.connection.close()

    def _send_all(self) -> None:
        # The first frame is why the lane is opened.
        work = self._queue.get()
        if work is None:
            return
        connection = self._open_lane()
        with self._lock:
            self.connection = connection
        while work is not None and not self._closing:
            frame, rest = work
            if rest is not None:
                connection.send_rest(rest)
            elif frame is not None:
                views = frame.views()
                if views is not None:
                    connection.send_views(_bytes_of(frame, views), views)
            with self._lock:
                self._waiting -= 1
            if frame is not None:
                frame.sent()
            # The names would keep the payload alive while the thread waits for more.
            del frame, rest, work
            work = self._queue.get()

    def _report(self, why: str) -> None:
        if not self._closing:
            self._lost(why)


def _bytes_of(frame: Outgoing, views: list[memoryview]) -> bytes:
    """A frame's prefix and head."""
    return prefixed(frame.head(views), frame.size)


@dataclass(slots=True, eq=False)
class _Watched:
    """An outgoing lane's socket."""

    peer: int
    connection: TcpConnection
    since: float | None = None
    """When the other end closed it."""


class Lanes:
    """All lanes of one rank in one session."""

    def __init__(
        self,
        rank: int,
        peers: tuple[Peer, ...],
        listener: TcpListener,
        frames: PeerFrames,
        tls: Path | None = None,
    ) -> None:
        """Offers each peer its lane to this rank; opens none.

        Args:
            rank: this rank.
            peers: all ranks.
            listener: where lanes are taken. It stays the caller's.
            frames: what becomes of frames.
            tls: the folder of certificates; None: nothing is encrypted.
        """
        self._rank, self._peers, self._tls, self._frames = rank, peers, tls, frames
        self._listener = listener
        self._lock = threading.Lock()
        """Guards the tables."""
        self._outgoing: dict[int, _OutgoingLane] = {}
        self._incoming: dict[int, TcpReceiver[PeerHead]] = {}
        self._left: set[int] = set()
        """Peers whose LaneEnd came."""
        self._closed = False
        self._ending = threading.Event()
        """Set once nothing need be opened any more."""
        self._watched: dict[int, _Watched] = {}
        """By file descriptor; of the watching thread and whoever holds the lock."""
        self._poll = select.poll()
        self._woken, self._waking = socket.socketpair()
        self._woken.settimeout(0)
        self._poll.register(self._woken, select.POLLIN)
        self._watching = threading.Thread(target=self._watch, name="andon-peer-watch", daemon=True)
        self._offers: list[OpenOffer] = []
        close_in_children(f":{listener.port}")
        for peer in peers:
            if peer.rank == rank:
                continue
            offer = listener.offer(
                LaneSession(peer.token_from),
                self._joining(peer.rank),
                frozenset({LaneDirection.CLIENT_SENDS}),
                nonce=peer_nonce(peer.token_from),
            )
            if offer is not None:
                self._offers.append(offer)
        self._watching.start()

    def put(self, peer: int, frame: Outgoing) -> bool:
        """Sends a frame to a peer; never blocks. True: the kernel has it already."""
        lane = self._outgoing.get(peer)
        if lane is None:
            lane = self._open(peer)
            if lane is None:
                return False
        return lane.put(frame)

    def left(self, peer: int) -> None:
        """A peer's LaneEnd came: what it closes from now on is closed in order."""
        self._left.add(peer)

    @property
    def linked(self) -> list[int]:
        """The peers with which there is a lane, in order."""
        with self._lock:
            return sorted({*self._outgoing, *self._incoming})

    def finish(self, within_s: float) -> None:
        """Sends what was put, ends the lanes that this rank opened, and waits for that."""
        with self._lock:
            lanes = list(self._outgoing.values())
        for lane in lanes:
            lane.finish()
        until = time.monotonic() + within_s
        for lane in lanes:
            lane.join(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Ends everything at once. No memory of a call is read or written after it returns."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._ending.set()
            lanes, receivers = list(self._outgoing.values()), list(self._incoming.values())
        for offer in self._offers:
            self._listener.withdraw(offer)
        for lane in lanes:
            lane.close()
        for receiver in receivers:
            receiver.close()
        for lane in lanes:
            lane.join(OPEN_WITHIN_S)
        self._wake()
        if threading.current_thread() is not self._watching:
            self._watching.join()

    # ------------------------------------------------------------------ opening and taking

    def _open(self, peer: int) -> _OutgoingLane | None:
        with self._lock:
            if self._closed:
                return None
            lane = self._outgoing.get(peer)
            if lane is None:
                lane = self._outgoing[peer] = _OutgoingLane(
                    f"andon-peer-send-{peer}",
                    lambda: self._connected(peer),
                    lambda why: self._send_failed(peer, why),
                )
            return lane

    def _connected(self, peer: int) -> TcpConnection:
        """Runs on the lane's own thread.

        The peer may not know yet that the session was formed: then it has offered nothing, and
        closes what this rank opens. So it is tried again, for as long as opening may take.

        Raises:
            TcpUnavailable: it can't be opened.
        """
        there = self._peers[peer]
        host, _, port = there.address.rpartition(":")
        close_in_children(there.address)
        deadline, pause_s = time.monotonic() + OPEN_WITHIN_S, _FIRST_PAUSE_S
        while True:
            try:
                (connection,) = connect(
                    host_of(there.address) if host else "localhost",
                    TcpOffer(int(port), peer_nonce(there.token_to), reports=False),
                    LaneSession(there.token_to),
                    (LaneDirection.CLIENT_SENDS,),
                    tls=self._tls,
                    within_s=max(pause_s, deadline - time.monotonic()),
                )
                connection.keep_unsent(_UNSENT_BYTES)
                break
            except TcpUnavailable:
                late = time.monotonic() + pause_s > deadline
                if late or self._ending.wait(pause_s) or peer in self._left:
                    raise
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        with self._lock:
            if self._closed:
                connection.close()
                raise TcpUnavailable("the session is over")
            self._watched[connection.descriptor] = _Watched(peer, connection)
            self._poll.register(connection.descriptor, _CLOSED)
        self._wake()
        return connection

    def _joining(self, peer: int) -> Callable[[LaneDirection, TcpConnection], None]:
        return lambda _, connection: self._joined(peer, connection)

    def _joined(self, peer: int, connection: TcpConnection) -> None:
        """Runs on the listener's thread."""
        reader = self._frames.reader(peer)
        with self._lock:
            if self._closed:
                connection.close()
                return
            self._incoming[peer] = TcpReceiver(
                connection,
                FrameReader(
                    parse=reader.parse,
                    place=reader.place,
                    received=reader.received,
                    ended=lambda error: self._ended(peer, error),
                    max_payload_bytes=MAX_PIECE_BYTES,
                ),
                f"andon-peer-receive-{peer}",
            )

    # ------------------------------------------------------------------ ends

    def _ended(self, peer: int, error: Exception | None) -> None:
        """The lane from a peer ended. Runs on the thread that read it."""
        if error is None or isinstance(error, OSError):
            if peer not in self._left:
                why = "its lane ended" if error is None else f"its lane broke: {error}"
                self._frames.lost(peer, why)
        else:
            self._frames.broke(peer, error)

    def _send_failed(self, peer: int, why: str) -> None:
        """Runs on the thread of the lane to a peer, which ends."""
        lane = self._outgoing.get(peer)
        if lane is not None and lane.connection is not None:
            # Perhaps it left in order: the watch waits for its LaneEnd.
            self._wake()
        elif peer in self._left:
            self._frames.deaf(peer)
        else:
            self._frames.lost(peer, f"no lane to it could be opened: {why}")

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waking.send(b"\0")

    def _watch(self) -> None:
        try:
            while not self._closed:
                self._look()
        except Exception:
            _log.exception("lanes to peers are not watched any more")
        finally:
            self._woken.close()
            self._waking.close()

    def _look(self) -> None:
        pending = [each for each in list(self._watched.values()) if each.since is not None]
        wait_ms = None if not pending else _GRACE_S * 500
        for descriptor, _ in self._poll.poll(wait_ms):
            if descriptor == self._woken.fileno():
                with contextlib.suppress(OSError):
                    self._woken.recv(4096)
                continue
            with contextlib.suppress(KeyError, OSError):
                self._poll.unregister(descriptor)
            with self._lock:
                found = self._watched.get(descriptor)
                if found is not None:
                    found.since = time.monotonic()
        now = time.monotonic()
        for descriptor, each in list(self._watched.items()):
            if each.since is not None and now > each.since + _GRACE_S:
                del self._watched[descriptor]
                if self._closed:
                    return
                if each.peer in self._left:
                    self._frames.deaf(each.peer)
                else:
                    self._frames.lost(each.peer, "it closed the lane to it")
