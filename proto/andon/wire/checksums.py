"""Checksums: the CRC-32C of the data plane's messages.

A message may have two. That of the header covers the fields, and is checked as soon as the message
is read, since the fields decide where the numbers go. That of the chunk covers header and payload,
and is checked on the thread that uses the numbers. docs/protocol.md defines the bytes.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from andon.protocol.messages import Abstain, AveragedBlock, BlockGradient, RingChunk, RingHeader
from andon.wire.fields import FIXED32, FrameError, varint

with warnings.catch_warnings():
    # Without its C extension it warns and is some thousand times slower: nothing is offered then.
    warnings.simplefilter("ignore", RuntimeWarning)
    import google_crc32c

__all__ = [
    "CAPABILITY",
    "Checksummed",
    "checksum_fields_of",
    "crc32c_of",
    "is_intact",
    "offered_capabilities",
    "require_header_intact",
]

CAPABILITY = "crc32c.v1"

Checksummed = BlockGradient | AveragedBlock | Abstain | RingHeader | RingChunk
"""The messages that may have checksums."""

_HEADER_NUMBER, _NUMBER = 14, 15
_HEADER_TAG, _TAG = varint(_HEADER_NUMBER << 3 | FIXED32), varint(_NUMBER << 3 | FIXED32)
_U32 = struct.Struct("<I")

_GRADIENT = struct.Struct("<I2Q6I2Qd2I")
_ABSTAIN = struct.Struct("<I2Q4I")
_AVERAGE = struct.Struct("<I2Q6I2QdI")
_TERMS = struct.Struct("<I2Q2Id3IQI")
_CHUNK = struct.Struct("<I2Q3I2QI")


def offered_capabilities() -> tuple[str, ...]:
    """The capability, unless checksums would be slow on this machine."""
    return (CAPABILITY,) if google_crc32c.implementation == "c" else ()


def crc32c_of(message: Checksummed) -> int:
    """The CRC-32C of a message's header and payload.

    Raises:
        ValueError: a number that its field can't hold.
    """
    return _extended(_header_crc32c_of(message), message)


def is_intact(message: BlockGradient | AveragedBlock | RingChunk) -> bool:
    """Whether a chunk matches its checksum; False if it has none."""
    return message.crc32c == crc32c_of(message)


def checksum_fields_of(message: Checksummed) -> bytes:
    """A message's checksums as the fields that follow it on the wire: the header's, the chunk's.

    Raises:
        ValueError: a number that its field can't hold.
    """
    header = _header_crc32c_of(message)
    trailer = _HEADER_TAG + _U32.pack(header)
    if isinstance(message, Abstain | RingHeader):
        return trailer
    return trailer + _TAG + _U32.pack(_extended(header, message))


def require_header_intact(message: object, header_crc32c: int | None) -> None:
    """Compares a message with the checksum of its header, if it came with one.

    Raises:
        FrameError: the message is not what its sender wrote.
    """
    if header_crc32c is None or not isinstance(message, Checksummed):
        return
    if header_crc32c != _header_crc32c_of(message):
        raise FrameError(
            f"{type(message).__name__} does not match its header_crc32c: the network, or a "
            "machine's memory, changed it on its way"
        )


def _header_crc32c_of(message: Checksummed) -> int:
    try:
        header = _HEADERS[type(message)](message)
    except struct.error as error:
        raise ValueError(f"{type(message).__name__}: {error}") from None
    return int(google_crc32c.value(header))


def _extended(crc: int, message: Checksummed) -> int:
    payload = getattr(message, "payload", None)
    if payload is None or not payload.nbytes:
        return crc
    # The library takes an array and no memoryview. Nothing is copied.
    return int(google_crc32c.extend(crc, np.frombuffer(payload, dtype=np.uint8)))


def _gradient(message: BlockGradient) -> bytes:
    answer = message.answer_encoding
    return _GRADIENT.pack(
        *(2, message.key.term, message.key.round, message.group, message.sequence),
        *(message.operation.value, message.rank, message.world_size, message.block),
        *(message.offset, message.count, message.weight, message.encoding.value),
        0 if answer is None else answer.value,
    )


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
