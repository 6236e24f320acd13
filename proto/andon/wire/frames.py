"""Frames: the messages of the data plane as bytes, and back with every rule checked.

A frame is one message of gRPC: a `ReduceRequest`, a `ReduceResponse` or a `PassRequest`, whose
bytes `andon.wire.bulk` writes and reads. A batch is several frames in one: a message of gRPC costs
far more than a frame that only points into shared memory. On a TCP lane a frame is split: its head
is the same message without the payload, which travels behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar, cast

from andon.protocol.messages import (
    Abstain,
    AveragedBlock,
    BlockFault,
    BlockGradient,
    EnterRound,
    OpenRound,
    PassMessage,
    Request,
    Response,
    RingChunk,
    RingHeader,
    RoundAborted,
    RoundOpened,
    SharedMemoryMapped,
    Slice,
    StaleRound,
)
from andon.v1 import reducer_pb2, ring_pb2
from andon.wire.bulk import Envelope
from andon.wire.checksums import Checksummed, checksum_fields_of, require_header_intact
from andon.wire.converter import Converter
from andon.wire.fields import LENGTH, FrameError, length_prefixed, read_fields, varint

__all__ = [
    "FrameError",
    "batch_requests",
    "batch_responses",
    "frame_pass",
    "frame_request",
    "frame_response",
    "parse_pass",
    "parse_pass_head",
    "parse_request",
    "parse_request_head",
    "parse_requests",
    "parse_response",
    "parse_response_head",
    "parse_responses",
    "split_pass",
    "split_request",
    "split_response",
    "with_payload",
]

Chunked = BlockGradient | AveragedBlock | RingChunk
"""The messages that carry a payload."""

AnyMessage = TypeVar("AnyMessage", bound=Request | Response | PassMessage)

_REQUESTS = Envelope(reducer_pb2.ReduceRequest)
_RESPONSES = Envelope(reducer_pb2.ReduceResponse)
_PASSES = Envelope(ring_pb2.PassRequest, always_padded=True)

_CONVERTERS: dict[type, Converter] = {
    plain: Converter(plain, generated)
    for plain, generated in (
        (OpenRound, reducer_pb2.OpenRound),
        (BlockGradient, reducer_pb2.BlockGradient),
        (Abstain, reducer_pb2.Abstain),
        (SharedMemoryMapped, reducer_pb2.SharedMemoryMapped),
        (RoundOpened, reducer_pb2.RoundOpened),
        (AveragedBlock, reducer_pb2.AveragedBlock),
        (BlockFault, reducer_pb2.BlockFault),
        (StaleRound, reducer_pb2.StaleRound),
        (RoundAborted, reducer_pb2.RoundAborted),
        (EnterRound, ring_pb2.EnterRound),
        (RingHeader, ring_pb2.RingHeader),
        (RingChunk, ring_pb2.RingChunk),
    )
}
_BY_GENERATED = {each.generated: each for each in _CONVERTERS.values()}

_NO_BYTES = memoryview(b"")

_REQUEST_BATCH, _RESPONSE_BATCH, _BATCHED = 5, 6, 1
"""Number of the batch's case in either wrapper, and of the only field of a batch."""
_BATCHED_TAG = varint(_BATCHED << 3 | LENGTH)


def frame_request(message: Request, *, checksums: bool = False) -> bytes:
    """A worker's message, as one `andon.v1.ReduceRequest`.

    With `checksums`, a message that may have checksums gets them. A slice has none.

    Raises:
        ValueError: a number that its field can't hold, or a count that does not match the payload.
    """
    return _frame(_REQUESTS, message, checksums=checksums)


def frame_response(message: Response, *, checksums: bool = False) -> bytes:
    """A reducer's message, as one `andon.v1.ReduceResponse`; `checksums` as in `frame_request`.

    Raises:
        ValueError: a number that its field can't hold, or a count that does not match the payload.
    """
    return _frame(_RESPONSES, message, checksums=checksums)


def frame_pass(
    message: PassMessage, *, checksums: bool = False, crc32c: int | None = None
) -> bytes:
    """A message of the ring, as one `andon.v1.PassRequest`; `checksums` as in `frame_request`.

    With `crc32c` the checksum of a chunk is known, and its payload is not read for it.

    Raises:
        ValueError: a number that its field can't hold, or a count that does not match the payload.
    """
    return _frame(_PASSES, message, checksums=checksums, crc32c=crc32c)


def parse_request(data: bytes | memoryview) -> Request:
    """The message of one `andon.v1.ReduceRequest`; a payload is a view of `data`.

    Raises:
        FrameError: the bytes are not such a message.
    """
    return cast(Request, _parse(_REQUESTS, data))


