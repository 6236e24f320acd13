"""Frames: the bulk messages of the data plane, written and read by hand.

Generated code copies a payload several times; here a prefix of some sixty bytes is joined with the
payload, and a payload is read as a view. A frame equals what generated code writes for the same
message, byte for byte, with `padding` as long as it takes for the payload to lie at a multiple of
16 bytes. Any message of generated code, in any order of fields, is read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from andon.protocol.encoding import Encoding
from andon.protocol.messages import (
    Abstain,
    AveragedBlock,
    BlockFault,
    BlockFaultKind,
    BlockGradient,
    CorruptChunk,
    OpenRound,
    Operation,
    Request,
    Response,
    RoundAborted,
    RoundOpened,
    SharedMemoryMapped,
    SharedMemoryOffer,
    Slice,
    StaleRound,
)
from andon.wire.checksums import ChecksumFields, Checksummed, checksum_fields_of
from andon.wire.fields import (
    BYTES,
    DOUBLE,
    KEY,
    OPTIONAL_UINT32,
    TEXT,
    TEXTS,
    UINT32,
    UINT64,
    UINT64S,
    VIEW,
    Field,
    FrameError,
    Table,
    enum_kind,
    joined,
    length_prefixed,
    message_kind,
    optional_enum_kind,
    read_fields,
    varint,
    write_fields,
)

__all__ = [
    "FrameError",
    "batch_requests",
    "batch_responses",
    "frame_request",
    "frame_response",
    "parse_request",
    "parse_requests",
    "parse_response",
    "parse_responses",
]

_ALIGNMENT = 16
_LENGTH = 2
_SLICE_NUMBER = 14
_REQUEST_BATCH, _RESPONSE_BATCH, _BATCHED = 5, 6, 1
"""The case of a batch up and down, and the one field of either."""
_BATCHED_TAG = varint(_BATCHED << 3 | _LENGTH)
_BATCHES = {"ReduceRequest": _REQUEST_BATCH, "ReduceResponse": _RESPONSE_BATCH}

_SLICE = message_kind(
    Slice, Field(1, "offset", UINT64), Field(2, "length", UINT64), Field(3, "generation", UINT64)
)
_OFFER = message_kind(
    SharedMemoryOffer,
    Field(1, "name", TEXT),
    Field(2, "size_bytes", UINT64),
    Field(3, "nonce_offset", UINT64),
)
_CORRUPT = message_kind(
    CorruptChunk,
    Field(1, "rank", UINT32),
    Field(2, "block", UINT32),
    Field(3, "element", UINT64),
)
_OPERATION = enum_kind(Operation)
_ENCODING = enum_kind(Encoding)


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    """One case of a oneof: its number there, its plain value and its fields."""

    number: int
    message: type[Request | Response]
    table: Table

    @property
    def written(self) -> list[Field]:
        """The fields before the payload, in their order on the wire."""
        return [field for field in self.table.fields if field.name != "payload"]


def _case(number: int, message: type[Request | Response], *fields: Field) -> _Case:
    return _Case(number, message, Table(*fields))


_EXCHANGE = (Field(1, "key", KEY), Field(2, "group", UINT32), Field(3, "sequence", UINT32))
_CONTENT = (Field(_SLICE_NUMBER, "payload", _SLICE), Field(15, "payload", VIEW))

_REQUESTS = (
    _case(
        1,
        OpenRound,
        Field(1, "run_id", TEXT),
        Field(2, "worker", UINT32),
        Field(3, "session_token", BYTES),
        Field(4, "capabilities", TEXTS),
        Field(5, "block_elements", UINT64S),
        Field(6, "shared_folder", BYTES),
    ),
    _case(
        2,
        BlockGradient,
        *_EXCHANGE,
        Field(4, "operation", _OPERATION),
        Field(5, "rank", UINT32),
        Field(6, "world_size", UINT32),
        Field(7, "block", UINT32),
        Field(8, "offset", UINT64),
        Field(9, "count", UINT64),
        Field(10, "weight", DOUBLE),
        Field(11, "encoding", _ENCODING),
        Field(12, "answer_encoding", optional_enum_kind(Encoding)),
        *_CONTENT,
    ),
    _case(
        3,
        Abstain,
        *_EXCHANGE,
        Field(5, "rank", UINT32),
        Field(6, "world_size", UINT32),
    ),
    _case(
        4,
        SharedMemoryMapped,
        Field(1, "contributions_nonce", BYTES),
        Field(2, "averages_nonce", BYTES),
    ),
)

_RESPONSES = (
    _case(
        1,
        RoundOpened,
        Field(1, "capabilities", TEXTS),
        Field(2, "max_payload_bytes", UINT32),
        Field(3, "contributions", _OFFER),
        Field(4, "averages", _OFFER),
        Field(5, "shared_memory_refused", TEXT),
    ),
    _case(
        2,
        AveragedBlock,
        *_EXCHANGE,
        Field(4, "operation", _OPERATION),
        Field(5, "contributors", UINT32),
        Field(6, "world_size", UINT32),
        Field(7, "block", UINT32),
        Field(8, "offset", UINT64),
        Field(9, "count", UINT64),
        Field(10, "total_weight", DOUBLE),
        Field(11, "encoding", _ENCODING),
        *_CONTENT,
    ),
    _case(
        3,
        BlockFault,
        *_EXCHANGE,
        Field(4, "kind", enum_kind(BlockFaultKind)),
        Field(5, "rank", OPTIONAL_UINT32),
        Field(6, "block", UINT32),
        Field(7, "element", UINT64),
        Field(8, "value", TEXT),
        Field(9, "message", TEXT),
    ),
    _case(4, StaleRound, Field(1, "key", KEY), Field(2, "greatest", KEY)),
    _case(
        5,
        RoundAborted,
        Field(1, "key", KEY),
        Field(2, "message", TEXT),
        Field(3, "corrupt", _CORRUPT),
    ),
)

_BY_TYPE = {case.message: case for case in (*_REQUESTS, *_RESPONSES)}
_WRITTEN = {message: case.written for message, case in _BY_TYPE.items()}
_REQUEST_OF = {case.number: case for case in _REQUESTS}
_RESPONSE_OF = {case.number: case for case in _RESPONSES}
_CONTENT_FIELD = _CONTENT[0]


def frame_request(message: Request, *, checksums: bool = False) -> bytes:
    """A message up, as one `andon.v1.ReduceRequest`; with its `checksums`, if it may have some.

    Raises:
        ValueError: a number that its field can't hold, or a count that its payload belies.
    """
    return _frame(message, checksums=checksums)


def frame_response(message: Response, *, checksums: bool = False) -> bytes:
    """A message down, as one `andon.v1.ReduceResponse`; with its `checksums`, if it may have some.

    Raises:
        ValueError: a number that its field can't hold, or a count that its payload belies.
    """
    return _frame(message, checksums=checksums)


def parse_request(data: bytes | memoryview) -> Request:
    """The message of one `andon.v1.ReduceRequest`; a payload is a view of `data`.

    Raises:
        FrameError: the bytes are no such message.
    """
    return cast(Request, _parse(data, _REQUEST_OF, "ReduceRequest"))


def parse_response(data: bytes | memoryview) -> Response:
    """The message of one `andon.v1.ReduceResponse`; a payload is a view of `data`.

    Raises:
        FrameError: the bytes are no such message.
    """
    return cast(Response, _parse(data, _RESPONSE_OF, "ReduceResponse"))


def batch_requests(frames: Sequence[bytes]) -> bytes:
    """Several framed messages up as one; a single one stays as it is."""
    return _batch(frames, _REQUEST_BATCH)


def batch_responses(frames: Sequence[bytes]) -> bytes:
    """Several framed messages down as one; a single one stays as it is."""
    return _batch(frames, _RESPONSE_BATCH)


def parse_requests(data: bytes) -> list[Request]:
    """The messages of one `andon.v1.ReduceRequest`: those of a batch, or the one that it is.

    Raises:
        FrameError: the bytes are no such message.
    """
    if not _is_batch(data, _REQUEST_BATCH):
        return [parse_request(data)]
    requests = [parse_request(each) for each in _batched(data, _REQUEST_BATCH)]
    if any(isinstance(each, OpenRound) for each in requests):
        raise FrameError("a batch holds OpenRound, which is the first message of a stream, alone")
    return requests


def parse_responses(data: bytes) -> list[Response]:
    """The messages of one `andon.v1.ReduceResponse`: those of a batch, or the one that it is.

    Raises:
        FrameError: the bytes are no such message.
    """
    if not _is_batch(data, _RESPONSE_BATCH):
        return [parse_response(data)]
    responses = [parse_response(each) for each in _batched(data, _RESPONSE_BATCH)]
    if any(isinstance(each, RoundOpened) for each in responses):
        raise FrameError("a batch holds RoundOpened, which is the first answer of a stream, alone")
    return responses


def _frame(message: Request | Response, *, checksums: bool) -> bytes:
    case = _BY_TYPE[type(message)]
    trailer = checksum_fields_of(message) if checksums and isinstance(message, Checksummed) else b""
    tag = varint(case.number << 3 | _LENGTH)
    body = write_fields(message, _WRITTEN[type(message)])
    if not isinstance(message, BlockGradient | AveragedBlock):
        return tag + length_prefixed(body) + trailer
    payload = message.payload
    size = payload.nbytes if message.slice is None else message.slice.length
    if message.count * message.encoding.itemsize != size:
        raise ValueError(
            f"{size} bytes are not {message.count} elements of {message.encoding.name.lower()}"
        )
    if message.slice is not None:
        body += _CONTENT_FIELD.tag + _SLICE.write(message.slice)
        return tag + length_prefixed(body)
    payload_head = b"\x7a" + varint(payload.nbytes)
    rest = len(payload_head) + payload.nbytes
    padding, head = 0, tag + varint(len(body) + rest)
    while missing := -(len(head) + len(body) + padding + len(payload_head)) % _ALIGNMENT:
        padding += missing
        if padding < 3:
            # The least that a padding field takes: an empty one is not written.
            padding += _ALIGNMENT
        head = tag + varint(len(body) + padding + rest)
    if padding:
        body += b"\x6a" + length_prefixed(bytes(padding - 2))
    return b"".join((head, body, payload_head, payload, trailer))


def _parse(data: bytes | memoryview, cases: dict[int, _Case], what: str) -> Request | Response:
    checksums = ChecksumFields()
    case, parts = _parts_of(data, cases, what, checksums)
    name = case.message.__name__
    values = case.table.read(joined(parts), name)
    checksums.add_to(values, case.message)
    if isinstance(values.get("payload"), Slice):
        values["slice"] = values.pop("payload")
    message = case.message(**values)
    if isinstance(message, BlockGradient | AveragedBlock):
        expected = message.count * message.encoding.itemsize
        found = message.payload.nbytes if message.slice is None else message.slice.length
        if expected != found:
            raise FrameError(
                f"{name}: {found} bytes of payload for {message.count} elements "
                f"of {message.encoding.name.lower()}"
            )
    checksums.require(message)
    return message


def _parts_of(
    data: bytes | memoryview, cases: dict[int, _Case], what: str, checksums: ChecksumFields
) -> tuple[_Case, list[memoryview]]:
    """Which message it is, and its bytes: of two, the last, as in protobuf."""
    case: _Case | None = None
    replaced, parts = False, list[memoryview]()
    for number, wire_type, raw in read_fields(memoryview(data)):
        if number not in cases:
            if number == _BATCHES[what]:
                # Skipping it as unknown would lose its messages.
                raise FrameError(f"{what} is a batch inside a batch, or beside another field")
            checksums.take(number, wire_type, raw)
            continue
        if wire_type != _LENGTH or isinstance(raw, int):
            raise FrameError(f"field {number} of {what} has wire type {wire_type}")
        if case is not None and case is not cases[number]:
            if replaced:
                raise FrameError(f"{what} holds more than two messages")
            # What does not count is refused all the same if it can't be.
            replaced = True
            case.table.read(joined(parts), case.message.__name__, whole=False)
            parts = []
        case = cases[number]
        parts.append(raw)
    if case is None:
        raise FrameError(f"{what} holds no message that is known here")
    return case, parts


def _batch(frames: Sequence[bytes], number: int) -> bytes:
    if len(frames) == 1:
        return frames[0]
    body = b"".join(part for frame in frames for part in (_BATCHED_TAG, varint(len(frame)), frame))
    return varint(number << 3 | _LENGTH) + length_prefixed(body)


def _is_batch(data: bytes, number: int) -> bool:
    """Whether a message is a batch.

    One that begins with another field, which only a foreign sender could write, is not read.
    """
    return bool(data) and data[0] == number << 3 | _LENGTH


def _batched(data: bytes, number: int) -> Sequence[memoryview]:
    """The messages in a batch."""
    parts: list[memoryview] = []
    for outer, _, body in read_fields(memoryview(data)):
        if outer != number or isinstance(body, int):
            raise FrameError("a batch has another message beside it")
        for inner, wire_type, raw in read_fields(body):
            if inner != _BATCHED:
                continue
            if wire_type != _LENGTH or isinstance(raw, int):
                raise FrameError(f"a message of a batch has wire type {wire_type}")
            parts.append(raw)
    return parts
