"""The receiving end of a lane of several connections: a thread each, which put frames together.

Theory of operation. A segment may overtake others on another connection. So a frame's head is
looked at once those of all earlier frames were, and a frame is handed on once all earlier ones
were: whoever uses the lane sees frames in the order in which they were sent. A segment whose
frame's head is not there waits, and its connection with it; the head is on its way on another one,
since a sender takes segments in order. So this can't lock: the first segment that is missing waits
for nothing here.

Frames that are not whole have their places at the same time. Where the place of one may be that of
a later one, `FrameReader.batch` tells the two apart, and the later one waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

from andon.tcp.connection import TcpConnection, TcpLost
from andon.tcp.framing import MAX_HEAD_BYTES
from andon.tcp.receiving import FrameReader
from andon.tcp.segments import SEGMENT_HEAD_BYTES, Coverage, SegmentHead, read_segment
from andon.wire.fields import FrameError

__all__ = ["FRAMES_OPEN", "WideReceiver"]

Message = TypeVar("Message")

FRAMES_OPEN = 16
"""How many frames may have a place, and not be whole."""

_NO_BYTES = memoryview(b"")

_log = logging.getLogger(__name__)


class _Arriving(Generic[Message]):
    """A frame whose head has come."""

    def __init__(self, message: Message, payload: memoryview, batch: Hashable, size: int) -> None:
        self.message, self.payload, self.batch = message, payload, batch
        self.coverage = Coverage(payload.nbytes)
        self.missing = payload.nbytes + 1
        """Bytes that are not in their places, and 1 until the segment with the head is: what has no
        payload is whole then, and not before."""
        self.size = size
        """Bytes of its segments that have come."""


class WideReceiver(Generic[Message]):
    """Receives frames in order over several connections. Any thread may add some."""

    def __init__(self, connection: TcpConnection, reading: FrameReader[Message], name: str) -> None:
        """Starts the first connection's thread, called `name`.

        What `FrameReader` says holds, on several threads: each function is called by one of them at
        a time, and `place` must name one view.
        """
        self._reading, self._name = reading, name
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._open: dict[int, _Arriving[Message]] = {}
        """By number, frames whose head has come, and that were not handed on."""
        self._heads = 0
        """How many frames' heads have come: the number of the next one."""
        self._head_comes = False
        """Whether a thread has the next head."""
        self._handed = 0
        """How many frames were handed on."""
        self._handing = False
        """Whether a thread hands frames on."""
        self._holds_back = False
        """Whether a head waits for room."""
        self._over = False
        self._closing = False
        self._running = 0
        self._connections: list[TcpConnection] = []
        self._threads: list[threading.Thread] = []
        self.add(connection)

    @property
    def received_bytes(self) -> int:
        """How many bytes of segments have come, parts of one too; any thread may ask."""
        return sum(each.received_bytes for each in list(self._connections))

    @property
    def reading(self) -> bool:
        """Whether it waits for bytes now, and holds nothing back; any thread may ask."""
        return not self._holds_back and any(each.reading for each in list(self._connections))

    @property
    def connections(self) -> int:
        """How many there are."""
        return len(self._connections)

    def add(self, connection: TcpConnection) -> None:
        """Reads from one more connection.

        Raises:
            RuntimeError: there is no thread left. The connection is closed.
        """
        with self._lock:
            if self._over:
                connection.close()
                return
            at = len(self._connections)
            name = self._name if not at else f"{self._name}-{at}"
            thread = threading.Thread(target=self._run, args=(connection,), name=name, daemon=True)
            self._running += 1
            try:
                thread.start()
            except RuntimeError:
                self._running -= 1
                connection.close()
                raise
            self._connections.append(connection)
            self._threads.append(thread)

    def close(self) -> None:
        """Ends the lane; nothing is called after it returns, unless it is called there.

        What blocks in `parse` or `place` must return before.
        """
        self._closing = True
        self._stop()
        for thread in self._threads:
            if threading.current_thread() is not thread:
                thread.join()

    def _stop(self) -> bool:
        """Ends all connections; returns whether they were not ended before."""
        with self._lock:
            first, self._over = not self._over, True
            self._changed.notify_all()
        for connection in self._connections:
            connection.end()
        return first

    def _run(self, connection: TcpConnection) -> None:
        error: Exception | None = None
        try:
            self._read(connection)
        except (OSError, FrameError) as expected:
            error = expected
        except Exception as unexpected:
            if not self._closing:
                _log.exception("a frame could not be taken")
            error = unexpected
        # Before anybody hears of it: see `TcpReceiver`.
        connection.close()
        with self._lock:
            self._running -= 1
            last = not self._running
            if last and error is None and self._open:
                error = TcpLost("the connections ended within a frame")
        # An end without an error is that of one connection: its sender may use the others.
        if (last or error is not None) and self._stop() and not self._closing:
            self._reading.ended(error)

    def _read(self, connection: TcpConnection) -> None:
        said, room = bytearray(SEGMENT_HEAD_BYTES), memoryview(bytearray(MAX_HEAD_BYTES))
        while connection.receive_into(memoryview(said), may_end=True):
            head = read_segment(said, self._reading.max_payload_bytes)
            if head.head_bytes:
                connection.receive_into(room[: head.head_bytes])
                self._begin(head, room[: head.head_bytes])
            part = self._place_of(head)
            if head.length:
                connection.receive_into(part)
            # The name would keep the payload alive while the thread waits for more.
            del part
            self._finish(head)

    def _begin(self, head: SegmentHead, data: memoryview) -> None:
        """Takes a frame's head, once those of all earlier frames were.

        Raises:
            FrameError: it is illegal, or has come before.
            TcpLost: the lane has ended.
        """
        reading = self._reading
        with self._lock:
            while head.number > self._heads or len(self._open) >= FRAMES_OPEN:
                self._wait()
            if head.number < self._heads or self._head_comes:
                raise FrameError(f"the head of frame {head.number} comes twice")
            self._head_comes = True
        # Without the lock: both may block. No other thread comes here, since the number of the next
        # head stays.
        self._holds_back = True
        message = reading.parse(data, head.payload_bytes)
        self._holds_back = False
        batch = reading.batch(message) if reading.batch is not None else None
        with self._lock:
            while any(each.batch != batch for each in self._open.values()):
                self._wait()
        payload = _NO_BYTES
        if head.payload_bytes:
            self._holds_back = True
            place = reading.place(message, head.payload_bytes)
            self._holds_back = False
            assert isinstance(place, memoryview), "a wide lane's payload has one place"
            assert place.nbytes == head.payload_bytes, "the place is not as long as the payload"
            payload = place
        with self._lock:
            size = SEGMENT_HEAD_BYTES + head.head_bytes
            self._open[head.number] = _Arriving(message, payload, batch, size)
            self._heads += 1
            self._head_comes = False
            self._changed.notify_all()

    def _place_of(self, head: SegmentHead) -> memoryview:
        """Where a segment's bytes belong, once that is known.

        Raises:
            FrameError: bytes of it have come before.
            TcpLost: the lane has ended.
        """
        with self._lock:
            while head.number >= self._heads:
                self._wait()
            frame = self._open.get(head.number)
            if frame is None:
                raise FrameError(f"a segment of frame {head.number}, which is whole")
            frame.coverage.take(head)
            return frame.payload[head.offset : head.offset + head.length]

    def _finish(self, head: SegmentHead) -> None:
        """A segment is in its place. Hands on what is whole now."""
        with self._lock:
            frame = self._open[head.number]
            frame.missing -= head.length + bool(head.head_bytes)
            frame.size += head.length
            if not head.head_bytes:
                frame.size += SEGMENT_HEAD_BYTES
            del frame
            if self._handing:
                return  # That thread looks again before it leaves.
            whole = self._next_whole()
            self._handing = whole is not None
        while whole is not None:
            self._reading.received(whole.message, whole.payload, whole.size)
            with self._lock:
                # Only now: a later frame of another batch waits until this one was taken.
                del self._open[self._handed]
                self._handed += 1
                self._changed.notify_all()
                whole = self._next_whole()
                self._handing = whole is not None

    def _next_whole(self) -> _Arriving[Message] | None:
        """The next frame to hand on, if it is whole."""
        frame = self._open.get(self._handed)
        return None if frame is None or frame.missing or self._over else frame

    def _wait(self) -> None:
        if self._over:
            raise TcpLost("the lane has ended")
        self._changed.wait()
