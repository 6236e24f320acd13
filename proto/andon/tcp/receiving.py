"""The receiving end of a TCP lane: one thread, which reads payloads to where they belong."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from andon.tcp.connection import TcpConnection
from andon.tcp.framing import MAX_HEAD_BYTES, PREFIX_BYTES, read_prefix
from andon.wire.fields import FrameError

__all__ = ["FrameReader", "TcpReceiver"]

Message = TypeVar("Message")

_NO_BYTES = memoryview(b"")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameReader(Generic[Message]):
    """What is done with each frame. Everything runs on the receiving thread."""

    parse: Callable[[memoryview, int], Message]
    """Makes the message of a head and of its payload's length, before the payload is read.

    FrameError: the head is illegal, or announces a payload that it does not agree with.
    """
    place: Callable[[Message, int], memoryview | Iterable[memoryview]]
    """Where the payload goes: a view of so many bytes. It may block: that is the back-pressure.

    Or several views, of so many bytes together. The next one is asked for when the one before is
    full, so that work on a piece finds it in the processor's cache, and a view may be used again.
    """
    received: Callable[[Message, memoryview, int], None]
    """Takes a message, its payload (where `place` said) and the bytes of the frame.

    After several views the payload is empty: who made them knows where it is.
    """
    ended: Callable[[Exception | None], object]
    """Called once, last: None if the other end sends no more, else why this one reads no more."""
    max_payload_bytes: int
    batch: Callable[[Message], Hashable] | None = None
    """On a lane of several connections: messages that differ in it never have places at the same
    time, since these may be the same memory. None: places never overlap."""


class TcpReceiver(Generic[Message]):
    """Receives frames in order."""

    def __init__(self, connection: TcpConnection, reading: FrameReader[Message], name: str) -> None:
        """Starts the thread, called `name`."""
        self._connection = connection
        self._reading = reading
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def received_bytes(self) -> int:
        """How many bytes of frames have come, parts of one too; any thread may ask."""
        return self._connection.received_bytes

    @property
    def reading(self) -> bool:
        """Whether it waits for bytes now, and holds nothing back; any thread may ask."""
        return self._connection.reading

    def close(self) -> None:
        """Ends the lane; nothing is called after it returns, unless it is called there.

        What blocks in `place` must return before.
        """
        self._closing.set()  # First, so that the end that follows is not reported.
        self._connection.end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        error: Exception | None = None
        try:
            self._read()
        except (OSError, FrameError) as expected:
            error = expected
        except Exception as unexpected:
            if not self._closing.is_set():
                _log.exception("a frame could not be taken")
            error = unexpected
        # Before anybody hears of it: the other end need not wait for that. Closed and not only
        # ended, else the kernel would take on what nobody reads, until its buffer is full.
        self._connection.close()
        if not self._closing.is_set():
            self._reading.ended(error)

    def _read(self) -> None:
        reading, receive_into = self._reading, self._connection.receive_into
        prefix, room = bytearray(PREFIX_BYTES), memoryview(bytearray(MAX_HEAD_BYTES))
        while receive_into(memoryview(prefix), may_end=True):
            head_bytes, payload_bytes = read_prefix(prefix, reading.max_payload_bytes)
            head = room[:head_bytes]
            receive_into(head)
            message = reading.parse(head, payload_bytes)
            payload = _NO_BYTES
            if payload_bytes:
                place = reading.place(message, payload_bytes)
                if isinstance(place, memoryview):
                    payload = place
                    receive_into(payload)
                else:
                    self._fill(place, payload_bytes)
                del place
            if self._closing.is_set():
                return
            reading.received(message, payload, PREFIX_BYTES + head_bytes + payload_bytes)
            # These names would keep the payload alive while the thread waits for more.
            del message, payload

    def _fill(self, views: Iterable[memoryview], size: int) -> None:
        for view in views:
            self._connection.receive_into(view)
            size -= view.nbytes
        # Else the bytes that follow would be taken for a frame.
        assert size == 0, "the views are not as long as the payload"
