"""A host between a worker and its service, which can harm the worker's lanes and leave gRPC alone.

It relays the same ports at another address of loopback, so that a worker which reaches gRPC there
looks for its lanes there too.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Self

__all__ = ["DOWN", "UP", "LaneRelay", "Recorded"]

UP, DOWN = 1, 2
_PREAMBLE_BYTES, _DIRECTION_AT = 64, 24
_LEAST_FRAME = 128
"""Less is a frame without a payload, or the beginning of one."""


@dataclass
class Recorded:
    """What a client said on one connection, to its end."""

    direction: int
    """A lane's; 0: the connection is gRPC's."""
    data: bytearray = field(default_factory=bytearray)


Lanes = Literal["open", "refused", "silent"]


class LaneRelay:
    """Relays gRPC at `host`, and lanes too unless they are refused, or accepted and left alone."""

    def __init__(
        self, address: str, tcp_port: int, host: str = "127.0.0.2", *, lanes: Lanes = "open"
    ) -> None:
        """Listens in place of the service at `address`, whose lanes are at `tcp_port`."""
        self._real, _, grpc_port = address.rpartition(":")
        self.address = f"{host}:{grpc_port}"
        self.delay_s = 0.0
        """How long it keeps what comes on a lane before it passes it on."""
        self.piece_bytes = 2**16
        """How much of it passes at once, at most."""
        self.slow: set[int] = {UP, DOWN}
        """The directions that `delay_s` is for."""
        self.flips: set[int] = set()
        """The directions in which it still has to change one bit of a payload."""
        self.lanes_opened = 0
        """How many connections of lanes it relayed."""
        self.records: list[Recorded] = []
        """What came of the client, connection by connection; of a lane with its preamble."""
        self._held: list[tuple[int, socket.socket]] = []
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._frozen: set[int] = set()
        self._thawed = threading.Condition()
        self._listen(host, int(grpc_port), self._relay_grpc)
        if lanes != "refused":
            self._listen(host, tcp_port, self._relay_lane if lanes == "open" else self._hold)
        self._tcp_port = tcp_port

    def __enter__(self) -> Self:
        """The relay."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes everything."""
        self.thaw()
        _end(self._sockets)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()

    def cut(self, *directions: int) -> int:
        """Cuts the lanes of these directions; returns how many there were."""
        found = [each for direction, each in self._held if direction in directions]
        self._held = [each for each in self._held if each[0] not in directions]
        _end(found)
        return len(found) // 2

    def freeze(self, *directions: int) -> None:
        """Passes nothing on, in these directions, and closes nothing."""
        with self._thawed:
            self._frozen |= set(directions)

    def thaw(self) -> None:
        """Passes everything on again, what was kept first."""
        with self._thawed:
            self._frozen.clear()
            self._thawed.notify_all()

    def _listen(self, host: str, port: int, serve: Callable[[socket.socket], None]) -> None:
        listener = socket.create_server((host, port))
        self._sockets.append(listener)
        self._start(self._accept, listener, serve)

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets.append(client)
            self._start(serve, client)

    def _relay_grpc(self, client: socket.socket) -> None:
        server = self._connected(int(self.address.rpartition(":")[2]))
        if server is not None:
            self._join(client, server, 0)

    def _relay_lane(self, client: socket.socket) -> None:
        """A lane's preamble says its direction; the relay only reads that byte."""
        preamble = b""
        with contextlib.suppress(OSError):
            while len(preamble) < _PREAMBLE_BYTES:
                piece = client.recv(_PREAMBLE_BYTES - len(preamble))
                if not piece:
                    break
                preamble += piece
        server = self._connected(self._tcp_port)
        if server is None or len(preamble) < _PREAMBLE_BYTES:
            client.close()
            return
        direction = preamble[_DIRECTION_AT]
        self._held += [(direction, client), (direction, server)]
        self.lanes_opened += 1
        with contextlib.suppress(OSError):
            server.sendall(preamble)
        self._join(client, server, direction, preamble)

    def _hold(self, client: socket.socket) -> None:
        """Accepts a lane and never says a word, as a filtered port looks to a proof."""

    def _connected(self, port: int) -> socket.socket | None:
        try:
            server = socket.create_connection((self._real, port))
        except OSError:
            return None
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets.append(server)
        return server

    def _join(
        self, client: socket.socket, server: socket.socket, direction: int, said: bytes = b""
    ) -> None:
        self.records.append(Recorded(direction, bytearray(said)))
        self._start(self._pass, client, server, direction, self.records[-1].data)
        self._start(self._pass, server, client, direction, bytearray())

    def _pass(
        self, source: socket.socket, target: socket.socket, direction: int, record: bytearray
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(self.piece_bytes if direction else 2**16):
                record += data
                if direction:
                    data = self._flipped(data, direction)
                    if self.delay_s and direction in self.slow:
                        time.sleep(self.delay_s)
                    with self._thawed:
                        self._thawed.wait_for(lambda: direction not in self._frozen)
                target.sendall(data)
        # Either side's end is the other's: gRPC half-closes no connection, and a lane ends whole.
        _end((source, target))

    def _flipped(self, data: bytes, direction: int) -> bytes:
        """The bytes, perhaps with one bit of the last number changed: a payload ends a frame."""
        if direction not in self.flips or len(data) < _LEAST_FRAME:
            return data
        self.flips.remove(direction)
        changed = bytearray(data)
        changed[-4] ^= 1
        return bytes(changed)


def _end(sockets: Iterable[socket.socket]) -> None:
    """Ends connections and listeners; a thread that waits in one of them returns."""
    for each in list(sockets):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
