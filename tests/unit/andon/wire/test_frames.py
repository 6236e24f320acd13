"""Frames: equal to generated code, read in any field order, and refused if they are hostile.

Contract C-WIRE-002. What no message may be is in `conformance/messages`, and tested with it
(`test_conformance_messages`); here is what holds for any message, and what one example can't show.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import assume, given
from hypothesis import strategies as st

from andon.protocol.encoding import Encoding, encode
from andon.protocol.limits import MAX_FIELDS, MAX_MESSAGE_BYTES, MAX_PAYLOAD_BYTES
from andon.protocol.messages import (
    AveragedBlock,
    BlockGradient,
    OpenRound,
    RingChunk,
    RingStage,
    RoundOpened,
    Slice,
)
from andon.protocol.records import Key
from andon.protocol.ring import segment_elements
from andon.v1 import reducer_pb2, ring_pb2
from andon.wire.fields import length_prefixed, read_fields, varint
from andon.wire.frames import (
    FrameError,
    batch_requests,
    batch_responses,
    frame_pass,
    frame_request,
    frame_response,
    parse_pass,
    parse_pass_head,
    parse_request,
    parse_request_head,
    parse_requests,
    parse_response,
    parse_response_head,
    parse_responses,
    split_pass,
    split_request,
    split_response,
    with_payload,
)
from unit.andon import generated
from unit.andon.strategies import (
    BOUNDED,
    averages,
    gradients,
    passes,
    requests,
    responses,
    ring_chunks,
)

KEY = Key(7 << 32 | 5, 3)
LENGTH = 2
BULK = BlockGradient | AveragedBlock | RingChunk
OPENINGS = OpenRound | RoundOpened


@dataclass(frozen=True)
class Way:
    """One direction of messages: how they are written and read, and what protobuf writes."""

    envelope: Any
    messages: st.SearchStrategy[Any]
    frame: Callable[[Any], bytes]
    parse: Callable[[bytes], Any]
    split: Callable[[Any], tuple[bytes, memoryview | None]]
    parse_head: Callable[[memoryview, int], Any]
    generated: Callable[..., Message]


WAYS = {
    "requests": Way(
        *(reducer_pb2.ReduceRequest, requests, frame_request, parse_request),
        *(split_request, parse_request_head, generated.request),
    ),
    "responses": Way(
        *(reducer_pb2.ReduceResponse, responses, frame_response, parse_response),
        *(split_response, parse_response_head, generated.response),
    ),
    "ring": Way(
        *(ring_pb2.PassRequest, passes, frame_pass, parse_pass),
        *(split_pass, parse_pass_head, generated.passed),
    ),
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def gradient_of(values: list[float]) -> BlockGradient:
    return BlockGradient(
        key=KEY,
        rank=1,
        world_size=2,
        block=4,
        offset=8,
        count=len(values),
        weight=32.0,
        payload=encode(np.array(values, np.float32), Encoding.FLOAT32),
    )


GRADIENT = gradient_of([1.0, 2.0])


def encoded_fields(body: memoryview) -> list[bytes]:
    """The fields of a message, each with its tag."""
    fields = []
    for number, wire_type, raw in read_fields(body):
        tag = varint(number << 3 | wire_type)
        if isinstance(raw, int):
            fields.append(tag + varint(raw))
        else:
            fields.append(tag + (varint(len(raw)) if wire_type == LENGTH else b"") + bytes(raw))
    return fields


def body_of(frame: bytes) -> tuple[int, memoryview]:
    """The number and the content of a frame's only field."""
    ((number, _, raw),) = read_fields(memoryview(frame))
    assert not isinstance(raw, int)
    return number, raw


def fields_of(frame: bytes) -> list[bytes]:
    return encoded_fields(body_of(frame)[1])


def rebuilt(frame: bytes, fields: list[bytes]) -> bytes:
    """The frame with other fields inside."""
    return varint(body_of(frame)[0] << 3 | LENGTH) + length_prefixed(b"".join(fields))


def padding_in(way: Way, frame: bytes) -> bytes:
    ((_, content),) = way.envelope.FromString(frame).ListFields()
    return bytes(getattr(content, "padding", b""))


def unpadded(message: Message) -> Message:
    for _, content in message.ListFields():
        if "padding" in content.DESCRIPTOR.fields_by_name:
            content.ClearField("padding")
    return message


# --------------------------------------------------------------------- written and read


