"""A network that changes one bit: a TCP relay in front of a service."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

__all__ = ["Direction", "FlippingRelay", "before_trailer", "in_run_of"]

Direction = str
"""`up`, to the service, or `down`."""

_TRAILER = re.compile(rb"\x75.{4}\x7d.{4}\Z", re.DOTALL)
"""Both checksums of a message, at the end of what was sent at once."""


def before_trailer(data: bytes) -> int | None:
    """The byte with the least bits of the last float32 before a message's checksums."""
    found = _TRAILER.search(data)
    return None if found is None or found.start() < 64 else found.start() - 4


def in_run_of(number: bytes) -> Callable[[bytes], int | None]:
    """Finds the first byte of a number in the midst of many of the same."""

    def find(data: bytes) -> int | None:
        found = data.find(16 * number)
        return None if found < 0 else found + 8 * len(number)

    return find


class FlippingRelay:
    """Relays connections to an address, and flips one bit, once, where `find` first says so."""

    def __init__(
        self,
        address: str,
        direction: Direction,
        find: Callable[[bytes], int | None],
        *,
        times: int = 1,
    ) -> None:
        """Listens on a free port.

        Args:
            address: of the service, as host:port.
            direction: which way bytes are changed.
            find: says which of some bytes is to be changed, if any.
            times: so many messages are changed.
        """
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._direction, self._find = direction, find
        self._left = times
        self.flipped = 0
        """How many bits were."""
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def __enter__(self) -> Self:
        """The relay."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends all connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._sockets += [near, far]
            self._start(self._relay, near, far, "up")
            self._start(self._relay, far, near, "down")

    def _relay(self, source: socket.socket, sink: socket.socket, direction: Direction) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                sink.sendall(self._changed(data) if direction == self._direction else data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _changed(self, data: bytes) -> bytes:
        with self._lock:
            place = self._find(data) if self._left else None
            if place is None:
                return data
            self._left -= 1
            self.flipped += 1
        changed = bytearray(data)
        changed[place] ^= 1
        return bytes(changed)
