"""How messages follow each other on a Unix socket: a length, then a message.

The message is what gRPC would carry: beside shared memory a ReduceRequest or a ReduceResponse, on a
control socket a TrainRequest or a TrainResponse.
"""

from __future__ import annotations

import struct

from andon.protocol.limits import MAX_MESSAGE_BYTES
from andon.wire.fields import FrameError

__all__ = ["SocketFrames", "socket_frame"]

_LENGTH = struct.Struct("<I")


def socket_frame(message: bytes) -> bytes:
    """A message with its length before it."""
    return _LENGTH.pack(len(message)) + message


class SocketFrames:
    """What came over a socket, and is not taken yet."""

    def __init__(self) -> None:
        """Nothing."""
        self._came = bytearray()

    def __len__(self) -> int:
        """The bytes that wait, parts of a message too."""
        return len(self._came)

    def put(self, data: bytes) -> None:
        """Adds what came."""
        self._came += data

    @property
    def whole(self) -> bool:
        """Whether a whole message waits, or a length that none has."""
        came = self._came
        if len(came) < _LENGTH.size:
            return False
        length: int = _LENGTH.unpack_from(came)[0]
        return length > MAX_MESSAGE_BYTES or len(came) >= _LENGTH.size + length

    def take(self) -> bytes:
        """The oldest message, once it is whole; it waits no more.

        Raises:
            FrameError: it is longer than a message may be.
        """
        message = self.peek()
        self.drop(message)
        return message

    def peek(self) -> bytes:
        """The oldest message, once it is whole.

        Raises:
            FrameError: it is longer than a message may be.
        """
        (length,) = _LENGTH.unpack_from(self._came)
        if length > MAX_MESSAGE_BYTES:
            text = f"a message of {length} bytes is above the limit of {MAX_MESSAGE_BYTES}"
            raise FrameError(text)
        return bytes(self._came[_LENGTH.size : _LENGTH.size + length])

    def drop(self, message: bytes) -> None:
        """The oldest message, which `peek` returned, waits no more."""
        del self._came[: _LENGTH.size + len(message)]
