"""Ring frames: the ring's messages as bytes, written and read by hand as `andon.wire.frames` does.

Payloads are views of what was read, and are aligned to 16 bytes by padding before them.
"""

from __future__ import annotations

from andon.protocol.encoding import Encoding
from andon.protocol.messages import (
    EnterRound,
    Operation,
    PassMessage,
    RingChunk,
    RingHeader,
    RingStage,
)
from andon.wire.checksums import ChecksumFields, checksum_fields_of
from andon.wire.fields import (
    BOOL,
    BYTES,
    DOUBLE,
    KEY,
    UINT32,
    UINT64,
    VIEW,
    Field,
    FrameError,
    Table,
    enum_kind,
    joined,
    length_prefixed,
    optional_enum_kind,
    read_fields,
    varint,
    write_fields,
)

__all__ = ["frame_pass", "parse_pass"]

_LENGTH = 2
_ALIGNMENT = 16
_PADDING_TAG, _PAYLOAD_TAG = varint(13 << 3 | _LENGTH), varint(15 << 3 | _LENGTH)

_ENTER = (
    Field(1, "key", KEY),
    Field(2, "rank", UINT32),
    Field(3, "world_size", UINT32),
    Field(4, "token", BYTES),
)
_TERMS = (
    Field(1, "key", KEY),
    Field(2, "sequence", UINT32),
    Field(3, "rank", UINT32),
    Field(4, "weight", DOUBLE),
    Field(5, "operation", optional_enum_kind(Operation)),
    Field(6, "first_block", UINT32),
    Field(7, "stop_block", UINT32),
    Field(8, "data_bytes", UINT64),
    Field(9, "data_head", BYTES),
    Field(10, "crc32c", BOOL),
)
_CHUNK = (
    Field(1, "key", KEY),
    Field(2, "sequence", UINT32),
    Field(3, "stage", enum_kind(RingStage)),
    Field(4, "block", UINT32),
    Field(5, "offset", UINT64),
    Field(6, "count", UINT64),
    Field(7, "encoding", enum_kind(Encoding)),
)
_CASES: dict[int, tuple[type[PassMessage], Table]] = {
    1: (EnterRound, Table(*_ENTER)),
    2: (RingHeader, Table(*_TERMS)),
    3: (RingChunk, Table(*_CHUNK, Field(15, "payload", VIEW))),
}


def frame_pass(message: PassMessage, *, checksums: bool = False) -> bytes:
    """A message, as one `andon.v1.PassRequest`; with its `checksums`, if it may have some.

    Raises:
        ValueError: a number that its field can't hold, or a count that its payload belies.
    """
    match message:
        case EnterRound():
            return varint(1 << 3 | _LENGTH) + length_prefixed(write_fields(message, _ENTER))
        case RingHeader():
            terms = varint(2 << 3 | _LENGTH) + length_prefixed(write_fields(message, _TERMS))
            return terms + checksum_fields_of(message) if checksums else terms
        case RingChunk():
            return _frame_chunk(message, checksum_fields_of(message) if checksums else b"")


def parse_pass(data: bytes) -> PassMessage:
    """The message of one `andon.v1.PassRequest`; a payload is a view of `data`.

    Raises:
        FrameError: the bytes are no such message.
    """
    number, parts, replaced = 0, list[memoryview](), False
    checksums = ChecksumFields()
    for each, wire_type, raw in read_fields(memoryview(data)):
        if each not in _CASES:
            checksums.take(each, wire_type, raw)
            continue
        if wire_type != _LENGTH or isinstance(raw, int):
            raise FrameError(f"field {each} of PassRequest has wire type {wire_type}")
        if number not in (0, each):
            if replaced:
                raise FrameError("PassRequest holds more than two messages")
            # The last of them counts, as in protobuf; what can't be is refused all the same.
            replaced = True
            kind, table = _CASES[number]
            table.read(joined(parts), kind.__name__)
            parts = []
        number = each
        parts.append(raw)
    if not number:
        raise FrameError("PassRequest holds no message that is known here")
    kind, table = _CASES[number]
    values = table.read(joined(parts), kind.__name__)
    checksums.add_to(values, kind)
    message = kind(**values)
    if isinstance(message, RingChunk):
        expected = message.count * message.encoding.itemsize
        if expected != message.payload.nbytes:
            raise FrameError(
                f"RingChunk: {message.payload.nbytes} bytes of payload for {message.count} "
                f"elements of {message.encoding.name.lower()}"
            )
    checksums.require(message)
    return message


def _frame_chunk(chunk: RingChunk, trailer: bytes) -> bytes:
    payload = chunk.payload
    if chunk.count * chunk.encoding.itemsize != payload.nbytes:
        raise ValueError(
            f"{payload.nbytes} bytes are not {chunk.count} elements of "
            f"{chunk.encoding.name.lower()}"
        )
    tag, body = varint(3 << 3 | _LENGTH), write_fields(chunk, _CHUNK)
    payload_head = _PAYLOAD_TAG + varint(payload.nbytes)
    rest = len(body) + len(payload_head) + payload.nbytes
    # A padding field takes two bytes and what is in it; the length before it may grow a byte.
    for filling in range(2 * _ALIGNMENT):
        padding = _PADDING_TAG + length_prefixed(bytes(filling))
        head = tag + varint(rest + len(padding))
        if (len(head) + len(body) + len(padding) + len(payload_head)) % _ALIGNMENT == 0:
            break
    return b"".join((head, body, padding, payload_head, payload, trailer))
