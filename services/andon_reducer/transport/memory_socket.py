"""The socket beside a stream's shared memory: small messages without gRPC's way through a process.

Theory of operation. What lies in shared memory is announced by messages of some sixty bytes. Over
gRPC each of them passes two threads and an event engine at either end; over a Unix socket it is one
call of the kernel. A stream is on its socket from the first message that comes over it. Before
that, a message over gRPC closes the socket, and its end means nothing. The call of gRPC stays: it
opens the stream, and says how it ended.

A message is taken as it comes, and written as it is made, with no task in between. Only what has to
wait, for room at the reducer or in the kernel, goes by the stream's tasks.

The socket is a file beside the memory, which only this user may open. The first message on it
proves that its sender has mapped the memory.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from andon.host.local_socket import LocalListener
from andon.wire.socket_frames import SocketFrames, socket_frame

__all__ = ["MemorySocket"]

_READ_BYTES = 2**16
"""How much is read at once, and about how much may wait for the stream to be read."""


class MemorySocket:
    """One stream's socket. Everything is for the event loop."""

    def __init__(self, path: Path) -> None:
        """Listens; whoever removes the memory's name removes this one.

        Raises:
            OSError: it can't listen there.
        """
        self._loop = asyncio.get_running_loop()
        self._frames = SocketFrames()
        self._came = asyncio.Event()
        self._ended = False
        """Whether the worker sends no more over it."""
        self._watched = False
        """Whether the loop reads the connection."""
        self._behind = False
        """Whether messages wait for `messages`, so that none behind them may be taken."""
        self._failure: Exception | None = None
        """What `take` raised."""
        self.in_use = False
        """Whether a message has come over it."""
        self.take: Callable[[bytes], bool] = lambda message: False
        """Takes a message at once; False: it has to wait, and comes by `messages`."""
        self.lost: Callable[[str], None] = lambda why: None
        """Called with why a message could not be written."""
        self._connection: socket.socket | None = None
        self._listener = LocalListener(path, self._connected)

    async def messages(self) -> AsyncIterator[bytes]:
        """What the worker sends over it and `take` did not take, until it sends no more.

        Raises:
            FrameError: it sent what is no message.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            while self._frames.whole:
                self.in_use = True
                yield self._frames.take()
            # Whoever asks for more has done with all that was left to it.
            self._behind = False
            if self._ended and self.in_use:
                return
            self._watch()
            # Nothing is awaited between the looks above and `clear`, so nothing gets lost.
            self._came.clear()
            await self._came.wait()

    def write_now(self, message: bytes) -> bytes:
        """Sends a message as far as the kernel takes it now; returns the rest, for `write`."""
        data = socket_frame(message)
        if self._connection is None:
            return b""  # The stream is about to end.
        try:
            return data[self._connection.send(data) :]
        except BlockingIOError:
            return data
        except OSError as error:
            self.lost(error.strerror or str(error))
            return b""

    async def write(self, rest: bytes) -> None:
        """Sends what is left of a message; waits while the worker does not read."""
        if rest and self._connection is not None:
            try:
                await self._loop.sock_sendall(self._connection, rest)
            except OSError as error:
                self.lost(error.strerror or str(error))

    def close(self) -> None:
        """Ends it. A second call does nothing."""
        self._listener.close()
        if self._connection is not None:
            self._unwatch()
            self._connection.close()
            self._connection = None

    def _connected(self, connection: socket.socket) -> None:
        self._connection = connection
        self._watch()

    def _watch(self) -> None:
        """Has the loop read what comes."""
        if self._connection is not None and not (self._watched or self._ended):
            self._loop.add_reader(self._connection.fileno(), self._readable)
            self._watched = True

    def _unwatch(self) -> None:
        if self._watched:
            assert self._connection is not None
            self._loop.remove_reader(self._connection.fileno())
            self._watched = False

    def _readable(self) -> None:
        assert self._connection is not None
        try:
            data = self._connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._frames.put(data)
            self._take_all()
        else:
            self._ended = True
            self._unwatch()
            self._came.set()

    def _take_all(self) -> None:
        """Has all that came taken now, or leaves what can't be, and all behind it."""
        try:
            while self._frames.whole and not self._behind:
                message = self._frames.peek()
                # Before it is taken: the answer is to come this way.
                self.in_use = True
                self._behind = not self.take(message)
                if not self._behind:
                    self._frames.drop(message)
        except Exception as error:  # For the task of the stream, which ends with it.
            self._failure = error
            self._behind = True
        if self._behind:
            self._came.set()
            # Back-pressure: what the stream does not take yet stays in the kernel, until the
            # worker's sends come to a stop.
            if len(self._frames) >= _READ_BYTES and self._frames.whole:
                self._unwatch()
