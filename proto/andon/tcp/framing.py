"""How frames follow each other on a TCP lane: a prefix with two lengths, a head, a payload.

The head is the message of `andon.wire.frames` without its payload, which is not in it, so that it
can be sent from, and received to, wherever the numbers are.
"""

from __future__ import annotations

import struct

from andon.wire.fields import FrameError

__all__ = ["MAX_HEAD_BYTES", "PREFIX_BYTES", "Frame", "FrameTooLarge", "prefixed", "read_prefix"]

_PREFIX = struct.Struct("<II")
PREFIX_BYTES = _PREFIX.size

MAX_HEAD_BYTES = 2**16
"""The longest head. What a gRPC message has room for beside its payload."""


class FrameTooLarge(FrameError):
    """A frame announces more than its receiver takes."""


Frame = tuple[bytes, memoryview | None]
"""A head, and its payload if it has one."""


def prefixed(head: bytes, payload: memoryview | int | None) -> bytes:
    """The prefix and the head of a frame, whose payload follows: it, or how many bytes it has.

    Raises:
        ValueError: the head is empty, or above MAX_HEAD_BYTES.
    """
    if not 0 < len(head) <= MAX_HEAD_BYTES:
        raise ValueError(f"a head has 1 to {MAX_HEAD_BYTES} bytes, not {len(head)}")
    size = payload.nbytes if isinstance(payload, memoryview) else payload or 0
    return _PREFIX.pack(len(head), size) + head


def read_prefix(data: bytes | bytearray, max_payload_bytes: int) -> tuple[int, int]:
    """The lengths of head and payload, checked before either is read.

    Raises:
        FrameTooLarge: one of them is above its limit.
        FrameError: the head has no bytes.
    """
    head_bytes, payload_bytes = _PREFIX.unpack(data)
    if not head_bytes:
        raise FrameError("a head of 0 bytes: every frame has a message")
    if head_bytes > MAX_HEAD_BYTES:
        raise FrameTooLarge(f"a head of {head_bytes} bytes is above the limit of {MAX_HEAD_BYTES}")
    if payload_bytes > max_payload_bytes:
        raise FrameTooLarge(
            f"a payload of {payload_bytes} bytes is above the limit of {max_payload_bytes}"
        )
    return head_bytes, payload_bytes
