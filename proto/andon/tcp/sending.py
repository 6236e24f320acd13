"""The sending end of a TCP lane: one thread, which writes frames from where their payloads lie."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from andon.tcp.connection import TcpConnection
from andon.tcp.framing import Frame, prefixed

__all__ = ["MakeFrame", "TcpSender"]

MakeFrame = Callable[[], Frame | None]
"""Makes a frame on the sending thread; None: there is nothing to send after all."""

_log = logging.getLogger(__name__)


class TcpSender:
    """Sends frames in the order in which they were given to it. Any thread may give them."""

    def __init__(self, connection: TcpConnection, lost: Callable[[str], None], name: str) -> None:
        """Starts the thread, called `name`. It calls `lost` once if the lane can't go on."""
        self._connection = connection
        self._lost = lost
        self._queue: queue.SimpleQueue[tuple[MakeFrame, Callable[[int], object] | None] | None] = (
            queue.SimpleQueue()
        )
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def sent_bytes(self) -> int:
        """The size of all frames that were begun; any thread may ask."""
        return self._connection.sent_bytes

    def send(self, make: MakeFrame, sent: Callable[[int], object] | None = None) -> None:
        """Sends what `make` returns; never blocks. `sent` then gets the frame's bytes.

        Both run on the sending thread. The payload must stay as it is until `sent` is called: by
        then the kernel has it.
        """
        self._queue.put((make, sent))

    def finish(self) -> None:
        """Ends this direction after all that was given to it. The other end reads to the end."""
        self._queue.put(None)

    def close(self) -> None:
        """Ends the lane at once; nothing is called after it returns, unless it is called there."""
        self._closing.set()  # First, so that the end that follows is not reported as a loss.
        self._connection.end()
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while (work := self._queue.get()) is not None:
                if self._closing.is_set():
                    return
                self._write(*work)
                # The name would keep a payload alive while the thread waits for more.
                del work
        except OSError as error:
            self._report(str(error))
        except Exception as error:
            if not self._closing.is_set():
                _log.exception("a frame could not be made")
            self._report(f"a frame could not be made: {error}")
        finally:
            self._connection.close()

    def _write(self, make: MakeFrame, sent: Callable[[int], object] | None) -> None:
        frame = make()
        if frame is None:
            return
        head, payload = prefixed(*frame), frame[1]
        self._connection.send(head, payload)
        if sent is not None:
            sent(len(head) + (0 if payload is None else payload.nbytes))

    def _report(self, why: str) -> None:
        if not self._closing.is_set():
            self._lost(why)
