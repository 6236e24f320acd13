"""A connection of a TCP lane once it is proven: bytes one way, encrypted or not."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Sequence

from andon.tcp.kernel import LaneFlow, flow_of

__all__ = ["TcpConnection", "TcpLost", "prepare"]

_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPALIVE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""When the kernel probes an idle connection: after how many seconds, how often again, and how many
probes may stay unanswered (Linux; macOS has another name for the first). So the receiving end
notices within half a minute that a firewall has forgotten the path. The pings of gRPC would not
show that, since they go over another connection."""


_TCP_INFO = struct.Struct("=B127xQ")
"""Where Linux's TCP_INFO has a connection's state, and the bytes that came over it."""
_MOST_VIEWS = 512
"""How many buffers one call of the kernel gets; Linux takes 1024."""
_ENDED_BY_PEER = frozenset({6, 8, 9, 11})
"""The states in which the other end's FIN has come: Linux counts it as a byte."""


class TcpLost(ConnectionError):
    """The other end of a connection is gone, or ended it within a frame."""


def prepare(connection: socket.socket) -> None:
    """Sets what every connection of a lane has: no delay, and the kernel's probes.

    TCP_USER_TIMEOUT is not set: a receiver that waits for a slow rank keeps the window shut for as
    long as that takes, and the kernel would take it for dead.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_CONGESTION") and _is_on_this_host(connection):
        # There is no network that could be congested. BBR, where it is the system's choice, would
        # pace what is sent with a timer, for a fifth of an exchange's processor time.
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def _is_on_this_host(connection: socket.socket) -> bool:
    """Whether both ends have the same address: loopback, or one of this host's own."""
    try:
        here, there = connection.getsockname(), connection.getpeername()
    except OSError:
        return False
    return len(here) > 1 and bool(here[0]) and here[0] == there[0]


def _arrived(connection: socket.socket) -> int | None:
    """How many bytes the kernel has received on a connection; None: it does not say."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    try:
        found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        state, received = _TCP_INFO.unpack(found)
    except (OSError, struct.error):
        return None
    return int(received) - (state in _ENDED_BY_PEER)


def _behind(views: list[memoryview], sent: int) -> list[memoryview]:
    """What is left of views, one after the other, once the first bytes were sent."""
    for at, view in enumerate(views):
        if sent < view.nbytes:
            return [view[sent:], *views[at + 1 :]]
        sent -= view.nbytes
    return []


class TcpConnection:
    """One direction of a lane. One thread sends or receives; any thread may end it, and count."""

    def __init__(self, connection: socket.socket, proof_bytes: int) -> None:
        """Takes over a blocking socket, which may be one of `ssl`.

        Args:
            connection: the socket.
            proof_bytes: how many bytes this end read of it before: they are of no frame.
        """
        self._socket = connection
        self._lock = threading.Lock()
        """So that `end` never meets a descriptor that `close` gave back meanwhile."""
        self._encrypted = isinstance(connection, ssl.SSLSocket)
        self.sent_bytes = 0
        """The size of all frames that were begun."""
        self.reading = False
        """Whether a thread waits here for bytes, or takes them."""
        self._taken = 0
        """How many bytes were read."""
        self._proof_bytes = proof_bytes
        # The kernel counts encrypted bytes, which are more than those of the frames.
        self._kernel_counts = not self._encrypted and _arrived(connection) is not None
        # One call for all that is missing, where the kernel has it and says how much has come
        # meanwhile. TLS hands out a record a call.
        self._flags = socket.MSG_WAITALL if self._kernel_counts else 0

    @property
    def received_bytes(self) -> int:
        """How many bytes of frames have come, parts of one too."""
        if self._kernel_counts:
            with self._lock:
                arrived = _arrived(self._socket)
            if arrived is not None:
                return arrived - self._proof_bytes
        return self._taken

    def send(self, head: bytes, payload: memoryview | None) -> None:
        """Sends a prefixed head, and its payload from where it lies; waits for the kernel.

        Raises:
            OSError: the other end is gone, or this one was ended.
        """
        self.sent_bytes += len(head) + (0 if payload is None else payload.nbytes)
        if payload is None or not payload.nbytes:
            self._socket.sendall(head)
            return
        payload = payload.cast("B")
        if self._encrypted:
            # `ssl` has no call for two buffers, and copies both to encrypt them anyway.
            self._socket.sendall(head)
            self._socket.sendall(payload)
            return
        sent = self._socket.sendmsg((head, payload))
        if sent < len(head):
            self._socket.sendall(head[sent:])
            sent = len(head)
        if sent < len(head) + payload.nbytes:
            self._socket.sendall(payload[sent - len(head) :])

    def send_views(self, head: bytes, views: Sequence[memoryview]) -> None:
        """Sends a prefixed head and what lies in several places behind it; waits for the kernel.

        Raises:
            OSError: the other end is gone, or this one was ended.
        """
        if self._encrypted or len(views) < 2:
            self.send(head, views[0] if views else None)
            for view in views[1:]:
                self.sent_bytes += view.nbytes
                self._socket.sendall(view)
            return
        rest = [memoryview(head), *views]
        self.sent_bytes += sum(view.nbytes for view in rest)
        while rest:
            rest = _behind(rest, self._socket.sendmsg(rest[:_MOST_VIEWS]))

    def send_at_once(self, data: bytes) -> int:
        """Sends what the kernel takes without waiting, and returns how many bytes that is.

        What is left must go to `send_rest`, before anything else is sent. Inside TLS it is nothing.

        Raises:
            OSError: the other end is gone, or this one was ended.
        """
        if self._encrypted or not hasattr(socket, "MSG_DONTWAIT"):
            return 0
        try:
            sent = self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        self.sent_bytes += len(data)
        return sent

    def send_rest(self, data: memoryview) -> None:
        """Sends what `send_at_once` left of a frame that it had begun; waits for the kernel.

        Raises:
            OSError: the other end is gone, or this one was ended.
        """
        self._socket.sendall(data)

    @property
    def flow(self) -> LaneFlow | None:
        """What the kernel says of what is sent here; None: it says nothing."""
        with self._lock:
            return flow_of(self._socket)

    def keep_unsent(self, most_bytes: int | None) -> None:
        """Lets the kernel keep about so many bytes that are not on their way; None: its own way."""
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            with self._lock, contextlib.suppress(OSError):
                self._socket.setsockopt(
                    socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, most_bytes or 0
                )

    @property
    def descriptor(self) -> int:
        """The socket's file descriptor, to watch it; -1 once it is closed."""
        return self._socket.fileno()

    def receive_into(self, view: memoryview, *, may_end: bool = False) -> bool:
        """Fills a buffer. False if the connection ended before its first byte, and `may_end`.

        Raises:
            TcpLost: it ended earlier than that.
            OSError: the other end is gone, or this one was ended.
        """
        rest = view
        self.reading = True
        try:
            while rest.nbytes:
                received = self._socket.recv_into(rest, 0, self._flags)
                if not received:
                    if may_end and rest.nbytes == view.nbytes:
                        return False
                    raise TcpLost("the connection ended within a frame")
                self._taken += received
                rest = rest[received:]
        finally:
            self.reading = False
        return True

    def end(self) -> None:
        """Ends both ways; a thread that waits in a call returns from it. Any thread may call it."""
        # Of the plain socket: that of `ssl` would forget its keys, and a thread in a call would go
        # on without them, as if the bytes were not encrypted.
        with self._lock, contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Frees it; only for the thread that sends or receives, or once there is none.

        What was sent still arrives. A peer that sends on learns that nobody reads.
        """
        with self._lock:
            self._socket.close()
