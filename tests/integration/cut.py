"""A cable that can be cut: a TCP relay to a port of this host."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self

__all__ = ["Cable"]


class Cable:
    """Relays bytes both ways until it is cut, or has carried a set number towards the client."""

    read_bytes = 1 << 16
    """The most bytes that it relays at once."""

    def __init__(self, port: int, *, carries_bytes: int | None = None) -> None:
        """Listens. If `carries_bytes` is None, it is only cut by `cut`."""
        self._target = port
        self._left = carries_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self.carried_bytes = 0
        """Bytes relayed towards the client."""

    @property
    def address(self) -> str:
        """The address for clients."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        """The cable."""
        return self

    def __exit__(self, *_: object) -> None:
        """Cuts it."""
        self.cut()
        for thread in self._threads:
            thread.join()

    def cut(self) -> None:
        """Closes both sides at once, and accepts no more connections."""
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # cut
            server = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [client, server]
            for source, target, down in ((client, server, False), (server, client, True)):
                thread = threading.Thread(target=self._pass, args=(source, target, down))
                thread.start()
                self._threads.append(thread)

    def _pass(self, source: socket.socket, target: socket.socket, down: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(self.read_bytes):
                if down and not self._may_carry(len(data)):
                    self.cut()
                    return
                target.sendall(self.carried(data, down=down))
            target.shutdown(socket.SHUT_WR)

    def carried(self, data: bytes, *, down: bool) -> bytes:
        """Returns the bytes to relay, down to the client or up; subclasses change them."""
        return data

    def _may_carry(self, size_bytes: int) -> bool:
        self.carried_bytes += size_bytes
        return self._left is None or self.carried_bytes <= self._left