@each_way
@BOUNDED
@given(data=st.data())
def test_c_wire_002_a_message_equals_what_generated_code_writes_and_round_trips(
    way: Way, data: st.DataObject
) -> None:
    message = data.draw(way.messages)

    frame = way.frame(message)

    theirs = way.generated(message, padding_in(way, frame)).SerializeToString()
    # A ring's chunk may have padding of length 0, which protobuf leaves out.
    ours = isinstance(message, RingChunk) and not padding_in(way, frame)
    # And protobuf writes a node behind the payload.
    ours = ours or (isinstance(message, BlockGradient) and message.node is not None)
    assert frame == theirs or ours
    assert way.parse(frame) == way.parse(theirs) == message


@each_way
@BOUNDED
@given(data=st.data())
def test_c_wire_002_a_message_whose_payload_travels_beside_it_round_trips(
    way: Way, data: st.DataObject
) -> None:
    message = data.draw(way.messages)
    assume(getattr(message, "slice", None) is None)

    head, payload = way.split(message)

    read = way.parse_head(memoryview(head), 0 if payload is None else payload.nbytes)
    assert with_payload(read, payload or memoryview(b"")) == message
    if isinstance(message, BULK):
        assert payload is message.payload, "it is not copied"
        bare = way.generated(message)
        ((_, content),) = bare.ListFields()
        content.ClearField("payload")
        assert unpadded(way.envelope.FromString(head)) == unpadded(bare)


def test_a_slice_of_shared_memory_is_not_sent_over_a_lane() -> None:
    with pytest.raises(ValueError, match="a slice of shared memory"):
        split_request(replace(GRADIENT, payload=memoryview(b""), slice=Slice(0, 8, 1)))


@pytest.mark.parametrize(
    ("name", "batch", "parse"),
    [
        ("requests", batch_requests, parse_requests),
        ("responses", batch_responses, parse_responses),
    ],
)
@BOUNDED
@given(data=st.data())
def test_c_wire_002_a_batch_is_the_messages_one_after_the_other(
    name: str, batch: Callable[..., bytes], parse: Callable[..., Any], data: st.DataObject
) -> None:
    way = WAYS[name]
    alone = way.messages.filter(lambda message: not isinstance(message, OPENINGS))
    messages = data.draw(st.lists(alone, min_size=1, max_size=5))
    frames = [way.frame(message) for message in messages]

    whole = batch(frames)

    assert parse(whole) == messages
    if len(frames) > 1:
        inside = getattr(way.envelope.FromString(whole).batch, name)
        assert list(inside) == [way.envelope.FromString(frame) for frame in frames]


