"""Frames from hostile peers: an error, never a crash or a large allocation (C-WIRE-002)."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from andon.protocol.encoding import Encoding
from andon.protocol.limits import MAX_FIELDS
from andon.protocol.messages import BlockGradient, Request, Response, Slice
from andon.protocol.records import Key
from andon.v1 import reducer_pb2
from andon.wire.fields import length_prefixed, varint
from andon.wire.frames import (
    FrameError,
    batch_requests,
    frame_request,
    frame_response,
    parse_request,
    parse_requests,
    parse_response,
)
from unit.andon import generated
from unit.andon.strategies import BOUNDED, requests, responses

GRADIENT = BlockGradient(
    key=Key(1, 1),
    rank=0,
    world_size=1,
    block=0,
    offset=0,
    count=2,
    weight=1.0,
    payload=memoryview(bytes(8)),
)
HUGE = varint(2**63)


def message_of(fields: reducer_pb2.BlockGradient) -> bytes:
    return reducer_pb2.ReduceRequest(block_gradient=fields).SerializeToString()


def good() -> reducer_pb2.BlockGradient:
    return generated.request(GRADIENT).block_gradient


def refuse(frame: bytes, match: str = ".") -> None:
    with pytest.raises(FrameError, match=match):
        parse_request(frame)


def read_or_refuse(
    parse: Callable[[bytes], Any], as_generated: Callable[[Any], Message], frame: bytes
) -> None:
    """Reads a message as generated code does, or refuses it."""
    try:
        message = as_generated(parse(frame))
    except FrameError:
        return
    theirs = type(message).FromString(frame)
    theirs.DiscardUnknownFields()
    for _, content in theirs.ListFields():
        if "padding" in content.DESCRIPTOR.fields_by_name:
            content.ClearField("padding")
    # As bytes: a weight may be NaN.
    assert message.SerializeToString() == theirs.SerializeToString()


@BOUNDED
@given(requests)
def test_c_wire_002_a_request_cut_short_anywhere_is_refused(message: Request) -> None:
    frame = frame_request(message)

    for end in range(len(frame)):
        refuse(frame[:end])


@BOUNDED
@given(responses)
def test_c_wire_002_a_response_cut_short_anywhere_is_refused(message: Response) -> None:
    frame = frame_response(message)

    for end in range(len(frame)):
        with pytest.raises(FrameError):
            parse_response(frame[:end])


@BOUNDED
@given(st.binary(max_size=200))
def test_c_wire_002_random_bytes_are_read_as_generated_code_reads_them_or_refused(
    frame: bytes,
) -> None:
    read_or_refuse(parse_request, generated.request, frame)
    read_or_refuse(parse_response, generated.response, frame)


@BOUNDED
@given(requests, st.data())
def test_c_wire_002_flipped_bits_are_read_as_generated_code_reads_them_or_refused(
    message: Request, data: st.DataObject
) -> None:
    frame = bytearray(frame_request(message))
    for bit in data.draw(st.lists(st.integers(0, 8 * len(frame) - 1), min_size=1, max_size=3)):
        frame[bit // 8] ^= 1 << bit % 8

    read_or_refuse(parse_request, generated.request, bytes(frame))


@BOUNDED
@given(responses, st.data())
def test_c_wire_002_flipped_bits_in_a_response_are_read_or_refused(
    message: Response, data: st.DataObject
) -> None:
    frame = bytearray(frame_response(message))
    for bit in data.draw(st.lists(st.integers(0, 8 * len(frame) - 1), min_size=1, max_size=3)):
        frame[bit // 8] ^= 1 << bit % 8

    read_or_refuse(parse_response, generated.response, bytes(frame))


@pytest.mark.parametrize(
    ("frame", "match"),
    [
        (b"", "holds no message"),
        (varint(9 << 3 | 2) + length_prefixed(b"later"), "holds no message"),
        (b"\x12" + HUGE, "cut short"),
        (b"\x12" + b"\xff" * 10, "64 bits"),
        (b"\x12" + b"\x80" * 30, "64 bits"),
        (b"\x12" + b"\xff" * 9 + b"\x02", "64 bits"),
        (b"\x12" + b"\xff" * 5, "cut short"),
        (b"\x10\x01", "wire type 0"),
        (b"\x13\x14", "wire type 3"),
        (b"\x14", "wire type 4"),
        (b"\x16", "wire type 6"),
        (b"\x17", "wire type 7"),
        (b"\x02\x00", "0 is no field number"),
        (varint(2**29 << 3 | 0) + b"\x00", "is no field number"),
        (b"\x12\x02\x08\x01", "key has wire type"),
        (b"\x12\x02\x7b\x7c", "wire type 3"),
        (b"\x12\x04\x7a" + HUGE[:3], "cut short"),
    ],
)
def test_c_wire_002_malformed_bytes_are_refused(frame: bytes, match: str) -> None:
    refuse(frame, match)


def test_c_wire_002_a_gradient_without_key_is_refused() -> None:
    fields = good()
    fields.ClearField("key")

    refuse(message_of(fields), "lacks key")


def test_c_wire_002_an_empty_key_is_refused() -> None:
    fields = good()
    fields.key.Clear()
    fields.key.SetInParent()

    refuse(message_of(fields), "unsigned 64-bit")


@pytest.mark.parametrize("field", ["operation", "encoding"])
def test_c_wire_002_an_unknown_or_unspecified_enum_is_refused(field: str) -> None:
    for number in (0, 77, -1):
        fields = good()
        setattr(fields, field, number)

        refuse(message_of(fields), field)


def test_c_wire_002_an_unknown_answer_encoding_is_refused() -> None:
    fields = good()
    fields.answer_encoding = 99  # type: ignore[assignment] # what a peer may send

    refuse(message_of(fields), "answer_encoding")


def test_c_wire_002_a_count_that_does_not_match_the_payload_is_refused() -> None:
    for count in (0, 1, 3, 2**62 + 2, 2**64 - 2):
        fields = good()
        fields.element_count = count

        refuse(message_of(fields), "8 bytes of payload")


def test_c_wire_002_a_negative_count_is_refused() -> None:
    negative = b"\x48" + varint(2**64 - 2)
    body = good().SerializeToString() + negative

    refuse(b"\x12" + length_prefixed(body), "payload for")


def test_c_wire_002_a_number_beyond_32_bits_is_refused_where_32_are_meant() -> None:
    body = good().SerializeToString() + b"\x28" + varint(2**32)

    refuse(b"\x12" + length_prefixed(body), "rank: 4294967296 does not fit 32 bits")


def test_c_wire_002_a_missing_payload_is_refused() -> None:
    fields = good()
    fields.ClearField("payload")

    refuse(message_of(fields), "lacks payload")


def test_c_wire_002_a_slice_of_another_length_than_its_elements_is_refused() -> None:
    fields = good()
    fields.slice.length = 12

    refuse(message_of(fields), "12 bytes of payload for 2 elements")


def test_c_wire_002_of_a_payload_and_a_slice_the_last_counts() -> None:
    body = good().SerializeToString()
    fields = good()
    fields.slice.length = 8
    slice_ = fields.SerializeToString()[len(body) - len(b"\x7a\x08") - 8 :]

    message = parse_request(b"\x12" + length_prefixed(body + slice_))

    assert isinstance(message, BlockGradient)
    assert message.slice == Slice(0, 8, 0)


def test_c_wire_002_a_message_that_another_replaces_must_be_valid_too() -> None:
    frame = message_of(good())
    mapped = reducer_pb2.ReduceRequest(shared_memory_mapped={}).SerializeToString()

    assert parse_request(frame + mapped) == parse_request(mapped)
    refuse(b"\x12\x02\x7a\x05" + mapped, "cut short")
    refuse(frame + mapped + frame, "more than two messages")


def test_c_wire_002_a_part_that_is_no_message_by_itself_is_refused() -> None:
    body = good().SerializeToString()

    refuse(b"\x12" + length_prefixed(body[:-3]) + b"\x12" + length_prefixed(body[-3:]), "cut short")


def test_c_wire_002_a_text_that_another_replaces_must_be_utf_8_too() -> None:
    texts = b"\x0a" + length_prefixed(b"\xff") + b"\x0a" + length_prefixed(b"run")

    refuse(b"\x0a" + length_prefixed(texts), "run_id")


def test_c_wire_002_a_batch_beside_a_message_is_refused() -> None:
    frame = message_of(good())

    refuse(frame + batch_requests([frame, frame]), "beside another field")


def test_c_wire_002_a_batch_in_a_batch_is_refused() -> None:
    frame = message_of(good())
    inner = batch_requests([frame, frame])

    with pytest.raises(FrameError, match="a batch inside a batch"):
        parse_requests(batch_requests([inner, frame]))


def test_c_wire_002_a_batch_of_more_messages_than_the_limit_is_refused() -> None:
    frame = message_of(good())

    with pytest.raises(FrameError, match="more than 1024 fields"):
        parse_requests(batch_requests([frame] * (MAX_FIELDS + 1)))


def test_c_wire_002_a_batch_cut_short_is_refused() -> None:
    frame = message_of(good())
    batch = batch_requests([frame, frame])

    for length in range(1, len(batch)):
        with pytest.raises(FrameError):
            parse_requests(batch[:length])


def test_c_wire_002_more_blocks_than_a_layout_has_are_refused() -> None:
    opening = reducer_pb2.OpenRound(run_id="r", block_elements=[1] * (2**16 + 1))

    refuse(b"\x0a" + length_prefixed(opening.SerializeToString()), "more than 65536 numbers")


def test_c_wire_002_text_that_is_not_utf_8_is_refused() -> None:
    refuse(b"\x0a" + length_prefixed(b"\x0a" + length_prefixed(b"\xff\xfe")), "run_id")


def test_c_wire_002_more_fields_than_the_limit_are_refused() -> None:
    body = good().SerializeToString()

    refuse(b"\x12" + length_prefixed(body + b"\x28\x01" * MAX_FIELDS), "more than 1024 fields")


def test_c_wire_002_a_key_in_more_parts_than_the_limit_of_fields_is_refused() -> None:
    part = b"\x0a" + length_prefixed(b"\x18\x01" * (MAX_FIELDS // 2))
    body = good().SerializeToString() + part * 3

    refuse(b"\x12" + length_prefixed(body), "more than 1024 fields")


def test_c_wire_002_an_absurd_length_allocates_nothing() -> None:
    frame = b"\x12" + varint(2**40) + bytes(16)
    tracemalloc.start()
    try:
        refuse(frame, "cut short")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 2**20


@pytest.mark.parametrize("encoding", list(Encoding))
def test_c_wire_002_a_payload_of_half_an_element_is_refused(encoding: Encoding) -> None:
    fields = good()
    fields.encoding = encoding.value  # type: ignore[assignment] # a number at run time
    fields.element_count = 1
    fields.payload = bytes(encoding.payload_bytes(1) + 1)

    refuse(message_of(fields), "bytes of payload for 1 elements")