def parse_response(data: bytes | memoryview) -> Response:
    """The message of one `andon.v1.ReduceResponse`; a payload is a view of `data`.

    Raises:
        FrameError: the bytes are not such a message.
    """
    return cast(Response, _parse(_RESPONSES, data))


def parse_pass(data: bytes | memoryview) -> PassMessage:
    """The message of one `andon.v1.PassRequest`; a payload is a view of `data`.

    Raises:
        FrameError: the bytes are not such a message.
    """
    return cast(PassMessage, _parse(_PASSES, data))


def split_request(message: Request, *, checksums: bool = False) -> tuple[bytes, memoryview | None]:
    """A worker's message for a TCP lane: its head, and its payload as it is, if it has one.

    Raises:
        ValueError: a number that its field can't hold, a count that does not match the payload, or
            a slice, which has no place on a network.
    """
    return _split(_REQUESTS, message, checksums=checksums)


def split_response(
    message: Response, *, checksums: bool = False
) -> tuple[bytes, memoryview | None]:
    """A reducer's message for a TCP lane; as `split_request`."""
    return _split(_RESPONSES, message, checksums=checksums)


def split_pass(
    message: PassMessage, *, checksums: bool = False, crc32c: int | None = None
) -> tuple[bytes, memoryview | None]:
    """A message of the ring for a TCP lane; as `split_request` and `frame_pass`."""
    return _split(_PASSES, message, checksums=checksums, crc32c=crc32c)


def parse_request_head(head: memoryview, payload_bytes: int) -> Request:
    """The message of a head whose payload, of so many bytes, is not read yet: `with_payload`.

    Raises:
        FrameError: the bytes are not such a message, it has a payload of its own or a slice, or its
            count does not match what is announced.
    """
    return cast(Request, _parse_head(_REQUESTS, head, payload_bytes))


def parse_response_head(head: memoryview, payload_bytes: int) -> Response:
    """A reducer's message; as `parse_request_head`."""
    return cast(Response, _parse_head(_RESPONSES, head, payload_bytes))


def parse_pass_head(head: memoryview, payload_bytes: int) -> PassMessage:
    """A message of the ring; as `parse_request_head`."""
    return cast(PassMessage, _parse_head(_PASSES, head, payload_bytes))


def with_payload(message: AnyMessage, payload: memoryview) -> AnyMessage:
    """A message that came as a head, with the payload that came behind it."""
    if isinstance(message, Chunked):
        return cast(AnyMessage, replace(message, payload=payload))
    return message


def batch_requests(frames: Sequence[bytes]) -> bytes:
    """Several frames of requests as one frame; a single one stays as it is."""
    return _batch(frames, _REQUEST_BATCH)


def batch_responses(frames: Sequence[bytes]) -> bytes:
    """Several frames of responses as one frame; a single one stays as it is."""
    return _batch(frames, _RESPONSE_BATCH)


def parse_requests(data: bytes) -> list[Request]:
    """The messages of one `andon.v1.ReduceRequest`: those of a batch, or the single one.

    Raises:
        FrameError: the bytes are not such a message.
    """
    if not _is_batch(data, _REQUEST_BATCH):
        return [parse_request(data)]
    # A batch inside it is refused by `parse_request`: it could hold any number of messages.
    requests = [parse_request(each) for each in _parts_of(data, _REQUEST_BATCH)]
    if any(isinstance(each, OpenRound) for each in requests):
        raise FrameError("a batch holds OpenRound, which is the first message of a stream, alone")
    return requests


def parse_responses(data: bytes) -> list[Response]:
    """The messages of one `andon.v1.ReduceResponse`: those of a batch, or the single one.

    Raises:
        FrameError: the bytes are not such a message.
    """
    if not _is_batch(data, _RESPONSE_BATCH):
        return [parse_response(data)]
    responses = [parse_response(each) for each in _parts_of(data, _RESPONSE_BATCH)]
    if any(isinstance(each, RoundOpened) for each in responses):
        raise FrameError("a batch holds RoundOpened, which is the first answer of a stream, alone")
    return responses


def _frame(
    envelope: Envelope,
    message: Request | Response | PassMessage,
    *,
    checksums: bool,
    crc32c: int | None = None,
) -> bytes:
    fields = _fields_of(message, crc32c) if checksums else b""
    header = _CONVERTERS[type(message)].to_generated(message)
    if not isinstance(message, Chunked):
        return envelope.write(header, None, fields)
    _require_count(message, _content_bytes(message), ValueError)
    if _slice_of(message) is not None:
        # Checksums cover bytes on the network, and a slice's numbers never leave this machine.
        return envelope.write(header)
    return envelope.write(header, message.payload, fields)


