"""Frames between ranks of a session as bytes: the head of a frame on a lane, and back.

The payload of a Piece travels behind its head, from where it lies to where it belongs; a checksum
covers both. docs/protocol-sessions.md, section 27, says which bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from fastcrc import crc32
from google.protobuf.message import DecodeError

from andon.protocol.limits import LimitExceeded
from andon.protocol.peer_frames import Begin, LaneEnd, PeerFrame, Piece
from andon.v1 import session_pb2 as pb
from andon.wire.conversion import WireError
from andon.wire.fields import FrameError
from andon.wire.sessions import call_from_proto, call_to_proto

__all__ = ["PeerHead", "crc32c_of", "parse_head", "peer_head"]

_PIECE = struct.Struct("<2Q2I2Q")
_BEGIN = struct.Struct("<2Q3IQIQ3I")
_END = struct.Struct("<2QI")
_WORD = struct.Struct("<I")

_BEGIN_CASE, _PIECE_CASE, _END_CASE = 3, 4, 5


@dataclass(frozen=True, slots=True)
class PeerHead:
    """What a head says."""

    frame: PeerFrame
    crc32c: int | None
    """Of a Piece, still to be compared once its payload is here; None: it has none."""


def crc32c_of(frame: PeerFrame) -> int:
    """The CRC-32C of a frame's fields, with which that of a Piece begins.

    `andon.wire.checksums.extended` adds the payload.
    """
    return crc32.iscsi(_fields_of(frame))  # iSCSI's is CRC-32C.


def peer_head(
    frame: PeerFrame, payload: Iterable[memoryview] = (), *, checksums: bool = False
) -> bytes:
    """A frame's head; with `checksums` it covers the payload, whose views follow each other."""
    message = pb.PeerFrame()
    if isinstance(frame, Piece):
        message.group, message.sequence = frame.group, frame.sequence
        piece = message.piece
        piece.stage, piece.offset, piece.length = frame.stage, frame.offset, frame.length
    elif isinstance(frame, Begin):
        message.group, message.sequence = frame.group, frame.sequence
        begin = message.begin
        begin.call.CopyFrom(call_to_proto(frame.call))
        begin.rank, begin.receives = frame.rank, frame.receives
        begin.gives_bytes = frame.gives_bytes
    else:
        message.lane_end.SetInParent()
    if checksums:
        crc32c = crc32c_of(frame)
        for view in payload:
            crc32c = crc32.iscsi(view, crc32c)
        message.crc32c = crc32c
    return message.SerializeToString()


def parse_head(head: memoryview, payload_bytes: int, *, checksums: bool = False) -> PeerHead:
    """Reads a frame's head, before its payload is read.

    Args:
        head: its bytes.
        payload_bytes: how many bytes follow as the payload.
        checksums: whether every frame must have one.

    Raises:
        FrameError: it is no such head, its payload is not as long as it says, or it does not match
            its checksum.
    """
    try:
        message = pb.PeerFrame.FromString(bytes(head))
        frame = _frame_of(message)
    except DecodeError:
        raise FrameError("the head is no PeerFrame") from None
    except (WireError, LimitExceeded, ValueError) as error:
        raise FrameError(f"PeerFrame: {error}") from None
    expected = frame.length if isinstance(frame, Piece) else 0
    if payload_bytes != expected:
        raise FrameError(f"PeerFrame: {payload_bytes} bytes follow, and {expected} are announced")
    crc32c = message.crc32c if message.HasField("crc32c") else None
    if crc32c is None and checksums:
        raise FrameError("PeerFrame: it has no checksum, and all ranks make them")
    if crc32c is not None and not isinstance(frame, Piece) and crc32c != crc32c_of(frame):
        raise FrameError(
            f"{type(frame).__name__} does not match its checksum: the network, or a machine's "
            "memory, changed it on its way"
        )
    return PeerHead(frame, crc32c)


def _frame_of(message: pb.PeerFrame) -> PeerFrame:
    case = message.WhichOneof("frame")
    if case == "piece":
        piece = message.piece
        return Piece(message.group, message.sequence, piece.stage, piece.offset, piece.length)
    if case == "begin":
        begin = message.begin
        return Begin(
            group=message.group,
            sequence=message.sequence,
            call=call_from_proto(begin.call),
            rank=begin.rank,
            gives_bytes=begin.gives_bytes,
            receives=begin.receives,
        )
    if case == "lane_end":
        return LaneEnd()
    raise ValueError("it says nothing, or something that this version does not know")


def _fields_of(frame: PeerFrame) -> bytes:
    if isinstance(frame, Piece):
        return _PIECE.pack(
            *(frame.group, frame.sequence, _PIECE_CASE, frame.stage, frame.offset, frame.length)
        )
    if isinstance(frame, LaneEnd):
        return _END.pack(0, 0, _END_CASE)
    call = frame.call
    root = 0 if call.root is None else call.root + 1
    numbers = _BEGIN.pack(
        *(frame.group, frame.sequence, _BEGIN_CASE, frame.rank, frame.receives, frame.gives_bytes),
        *(call.kind.value, call.count, root, call.tag, call.tensors),
    )
    words = (call.dtype.encode(), call.reduction.encode())
    return numbers + b"".join(_WORD.pack(len(word)) + word for word in words)
