"""What a rank writes into its shared memory before the first part of a call.

docs/protocol-sessions.md, section 30, is normative.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from andon.protocol.peer_calls import Call, CallKind

__all__ = ["ANNOUNCEMENT_BYTES", "MAX_NEIGHBOURS", "Announcement"]

ANNOUNCEMENT_BYTES = 1024
"""The room that an announcement has."""
MAX_NEIGHBOURS = 64
"""The most ranks that share memory."""

_GIVES_AT = 256
_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<QIIQIII")


@dataclass(frozen=True, slots=True)
class Announcement:
    """A call, or one tensor of it, as a rank is about to exchange it."""

    sequence: int
    """The call's number in its group."""
    stage: int
    """Counts what is announced within the call, from 0."""
    call: Call
    gives: tuple[int, ...] = ()
    """How many bytes the rank gives to each neighbour."""

    def compared(self) -> bytes:
        """The first bytes of the announcement, which must be the same on all neighbours.

        Raises:
            ValueError: the names of the type and the reduction are too long.
        """
        call = self.call
        root = 0 if call.root is None else call.root + 1
        numbers = (self.sequence, self.stage, call.kind.value, call.count, root, call.tag)
        packed = _HEAD.pack(*numbers, call.tensors)
        for text in (call.dtype.encode(), call.reduction.encode()):
            packed += _LENGTH.pack(len(text)) + text
        if _LENGTH.size + len(packed) > _GIVES_AT:
            raise ValueError(f"the names of {call} are too long for shared memory")
        return _LENGTH.pack(len(packed)) + packed

    def packed(self) -> bytes:
        """The whole announcement."""
        head = self.compared().ljust(_GIVES_AT, b"\0")
        return head + struct.pack(f"<{len(self.gives)}Q", *self.gives)

    @classmethod
    def unpack(cls, data: bytes, neighbours: int) -> Announcement:
        """Reads an announcement of one of so many neighbours.

        Raises:
            ValueError: it is none.
        """
        try:
            sequence, stage, kind, count, root, tag, tensors = _HEAD.unpack_from(data, _LENGTH.size)
            at = _LENGTH.size + _HEAD.size
            texts = []
            for _ in range(2):
                (length,) = _LENGTH.unpack_from(data, at)
                at += _LENGTH.size
                texts.append(data[at : at + length].decode())
                at += length
            call = Call(
                kind=CallKind(kind),
                dtype=texts[0],
                count=count,
                reduction=texts[1],
                root=root - 1 if root else None,
                tag=tag,
                tensors=tensors,
            )
            return cls(
                sequence, stage, call, struct.unpack_from(f"<{neighbours}Q", data, _GIVES_AT)
            )
        except (struct.error, ValueError) as error:
            raise ValueError(f"a neighbour's announcement can't be read ({error})") from None
