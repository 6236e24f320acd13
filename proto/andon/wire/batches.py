"""Batches: several framed messages of the data plane in one, the same as one after the other.

A frame goes into a batch as it is; a message of gRPC costs far more than a frame of a slice.
"""

from __future__ import annotations

from collections.abc import Sequence

from andon.protocol.messages import OpenRound, Request, Response, RoundOpened
from andon.wire.fields import FrameError, length_prefixed, read_fields, varint
from andon.wire.frames import parse_request, parse_response

__all__ = ["batch_requests", "batch_responses", "parse_requests", "parse_responses"]

_LENGTH = 2
_REQUEST_BATCH, _RESPONSE_BATCH, _BATCHED = 5, 6, 1
"""The case of a batch up and down, and the one field of either."""
_BATCHED_TAG = varint(_BATCHED << 3 | _LENGTH)


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
    requests = [parse_request(each) for each in _parts_of(data, _REQUEST_BATCH)]
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
    responses = [parse_response(each) for each in _parts_of(data, _RESPONSE_BATCH)]
    if any(isinstance(each, RoundOpened) for each in responses):
        raise FrameError("a batch holds RoundOpened, which is the first answer of a stream, alone")
    return responses


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


def _parts_of(data: bytes, number: int) -> Sequence[memoryview]:
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
