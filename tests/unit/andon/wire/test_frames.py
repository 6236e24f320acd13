"""Frames: equal to generated code, read in any field order (contract C-WIRE-002)."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.protocol.encoding import Encoding, decode, encode
from andon.protocol.messages import (
    Abstain,
    AveragedBlock,
    BlockGradient,
    OpenRound,
    Request,
    Response,
    RoundOpened,
)
from andon.protocol.records import Key
from andon.v1 import reducer_pb2
from andon.wire.fields import length_prefixed, read_fields, varint
from andon.wire.frames import (
    FrameError,
    batch_requests,
    batch_responses,
    frame_request,
    frame_response,
    parse_request,
    parse_requests,
    parse_response,
    parse_responses,
)
from unit.andon import generated
from unit.andon.strategies import BOUNDED, averages, gradients, requests, responses

KEY = Key(7 << 32 | 5, 3)
LENGTH = 2


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


def rebuilt(frame: bytes, fields: list[bytes]) -> bytes:
    """The frame with other fields inside."""
    return varint(body_of(frame)[0] << 3 | LENGTH) + length_prefixed(b"".join(fields))


@BOUNDED
@given(requests)
def test_c_wire_002_a_request_equals_what_generated_code_writes(message: Request) -> None:
    frame = frame_request(message)

    padding = reducer_pb2.ReduceRequest.FromString(frame).block_gradient.padding
    assert frame == generated.request(message, padding).SerializeToString()


@BOUNDED
@given(responses)
def test_c_wire_002_a_response_equals_what_generated_code_writes(message: Response) -> None:
    frame = frame_response(message)

    padding = reducer_pb2.ReduceResponse.FromString(frame).averaged_block.padding
    assert frame == generated.response(message, padding).SerializeToString()


@BOUNDED
@given(requests)
def test_c_wire_002_a_request_round_trips(message: Request) -> None:
    assert parse_request(frame_request(message)) == message
    assert parse_request(generated.request(message).SerializeToString()) == message


@BOUNDED
@given(responses)
def test_c_wire_002_a_response_round_trips(message: Response) -> None:
    assert parse_response(frame_response(message)) == message
    assert parse_response(generated.response(message).SerializeToString()) == message


def _may_be_batched(message: Request | Response) -> bool:
    """Whether it is not the first of a stream, which stands alone."""
    return not isinstance(message, OpenRound | RoundOpened)


@BOUNDED
@given(st.lists(requests.filter(_may_be_batched), min_size=1, max_size=5))
def test_c_wire_002_a_batch_of_requests_is_the_messages_one_after_the_other(
    messages: list[Request],
) -> None:
    frames = [frame_request(message) for message in messages]

    batch = batch_requests(frames)

    assert parse_requests(batch) == messages
    read = reducer_pb2.ReduceRequest.FromString(batch)
    if len(frames) > 1:
        assert [each.SerializeToString() for each in read.batch.requests] == frames


@BOUNDED
@given(st.lists(responses.filter(_may_be_batched), min_size=1, max_size=5))
def test_c_wire_002_a_batch_of_responses_is_the_messages_one_after_the_other(
    messages: list[Response],
) -> None:
    frames = [frame_response(message) for message in messages]

    batch = batch_responses(frames)

    assert parse_responses(batch) == messages
    read = reducer_pb2.ReduceResponse.FromString(batch)
    if len(frames) > 1:
        assert [each.SerializeToString() for each in read.batch.responses] == frames


@BOUNDED
@given((gradients() | averages()).filter(lambda message: message.slice is None))
def test_the_payload_lies_at_a_multiple_of_16_bytes(message: BlockGradient | AveragedBlock) -> None:
    if isinstance(message, BlockGradient):
        frame = frame_request(message)
    else:
        frame = frame_response(message)

    assert (len(frame) - message.payload.nbytes) % 16 == 0


def test_the_payload_lies_at_a_multiple_of_16_bytes_around_each_length_of_a_varint() -> None:
    for count in [*range(70), *range(4050, 4110), 2**18]:
        message = gradient_of([0.0] * count)

        frame = frame_request(message)

        assert (len(frame) - 4 * count) % 16 == 0
        assert parse_request(frame) == message


def test_a_payload_is_a_view_of_the_frame() -> None:
    frame = frame_request(gradient_of([1.0, 2.0]))

    message = parse_request(frame)

    assert isinstance(message, BlockGradient)
    assert message.payload.obj is frame


@BOUNDED
@given(requests, st.randoms(use_true_random=False))
def test_c_wire_002_fields_may_come_in_any_order(message: Request, shuffle: random.Random) -> None:
    frame = frame_request(message)
    fields = encoded_fields(body_of(frame)[1])
    repeated = [field for field in fields if isinstance(message, OpenRound) and field[0] == 0x22]
    single = [field for field in fields if field not in repeated]

    shuffle.shuffle(single)

    assert parse_request(rebuilt(frame, single + repeated)) == message


@BOUNDED
@given(gradients(), gradients().filter(lambda message: message.count > 0))
def test_c_wire_002_the_last_of_a_repeated_field_wins(
    first: BlockGradient, second: BlockGradient
) -> None:
    frame = frame_request(first)
    fields = encoded_fields(body_of(frame)[1]) + encoded_fields(body_of(frame_request(second))[1])

    merged = rebuilt(frame, fields)

    expected = reducer_pb2.ReduceRequest.FromString(merged).block_gradient
    message = parse_request(merged)
    assert isinstance(message, BlockGradient)
    expected.padding = b""
    assert generated.request(message).block_gradient == expected


def test_c_wire_002_one_message_in_two_parts_is_merged() -> None:
    message = gradient_of([1.0, 2.0])
    frame = frame_request(message)
    fields = encoded_fields(body_of(frame)[1])

    for cut in range(len(fields) + 1):
        halves = rebuilt(frame, fields[:cut]) + rebuilt(frame, fields[cut:])
        assert parse_request(halves) == message


def test_c_wire_002_a_key_in_two_parts_is_merged() -> None:
    frame = frame_request(Abstain(key=KEY, rank=1, world_size=2))
    term, round_ = encoded_fields(memoryview(generated.key(KEY).SerializeToString()))
    others = encoded_fields(body_of(frame)[1])[1:]

    split = [b"\x0a" + length_prefixed(round_), *others, b"\x0a" + length_prefixed(term)]

    assert parse_request(rebuilt(frame, split)) == Abstain(key=KEY, rank=1, world_size=2)


def test_c_wire_002_the_last_case_of_a_oneof_wins() -> None:
    first, last = gradient_of([1.0]), Abstain(key=KEY, rank=0, world_size=1)

    assert parse_request(frame_request(first) + frame_request(last)) == last


@BOUNDED
@given(requests, st.randoms(use_true_random=False))
def test_c_wire_002_unknown_fields_are_skipped(message: Request, shuffle: random.Random) -> None:
    frame = frame_request(message)
    fields = encoded_fields(body_of(frame)[1])
    for unknown in (
        varint(100 << 3 | 0) + varint(2**64 - 1),
        varint(101 << 3 | 1) + bytes(8),
        varint(102 << 3 | 2) + length_prefixed(b"later"),
        varint(103 << 3 | 5) + bytes(4),
    ):
        fields.insert(shuffle.randrange(len(fields) + 1), unknown)

    extended = varint(99 << 3 | 2) + length_prefixed(b"later") + rebuilt(frame, fields)

    assert parse_request(extended) == message


def test_nan_and_infinities_survive_a_round_trip() -> None:
    message = gradient_of([math.nan, math.inf, -math.inf, -0.0])

    parsed = parse_request(frame_request(message))

    assert isinstance(parsed, BlockGradient)
    assert bytes(parsed.payload) == bytes(message.payload)
    values = decode(parsed.payload, parsed.encoding)
    assert math.isnan(values[0])
    assert values[1:].tolist() == [math.inf, -math.inf, 0.0]


def test_a_weight_that_is_not_a_number_is_left_to_the_reducer_to_refuse() -> None:
    parsed = parse_request(frame_request(replace(gradient_of([1.0]), weight=math.nan)))

    assert isinstance(parsed, BlockGradient)
    assert math.isnan(parsed.weight)


def test_a_round_in_which_all_abstained_has_no_elements() -> None:
    message = AveragedBlock(
        key=KEY,
        block=0,
        offset=0,
        count=0,
        total_weight=0.0,
        contributors=0,
        world_size=2,
        payload=memoryview(b""),
    )

    frame = frame_response(message)

    assert parse_response(frame) == message
    assert reducer_pb2.ReduceResponse.FromString(frame).averaged_block.HasField("payload")


def test_a_number_beyond_its_field_or_a_wrong_count_is_not_framed() -> None:
    for wrong in (
        replace(gradient_of([1.0]), rank=2**32),
        replace(gradient_of([1.0]), offset=-1),
        replace(gradient_of([1.0]), count=2),
    ):
        with pytest.raises(ValueError, match=r"BlockGradient: .*range|elements"):
            frame_request(wrong)


def test_a_frame_error_is_a_value_error() -> None:
    assert issubclass(FrameError, ValueError)
