"""Bulk messages: the payload is found in any legal message, and is a view where it can be."""

from __future__ import annotations

import pytest

from andon.protocol.messages import BlockGradient
from andon.protocol.records import Key
from andon.wire.fields import FrameError, length_prefixed, varint
from andon.wire.frames import frame_request, parse_request

PAYLOAD = bytes(range(8))
GRADIENT = BlockGradient(
    key=Key(1, 1),
    rank=0,
    world_size=1,
    block=0,
    offset=0,
    count=2,
    weight=1.0,
    payload=memoryview(PAYLOAD),
)
PAYLOAD_TAG = b"\x7a"


def framed(header: bytes, payload_field: bytes) -> bytes:
    """A gradient with this header, and with these bytes in place of its payload."""
    return b"\x12" + length_prefixed(header + payload_field)


def header_of(gradient: BlockGradient) -> bytes:
    """The fields before the payload, without the wrapper's tag and length, which are two bytes."""
    frame = frame_request(gradient)
    return frame[2 : -len(PAYLOAD_TAG + length_prefixed(PAYLOAD))]


def is_view_of(message: BlockGradient, frame: bytes) -> bool:
    return message.payload.obj is frame


@pytest.mark.parametrize(
    "extra",
    [b"", b"\x28\x00", b"\x28\x00\x28\x00", varint(100 << 3) + b"\x01"],
    ids=["canonical", "an explicit zero", "a repeated field", "an unknown field"],
)
def test_a_payload_that_is_last_is_a_view_whatever_the_header_holds(extra: bytes) -> None:
    frame = framed(header_of(GRADIENT) + extra, PAYLOAD_TAG + length_prefixed(PAYLOAD))

    message = parse_request(frame)

    assert message == GRADIENT
    assert isinstance(message, BlockGradient)
    assert is_view_of(message, frame)


@pytest.mark.parametrize("number", [0x7A, 0x7A7A7A7A, 0x087A087A087A])
def test_the_byte_of_the_payload_tag_inside_another_field_does_not_mislead(number: int) -> None:
    gradient = BlockGradient(
        key=Key(number, number),
        rank=0x7A,
        world_size=0x7A,
        block=0x7A,
        offset=number,
        count=2,
        weight=1.0,
        payload=memoryview(PAYLOAD),
    )
    frame = frame_request(gradient)

    message = parse_request(frame)

    assert message == gradient
    assert isinstance(message, BlockGradient)
    assert is_view_of(message, frame)


def test_a_payload_that_looks_like_another_payload_field_is_whole() -> None:
    inner = PAYLOAD_TAG + length_prefixed(bytes(6))
    gradient = BlockGradient(
        key=Key(1, 1),
        rank=0,
        world_size=1,
        block=0,
        offset=0,
        count=2,
        weight=1.0,
        payload=memoryview(inner),
    )

    message = parse_request(frame_request(gradient))

    assert isinstance(message, BlockGradient)
    assert bytes(message.payload) == inner


def test_a_length_in_more_bytes_than_it_needs_is_read() -> None:
    frame = framed(header_of(GRADIENT), PAYLOAD_TAG + b"\x88\x00" + PAYLOAD)
    with_zero = framed(header_of(GRADIENT) + b"\x28\x00", PAYLOAD_TAG + b"\x88\x00" + PAYLOAD)

    assert parse_request(frame) == GRADIENT
    assert parse_request(with_zero) == GRADIENT


def test_a_field_after_the_payload_does_not_hide_it() -> None:
    frame = framed(header_of(GRADIENT), PAYLOAD_TAG + length_prefixed(PAYLOAD) + b"\x28\x00")

    assert parse_request(frame) == GRADIENT


def test_of_two_payloads_the_last_counts() -> None:
    first = PAYLOAD_TAG + length_prefixed(bytes(8))
    frame = framed(header_of(GRADIENT) + first, PAYLOAD_TAG + length_prefixed(PAYLOAD))

    assert parse_request(frame) == GRADIENT


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        (b"\x68\x01", r"BlockGradient\.padding has wire type 0"),
        (b"\x2d\x00\x00\x00\x00", r"BlockGradient\.rank has wire type 5"),
        (b"\x0a\x02\x08\x01", r"Key\.term has wire type 0"),
        (b"\x28" + varint(2**32), r"BlockGradient\.rank: 4294967296 does not fit 32 bits"),
        (b"\x58\x63\x58\x01", r"BlockGradient\.encoding: 99 is no known value"),
    ],
)
def test_c_wire_002_what_generated_code_would_let_pass_is_refused(extra: bytes, match: str) -> None:
    frame = framed(header_of(GRADIENT) + extra, PAYLOAD_TAG + length_prefixed(PAYLOAD))

    with pytest.raises(FrameError, match=match):
        parse_request(frame)