@pytest.mark.parametrize(
    ("way", "bulk"),
    [("requests", gradients()), ("responses", averages()), ("ring", ring_chunks())],
)
@BOUNDED
@given(data=st.data())
def test_the_payload_lies_at_a_multiple_of_16_bytes(
    way: str, bulk: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    message = data.draw(bulk.filter(lambda message: getattr(message, "slice", None) is None))

    assert (len(WAYS[way].frame(message)) - message.payload.nbytes) % 16 == 0


def test_the_payload_lies_at_a_multiple_of_16_bytes_around_each_length_of_a_varint() -> None:
    for count in [*range(70), *range(4050, 4110), 2**18]:
        message = gradient_of([0.0] * count)

        frame = frame_request(message)

        assert (len(frame) - 4 * count) % 16 == 0
        assert parse_request(frame) == message


@pytest.mark.parametrize(
    "extra",
    [b"", b"\x28\x00", b"\x28\x00\x28\x00", varint(100 << 3) + b"\x01"],
    ids=["canonical", "an explicit zero", "a repeated field", "an unknown field"],
)
def test_a_payload_that_is_last_is_a_view_whatever_comes_before_it(extra: bytes) -> None:
    message = replace(GRADIENT, rank=0)
    *header, payload = fields_of(frame_request(message))
    frame = rebuilt(frame_request(message), [*header, extra, payload])
    longer = [*header, extra, b"\x7a\x88\x00", bytes(message.payload)]

    found = parse_request(frame)

    assert found == message == parse_request(rebuilt(frame, longer))
    assert isinstance(found, BlockGradient)
    assert found.payload.obj is frame


@pytest.mark.parametrize("number", [0x7A, 0x7A7A7A7A, 0x087A087A087A])
def test_the_byte_of_the_payloads_tag_inside_another_field_does_not_mislead(number: int) -> None:
    inner = b"\x7a\x06" + bytes(6)  # It looks like another payload.
    message = replace(
        GRADIENT, key=Key(number, number), rank=0x7A, block=0x7A, offset=number,
        payload=memoryview(inner),
    )  # fmt: skip
    frame = frame_request(message)

    found = parse_request(frame)

    assert found == message
    assert isinstance(found, BlockGradient)
    assert found.payload.obj is frame


UNKNOWN = (
    varint(100 << 3 | 0) + varint(2**64 - 1),
    varint(101 << 3 | 1) + bytes(8),
    varint(102 << 3 | 2) + length_prefixed(b"later"),
    varint(103 << 3 | 5) + bytes(4),
)


@each_way
@BOUNDED
@given(data=st.data(), shuffle=st.randoms(use_true_random=False))
def test_c_wire_002_fields_may_come_in_any_order_among_unknown_ones(
    way: Way, data: st.DataObject, shuffle: random.Random
) -> None:
    message = data.draw(way.messages)
    frame = way.frame(message)
    fields = [*fields_of(frame), *UNKNOWN]
    # Only parts of a repeated field stay in their order.
    of_tag = {tag: iter([each for each in fields if each[0] == tag]) for tag, *_ in fields}

    shuffle.shuffle(fields)

    in_order = [next(of_tag[each[0]]) for each in fields]
    whole = varint(99 << 3 | 2) + length_prefixed(b"later") + rebuilt(frame, in_order)
    assert way.parse(whole) == message


@BOUNDED
@given(gradients(), gradients().filter(lambda message: message.count > 0))
def test_c_wire_002_the_last_of_a_repeated_field_wins(
    first: BlockGradient, second: BlockGradient
) -> None:
    # The fields of two nodes would be merged, perhaps to one that is none.
    frame = frame_request(replace(first, node=None))

    merged = rebuilt(frame, fields_of(frame) + fields_of(frame_request(second)))

    theirs = reducer_pb2.ReduceRequest.FromString(merged)
    found = parse_request(merged)
    assert isinstance(found, BlockGradient)
    assert unpadded(generated.request(found)) == unpadded(theirs)


def test_c_wire_002_one_message_in_two_parts_is_merged_wherever_it_is_cut() -> None:
    frame = frame_request(GRADIENT)
    fields = fields_of(frame)

    for cut in range(len(fields) + 1):
        halves = rebuilt(frame, fields[:cut]) + rebuilt(frame, fields[cut:])
        assert parse_request(halves) == GRADIENT


def test_c_wire_002_of_a_payload_and_a_slice_the_last_counts() -> None:
    slice_ = varint(14 << 3 | LENGTH) + length_prefixed(b"\x10\x08")

    found = parse_request(rebuilt(frame_request(GRADIENT), [*fields_of(frame_request(GRADIENT)),
                                                             slice_]))  # fmt: skip

    assert isinstance(found, BlockGradient)
    assert found.slice == Slice(0, 8, 0)


@pytest.mark.parametrize("wrong", [{"rank": 2**32}, {"offset": -1}, {"count": 3}], ids=str)
def test_a_number_beyond_its_field_or_a_wrong_count_is_not_framed(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"BlockGradient: .*range|elements"):
        frame_request(replace(GRADIENT, **wrong))  # type: ignore[arg-type]  # numbers


def test_a_partial_sum_fits_a_message_whatever_the_chunks_are() -> None:
    # Chunks of bfloat16 may have twice the elements that fit a message of float32.
    most = segment_elements(MAX_PAYLOAD_BYTES // 2)

    chunk = RingChunk(
        key=KEY,
        stage=RingStage.PARTIAL_SUM,
        block=2**32 - 1,
        offset=2**48,
        count=most,
        payload=memoryview(bytes(4 * most)),
    )

    assert len(frame_pass(chunk)) <= MAX_MESSAGE_BYTES
    with pytest.raises(ValueError, match="bytes of payload for 3 elements"):
        frame_pass(replace(chunk, count=3))


# ------------------------------------------------------------------------- of hostile peers


def refuse(frame: bytes, match: str = ".") -> None:
    with pytest.raises(FrameError, match=match):
        parse_request(frame)


def around(body: bytes) -> bytes:
    """A frame with this content of a gradient."""
    return b"\x12" + length_prefixed(body)


def read_or_refuse(way: Way, frame: bytes) -> None:
    """Reads a message as generated code does, or refuses it."""
    try:
        message = way.generated(way.parse(frame))
    except FrameError:
        return
    theirs = way.envelope.FromString(frame)
    theirs.DiscardUnknownFields()
    for checksum in ("header_crc32c", "crc32c"):
        theirs.ClearField(checksum)
    # As bytes: a weight may be NaN.
    assert unpadded(message).SerializeToString() == unpadded(theirs).SerializeToString()


@each_way
@BOUNDED
@given(data=st.data())
def test_c_wire_002_a_frame_cut_short_anywhere_is_refused(way: Way, data: st.DataObject) -> None:
    frame = way.frame(data.draw(way.messages))

    for end in range(len(frame)):
        with pytest.raises(FrameError):
            way.parse(frame[:end])


@each_way
@BOUNDED
@given(frame=st.binary(max_size=200))
def test_c_wire_002_random_bytes_are_read_as_generated_code_reads_them_or_refused(
    way: Way, frame: bytes
) -> None:
    read_or_refuse(way, frame)


@each_way
@BOUNDED
@given(data=st.data())
def test_c_wire_002_flipped_bits_are_read_as_generated_code_reads_them_or_refused(
    way: Way, data: st.DataObject
) -> None:
    frame = bytearray(way.frame(data.draw(way.messages)))
    for bit in data.draw(st.lists(st.integers(0, 8 * len(frame) - 1), min_size=1, max_size=3)):
        frame[bit // 8] ^= 1 << bit % 8

    read_or_refuse(way, bytes(frame))


BODY = bytes(body_of(frame_request(GRADIENT))[1])
SMALL = frame_request(GRADIENT)
MAPPED = reducer_pb2.ReduceRequest(shared_memory_mapped={}).SerializeToString()
NO_TEXT = b"\x0a" + length_prefixed(b"\xff")
LAYOUT_OF_MANY = reducer_pb2.OpenRound(run_id="r", block_elements=[1] * (2**16 + 1))
TOO_MANY_PARTS = 3 * (b"\x0a" + length_prefixed(b"\x18\x01" * (MAX_FIELDS // 2)))


@pytest.mark.parametrize(
    ("frame", "match"),
    [
        (b"\x12\x02\x7a\x05" + MAPPED, "cut short"),
        (SMALL + MAPPED + SMALL, "more than two messages"),
        (around(BODY[:-3]) + around(BODY[-3:]), "cut short"),
        (b"\x0a" + length_prefixed(NO_TEXT), "run_id"),
        (b"\x0a" + length_prefixed(NO_TEXT + b"\x0a" + length_prefixed(b"run")), "run_id"),
        (b"\x0a" + length_prefixed(LAYOUT_OF_MANY.SerializeToString()), "more than 65536 numbers"),
        (around(BODY + TOO_MANY_PARTS), "more than 1024 fields"),
        (around(b"\x68\x01" + BODY), r"BlockGradient\.padding has wire type 0"),
        (around(b"\x0a\x02\x08\x01" + BODY), r"Key\.term has wire type 0"),
        (around(BODY + b"\x28" + varint(2**32)), "rank: 4294967296 does not fit 32 bits"),
        (around(BODY + b"\x48" + varint(2**64 - 2)), "payload for"),
        (around(b"\x58\x63\x58\x01" + BODY), r"encoding: 99 is no known value"),
    ],
    ids=[
        "a replaced message is cut short", "a third message", "a part is no message by itself",
        "no UTF-8", "a replaced text is no UTF-8", "more blocks than a layout has",
        "a key in many parts", "padding is a number", "a term is a number", "33 bits",
        "a negative count", "a replaced encoding is not known",
    ],
)  # fmt: skip
def test_c_wire_002_what_generated_code_would_let_pass_is_refused(frame: bytes, match: str) -> None:
    refuse(frame, match)


def test_c_wire_002_a_message_that_another_replaces_is_read_as_the_other() -> None:
    assert parse_request(SMALL + MAPPED) == parse_request(MAPPED)


def test_c_wire_002_an_absurd_length_allocates_nothing() -> None:
    frame = b"\x12" + varint(2**40) + bytes(16)
    tracemalloc.start()
    try:
        refuse(frame, "cut short")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 2**20


@pytest.mark.parametrize("encoding", [each for each in Encoding if each is not Encoding.TOPK])
def test_c_wire_002_a_payload_of_half_an_element_is_refused(encoding: Encoding) -> None:
    fields = generated.request(replace(GRADIENT, encoding=encoding, count=1)).block_gradient
    fields.payload = bytes(encoding.payload_bytes(1) + 1)

    refuse(around(fields.SerializeToString()), "bytes of payload for 1 elements")