def _fields_of(message: Request | Response | PassMessage, crc32c: int | None) -> bytes:
    return checksum_fields_of(message, crc32c) if isinstance(message, Checksummed) else b""


def _split(
    envelope: Envelope,
    message: Request | Response | PassMessage,
    *,
    checksums: bool,
    crc32c: int | None = None,
) -> tuple[bytes, memoryview | None]:
    fields = _fields_of(message, crc32c) if checksums else b""
    head = envelope.write_head(_CONVERTERS[type(message)].to_generated(message), fields)
    if not isinstance(message, Chunked):
        return head, None
    if _slice_of(message) is not None:
        raise ValueError("a slice of shared memory can't travel on a TCP lane")
    _require_count(message, message.payload.nbytes, ValueError)
    return head, message.payload


def _parse(envelope: Envelope, data: bytes | memoryview) -> Request | Response | PassMessage:
    received = envelope.read(data)
    # The wrapper knows the same cases as this table, so there is an entry.
    converter = _BY_GENERATED[type(received.message)]
    values = converter.values_of(received.message)
    if issubclass(converter.plain, Chunked):
        values["crc32c"] = received.crc32c
        if received.payload is not None:
            values["payload"] = received.payload
            if "slice" in values:
                # The other case of the payload's oneof: the payload came later, and so it counts.
                values["slice"] = None
        elif values.get("slice") is None:
            raise FrameError(f"{converter.plain.__name__} lacks payload")
    message: Request | Response | PassMessage = converter.plain(**values)
    if isinstance(message, Chunked):
        _require_count(message, _content_bytes(message), FrameError)
    # Last, since a checksum covers the fields' values. That of the payload is left to the thread
    # that averages.
    require_header_intact(message, received.header_crc32c)
    return message


def _parse_head(
    envelope: Envelope, head: memoryview, payload_bytes: int
) -> Request | Response | PassMessage:
    received = envelope.read(head)
    converter = _BY_GENERATED[type(received.message)]
    name = converter.plain.__name__
    values = converter.values_of(received.message)
    if received.payload is not None or values.get("slice") is not None:
        raise FrameError(f"{name} on a TCP lane has its numbers in its head, or in shared memory")
    chunked = issubclass(converter.plain, Chunked)
    if payload_bytes and not chunked:
        raise FrameError(f"{name} has no payload, and {payload_bytes} bytes are announced")
    if chunked:
        values |= {"crc32c": received.crc32c, "payload": _NO_BYTES}
    message: Request | Response | PassMessage = converter.plain(**values)
    if isinstance(message, Chunked):
        _require_count(message, payload_bytes, FrameError)
    require_header_intact(message, received.header_crc32c)
    return message


def _require_count(chunk: Chunked, size: int, error: type[ValueError]) -> None:
    """Refuses a chunk whose numbers are not as many bytes as its count says."""
    if not chunk.encoding.fits(size, chunk.count):
        raise error(
            f"{type(chunk).__name__}: {size} bytes of payload for {chunk.count} elements of "
            f"{chunk.encoding.label}"
        )


def _content_bytes(chunk: Chunked) -> int:
    """The size of a chunk's numbers, in the message or in shared memory."""
    found = _slice_of(chunk)
    return chunk.payload.nbytes if found is None else found.length


def _slice_of(chunk: Chunked) -> Slice | None:
    return None if isinstance(chunk, RingChunk) else chunk.slice


def _batch(frames: Sequence[bytes], number: int) -> bytes:
    if len(frames) == 1:
        return frames[0]
    body = b"".join(part for frame in frames for part in (_BATCHED_TAG, varint(len(frame)), frame))
    return varint(number << 3 | LENGTH) + length_prefixed(body)


def _is_batch(data: bytes, number: int) -> bool:
    """Whether a message begins with a batch, which then must be its only field.

    A batch behind another field is refused when the other one is parsed.
    """
    return bool(data) and data[0] == number << 3 | LENGTH


def _parts_of(data: bytes, number: int) -> list[memoryview]:
    """The messages in a batch."""
    parts: list[memoryview] = []
    for outer, _, body in read_fields(memoryview(data)):
        if outer != number or isinstance(body, int):
            raise FrameError("a batch has another message beside it")
        for inner, wire_type, raw in read_fields(body):
            if inner != _BATCHED:
                continue
            if wire_type != LENGTH or isinstance(raw, int):
                raise FrameError(f"a message of a batch has wire type {wire_type}")
            parts.append(raw)
    return parts
