"""How frames travel on a lane of several connections: in segments, each with a head of its own.

A segment says which frame it is of, and where in its payload its bytes belong. So it may take any
connection of its lane. The frame's head travels in front of its first segment.
"""

from __future__ import annotations

import bisect
import struct
from dataclasses import dataclass

from andon.tcp.framing import MAX_HEAD_BYTES, FrameTooLarge
from andon.wire.fields import FrameError

__all__ = ["SEGMENT_BYTES", "SEGMENT_HEAD_BYTES", "Coverage", "SegmentHead", "pack", "read_segment"]

_HEAD = struct.Struct("<QIIII")
SEGMENT_HEAD_BYTES = _HEAD.size

SEGMENT_BYTES = 2**18
"""How long a segment of a payload is, where several connections are used: long enough that its head
costs nothing, and short enough that all connections end a payload together."""


@dataclass(frozen=True, slots=True)
class SegmentHead:
    """What stands in front of a segment."""

    number: int
    """Of its frame: a lane's frames are counted from 0."""
    offset: int
    """Where in the frame's payload its bytes belong."""
    length: int
    """How many bytes of the payload it has."""
    head_bytes: int
    """The length of the frame's head, which follows in front of these bytes; 0: another segment has
    it."""
    payload_bytes: int
    """The length of the frame's whole payload."""


def pack(head: SegmentHead) -> bytes:
    """The bytes in front of a segment."""
    return _HEAD.pack(head.number, head.offset, head.length, head.head_bytes, head.payload_bytes)


def read_segment(data: bytes | bytearray, max_payload_bytes: int) -> SegmentHead:
    """What SEGMENT_HEAD_BYTES say, checked before anything of the segment is read.

    Raises:
        FrameTooLarge: the frame's head or payload is above its limit.
        FrameError: no sender of segments may say so.
    """
    head = SegmentHead(*_HEAD.unpack(data))
    if head.head_bytes > MAX_HEAD_BYTES:
        text = f"a head of {head.head_bytes} bytes is above the limit of {MAX_HEAD_BYTES}"
        raise FrameTooLarge(text)
    if head.payload_bytes > max_payload_bytes:
        text = f"a payload of {head.payload_bytes} bytes is above the limit of {max_payload_bytes}"
        raise FrameTooLarge(text)
    if head.offset + head.length > head.payload_bytes:
        raise FrameError(f"a segment of frame {head.number} lies beyond the frame's payload")
    if head.head_bytes and head.offset:
        raise FrameError(f"the head of frame {head.number} is not in front of its payload")
    if not (head.head_bytes or head.length):
        raise FrameError(f"a segment of frame {head.number} has neither a head nor a payload")
    return head


class Coverage:
    """Which bytes of a payload are spoken for: each may come once."""

    def __init__(self, payload_bytes: int) -> None:
        """None are."""
        self._size = payload_bytes
        self._taken: list[tuple[int, int]] = []
        """Start and end of each segment, sorted."""

    def take(self, head: SegmentHead) -> None:
        """Speaks for the bytes of a segment.

        Raises:
            FrameError: another segment has one of them, or said another length of the payload.
        """
        if head.payload_bytes != self._size:
            text = f"{self._size} and {head.payload_bytes}"
            raise FrameError(f"segments of frame {head.number} differ in its length: {text}")
        if not head.length:
            return
        start, end = head.offset, head.offset + head.length
        at = bisect.bisect(self._taken, (start, end))
        before = at and self._taken[at - 1][1] > start
        if before or (at < len(self._taken) and self._taken[at][0] < end):
            raise FrameError(f"a byte of frame {head.number} comes twice")
        self._taken.insert(at, (start, end))
