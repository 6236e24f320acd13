"""Checksums: the CRC-32C of the data plane's messages.

A message may have two. That of the header covers the fields, and is checked as soon as the message
is read, since the fields decide where the numbers go. That of the chunk covers header and payload,
and is checked on the thread that uses the numbers. docs/protocol-data.md defines the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from fastcrc import crc32

from andon.protocol.messages import Abstain, AveragedBlock, BlockGradient, RingChunk, RingHeader
from andon.wire.fields import FIXED32, FrameError, varint

__all__ = [
    "CAPABILITY",
    "Checksummed",
    "checksum_fields_of",
    "crc32c_of",
    "extended",
    "header_crc32c_of",
    "is_intact",
    "require_header_intact",
]

CAPABILITY = "crc32c.v1"

Checksummed = BlockGradient | AveragedBlock | Abstain | RingHeader | RingChunk
"""The messages that may have checksums."""

_HEADER_NUMBER, _NUMBER = 14, 15
_HEADER_TAG, _TAG = varint(_HEADER_NUMBER << 3 | FIXED32), varint(_NUMBER << 3 | FIXED32)
_U32 = struct.Struct("<I")

_GRADIENT = struct.Struct("<I2Q6I2Qd2I")
_NODE = struct.Struct("<4I")
_ABSTAIN = struct.Struct("<I2Q4I")
_AVERAGE = struct.Struct("<I2Q6I2QdI")
_TERMS = struct.Struct("<I2Q2Id3IQI")
_CHUNK = struct.Struct("<I2Q3I2QI")


def crc32c_of(message: Checksummed) -> int:
    """The CRC-32C of a message's header and payload.

    Raises:
        ValueError: a number that its field can't hold.
    """
    return _of_payload(header_crc32c_of(message), message)


def is_intact(message: BlockGradient | AveragedBlock | RingChunk) -> bool:
    """Whether a chunk matches its checksum; False if it has none."""
    return message.crc32c == crc32c_of(message)


def checksum_fields_of(message: Checksummed, crc32c: int | None = None) -> bytes:
    """A message's checksums as the fields that follow it on the wire: the header's, the chunk's.

    Args:
        message: what they are of.
        crc32c: the chunk's, where it is known: then the payload is not read again.

    Raises:
        ValueError: a number that its field can't hold.
    """
    header = header_crc32c_of(message)
    trailer = _HEADER_TAG + _U32.pack(header)
    if isinstance(message, Abstain | RingHeader):
        return trailer
    return trailer + _TAG + _U32.pack(_of_payload(header, message) if crc32c is None else crc32c)


def require_header_intact(message: object, header_crc32c: int | None) -> None:
    """Compares a message with the checksum of its header, if it came with one.

    Raises:
        FrameError: the message is not what its sender wrote.
    """
    if header_crc32c is None or not isinstance(message, Checksummed):
        return
    if header_crc32c != header_crc32c_of(message):
        raise FrameError(
            f"{type(message).__name__} does not match its header_crc32c: the network, or a "
            "machine's memory, changed it on its way"
        )


def header_crc32c_of(message: Checksummed) -> int:
    """The CRC-32C of a message's header alone, with which that of the chunk begins.

    Raises:
        ValueError: a number that its field can't hold.
    """
    try:
        header = _HEADERS[type(message)](message)
    except struct.error as error:
        raise ValueError(f"{type(message).__name__}: {error}") from None
    return crc32.iscsi(header)  # iSCSI's is CRC-32C.


def extended(crc32c: int, data: memoryview) -> int:
    """A CRC-32C over more bytes: those of which it is, and `data` behind them."""
    return crc32.iscsi(data, crc32c)


def _of_payload(crc: int, message: Checksummed) -> int:
    payload = getattr(message, "payload", None)
    return crc if payload is None else extended(crc, payload)


def _gradient(message: BlockGradient) -> bytes:
    answer, node = message.answer_encoding, message.node
    header = _GRADIENT.pack(
        *(2, message.key.term, message.key.round, message.group, message.sequence),
        *(message.operation.value, message.rank, message.world_size, message.block),
        *(message.offset, message.count, message.weight, message.encoding.value),
        0 if answer is None else answer.value,
    )
    if node is None:
        return header
    return header + _NODE.pack(node.first, node.grains, node.batch_grains, node.grain)


def _abstain(message: Abstain) -> bytes:
    return _ABSTAIN.pack(
        *(3, message.key.term, message.key.round, message.group, message.sequence),
        *(message.rank, message.world_size),
    )


def _average(message: AveragedBlock) -> bytes:
    return _AVERAGE.pack(
        *(2, message.key.term, message.key.round, message.group, message.sequence),
        *(message.operation.value, message.contributors, message.world_size, message.block),
        *(message.offset, message.count, message.total_weight, message.encoding.value),
    )


def _terms(message: RingHeader) -> bytes:
    operation = message.operation
    header = _TERMS.pack(
        *(2, message.key.term, message.key.round, message.sequence, message.rank),
        *(message.weight, 0 if operation is None else operation.value),
        *(message.first_block, message.stop_block, message.data_bytes, message.crc32c),
    )
    return header + message.data_head


def _chunk(message: RingChunk) -> bytes:
    return _CHUNK.pack(
        *(3, message.key.term, message.key.round, message.sequence, message.stage.value),
        *(message.block, message.offset, message.count, message.encoding.value),
    )


_HEADERS: Mapping[type, Callable[[Any], bytes]] = {
    BlockGradient: _gradient,
    Abstain: _abstain,
    AveragedBlock: _average,
    RingHeader: _terms,
    RingChunk: _chunk,
}
"""The bytes that the header's checksum covers, by message."""
