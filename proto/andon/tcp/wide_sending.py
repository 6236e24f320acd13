"""The sending end of a lane of several connections: a thread each, which share the frames' bytes.

Theory of operation. Frames are made one after the other, in the order in which they were given.
Each is cut into segments, and each thread takes the next segment once the kernel has its last one.
So a connection carries what it can, whichever of them the network slows down. The kernel is told to
keep little that is not on its way (`TCP_NOTSENT_LOWAT`): what waits there could take no other
connection.

While only one connection is used, a frame is one segment, and travels as it would alone.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from andon.tcp.connection import TcpConnection
from andon.tcp.framing import MAX_HEAD_BYTES
from andon.tcp.kernel import LaneFlow, sum_of
from andon.tcp.segments import SEGMENT_BYTES, SegmentHead, pack
from andon.tcp.sending import MakeFrame

__all__ = ["WideSender"]

_log = logging.getLogger(__name__)


class _Sending:
    """A frame that is under way."""

    def __init__(
        self,
        number: int,
        head: bytes,
        payload: memoryview | None,
        sent: Callable[[int], object] | None,
    ) -> None:
        if not 0 < len(head) <= MAX_HEAD_BYTES:
            raise ValueError(f"a head has 1 to {MAX_HEAD_BYTES} bytes, not {len(head)}")
        self.number, self.head, self.sent = number, head, sent
        self.payload = memoryview(b"") if payload is None else payload.cast("B")
        self.taken = 0
        """Bytes of the payload that are in a segment."""
        self.begun = False
        self.under_way = 0
        """Segments that the kernel does not have."""
        self.size = 0
        """Bytes of its segments so far."""

    @property
    def is_taken(self) -> bool:
        """Whether all of it is in segments."""
        return self.begun and self.taken == self.payload.nbytes

    def next_segment(self, most: int) -> _Segment:
        """The next part of it."""
        part = self.payload[self.taken : self.taken + most]
        whole, offset = self.payload.nbytes, self.taken
        head = b"" if self.begun else self.head
        packed = pack(SegmentHead(self.number, offset, part.nbytes, len(head), whole)) + head
        self.begun = True
        self.taken += part.nbytes
        self.under_way += 1
        self.size += len(packed) + part.nbytes
        return _Segment(self, packed, part)


class _Segment(NamedTuple):
    """What one connection sends at a time."""

    frame: _Sending
    head: bytes
    part: memoryview


class WideSender:
    """Sends frames over several connections. Any thread may give them, and add connections."""

    def __init__(self, connection: TcpConnection, lost: Callable[[str], None], name: str) -> None:
        """Starts the first connection's thread, called `name`.

        A thread calls `lost` once if the lane can't go on.
        """
        self._lost, self._name = lost, name
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        """Where the threads of connections that are used wait."""
        self._spare = threading.Condition(self._lock)
        """Where the others do."""
        self._waiting: deque[tuple[MakeFrame, Callable[[int], object] | None]] = deque()
        self._frame: _Sending | None = None
        """What segments are taken of."""
        self._making = False
        """Whether a thread makes the next frame."""
        self._made = 0
        self._used = 1
        self._over = False
        """Whether nothing is sent any more: it was closed, or it is lost."""
        self._closing = False
        self._connections: list[TcpConnection] = []
        self._threads: list[threading.Thread] = []
        self.add(connection)

    @property
    def sent_bytes(self) -> int:
        """The size of all segments that were begun; any thread may ask."""
        return sum(each.sent_bytes for each in list(self._connections))

    @property
    def connections(self) -> int:
        """How many there are."""
        return len(self._connections)

    @property
    def flow(self) -> LaneFlow | None:
        """What the kernel says of all of them together; None: it says nothing."""
        return sum_of([each.flow for each in list(self._connections)])

    @property
    def used(self) -> int:
        """On how many of them segments are sent."""
        return min(self._used, len(self._connections))

    def add(self, connection: TcpConnection) -> None:
        """Adds a connection; it is used once `use` says so.

        Raises:
            RuntimeError: there is no thread left. The connection is closed.
        """
        with self._lock:
            if self._over:
                connection.close()
                return
            at = len(self._connections)
            name = self._name if not at else f"{self._name}-{at}"
            thread = threading.Thread(
                target=self._run, args=(at, connection), name=name, daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                connection.close()
                raise
            # Its thread waits for the lock, and finds it in here.
            self._connections.append(connection)
            self._threads.append(thread)

    def use(self, count: int) -> None:
        """Sends on so many connections from now on, or on all if there are fewer."""
        with self._lock:
            before, self._used = self._used, max(1, count)
            if before != self._used:
                for connection in self._connections:
                    connection.keep_unsent(None if self._used == 1 else 2 * SEGMENT_BYTES)
                self._spare.notify_all()

    def send(self, make: MakeFrame, sent: Callable[[int], object] | None = None) -> None:
        """Sends what `make` returns; never blocks. `sent` then gets the frame's bytes.

        Both run on a sending thread, `make` in the order of the calls. The payload must stay as it
        is until `sent` is called: by then the kernel has it.
        """
        with self._lock:
            self._waiting.append((make, sent))
            self._work.notify()

    def close(self) -> None:
        """Ends the lane at once; nothing is called after it returns, unless it is called there."""
        self._closing = True
        self._stop()
        for thread in self._threads:
            if threading.current_thread() is not thread:
                thread.join()

    def _stop(self) -> None:
        with self._lock:
            self._over = True
            self._waiting.clear()
            self._frame = None
            self._work.notify_all()
            self._spare.notify_all()
        for connection in self._connections:
            connection.end()

    def _run(self, at: int, connection: TcpConnection) -> None:
        try:
            while (segment := self._next(at)) is not None:
                connection.send(segment.head, segment.part)
                self._finish(segment)
                # The name would keep a payload alive while the thread waits for more.
                del segment
        except OSError as error:
            self._report(str(error))
        except Exception as error:
            if not self._closing:
                _log.exception("a frame could not be made")
            self._report(f"a frame could not be made: {error}")
        finally:
            connection.close()

    def _next(self, at: int) -> _Segment | None:
        """Waits for the next segment; None: the lane is over."""
        with self._lock:
            while not self._over:
                if at >= self._used:
                    # It may have been woken for work that another one must do then.
                    self._work.notify()
                    self._spare.wait()
                elif self._frame is not None:
                    return self._take(self._frame)
                elif self._waiting and not self._making:
                    self._make()
                else:
                    self._work.wait()
            return None

    def _take(self, frame: _Sending) -> _Segment:
        most = frame.payload.nbytes if self._used == 1 else SEGMENT_BYTES
        segment = frame.next_segment(most)
        if frame.is_taken:
            self._frame = None
        if self._frame is not None or self._waiting:
            self._work.notify()
        return segment

    def _make(self) -> None:
        """Makes the next frame, without the lock: whoever gives frames does not wait for that."""
        make, sent = self._waiting.popleft()
        self._making = True
        self._lock.release()
        try:
            made = make()
        finally:
            self._lock.acquire()
            self._making = False
        if made is not None and not self._over:
            self._frame = _Sending(self._made, *made, sent)
            self._made += 1

    def _finish(self, segment: _Segment) -> None:
        """The kernel has a segment."""
        frame = segment.frame
        with self._lock:
            frame.under_way -= 1
            if frame.under_way == 0 and frame.is_taken and not self._over and frame.sent:
                # With the lock: frames may be done on two threads at once.
                frame.sent(frame.size)

    def _report(self, why: str) -> None:
        with self._lock:
            first, self._over = not self._over, True
        if first:
            self._stop()
            self._lost(why)
