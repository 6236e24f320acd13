"""The socket of a control stream: a worker of this host speaks over it in place of gRPC.

Theory of operation. A message over gRPC wakes three threads at the worker, and a poller, an event
engine and a task here; over a Unix socket it is one call of the kernel. JoinAccepted names the
socket, and the worker's next message says by its way whether it is used. Until then nothing else is
sent, so neither end has to put messages of two ways in order. The call of gRPC stays: it shows that
the worker is there, and says how the stream ended.

The socket's name lies in the folder of shared memory, which only this user may open there, and goes
once the worker has chosen.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

from andon.host.arena import FILE_PREFIX, SharedMemoryUnavailable, socket_of
from andon.host.arena_file import EmptyFile
from andon.host.local_socket import LocalListener
from andon.wire.socket_frames import SocketFrames

__all__ = ["ControlSocket"]

_MOST_READS = 64
_READ_BYTES = 2**12
"""So much is read at once: a flood of one worker's messages must leave the others their turns."""


class ControlSocket:
    """One stream's socket. Everything is for the event loop."""

    def __init__(self, folder: Path, take: Callable[[SocketFrames], bool]) -> None:
        """Listens under a new name in the folder.

        `take` is to take every whole message. It returns False if nothing more is to be read.

        Raises:
            OSError: it can't listen there.
        """
        self._loop = asyncio.get_running_loop()
        self._take = take
        self._frames = SocketFrames()
        self._writing = False
        """Whether `write` waits for the kernel."""
        self._connection: socket.socket | None = None
        try:
            # Locked as long as it is named: what a killed coordinator leaves can be told by that.
            self._file = EmptyFile(folder, [FILE_PREFIX + secrets.token_hex(16)])
        except SharedMemoryUnavailable as error:
            raise OSError(str(error)) from None
        path = socket_of(self._file.path)
        self.name = path.name
        """Its name in the folder."""
        try:
            self._listener = LocalListener(path, self._connected)
        except OSError:
            self._file.unlink()
            raise

    def write_now(self, data: bytes) -> bytes:
        """Sends as much as the kernel takes now; returns the rest, for `write`."""
        if self._connection is None or self._writing:
            return data
        try:
            return data[self._connection.send(data) :]
        except BlockingIOError:
            return data
        except OSError:  # The worker is gone, which its call says, too.
            return b""

    async def write(self, data: bytes) -> None:
        """Sends all of it; waits while the worker does not read."""
        assert self._connection is not None
        self._writing = True
        try:
            with contextlib.suppress(OSError):  # As above.
                await self._loop.sock_sendall(self._connection, data)
        finally:
            self._writing = False

    def read_rest(self) -> None:
        """Takes what has come, and was not taken yet: about what the kernel keeps, at most."""
        for _ in range(_MOST_READS):
            if self._connection is None or not self._read():
                return

    def close(self) -> None:
        """Ends it. A second call does nothing."""
        self._listener.close()
        self._file.unlink()
        if self._connection is not None:
            self._unwatch()
            # A `write` that is about to be cancelled may wait for it.
            self._loop.remove_writer(self._connection.fileno())
            self._connection.close()
            self._connection = None

    def _connected(self, connection: socket.socket) -> None:
        self._file.unlink()
        self._connection = connection
        self._loop.add_reader(connection.fileno(), self._read)

    def _unwatch(self) -> None:
        assert self._connection is not None
        self._loop.remove_reader(self._connection.fileno())

    def _read(self) -> bool:
        """Takes some of what has come; False: nothing is there now."""
        assert self._connection is not None
        try:
            data = self._connection.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self._frames.put(data)
        if not data or not self._take(self._frames):
            self._unwatch()  # Its call says what follows from that.
            return False
        return True
