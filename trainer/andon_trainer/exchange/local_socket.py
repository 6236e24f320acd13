"""The worker's end of a socket to a service of its host: messages leave where they are made.

Theory of operation. A small message goes to the kernel on the thread that sends it, which costs
less than to wake another thread. What the kernel does not take at once, and whatever is large, goes
to a thread that lives as long as something waits; until then all that follows waits behind it. So
the training thread never blocks. A receiving thread hands on what comes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from andon.host.arena import short_path
from andon.wire.fields import FrameError
from andon.wire.socket_frames import SocketFrames, socket_frame

__all__ = ["LocalSocket"]

_READ_BYTES = 2**16
_CONNECT_S = 2.0


class LocalSocket:
    """One stream's socket. `received` and `lost` are called on its receiving thread."""

    def __init__(
        self,
        path: Path,
        received: Callable[[bytes], None],
        lost: Callable[[str], None],
        *,
        peer: str,
    ) -> None:
        """Connects; `peer` says in texts for people what listens there.

        Raises:
            OSError: there is no such socket of this user, or nobody listens there.
        """
        self._peer = peer
        self._received = received
        self._lost = lost
        found = path.lstat()
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
            raise OSError("it is no socket of this user")
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            # It is accepted by an event loop, and a socket that listens accepts at once.
            self._socket.settimeout(_CONNECT_S)
            with short_path(path) as short:
                self._socket.connect(short)
            self._socket.settimeout(None)
        except OSError:
            self._socket.close()
            raise
        self._lock = threading.Lock()
        """Guards `_waiting` and `_sending`."""
        self._waiting: deque[Callable[[], bytes]] = deque()
        self._sending = False
        """Whether a thread sends what waits."""
        self._closing = threading.Event()
        self.alive = True
        self._thread = threading.Thread(target=self._read, name=f"andon-from-{peer}", daemon=True)
        self._thread.start()

    def send(self, make: Callable[[], bytes], *, small: bool) -> None:
        """Sends the message that `make` returns, now or on another thread. Never blocks."""
        with self._lock:
            if small and not self._sending:
                data = socket_frame(make())
                rest = data[self._taken_now(data) :]
                if not rest:
                    return
                self._waiting.append(lambda: rest)
            else:
                self._waiting.append(lambda: socket_frame(make()))
            if not self._sending:
                self._sending = True
                thread = threading.Thread(target=self._send_waiting, name=f"andon-to-{self._peer}")
                thread.daemon = True
                thread.start()

    def close(self) -> None:
        """Ends it; nothing is received after it returns."""
        self._closing.set()  # First, so that the end that follows is not reported as a loss.
        self._end()
        self._thread.join()
        self._socket.close()

    def _taken_now(self, data: bytes) -> int:
        """How many bytes the kernel takes without a wait; all of them if nobody reads any more."""
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # The receiving thread learns of it, and says so.

    def _send_waiting(self) -> None:
        """Runs on a thread of its own, until nothing waits."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._sending = False
                    return
                make = self._waiting.popleft()
            try:
                self._socket.sendall(make())
            except OSError:
                with self._lock:
                    self._waiting.clear()
            # The name would keep a payload alive.
            del make

    def _read(self) -> None:
        """Runs on the receiving thread."""
        why, frames = f"the {self._peer} ended its socket", SocketFrames()
        try:
            while data := self._socket.recv(_READ_BYTES):
                frames.put(data)
                while frames.whole:
                    self._received(frames.take())
        except OSError as error:
            why = f"the socket to the {self._peer} broke: {error.strerror or error}"
        except FrameError as error:
            why = f"the {self._peer} sent what can't be read: {error}"
        finally:
            # Before `lost` is called: whoever hears of the loss must find it dead.
            self.alive = False
            self._end()
            if not self._closing.is_set():
                self._lost(why)

    def _end(self) -> None:
        """A thread that waits in a call returns from it."""
        with contextlib.suppress(OSError):  # The other end is gone.
            self._socket.shutdown(socket.SHUT_RDWR)
